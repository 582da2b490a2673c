"""One node of the graph as one Python expression."""

from __future__ import annotations

import dataclasses
import keyword
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from gemsc.base.dtypes import is_real
from gemsc.base.nests import nest_text
from gemsc.codegen.python_text import formatted, literal_text, quoted
from gemsc.errors import GemscError, InternalError
from gemsc.ir import meta
from gemsc.ir.opaque import opaque_of
from gemsc.ir.program import DataclassValue, Slot
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.ir.staged import keywords_of_both
from gemsc.messages.exchange import Exchange
from gemsc.runtime import tiles
from gemsc.runtime.tiles.windows import AxisWindows, Resize

INFIX: dict[Any, str] = {
    operator.or_: "|",
    operator.xor: "^",
    operator.and_: "&",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.matmul: "@",
    operator.pow: "**",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
PREFIX: dict[Any, str] = {operator.neg: "-", operator.invert: "~"}
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


Name = Callable[[fx.Node], str]
# the name of something that the module defines or imports at its top
Named = Callable[[UserObject | Exchange], str]


def expression(
    node: fx.Node,
    name: Name,
    twin: fx.Node | None,
    named: Named,
    dtype: torch.dtype | None = None,
) -> str:
    """Return the node's computation as text.

    `name(node)` gives the text of an input; `twin` is the same node in the graph for
    evaluation, whose constants may differ; `named` gives the name of a user's object
    or of a constant. The text may use a variable `dtype`, which is `dtype` where the
    program runs as it was traced.
    """
    args, kwargs = _with_choices(node, twin)
    show = _Show(name, named, dtype, stays=meta.dtypes(node).constants)
    return formatted(_computation(node, args, kwargs, show))


def _computation(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], show: _Show
) -> str:
    """Return it as text with all parentheses that may be needed."""
    target: Any = node.target
    if node.op == "call_module":
        layer = access(str(target), node.graph.owning_module)
        return _node_call(node, layer, args, kwargs, show)
    if node.op == "call_method":
        return _call(f"({show(args[0])}).{target}", args[1:], kwargs, show)
    if node.op != "call_function":
        raise InternalError(f"no expression for {node.op} {node.name}")
    if target in INFIX and len(args) == 2 and not kwargs:
        return f"({show(args[0])}) {INFIX[target]} ({show(args[1])})"
    if target in PREFIX:
        return f"{PREFIX[target]}({show(args[0])})"
    if target is operator.getitem:
        return f"({show(args[0])})[{show.index(args[1])}]"
    if target is operator.setitem:
        return f"({show(args[0])})[{show.index(args[1])}] = {show(args[2])}"
    if target is getattr and isinstance(args[1], str) and args[1].isidentifier():
        return f"({show(args[0])}).{args[1]}"
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        text = show.named(UserObject(owner.__module__, owner.__qualname__))
        return _node_call(node, f"{text}.apply", args, kwargs, show)
    return _node_call(node, _public_name(node), args, kwargs, show)


def _node_call(
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
        if isinstance(value, fx.Node):
            return self.name(value)
        if isinstance(value, Exchange):
            return self.named(value)
        if isinstance(value, ShapeGrid):
            return "self.grid"
        if isinstance(value, Choice):
            if value.training is True and value.evaluation is False:
                return "self.training"
            either = f"{self(value.training)} if self.training"
            return f"({either} else {self(value.evaluation)})"
        if isinstance(value, tuple | list | dict):
            return nest_text(value, self)
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self, parts))})"
        return self._typed(value) or literal(value)

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
        bounds = [value.start, value.stop, value.step]
        if value.step is None:
            bounds.pop()
        return ":".join("" if bound is None else self(bound) for bound in bounds)


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
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)  # of any subclass: an IntEnum, for example
    if value is None or value is ... or isinstance(value, bool | str):
        return literal_text(value)
    if isinstance(value, float):
        return literal_text(float(value))
    if isinstance(value, range):
        return repr(value)
    kinds = torch.dtype | torch.memory_format | torch.layout | torch.qscheme
    if isinstance(value, kinds):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, AxisWindows | Resize):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        inside = ", ".join(f"{name}={_nested(part)}" for name, part in fields)
        return f"{type(value).__name__}({inside})"
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    raise InternalError(f"no text for a constant of type {type(value).__name__}")


def _nested(value: object) -> str:
    """Return a constant, or a tuple of them, as text."""
    return nest_text(value, _nested) if isinstance(value, tuple) else literal(value)


def is_attribute(name: str) -> bool:
    """Whether a name can stand behind `self.` as it is."""
    mangled = name.startswith("__") and not name.endswith("__")
    return name.isidentifier() and not keyword.iskeyword(name) and not mangled


def access(path: str, module: nn.Module | None = None) -> str:
    """Return `self.layer1["0"].conv1` for the path `layer1.0.conv1`.

    A module of the user's own, which the program's `module` has whole, has lists, where
    stages have dictionaries: what lies in it is found by its path.
    """
    text, parts = "self", path.split(".")
    if module is not None and not all(map(is_attribute, parts)):
        owners = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        if any(opaque_of(module.get_submodule(owner)) for owner in owners):
            return f"operator.attrgetter({quoted(path)})(self)"
    for part in parts:
        text += f".{part}" if is_attribute(part) else f"[{quoted(part)}]"
    return text


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


def structure_text(value: Any, outputs: Sequence[str]) -> str:
    """Return what the model returns, around the texts of its outputs."""
    if isinstance(value, Slot):
        return outputs[value.index]
    if isinstance(value, DataclassValue):  # its fields, under their names
        return structure_text(dict(value.fields), outputs)
    if hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)
        items = (f"{name}={structure_text(item, outputs)}" for name, item in pairs)
        return f"named_output({', '.join(items)})"
    if isinstance(value, tuple | list | dict):
        return nest_text(value, lambda item: structure_text(item, outputs))
    return literal(value)
