"""Names for what goes into a model, and the structure of what comes out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gemsc.errors import GemscError
from gemsc.ir.program import DataclassValue, Slot
from gemsc.nests import Inputs, Path, named_tuple

__all__ = ["input_names", "output_structure"]

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.Size,
)


def input_names(model: nn.Module, inputs: Inputs) -> Callable[[Path], str]:
    """Return the function that names the tensor at a path ("input", 0, "mask")."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]

    def name(path: Path) -> str:
        kind, *rest = path
        if kind == "input" and isinstance(inputs, tuple):
            index = int(rest[0])
            if index < len(named):
                rest[0] = named[index]
            else:
                rest[:1] = [variadic[0] if variadic else "input", index]
            return "_".join(map(str, rest))
        return "_".join(map(str, rest if kind == "input" else path))

    return name


def output_structure(output: object) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return what the model returned with a `Slot` for each tensor, and the tensors."""
    tensors: list[torch.Tensor] = []
    structure = _structure(output, tensors)
    if not tensors:
        raise GemscError("the model returns no tensor", help="return a tensor")
    return structure, tuple(tensors)


def _structure(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, _CONSTANTS):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = ((n, _structure(getattr(value, n), tensors)) for n in names)
        return DataclassValue(type(value), tuple(fields))
    if isinstance(value, Mapping):
        return {key: _structure(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_structure(item, tensors) for item in value]
    if isinstance(value, tuple):
        return named_tuple(value, [_structure(item, tensors) for item in value])
    raise GemscError(
        f"the model returns an object of type {type(value).__name__}",
        help="return tensors in tuples, lists, dicts or dataclasses",
    )
