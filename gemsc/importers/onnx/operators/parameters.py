"""The tensors of a graph: those that are known beforehand, and what nodes hold of them.

What two nodes hold is one parameter: a layer with the same settings is called twice,
and another use of a layer's weight names the layer, `self.embed.weight.T`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from gemsc.errors import InternalError
from gemsc.importers.onnx.operators.names import is_machine_made, place_of_layer, scope
from gemsc.importers.sheet import Sheet, Symbol
from gemsc.importers.weight import Array, Weight, constant

MOST_AXES = 4  # of a tensor that is looked for in another order of its axes
# the types that are a whole number of bytes, as torch has them
NUMBERS = frozenset(
    [
        *("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "BOOL", "INT8", "INT16", "INT32"),
        *("INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    ]
)


@dataclass(frozen=True, eq=False)
class Static:
    """A tensor that is known when the file is read.

    `weight` says which elements of the file it has. What was computed from them, or is
    no initializer, has a weight without sources. A `trained` one is a parameter where
    it becomes a value of forward, another one a buffer, or a literal if it is small.
    What depends on the shape of a value is `sized`: its batch is that of the example.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weight: Weight
    read: Callable[[str], Array]
    trained: bool = False
    sized: bool = False

    @cached_property
    def array(self) -> Array:
        """Its numbers."""
        return self.weight.made(self.read).astype(self.dtype, copy=False)

    @property
    def rank(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def moved(self, move: Callable[[Array], Array], *shape: int) -> Static:
        """Return it with its elements moved, in this shape."""
        return replace(self, shape=shape, weight=self.weight.then(move))

    def flat(self) -> Static:
        """Return it without axes but one."""
        size = int(np.prod(self.shape, dtype=np.int64))
        return self.moved(lambda array: array.reshape(-1), size)


# what a name of the graph stands for
Value = Symbol | Static


def computed(name: str, array: Array, *, sized: bool = False) -> Static:
    """Return numbers that the file does not hold as they are."""
    array = np.asarray(array)

    def read(source: str) -> Array:
        raise InternalError(f"'{name}' is not made of '{source}'")

    return Static(name, array.shape, array.dtype, constant(array), read, sized=sized)


def number_type(code: int) -> np.dtype[Any] | None:
    """Return the type of arrays for a code of the format; None if torch has none."""
    known = onnx.TensorProto.DataType
    if code not in known.values() or known.Name(code) not in NUMBERS:
        return None
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))


def torch_type(kind: np.dtype[Any]) -> torch.dtype:
    """Return PyTorch's type for NumPy's."""
    if kind.name == "bfloat16":
        return torch.bfloat16
    return torch.from_numpy(np.empty(0, kind)).dtype


def numpy_type(kind: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's type for PyTorch's."""
    if kind is torch.bfloat16:
        return onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
    dtype: np.dtype[Any] = torch.empty(0, dtype=kind, device="cpu").numpy().dtype
    return dtype


def type_code(value: Value) -> int:
    """Return the code that the format has for a value's type."""
    kind = value.dtype if isinstance(value, Static) else numpy_type(value.tensor.dtype)
    return int(onnx.helper.np_dtype_to_tensor_dtype(kind))


@dataclass(frozen=True)
class _Held:
    """A tensor that the network has: its text, and where its elements come from."""

    text: str
    weight: Weight
    tensor: Tensor
    layer: str
    settings: str


@dataclass(eq=False)
class Parameters:
    """What has been added to a sheet, by the tensors of the file that it is made of.

    `shape` tells the sizes of a tensor of the file.
    """

    sheet: Sheet
    shape: Callable[[str], tuple[int, ...]]
    _held: dict[str, list[_Held]] = field(default_factory=dict)
    _constants: dict[Static, Symbol] = field(default_factory=dict)
    _starts: dict[str, int] = field(default_factory=dict)  # of the elements' numbers
    _count: int = 0

    def layer(
        self, node: onnx.NodeProto, module: nn.Module, weights: Mapping[str, Static]
    ) -> str:
        """Add a layer, or return the text of the one that is the same."""
        kinds = {weight.dtype for weight in weights.values()}
        if len(kinds) == 1:  # layers of another type than float32
            module.to(torch_type(kinds.pop()))
        settings = repr(module)
        if text := self._same_layer(settings, weights):
            return text
        module.to("meta")
        made = dict([*module.named_parameters(), *module.named_buffers()])
        for key, weight in weights.items():
            if weight.shape != tuple(made[key].shape):
                raise self.sheet.refuse(
                    f"has a {key} of {weight.shape}, and needs {tuple(made[key].shape)}"
                )
        plain = {key: weight.weight for key, weight in weights.items()}
        ties = {key: self._tie(weight, made[key]) for key, weight in plain.items()}
        sources = {
            k: w.sources[0] for k, w in plain.items() if w.sources and not ties[k]
        }
        frozen = {key for key, weight in weights.items() if not weight.trained}
        text = self.sheet.layer(
            place_of_layer(node, sources), module, plain, frozen=frozen
        )
        for key in plain:
            self._hold(_Held(f"{text}.{key}", plain[key], made[key], text, settings))
            if ties[key]:
                self.sheet.tie(f"{text}.{key}", ties[key])
        return text

    def held(self, static: Static) -> Symbol | None:
        """Return the parameter that has these elements, if there is one."""
        mine, shape = static.weight, static.shape
        for held in self._others(mine):
            text = _text(held, self._numbers(held.weight), self._numbers(mine), shape)
            if text:
                empty = torch.empty(shape, dtype=held.tensor.dtype, device="meta")
                return Symbol(text, empty, empty)
        return None

    def value(self, node: onnx.NodeProto, static: Static) -> Symbol:
        """Return a tensor of the network itself: a parameter or a buffer."""
        if static.weight.sources:
            if known := self.held(static):
                return known
            self._refuse_shared(static.weight)
        elif static in self._constants:
            return self._constants[static]
        name = (*static.weight.sources, static.name)[0]
        if is_machine_made(name):
            name = ".".join(filter(None, [scope(node), "weight"]))
            name = name if static.trained else f"{name.removesuffix('weight')}constant"
        path = ".".join(part for part in name.replace("/", ".").split(".") if part)
        try:
            kind = torch_type(static.dtype)
        except TypeError:
            raise self.sheet.refuse(f"makes numbers of type {static.dtype}") from None
        weight = static.weight if static.weight.sources else constant(static.array)
        symbol = self.sheet.tensor(
            path, static.shape, weight, dtype=kind, trained=static.trained
        )
        self._constants[static] = symbol
        self._hold(_Held(symbol.text, weight, symbol.tensor, "", ""))
        return symbol

    # ------------------------------------------------------------ the same elements

    def _hold(self, held: _Held) -> None:
        for source in held.weight.sources:
            self._held.setdefault(source, []).append(held)

    def _others(self, weight: Weight) -> list[_Held]:
        """Return what has elements of the same tensors of the file."""
        return list(
            dict.fromkeys(h for s in weight.sources for h in self._held.get(s, ()))
        )

    def _equal(self, weight: Weight) -> Iterator[_Held]:
        """Yield what has the same elements in the same order."""
        for held in self._others(weight):
            if np.array_equal(self._numbers(weight), self._numbers(held.weight)):
                yield held

    def _numbers(self, weight: Weight) -> Array:
        """Return which elements of the file a weight has: numbers, one for each."""
        arrays = []
        for source in weight.sources:
            shape = self.shape(source)
            size = int(np.prod(shape, dtype=np.int64))
            if source not in self._starts:
                self._starts[source] = 1 + self._count
                self._count += size
            start = self._starts[source]
            arrays.append(np.arange(start, start + size, dtype=np.int64).reshape(shape))
        return weight.move(*arrays)

    def _same_layer(self, settings: str, weights: Mapping[str, Static]) -> str:
        """Return the text of a layer with these settings and elements, if any."""
        texts = set()
        for key, static in weights.items():
            same = [
                held.layer
                for held in self._equal(static.weight)
                if (held.settings, held.text) == (settings, f"{held.layer}.{key}")
            ]
            if len(same) != 1:
                return ""
            texts.add(same[0])
        return texts.pop() if len(texts) == 1 else ""

    def _tie(self, weight: Weight, new: Tensor) -> str:
        """Return the parameter that a new layer's one is, "" where it is its own."""
        if not isinstance(new, nn.Parameter):
            return ""
        for held in self._equal(weight):
            if isinstance(held.tensor, nn.Parameter):
                return held.text
        self._refuse_shared(weight)
        return ""

    def _refuse_shared(self, weight: Weight) -> None:
        """Refuse a weight that has elements of another one, for it would be two.

        What is no parameter may be there twice.
        """
        for held in self._others(weight):
            if not isinstance(held.tensor, nn.Parameter):
                continue
            if np.intersect1d(self._numbers(weight), self._numbers(held.weight)).any():
                raise self.sheet.refuse(
                    f"has elements of '{weight.sources[0]}', which {held.text} holds in"
                    " another way",
                    help="export the model with a tensor for each of the two",
                )


def _text(held: _Held, theirs: Array, mine: Array, shape: tuple[int, ...]) -> str:
    """Return how the elements of a weight are had from a tensor, "" if not at all."""
    if theirs.shape == mine.shape and np.array_equal(theirs, mine):
        return held.text
    if theirs.size != mine.size:
        return ""
    if np.array_equal(theirs.reshape(-1), mine.reshape(-1)):
        return f"{held.text}.reshape({', '.join(map(str, shape))})"
    if theirs.ndim == mine.ndim <= MOST_AXES:
        for axes in itertools.permutations(range(theirs.ndim)):
            moved = theirs.transpose(axes)
            if moved.shape == mine.shape and np.array_equal(moved, mine):
                return f"{held.text}.permute({', '.join(map(str, axes))})"
    return ""
