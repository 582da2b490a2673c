"""One node of the graph as one Python expression."""

from __future__ import annotations

import dataclasses
import keyword
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from gemsc.base.dtypes import is_real
from gemsc.errors import GemscError, InternalError
from gemsc.ir import meta
from gemsc.ir.program import DataclassValue, Slot
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.ir.twins import keywords_of_both
from gemsc.messages.exchange import Exchange
from gemsc.runtime import tiles
from gemsc.runtime.tiles.windows import AxisWindows, Resize

PREFIXED = 7
POWER = 8
ATOM = 9
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
    operator.pow: ("**", POWER),
    operator.lt: ("<", 0),
    operator.le: ("<=", 0),
    operator.gt: (">", 0),
    operator.ge: (">=", 0),
    operator.eq: ("==", 0),
    operator.ne: ("!=", 0),
}
PREFIX: dict[Any, str] = {operator.neg: "-", operator.invert: "~"}
# what a formatter calls simple: `x.y**2` and `x[a:-1]`, but `f(x) ** 2`, `x[a.b :]`
NUMBER = r"-?[\d.]+(?:e[-+]?\d+)?"
SIMPLE_OPERAND = re.compile(rf"[^\W\d][\w.]*|{NUMBER}")
SIMPLE_BOUND = re.compile(rf"|\w+|{NUMBER}")
NAMESPACES: tuple[tuple[str, Any], ...] = (
    ("F", F),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch.sparse", torch.sparse),
    ("torch._C._nn", torch._C._nn),
    ("torch._VF", torch._VF),
    ("operator", operator),
    ("tiles", tiles),
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
# the name of something that the module defines or imports at its top
Named = Callable[[UserObject | Exchange], str]


def expression(
    node: fx.Node,
    name: Name,
    twin: fx.Node | None,
    named: Named,
    dtype: torch.dtype | None = None,
) -> Shown:
    """Return the node's computation as text, and how tightly the text binds.

    `name(node)` gives the text of an input; `twin` is the same node in the graph for
    evaluation, whose constants may differ; `named` gives the name of a user's object
    or of a constant. The text may use a variable `dtype`, which is `dtype` where the
    program runs as it was traced.
    """
    args, kwargs = _with_choices(node, twin)
    show = _Show(name, named, dtype, stays=meta.dtypes(node).constants)
    if node.op == "call_module":
        return _own(node, access("self", str(node.target)), args, kwargs, show), ATOM
    if node.op == "call_method":
        owner = show.bound(args[0], ATOM)
        return _call(f"{owner}.{node.target}", args[1:], kwargs, show), ATOM
    if node.op != "call_function":
        raise InternalError(f"no expression for {node.op} {node.name}")
    return _function(node, args, kwargs, show, named)


def _function(
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    show: _Show,
    named: Named,
) -> Shown:
    target: Any = node.target
    if target in INFIX and len(args) == 2 and not kwargs:
        return _infix(*INFIX[target], args, show)
    if target in PREFIX:
        return f"{PREFIX[target]}{show.bound(args[0], ATOM)}", PREFIXED
    if target is operator.getitem:
        return f"{show.bound(args[0], ATOM)}[{show.index(args[1])}]", ATOM
    if target is operator.setitem:
        left = f"{show.bound(args[0], ATOM)}[{show.index(args[1])}]"
        return f"{left} = {show(args[2])}", ATOM
    if target is getattr and isinstance(args[1], str) and args[1].isidentifier():
        return f"{show.bound(args[0], ATOM)}.{args[1]}", ATOM
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        text = named(UserObject(owner.__module__, owner.__qualname__))
        return _own(node, f"{text}.apply", args, kwargs, show), ATOM
    return _own(node, _public_name(node), args, kwargs, show), ATOM


def _own(
    node: fx.Node,
    head: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    show: _Show,
) -> str:
    """Return a call of what may be the user's own, with a backward of its own."""
    grid = meta.whole_gradients(node)
    if grid is None:
        return _call(head, args, kwargs, show)
    return _call("tiles.with_whole_gradients", args, kwargs, show, show(grid), head)


def _infix(sign: str, level: int, args: tuple[Any, ...], show: _Show) -> Shown:
    if level == POWER:  # from right to left; a negative number may stand on the right
        left, right = show.bound(args[0], ATOM), show.bound(args[1], ATOM)
        if isinstance(args[1], int | float):
            right = show(args[1])
        if SIMPLE_OPERAND.fullmatch(left) and SIMPLE_OPERAND.fullmatch(right):
            return f"{left}{sign}{right}", level
        return f"{left} {sign} {right}", level
    left = show.bound(args[0], level if level else 1)  # no chains of comparisons
    return f"{left} {sign} {show.bound(args[1], level + 1)}", level


def _public_name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{target}"
    name = getattr(target, "__name__", "")
    for space, module in NAMESPACES:
        # torch.fft.rfft calls itself fft_rfft, torch.sparse.mm _sparse_mm
        short = name.removeprefix("_").removeprefix(space.rpartition(".")[2] + "_")
        for public in (name, short):
            if public and getattr(module, public, None) is target:
                return f"{space}.{public}"
    if name and getattr(torch.Tensor, name, None) is target:
        return f"torch.Tensor.{name}"
    raise GemscError(
        f"gemsc cannot write a call of {target!r}",
        at=meta.location(node),
        help="use a function of torch, or wrap it in a torch.autograd.Function",
    )


def _call(
    head: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    show: _Show,
    *first: str,
) -> str:
    shown = [*first, *(show(value) for value in args)]
    shown += [f"{key}={show(value)}" for key, value in kwargs.items()]
    return f"{head}({', '.join(shown)})"


class _Show:
    """Arguments as text."""

    def __init__(
        self, name: Name, named: Named, dtype: torch.dtype | None, *, stays: bool
    ) -> None:
        self.name = name
        self.named = named
        self.dtype = dtype
        self.stays = stays  # whether dtypes are those that the user wrote

    def __call__(self, value: Any) -> str:
        return self.pair(value)[0]

    def bound(self, value: Any, level: int) -> str:
        """Return the text, in parentheses if it binds less tightly than `level`."""
        text, own = self.pair(value)
        return text if own >= level else f"({text})"

    def pair(self, value: Any) -> Shown:
        if isinstance(value, fx.Node):
            return self.name(value)
        if isinstance(value, Exchange):
            return self.named(value), ATOM
        if isinstance(value, ShapeGrid):
            return "self.grid", ATOM
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
        text = self._typed(value) or literal(value)
        return text, (PREFIXED if text.startswith("-") else ATOM)

    def _typed(self, value: Any) -> str:
        """Return a constant that follows the dtype of the model; "" for all others."""
        if self.dtype is None:
            return ""
        if isinstance(value, meta.TypedNumber):
            return _typed_number(value, self.dtype)
        if isinstance(value, torch.dtype) and is_real(value) and not self.stays:
            return _typed(value, self.dtype)
        return ""

    def index(self, value: Any) -> str:
        """Return what stands between the brackets of a subscript."""
        if isinstance(value, tuple) and value:
            inside = ", ".join(map(self._index_part, value))
            return f"{inside}," if len(value) == 1 else inside
        return self._index_part(value)

    def _index_part(self, value: Any) -> str:
        if not isinstance(value, slice):
            return self(value)
        bounds = (value.start, value.stop, value.step)
        parts = ["" if bound is None else self(bound) for bound in bounds]
        if value.step is None:
            parts.pop()
        if all(SIMPLE_BOUND.fullmatch(part) for part in parts):
            return ":".join(parts)
        text = parts[0]
        for part in parts[1:]:
            space = " " if text and not text.endswith(":") else ""
            text += f"{space}: {part}" if part else f"{space}:"
        return text


def _typed(value: torch.dtype, dtype: torch.dtype) -> str:
    """Return a dtype that follows that of the model, which is `dtype` as traced."""
    if value == dtype:
        return "dtype"
    if value.is_complex and value == dtype.to_complex():
        return "dtype.to_complex()"
    return f"({value} if dtype is {dtype} else dtype)"


def _typed_number(value: meta.TypedNumber, dtype: torch.dtype) -> str:
    """Return a number that follows the model's dtype: `torch.finfo(dtype).eps`."""
    info = torch.finfo(dtype)
    for name in ("min", "max", "eps", "tiny", "resolution"):
        if getattr(info, name) == value:
            return f"torch.finfo(dtype).{name}"
    return f"({literal(value)} if dtype is {dtype} else {literal(value.other)})"


def literal(value: object) -> str:
    """Return a constant as Python text.

    Raises:
        InternalError: the value has no exact text.
    """
    if value is None or isinstance(value, bool | range):
        return repr(value)
    if isinstance(value, int):  # of any subclass: an IntEnum, for example
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value).replace("e+", "e")
        return text if math.isfinite(value) else f'float("{text}")'
    if isinstance(value, str):
        return quoted(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, AxisWindows | Resize):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        inside = ", ".join(f"{name}={_nested(each)}" for name, each in fields)
        return f"{type(value).__name__}({inside})"
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    raise InternalError(f"no text for a constant of type {type(value).__name__}")


def _nested(value: object) -> str:
    """Return a constant, or a tuple of them, as text."""
    if not isinstance(value, tuple):
        return literal(value)
    parts = [_nested(part) for part in value]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def quoted(text: str) -> str:
    """Return a string literal, on one line, that can hold any text."""
    inside = text.encode("unicode_escape").decode("ascii")
    mark = '"' if inside.count('"') <= inside.count("'") else "'"
    return mark + inside.replace(mark, f"\\{mark}") + mark


def is_attribute(name: str) -> bool:
    """Whether a name can stand behind `self.` as it is."""
    mangled = name.startswith("__") and not name.endswith("__")
    return name.isidentifier() and not keyword.iskeyword(name) and not mangled


def access(owner: str, path: str) -> str:
    """Return `owner.layer1["0"].conv1` for the path `layer1.0.conv1`."""
    for part in path.split("."):
        owner += f".{part}" if is_attribute(part) else f"[{quoted(part)}]"
    return owner


def _with_choices(
    node: fx.Node, twin: fx.Node | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if twin is None:
        return tuple(node.args), dict(node.kwargs)
    args = tuple(_choose(a, b) for a, b in zip(node.args, twin.args, strict=True))
    both = keywords_of_both(node, twin)
    if both is None:
        raise InternalError(f"{node.name} and its twin have other keywords")
    return args, {key: _choose(*values) for key, values in both.items()}


def _choose(training: Any, evaluation: Any) -> Any:
    if isinstance(training, fx.Node):
        return training
    if isinstance(training, tuple | list):
        pairs = zip(training, evaluation, strict=True)
        chosen = [_choose(a, b) for a, b in pairs]
        return tuple(chosen) if isinstance(training, tuple) else chosen
    if isinstance(training, dict):
        return {key: _choose(v, evaluation[key]) for key, v in training.items()}
    if isinstance(training, slice):
        names = ("start", "stop", "step")
        parts = [_choose(getattr(training, n), getattr(evaluation, n)) for n in names]
        return slice(*parts)
    if training is evaluation or training == evaluation:
        return training
    return Choice(training, evaluation)


def as_tuple(values: Sequence[object]) -> str:
    """Return a tuple of strings and numbers as text."""
    parts = [quoted(v) if isinstance(v, str) else repr(v) for v in values]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def structure_text(value: Any, outputs: Sequence[str]) -> str:
    """Return what the model returns, around the texts of its outputs."""
    if isinstance(value, Slot):
        return outputs[value.index]
    if isinstance(value, DataclassValue):  # its fields, under their names
        return structure_text(dict(value.fields), outputs)
    if isinstance(value, tuple):
        inside = ", ".join(structure_text(item, outputs) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, list):
        return f"[{', '.join(structure_text(item, outputs) for item in value)}]"
    if isinstance(value, dict):
        shown = {literal(k): structure_text(v, outputs) for k, v in value.items()}
        return "{" + ", ".join(f"{k}: {v}" for k, v in shown.items()) + "}"
    return literal(value)
