"""Nests of tensors: what goes into a model and what comes out of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gemsc.errors import GemscError
from gemsc.ir.program import DataclassValue, Slot

__all__ = [
    "Inputs",
    "Path",
    "input_names",
    "map_tensors",
    "named_tuple",
    "normalize_inputs",
    "output_structure",
    "tensor_leaves",
]

Path = tuple[str | int, ...]
Inputs = tuple[Any, ...] | dict[str, Any]
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


def normalize_inputs(inputs: object) -> Inputs:
    """Return a tuple of positional or a dict of keyword inputs, checked."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if not isinstance(inputs, (tuple, dict)):
        raise GemscError(
            f"example_inputs is of type {type(inputs).__name__}",
            help="return a tuple of positional or a dict of keyword inputs",
        )
    if not any(True for _ in tensor_leaves(inputs)):
        raise GemscError(
            "example_inputs holds no tensor",
            help="return the tensors of one micro-batch, as forward takes them",
        )
    return inputs


def tensor_leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, tensor) for each tensor of a nest, in order."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensor_leaves(item, (*path, index))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensor_leaves(item, (*path, _key(key)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensor_leaves(getattr(value, field.name), (*path, field.name))


def map_tensors(
    value: Any, change: Callable[[Path, torch.Tensor], Any], path: Path = ()
) -> Any:
    """Return the nest with `change(path, tensor)` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [map_tensors(v, change, (*path, i)) for i, v in enumerate(value)]
        return items if isinstance(value, list) else named_tuple(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value)]
        changed = {
            f: map_tensors(getattr(value, f), change, (*path, f)) for f in fields
        }
        return dataclasses.replace(value, **changed)
    if isinstance(value, Mapping):
        return {
            key: map_tensors(item, change, (*path, _key(key)))
            for key, item in value.items()
        }
    return value


def named_tuple(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return the items as a tuple, a named one if `like` is."""
    if hasattr(like, "_fields"):
        return type(like)(*items)
    return tuple(items)


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


def _key(key: object) -> str | int:
    return key if isinstance(key, (str, int)) else str(key)
