"""Write a layer of torch.nn or gemsc.nn as the expression that makes it."""

from __future__ import annotations

import copy
import inspect
import numbers
import re
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import container
from torch.nn.parameter import is_lazy

import gemsc.nn
from gemsc.base.dtypes import default_dtype
from gemsc.base.nests import nest_text

# modules whose classes have text, by their names in it
_SPACES = {"nn": nn, "gemsc.nn": gemsc.nn}
_INTERNAL = frozenset(vars(nn.Module())) - {"_non_persistent_buffers_set"}
_EVALUATED = {"nn": nn, "torch": torch, "gemsc": gemsc, "float": float}
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_ABOUT = {"__init__", "reset_parameters", "extra_repr", "__repr__", "__constants__"}
_CONTAINERS = tuple(getattr(container, name) for name in container.__all__)
_MAX_POSITIONAL = 2  # nn.Conv2d(32, 64, kernel_size=3)
_MISSING = object()
NORM_STATISTICS = "running_mean", "running_var", "num_batches_tracked"


class _UnwritableError(Exception):
    """A value that has no exact literal."""


def layer_source(module: nn.Module) -> str | None:
    """Return for example `nn.Conv2d(32, 64, kernel_size=3, padding=1)`.

    The expression is evaluated on the meta device and compared with `module`: class,
    names, shapes and dtypes of all tensors, all settings. None if no expression gives
    the same layer: classes from elsewhere, containers, layers with children or hooks.
    Values of parameters and buffers are not part of it: they are loaded afterwards.
    """
    if not _is_plain(module):
        return None
    for short in (True, False):
        try:
            positional, keywords = _arguments(module, short=short)
        except _UnwritableError:
            return None
        if _gives_same(_call(module, positional, keywords), module):
            return _shortest(module, positional, keywords)
    return None


def as_of_torch(module: nn.Module) -> nn.Module:
    """Return a layer as one of torch's own, if its class changes nothing of that.

    Example: `class Norm(nn.BatchNorm2d)` with an `__init__` that sets `eps`. The layer
    that is returned shares its tensors; any other one is returned as it is.
    """
    for cls in type(module).__mro__:
        if any(_is_of(space, cls) for space in _SPACES):
            break
        defined = {name for name in vars(cls) if name not in vars(_Empty)}
        if not defined <= _ABOUT:
            return module
    else:
        return module
    if cls is type(module) or cls in _CONTAINERS or cls is nn.Module:
        return module
    plain = copy.copy(module)
    plain.__class__ = cls
    return plain if layer_source(plain) is not None else module


def norm_of_torch(module: nn.Module) -> nn.Module | None:
    """Return a BatchNorm of torch with the tensors of a class that derives from it.

    It has none of its values and none of its other attributes, and is None if there is
    none that has tensors of these names, shapes and dtypes.
    """
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    cls = next((base for base in type(module).__mro__ if base in plain), None)
    norm: Any = module
    # an average of all would be begun anew where nothing is counted
    if cls is None or norm.momentum is None or module._non_persistent_buffers_set:
        return None
    layer = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, device="meta")

    def tensors(owner: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
        named = {**owner._parameters, **owner._buffers}
        return {name: (t.shape, t.dtype) for name, t in named.items() if t is not None}

    return layer if tensors(layer) == tensors(module) else None


class _Empty:
    """What any class has: its module, its text, its annotations."""

    field: int


def _shortest(module: nn.Module, positional: list[str], keywords: list[str]) -> str:
    """Drop the keywords that make no difference."""
    for keyword in list(keywords):
        fewer = [other for other in keywords if other != keyword]
        if _gives_same(_call(module, positional, fewer), module):
            keywords = fewer
    return _call(module, positional, keywords)


def _call(module: nn.Module, positional: list[str], keywords: list[str]) -> str:
    cls = type(module)
    space = next(name for name in _SPACES if _is_of(name, cls))
    return f"{space}.{cls.__name__}({', '.join(positional + keywords)})"


def _is_of(space: str, cls: type) -> bool:
    return getattr(_SPACES[space], cls.__name__, None) is cls


def _is_plain(module: nn.Module) -> bool:
    cls = type(module)
    return (
        any(_is_of(space, cls) for space in _SPACES)
        and not isinstance(module, _CONTAINERS)
        and not any(True for _ in module.children())
        and not any(vars(module).get(name) for name in HOOKS)
        and not any(is_lazy(parameter) for parameter in module.parameters())
        and not _shadowed(module)
    )


def _shadowed(module: nn.Module) -> bool:
    """Return whether the object replaces a method of its class."""
    names = set(vars(module)) - _INTERNAL
    return any(callable(getattr(type(module), name, None)) for name in names)


def _arguments(module: nn.Module, *, short: bool) -> tuple[list[str], list[str]]:
    positional: list[str] = []
    keywords: list[str] = []
    cls: Any = type(module)
    for parameter in _parameters(cls):
        value = _setting(module, parameter.name)
        if value is _MISSING or _same(value, parameter.default):
            continue
        text = _literal(_shorten(value) if short else value)
        required = parameter.default is inspect.Parameter.empty
        if required and not keywords and len(positional) < _MAX_POSITIONAL:
            positional.append(text)
        else:
            keywords.append(f"{parameter.name}={text}")
    return positional, keywords


@cache
def _parameters(cls: Any) -> tuple[inspect.Parameter, ...]:
    if issubclass(cls, nn.RNNBase):  # RNNBase hides its signature behind *args
        return tuple(_recurrent_parameters(cls))
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cls.__init__).parameters.values()
    return tuple(p for p in list(parameters)[1:] if p.kind not in variadic)


def _recurrent_parameters(cls: type) -> Iterator[inspect.Parameter]:
    _, _, *parameters = inspect.signature(nn.RNNBase.__init__).parameters.values()
    for parameter in parameters:  # all but self and the mode, which the class says
        if parameter.name != "proj_size" or cls is nn.LSTM:
            yield parameter
    if cls is nn.RNN:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        yield inspect.Parameter("nonlinearity", kind, default="tanh")


def _setting(module: nn.Module, name: str) -> Any:
    """Return the value of a constructor parameter, as the layer still knows it."""
    if name == "dtype":
        return _dtype(module)
    if name == "device" or name.startswith("_"):
        return _MISSING
    value = getattr(module, name, _MISSING)
    if name == "bias" and (value is None or isinstance(value, torch.Tensor)):
        return value is not None
    return value


def _dtype(module: nn.Module) -> Any:
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point() or tensor.is_complex():
            return _MISSING if tensor.dtype is torch.float32 else tensor.dtype
    return _MISSING


def _shorten(value: Any) -> Any:
    """Return 3 for (3, 3)."""
    if isinstance(value, tuple) and value and all(v == value[0] for v in value):
        return value[0]
    return value


def _literal(value: object) -> str:
    """Return Python text of a constant; no other object's `repr` ever gets in."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, float):
        text = float.__repr__(value)
        return text if re.fullmatch(r"[-+.e\d]+", text) else f'float("{text}")'
    if isinstance(value, (str, torch.dtype)):
        return _word(value)
    if isinstance(value, (tuple, list)):
        return nest_text(value, _literal)
    if isinstance(value, torch.Tensor):
        return empty_source(value)
    raise _UnwritableError


def empty_source(tensor: torch.Tensor) -> str:
    """Return such a tensor without values: `torch.empty(4, 3, dtype=torch.int64)`."""
    dtype = "" if tensor.dtype is torch.float32 else f", dtype={tensor.dtype}"
    shape = ", ".join(str(int(size)) for size in tensor.shape) or "()"
    return f"torch.empty({shape}{dtype})"


def _word(value: str | torch.dtype) -> str:
    if isinstance(value, torch.dtype):
        return str(value)
    if not re.fullmatch(r"[A-Za-z0-9_-]*", value):
        raise _UnwritableError
    return f'"{value}"'


def _gives_same(source: str, module: nn.Module) -> bool:
    made = _made(source)
    return (
        type(made) is type(module)
        and _tensors(made._parameters) == _tensors(module._parameters)
        and _tensors(made._buffers) == _tensors(module._buffers)
        and _same_settings(made, module)
    )


@lru_cache(maxsize=1024)  # models have many layers of a kind
def _made(source: str) -> nn.Module | None:
    """Return the layer that an expression gives, None if it gives none."""
    try:
        with (
            default_dtype(torch.float32),
            torch.device("meta"),
            warnings.catch_warnings(action="ignore"),  # the user has seen them
        ):
            # Safe: `_literal` wrote every part of the text.
            made: nn.Module = eval(source, dict(_EVALUATED))
    except (TypeError, ValueError, RuntimeError, AssertionError):
        return None
    return made


def _tensors(named: dict[str, Any]) -> list[object]:
    return [
        (name, None if t is None else (tuple(t.shape), t.dtype))
        for name, t in named.items()
    ]


def _same_settings(made: nn.Module, module: nn.Module) -> bool:
    """Compare what the constructor sets; extra attributes are never read by torch."""
    ours = vars(module)
    names = set(vars(made)) - _INTERNAL
    return all(name in ours and _same(vars(made)[name], ours[name]) for name in names)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and a.shape == b.shape and a.dtype == b.dtype
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a).__name__ == type(b).__name__ == "ReferenceType":
        return True  # an LSTM's weak references to its own weights
    if (isinstance(a, float) and a != a) or (isinstance(b, float) and b != b):
        return bool(a != a and b != b)
    return bool(a == b)
