"""One node of the graph as one Python expression."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from gemsc.errors import GemscError, InternalError
from gemsc.ir import meta

__all__ = ["UserObject", "access", "expression", "literal", "quoted"]

INFIX: dict[Any, tuple[str, int]] = {
    operator.or_: ("|", 1),
    operator.xor: ("^", 2),
    operator.and_: ("&", 3),
    operator.lshift: ("<<", 4),
    operator.rshift: (">>", 4),
    operator.add: ("+", 5),
    operator.sub: ("-", 5),
    operator.mul: ("*", 6),
    operator.truediv: ("/", 6),
    operator.floordiv: ("//", 6),
    operator.mod: ("%", 6),
    operator.matmul: ("@", 6),
    operator.pow: ("**", 8),
    operator.lt: ("<", 0),
    operator.le: ("<=", 0),
    operator.gt: (">", 0),
    operator.ge: (">=", 0),
    operator.eq: ("==", 0),
    operator.ne: ("!=", 0),
}
PREFIX: dict[Any, str] = {operator.neg: "-", operator.invert: "~"}
ATOM = 9
NAMESPACES: tuple[tuple[str, Any], ...] = (
    ("F", F),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch._C._nn", torch._C._nn),
    ("torch._VF", torch._VF),
    ("operator", operator),
)


@dataclass(frozen=True, slots=True)
class UserObject:
    """Something of the user's own code that a generated file must import."""

    module: str
    qualname: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A constant that differs between training and evaluation."""

    training: object
    evaluation: object


Shown = tuple[str, int]  # text and how tightly it binds
Name = Callable[[fx.Node], Shown]


def expression(
    node: fx.Node, name: Name, twin: fx.Node | None, user: Callable[[UserObject], str]
) -> Shown:
    """Return the node's computation as text, and how tightly the text binds.

    `name(node)` gives the text of an input; `twin` is the same node in the graph for
    evaluation, whose constants may differ; `user` gives the text of a user's object.
    """
    args, kwargs = _with_choices(node, twin)
    show = _Show(name)
    if node.op == "call_module":
        return _call(access("self", str(node.target)), args, kwargs, show), ATOM
    if node.op == "call_method":
        owner = show.bound(args[0], ATOM)
        return _call(f"{owner}.{node.target}", args[1:], kwargs, show), ATOM
    if node.op != "call_function":
        raise InternalError(f"no expression for {node.op} {node.name}")
    return _function(node, args, kwargs, show, user)


def _function(
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    show: _Show,
    user: Callable[[UserObject], str],
) -> Shown:
    target: Any = node.target
    if target in INFIX and len(args) == 2 and not kwargs:
        sign, level = INFIX[target]
        left = show.bound(args[0], level if level else 1)
        return f"{left} {sign} {show.bound(args[1], level + 1)}", level
    if target in PREFIX:
        return f"{PREFIX[target]}{show.bound(args[0], ATOM)}", 7
    if target is operator.getitem:
        return f"{show.bound(args[0], ATOM)}[{show.index(args[1])}]", ATOM
    if target is operator.setitem:
        left = f"{show.bound(args[0], ATOM)}[{show.index(args[1])}]"
        return f"{left} = {show(args[2])}", ATOM
    if target is getattr and isinstance(args[1], str) and args[1].isidentifier():
        return f"{show.bound(args[0], ATOM)}.{args[1]}", ATOM
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        text = user(UserObject(owner.__module__, owner.__qualname__))
        return _call(f"{text}.apply", args, kwargs, show), ATOM
    return _call(_public_name(node), args, kwargs, show), ATOM


def _public_name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{target}"
    name = getattr(target, "__name__", "")
    for space, module in NAMESPACES:
        if name and getattr(module, name, None) is target:
            return f"{space}.{name}"
    if name and getattr(torch.Tensor, name, None) is target:
        return f"torch.Tensor.{name}"
    raise GemscError(
        f"no way is known to write a call of {target!r}",
        at=meta.location(node),
        help="use a function of torch, or wrap it in a torch.autograd.Function",
    )


def _call(
    head: str, args: tuple[Any, ...], kwargs: dict[str, Any], show: _Show
) -> str:
    shown = [show(value) for value in args]
    shown += [f"{key}={show(value)}" for key, value in kwargs.items()]
    return f"{head}({', '.join(shown)})"


class _Show:
    """Arguments as text."""

    def __init__(self, name: Name) -> None:
        self.name = name

    def __call__(self, value: Any) -> str:
        return self.pair(value)[0]

    def bound(self, value: Any, level: int) -> str:
        """Return the text, in parentheses if it binds less tightly than `level`."""
        text, own = self.pair(value)
        return text if own >= level else f"({text})"

    def pair(self, value: Any) -> Shown:
        if isinstance(value, fx.Node):
            return self.name(value)
        if isinstance(value, Choice):
            if value.training is True and value.evaluation is False:
                return "self.training", ATOM
            either = f"{self(value.training)} if self.training"
            return f"({either} else {self(value.evaluation)})", ATOM
        if isinstance(value, tuple):
            inside = ", ".join(map(self, value))
            return (f"({inside},)" if len(value) == 1 else f"({inside})"), ATOM
        if isinstance(value, list):
            return f"[{', '.join(map(self, value))}]", ATOM
        if isinstance(value, dict):
            pairs = (f"{literal(key)}: {self(item)}" for key, item in value.items())
            return "{" + ", ".join(pairs) + "}", ATOM
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self, parts))})", ATOM
        text = literal(value)
        return text, (7 if text.startswith("-") else ATOM)

    def index(self, value: Any) -> str:
        """Return what stands between the brackets of a subscript."""
        if isinstance(value, tuple) and value:
            inside = ", ".join(map(self._index_part, value))
            return f"{inside}," if len(value) == 1 else inside
        return self._index_part(value)

    def _index_part(self, value: Any) -> str:
        if not isinstance(value, slice):
            return self(value)
        start = "" if value.start is None else self(value.start)
        stop = "" if value.stop is None else self(value.stop)
        step = "" if value.step is None else f":{self(value.step)}"
        return f"{start}:{stop}{step}"


def literal(value: object) -> str:
    """Return a constant as Python text.

    Raises:
        InternalError: the value has no exact text.
    """
    if value is None or isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, str):
        return quoted(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, torch.Size | range):
        return f"({', '.join(map(literal, value))},)"
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    raise InternalError(f"no text for a constant of type {type(value).__name__}")


def quoted(text: str) -> str:
    """Return a string literal in double quotes that can hold any text."""
    return json.dumps(text)


def access(owner: str, path: str) -> str:
    """Return `owner.layer1["0"].conv1` for the path `layer1.0.conv1`."""
    for part in path.split("."):
        owner += f".{part}" if part.isidentifier() else f"[{quoted(part)}]"
    return owner


def _with_choices(
    node: fx.Node, twin: fx.Node | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if twin is None:
        return tuple(node.args), dict(node.kwargs)
    args = tuple(_choose(a, b) for a, b in zip(node.args, twin.args, strict=True))
    kwargs = {key: _choose(v, twin.kwargs[key]) for key, v in node.kwargs.items()}
    return args, kwargs


def _choose(training: Any, evaluation: Any) -> Any:
    if isinstance(training, fx.Node):
        return training
    if isinstance(training, tuple | list):
        pairs = zip(training, evaluation, strict=True)
        return type(training)(_choose(a, b) for a, b in pairs)
    if isinstance(training, dict):
        return {key: _choose(v, evaluation[key]) for key, v in training.items()}
    if isinstance(training, slice):
        parts = ((getattr(s, n) for n in ("start", "stop", "step")) for s in (training, evaluation))
        return slice(*(_choose(a, b) for a, b in zip(*parts, strict=True)))
    if training is evaluation or training == evaluation:
        return training
    return Choice(training, evaluation)
