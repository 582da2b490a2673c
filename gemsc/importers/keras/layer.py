"""A call of a Keras layer, as the function of its class sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from torch import nn

from gemsc.errors import GemscError, InternalError
from gemsc.importers.sheet import Sheet, Symbol
from gemsc.importers.weight import FileTensor, Weight, same

# returns what a layer gives: a value, or several of them
Translator = Callable[["LayerCall"], "Laid | Sequence[Laid]"]
Function = TypeVar("Function", bound=Translator)
LAYERS: dict[str, Translator] = {}  # the layers of Keras, by the names of their classes
OPERATIONS: dict[str, Translator] = {}  # and the functions of keras.ops


def translates(
    *kinds: str, table: dict[str, Translator] = LAYERS
) -> Callable[[Function], Function]:
    """Let a function translate the calls of layers of these classes."""

    def register(function: Function) -> Function:
        table.update(dict.fromkeys(kinds, function))
        return function

    return register


def dimension(axis: int, rank: int, first: bool) -> int:
    """Return the dimension of a tensor that is an axis of Keras.

    `first` says that the tensor has its channels first, where Keras has them last.
    """
    axis %= rank
    if not first or axis == 0:
        return axis
    return 1 if axis == rank - 1 else axis + 1


@dataclass(frozen=True, eq=False)
class Laid:
    """A value and the order of its axes: as Keras has them, or channels first.

    With `first` the axes are (batch, channels, ...), where Keras has (batch, ...,
    channels). Values of rank 2 and less are never so. `others` has the same value in
    the other order, once a line has permuted it. `masked` names the layer whose mask
    Keras hands on with it.
    """

    value: Symbol
    first: bool = False
    masked: str = ""
    others: list[Symbol] = field(default_factory=list, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes, in the order that Keras has them."""
        sizes = self.value.shape
        return (sizes[0], *sizes[2:], sizes[1]) if self.first else sizes

    def ordered(self, sheet: Sheet, *, first: bool) -> Symbol:
        """Return the value in an order of axes; the first time a line permutes it."""
        rank = len(self.value.shape)
        if first == self.first or rank < 3:
            return self.value
        if not self.others:
            inner = range(1, rank - 1)
            axes = (0, rank - 1, *inner) if first else (0, *range(2, rank), 1)
            wish = f"{self.value}_{'first' if first else 'last'}"
            text = f"{self.value}.permute({', '.join(map(str, axes))})"
            self.others.append(sheet.line(wish, text))
        return self.others[0]


@dataclass(eq=False)
class Layer:
    """A layer of the archive, which may be called several times.

    `variables` are the names of its tensors in the file, in Keras' order, and by the
    paths of its parts for those that have parts: {"": (...), "cell": (...)}. `table`
    says what the file knows of them, and `path` is where they stand in it. A layer that
    is `frozen` is not trained, because it or the whole model says so. `text` is the
    whole config of a model within a model, and `is_operation` marks a function of
    keras.ops.
    """

    kind: str
    name: str
    config: Mapping[str, Any]
    variables: Mapping[str, Sequence[str]]
    table: Mapping[str, FileTensor] = field(default_factory=dict)
    path: str = ""
    frozen: bool = False
    text: Mapping[str, Any] | None = None
    is_operation: bool = False
    added: dict[str, str] = field(default_factory=dict)
    tensors: dict[tuple[str, tuple[int, ...]], Symbol] = field(default_factory=dict)
    parts: dict[str, Layer] = field(default_factory=dict)


@dataclass(eq=False)
class LayerCall:
    """One call of a layer: what it is given, and the sheet to write to.

    `inputs` are the tensors among the positional arguments, in their order; in
    `arguments` they stand among lists and constants, as in `keywords`. `translate` adds
    the lines of another call, and `find` gives a layer that this one holds.
    """

    sheet: Sheet
    layer: Layer
    inputs: Sequence[Laid]
    keywords: Mapping[str, Any]
    arguments: Sequence[Any]
    translate: Translator
    find: Callable[[Layer, Mapping[str, Any], str], Layer]

    @property
    def config(self) -> Mapping[str, Any]:
        """The layer's settings."""
        return self.layer.config

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting, which the call may name as well."""
        return self.keywords.get(name, self.config.get(name, default))

    def refuse(self, what: str, help: str | None = None) -> GemscError:
        """Return the error for a layer that cannot be had; it names the layer."""
        return self.sheet.refuse(what, help)

    def variable(self, index: int, part: str = "") -> Weight:
        """Return a variable of the layer, in Keras' shape.

        Raises:
            GemscError: the file has none.
        """
        return same(self._variable(index, part))

    def tensor(
        self, part: str, shape: Sequence[int], weight: Weight, *, trained: bool = True
    ) -> Symbol:
        """Return a tensor of the layer's own; the first call of that shape adds it."""
        key = (part, tuple(shape))
        if key not in self.layer.tensors:
            trained = trained and bool(weight.sources) and not self.layer.frozen
            self.layer.tensors[key] = self.sheet.tensor(
                f"{self.layer.name}.{part}", shape, weight, trained=trained
            )
        return self.layer.tensors[key]

    def size(self, index: int, part: str = "") -> tuple[int, ...]:
        """Return the sizes of a variable."""
        return self.layer.table[self._variable(index, part)].shape

    def shape_of(self, weight: Weight) -> tuple[int, ...]:
        """Return the sizes of a tensor; nothing is read for it."""
        shapes = [self.layer.table[source].shape for source in weight.sources]
        empty = [np.broadcast_to(np.int8(0), shape) for shape in shapes]
        return weight.move(*empty).shape

    def _variable(self, index: int, part: str) -> str:
        names = self.layer.variables.get(part, ())
        if index < len(names):
            return names[index]
        whose = f"its {part} has" if part else "it has"
        raise self.refuse(
            f"needs variable {index} in the file, where {whose} {len(names)}",
            help="save the model with its weights: model.save(...) after it is built",
        )

    def add(
        self,
        make: Callable[[], nn.Module],
        part: str = "",
        frozen: Collection[str] = (),
        **weights: Weight | None,
    ) -> str:
        """Return the text that names a layer, which the first call makes.

        It stands under the Keras layer's name; those of several parts below it. Of its
        weights, None is one that it has not. What Keras does not train is frozen, too:
        layers that say so, and weights that the file does not hold.

        Raises:
            GemscError: a tensor of the file has another shape than the layer's settings
                say.
        """
        if part not in self.layer.added:
            module, known = make(), {k: w for k, w in weights.items() if w is not None}
            self._check(module, known)
            still = {*frozen, *(name for name, w in known.items() if not w.sources)}
            if self.layer.frozen:
                still = {name for name, _ in module.named_parameters()}
            path = f"{self.layer.name}.{part}" if part else self.layer.name
            text = self.sheet.layer(path, module, known, frozen=still)
            self.layer.added[part] = text
        return self.layer.added[part]

    def _check(self, module: nn.Module, weights: Mapping[str, Weight]) -> None:
        for name, tensor in module.state_dict().items():
            weight = weights.get(name)
            if weight is None:
                if name.endswith("num_batches_tracked"):
                    continue
                raise InternalError(f"{self.layer.kind} has no weight for '{name}'")
            if self.shape_of(weight) != tuple(tensor.shape):
                sizes = "x".join(map(str, tensor.shape))
                has = "x".join(map(str, self.shape_of(weight)))
                raise self.refuse(
                    f"needs a {name} of {sizes}, and the file's is {has}",
                    help="the file is damaged, or its settings were changed by hand",
                )

    def first(self) -> Symbol:
        """Return the input with its channels first; a line permutes it where needed."""
        return self._input(0).ordered(self.sheet, first=True)

    def last(self, of: int | Laid = 0) -> Symbol:
        """Return an input with its axes as Keras has them."""
        return self._input(of).ordered(self.sheet, first=False)

    def _input(self, of: int | Laid) -> Laid:
        if isinstance(of, Laid):
            return of
        if of >= len(self.inputs):
            raise self.refuse(f"needs {of + 1} inputs, and is given {len(self.inputs)}")
        return self.inputs[of]

    def alike(self) -> tuple[Sequence[Symbol], bool]:
        """Return all inputs in one order of axes, and whether it has channels first.

        It is the order that most of them have; only values of the same rank can have
        their channels first.
        """
        ranks = {len(laid.value.shape) for laid in self.inputs}
        wanted = [laid.first for laid in self.inputs if len(laid.value.shape) > 2]
        first = len(ranks) == 1 and 2 * sum(wanted) > len(wanted)
        return [laid.ordered(self.sheet, first=first) for laid in self.inputs], first

    def gives(self, text: str, *, first: bool = False, wish: str = "") -> Laid:
        """Add a line; its value is called as the layer if there is no other wish."""
        value = self.sheet.line(wish or self.layer.name, text)
        return Laid(value, first and len(value.shape) > 2)

    def several(self, text: str, count: int) -> list[Laid]:
        """Add a line that gives so many values: `x_0, x_1 = text`."""
        wishes = [f"{self.layer.name}_{number}" for number in range(count)]
        return [Laid(value) for value in self.sheet.unpack(wishes, text)]

    def inner(
        self, layer: Mapping[str, Any], part: str, inputs: Sequence[Laid]
    ) -> Laid:
        """Call a layer that this one holds: its settings as the config has them.

        Its variables are those of the part, and it stands below this one.

        Raises:
            GemscError: it cannot be had, or gives several values.
        """
        if part not in self.layer.parts:
            self.layer.parts[part] = self.find(self.layer, layer, part)
        held = self.layer.parts[part]
        call = replace(self, layer=held, inputs=inputs, arguments=inputs, keywords={})
        outputs = self.translate(call)
        if isinstance(outputs, Laid):
            return outputs
        if len(outputs) != 1:
            raise self.refuse("holds a layer with several outputs")
        return outputs[0]
