"""The state of optimizers, schedulers, callbacks, ... as JSON: nothing is executed.

    {"lr": inf, "betas": (0.9, 0.999)}
    {"lr": {"$": "float", "of": "inf"}, "betas": {"$": "tuple", "of": [0.9, 0.999]}}

Numbers, texts and what is made of lists and dicts with text keys are plain JSON. Small
tensors stand in it, others are put elsewhere, under a name.

What was read is checked before it is used. `load_state_dict` takes nearly anything, and
the next step then fails on it, or goes another way. So the values are compared with
those that are there, and torch's own optimizers make a step with what they have loaded,
on tensors without memory.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gemsc.base.dtypes import dtype_name
from gemsc.base.elementwise import NUMBERS
from gemsc.base.rng import torch_state
from gemsc.errors import GemscError
from gemsc.weights.write import DTYPES as STORED_DTYPES

SMALL = 16  # elements of a tensor that stands in the text
KIND, OF = "$", "of"
BOUNDED = "bounded deque"


DTYPES = {dtype_name(dtype): dtype for dtype in STORED_DTYPES.values()}

Put = Callable[[Tensor], str]
Get = Callable[[str], Tensor]

LISTS: dict[str, type] = {"tuple": tuple, "set": set, "deque": deque}
MAPPINGS: dict[str, type] = {"Counter": Counter, "OrderedDict": OrderedDict}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda parts: complex(*parts),
    "array": Tensor.numpy,
    "dtype": DTYPES.__getitem__,
    **LISTS,
    BOUNDED: lambda pair: deque(*pair),
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
    "dict": dict,
}


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
            return _tensor(value, put, what)
        case list():
            return [encode(part, put, what) for part in value]
        case tuple() | set() | deque():
            kind = next(k for k, cls in LISTS.items() if isinstance(value, cls))
            of = [encode(part, put, what) for part in value]
            most = getattr(value, "maxlen", None)
            return _kind(kind, of) if most is None else _kind(BOUNDED, [of, most])
        case Mapping():
            return _mapping(value, put, what)
    raise GemscError(
        f"{what} holds a {type(value).__name__}, which no checkpoint can hold",
        help="return only numbers, strings, tensors, lists and dicts from state_dict()",
    )


def _kind(name: str, of: Any) -> dict[str, Any]:
    return {KIND: name, OF: of}


def _mapping(value: Mapping[Any, Any], put: Put, what: str) -> dict[str, Any]:
    kinds = (k for k, cls in MAPPINGS.items() if isinstance(value, cls))
    kind = next(kinds, "dict")
    plain = kind == "dict" and all(isinstance(key, str) for key in value)
    if plain and KIND not in value:
        return {key: encode(part, put, f"{what}: {key}") for key, part in value.items()}
    pairs = [
        [encode(key, put, what), encode(part, put, f"{what}: {key}")]
        for key, part in value.items()
    ]
    return _kind(kind, pairs)


def _tensor(tensor: Any, put: Put, what: str) -> dict[str, Any]:
    if is_array := isinstance(tensor, np.ndarray):
        tensor = tensor.astype(tensor.dtype.newbyteorder("="))
    if (name := dtype_name(tensor.dtype)) not in DTYPES:
        raise GemscError(
            f"{what} holds a tensor of {name}, which no checkpoint can hold",
            help="return a tensor of another dtype from state_dict()",
        )
    if is_array:
        return _kind("array", _tensor(torch.from_numpy(tensor), put, what))
    if tensor.numel() > SMALL:
        return _kind("stored", put(tensor.detach()))
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
        return [decode(part, get) for part in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: decode(part, get) for key, part in value.items()}
    kind, of = value[KIND], value[OF]
    if kind == "stored":
        return get(of)
    decoded = decode(of, get)
    if kind == "tensor":
        numbers = torch.tensor(decoded, dtype=DTYPES[value["dtype"]])
        return numbers.reshape(value["shape"])
    return MAKERS[kind](decoded)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators of this process, `device`'s among them."""
    version, words, gauss = random.getstate()
    kind, numbers, *tail = cast("tuple[Any, ...]", np.random.get_state())
    states = {
        "torch": torch_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.from_numpy(numbers.astype(np.int64)), *tail],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def check_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Make sure that `set_generators` takes states; NumPy would take nearly any.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: it does not.
    """
    torch.Generator().set_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.Generator(device).set_state(states["cuda"])
    random.Random().setstate(_python(states))
    gauss = states["python"][2]
    _, numbers, place, has_gauss, number = states["numpy"]
    in_order = (
        numbers.shape == (624,),
        type(place) is int and 0 <= place <= 624,
        has_gauss in (0, 1),
        int(numbers.min()) >= 0 and int(numbers.max()) < 2**32,
        isinstance(number, float),
        gauss is None or isinstance(gauss, float),
    )
    if not all(in_order):
        raise ValueError("a generator of random numbers has no such state")
    np.random.RandomState().set_state(_numpy(states))


def set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators of this process into these states."""
    torch.set_rng_state(states["torch"])
    random.setstate(_python(states))
    np.random.set_state(_numpy(states))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _python(states: Mapping[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = states["python"]
    return version, tuple(words.tolist()), gauss


def _numpy(states: Mapping[str, Any]) -> tuple[Any, ...]:
    kind, numbers, *tail = states["numpy"]
    return kind, numbers.numpy().astype(np.uint32), *tail


def check_alike(part: Any, now: Any, saved: Any, *, is_same: bool) -> None:
    """Make sure that saved values are of the kinds that an optimizer or scheduler has.

    Where the layout of the ranks `is_same`, lists are as long as they are now, or have
    grown. What is None, or not there, may become anything else.

    Raises:
        ValueError: a value is not, or it would stand in the place of a method.
    """
    if now is None:
        return
    pairs: Iterable[tuple[Any, Any]] = ()
    match now:
        case _ if _is_number(now):
            is_alike = _is_number(saved)
        case Tensor():
            is_alike = isinstance(saved, Tensor) and saved.shape == now.shape
        case Counter():
            is_alike = isinstance(saved, Counter)
            is_alike = is_alike and all(map(_is_number, (*saved, *saved.values())))
        case Mapping():
            is_alike = isinstance(saved, Mapping)
            is_alike = is_alike and not any(
                key not in now and _is_own(part, key) for key in saved
            )
            pairs = [(now.get(key), saved[key]) for key in saved] if is_alike else ()
        case list() | tuple():
            is_alike = isinstance(saved, list | tuple)
            is_alike = is_alike and not (is_same and len(now) > len(saved))
            pairs = zip(now, saved if is_alike else (), strict=False)
        case _:
            is_alike = isinstance(saved, type(now))
    if not is_alike:
        raise ValueError(f"{saved!r:.200} in place of {now!r:.200}")
    for ours, theirs in pairs:
        check_alike(part, ours, theirs, is_same=is_same)


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def _is_own(part: Any, key: Any) -> bool:
    return key == "optimizer" or callable(getattr(part, str(key), None))


def is_torchs(part: Any) -> bool:
    """Whether an optimizer or a scheduler is one of torch's own."""
    return type(part).__module__.startswith("torch.optim.")


def check_step(optimizer: Any) -> None:
    """Make one step with the state of an optimizer of torch's, without its tensors.

    Nothing is said of one that cannot even begin like this.

    Raises:
        Exception: the step fails.
    """
    if not is_torchs(optimizer):
        return
    try:
        _trial(optimizer, {})
    except Exception:
        return
    _trial(optimizer, optimizer.state)


def _trial(optimizer: Any, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
    trial = copy.copy(optimizer)  # as pickle copies it: without hooks
    trial.state, trial.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        blanks = []
        for parameter in group["params"]:
            blank = nn.Parameter(torch.empty_like(parameter, device="meta"))
            blank.grad = torch.empty_like(blank)
            blanks.append(blank)
            trial.state[blank] = {
                key: _blank(key, value, parameter)
                for key, value in states.get(parameter, {}).items()
            }
        trial.param_groups.append({**group, "params": blanks})
    trial.step()


def _blank(key: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    is_number = key in NUMBERS or value.shape != parameter.shape
    return value.detach().clone() if is_number else value.to("meta")


def saved_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the states of those callbacks that have any, by their names."""
    states = {n: callback.state_dict() for n, callback in _named(callbacks).items()}
    return {name: state for name, state in states.items() if state}


def load_states(callbacks: Sequence[Any], states: Mapping[str, Any]) -> set[str]:
    """Give each callback the state that was saved under its name, if there is one.

    Returns the names of states that no callback takes.
    """
    named = _named(callbacks)
    for name, callback in named.items():
        if (state := states.get(name)) is not None:
            callback.load_state_dict(state)
    return {*states} - {*named}


def tensors_of(callbacks: Sequence[Any]) -> dict[str, Mapping[str, Tensor]]:
    """Return what callbacks keep of each parameter, by its kind."""
    return {
        kind: named
        for callback in callbacks
        for kind, named in callback.tensors().items()
    }


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    """The callbacks, each with a name of its own."""
    kinds = [type(callback).__name__ for callback in callbacks]
    numbers = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
    names = [f"{k} {n}" if n else k for k, n in zip(kinds, numbers, strict=True)]
    return dict(zip(names, callbacks, strict=True))
