"""Say what a call of a torch function is in the graph: operator, method, function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from gemsc.errors import GemscError
from gemsc.frontend.opaque import AsksForGradientsError
from gemsc.ir.staged import defaults_of

TargetCall = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""(op, target, args, kwargs) of an FX node, with tensors in the arguments."""

_TURNED = "sub truediv pow floordiv mod matmul lshift rshift"
_REVERSED: dict[str, Callable[..., Any]] = {
    f"__r{name}__": getattr(operator, f"__{name}__") for name in _TURNED.split()
} | {"__rdiv__": operator.truediv}
_DUNDERS: dict[str, Callable[..., Any]] = {
    name: function
    for name, function in vars(operator).items()
    if name.startswith("__") and callable(function)
}
# These arrive under the method's name whether written `a + b` or `a.add(b)`.
_IN_PLACE = ("add", "sub", "mul", "pow")
_SAME = (*_IN_PLACE, "matmul", "neg", "eq", "ne", "lt", "le", "gt", "ge")
_NAMES: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _SAME},
    **{f"{name}_": getattr(operator, f"i{name}") for name in _IN_PLACE},
    "div": operator.truediv,
    "div_": operator.itruediv,
    "remainder": operator.mod,
    "remainder_": operator.imod,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
}
_IGNORED = frozenset(
    {
        *("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "retain_grad"),
        *("set_default_dtype", "manual_seed", "seed"),
    }
)
_REFUSED = {
    "backward": "let the optimizer step call backward: return the loss instead",
    "register_hook": "change the gradient in a torch.autograd.Function",
    "set_": "write x = y instead",
    "resize_": "write x = x.reshape(...) instead",
}


def is_ignored(func: Any) -> bool:
    """Return whether a function only sets modes, which each node carries itself."""
    return getattr(func, "__name__", "") in _IGNORED


def check_autocast() -> None:
    """Refuse autocast without its cache: a program has one.

    Raises:
        GemscError: it has none here.
    """
    is_on = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    if is_on and not torch.is_autocast_cache_enabled():
        raise GemscError(
            "autocast has cache_enabled=False here, without which the gradients of a "
            "weight that is used several times are rounded before they are added up",
            help="leave out cache_enabled=False",
        )


def describe_call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    written_as_operator: bool,
) -> TargetCall:
    """Return the node for a torch function, as the user wrote it.

    Raises:
        GemscError: the function cannot stand in a graph.
        AsksForGradientsError: it needs the backward of what forward has computed.
    """
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return _attribute(name, func.__self__.__name__, args)
    if func is torch.autograd.grad:
        raise AsksForGradientsError
    if name in _REFUSED and (_is_method(func) or name == "backward"):
        raise GemscError(
            f"forward calls {name}(), which a graph cannot contain",
            help=_REFUSED[name],
        )
    if name in _REVERSED and len(args) == 2:
        return "call_function", _REVERSED[name], (args[1], args[0]), {}
    if name in _DUNDERS and _is_method(func) and not kwargs:
        return "call_function", _DUNDERS[name], args, {}
    if written_as_operator and name in _NAMES and not kwargs:
        return "call_function", _NAMES[name], args, {}
    if _is_method(func):
        if name == "new" and isinstance(args[-1], torch.Size):
            name = "new_empty"  # of a tuple, `new` would take the numbers for data
        return "call_method", name, args, kwargs
    return "call_function", func, args, _without_defaults(func, kwargs)


def _attribute(kind: str, attribute: str, args: tuple[Any, ...]) -> TargetCall:
    if kind == "__get__":
        return "call_function", getattr, (args[0], attribute), {}
    if attribute == "requires_grad":
        return "call_method", "requires_grad_", args, {}
    raise GemscError(
        f"forward assigns to .{attribute} of a tensor",
        help="use x.copy_(y) under torch.no_grad(), or make a new tensor",
    )


def _is_method(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__qualname__", "").split(".")[0]
    return owner in ("TensorBase", "Tensor") and hasattr(torch.Tensor, name)


def _without_defaults(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop what torch.nn.functional adds to the call on the way."""
    if not kwargs or not getattr(func, "__module__", "").startswith("torch.nn"):
        return kwargs
    defaults = defaults_of(func)
    return {
        name: value
        for name, value in kwargs.items()
        if name != "_stacklevel"
        and not (name in defaults and _identical(value, defaults[name]))
    }


def _identical(a: object, b: object) -> bool:
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b)
