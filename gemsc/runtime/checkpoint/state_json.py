"""The state of optimizers, schedulers and generators as JSON: nothing is executed.

    {"lr": inf, "betas": (0.9, 0.999)}
    {"lr": {"$": "float", "of": "inf"}, "betas": {"$": "tuple", "of": [0.9, 0.999]}}

Numbers, texts and what is made of lists and dicts with text keys are plain JSON. Small
tensors stand in it, others are put elsewhere, under a name.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemsc.errors import GemscError

SMALL = 16  # elements of a tensor that stands in the text
KIND, OF = "$", "of"
NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("bool", "complex64"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES}

Put = Callable[[Tensor], str]
Get = Callable[[str], Tensor]

LISTS: dict[str, type] = {"tuple": tuple, "set": set, "deque": deque}
MAPPINGS: dict[str, type] = {"Counter": Counter, "OrderedDict": OrderedDict}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda parts: complex(*parts),
    "dtype": DTYPES.__getitem__,
    **LISTS,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
    "dict": dict,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def encode(value: Any, put: Put, what: str) -> Any:
    """Return JSON for a value; `put` keeps a tensor and returns a name for it.

    Raises:
        GemscError: there is none; `what` says what the value is part of.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    match value:
        case float():
            return float(value) if math.isfinite(value) else _kind("float", str(value))
        case complex():
            parts = [encode(part, put, what) for part in (value.real, value.imag)]
            return _kind("complex", parts)
        case torch.dtype():
            return _kind("dtype", dtype_name(value))
        case Tensor() | np.ndarray():
            return _tensor(torch.as_tensor(value).detach(), put, what)
        case list():
            return [encode(each, put, what) for each in value]
        case tuple() | set() | deque():
            kind = next(k for k, cls in LISTS.items() if isinstance(value, cls))
            return _kind(kind, [encode(each, put, what) for each in value])
        case Mapping():
            return _mapping(value, put, what)
    raise GemscError(
        f"{what} holds a {type(value).__name__}, which no checkpoint can hold",
        help="keep numbers, texts, tensors, lists and dicts in what state_dict() gives",
    )


def _kind(name: str, of: Any) -> dict[str, Any]:
    return {KIND: name, OF: of}


def _mapping(value: Mapping[Any, Any], put: Put, what: str) -> dict[str, Any]:
    kinds = (k for k, cls in MAPPINGS.items() if isinstance(value, cls))
    kind = next(kinds, "dict")
    plain = kind == "dict" and all(isinstance(key, str) for key in value)
    if plain and KIND not in value:
        return {key: encode(each, put, f"{what}: {key}") for key, each in value.items()}
    pairs = [
        [encode(key, put, what), encode(each, put, f"{what}: {key}")]
        for key, each in value.items()
    ]
    return _kind(kind, pairs)


def _tensor(tensor: Tensor, put: Put, what: str) -> dict[str, Any]:
    if (name := dtype_name(tensor.dtype)) not in DTYPES:
        raise GemscError(
            f"{what} holds a tensor of {name}, which no checkpoint can hold",
            help="keep a tensor of another dtype in what state_dict() gives",
        )
    if tensor.numel() > SMALL or tensor.is_complex():
        return _kind("stored", put(tensor))
    numbers = tensor.cpu().reshape(-1).tolist()
    return {
        **_kind("tensor", encode(numbers, put, what)),
        "dtype": name,
        "shape": list(tensor.shape),
    }


def decode(value: Any, get: Get) -> Any:
    """Return the value that `encode` was given; `get` returns a tensor by its name.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: no value is encoded like this.
    """
    if isinstance(value, list):
        return [decode(each, get) for each in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: decode(each, get) for key, each in value.items()}
    kind, of = value[KIND], value[OF]
    if kind == "stored":
        return get(of)
    found = decode(of, get)
    if kind == "tensor":
        numbers = torch.tensor(found, dtype=DTYPES[value["dtype"]])
        return numbers.reshape(value["shape"])
    return MAKERS[kind](found)
