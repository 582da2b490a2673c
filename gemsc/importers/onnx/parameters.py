"""The layers and tensors that the nodes of a graph hold, each once.

What two nodes hold is one parameter: a layer with the same settings is called twice,
and another use of a layer's weight names the layer, `self.embed.weight.T`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from gemsc.importers.onnx.names import is_machine_made, place_of_layer, scope
from gemsc.importers.onnx.static import Static, torch_type
from gemsc.importers.sheet import Sheet, Symbol
from gemsc.importers.weight import Array, Weight, constant

MOST_AXES = 4  # of a tensor that is looked for in another order of its axes


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
    _sizes: dict[str, int] = field(default_factory=dict)

    def layer(
        self,
        node: onnx.NodeProto,
        module: nn.Module,
        weights: Mapping[str, Static | Weight],
    ) -> str:
        """Add a layer, or return the text of the one that is the same."""
        kinds = {w.dtype for w in weights.values() if isinstance(w, Static)}
        if len(kinds) == 1:  # layers of another type than float32
            module.to(torch_type(kinds.pop()))
        settings = repr(module)
        plain = {
            key: w.weight if isinstance(w, Static) else w for key, w in weights.items()
        }
        found = self._same_layer(settings, plain)
        if found:
            return found
        module.to("meta")
        own = dict([*module.named_parameters(), *module.named_buffers()])
        for key, weight in weights.items():
            if isinstance(weight, Static) and weight.shape != tuple(own[key].shape):
                raise self.sheet.refuse(
                    f"has a {key} of {weight.shape}, and needs {tuple(own[key].shape)}"
                )
        ties = {key: self._tie(weight, own[key]) for key, weight in plain.items()}
        frozen = {
            key
            for key, weight in weights.items()
            if not (weight.trained if isinstance(weight, Static) else weight.sources)
        }
        sources = {
            k: w.sources[0] for k, w in plain.items() if w.sources and not ties[k]
        }
        text = self.sheet.layer(
            place_of_layer(node, sources), module, plain, frozen=frozen
        )
        for key, weight in plain.items():
            self._hold(_Held(f"{text}.{key}", weight, own[key], text, settings))
            if ties[key]:
                self.sheet.tie(f"{text}.{key}", ties[key])
        return text

    def held(self, weight: Weight, shape: tuple[int, ...]) -> Symbol | None:
        """Return the parameter that has a weight's elements, if there is one."""
        for held in self._others(weight):
            text = _text(held, self._numbers(held.weight), self._numbers(weight), shape)
            if text:
                empty = torch.empty(shape, dtype=held.tensor.dtype, device="meta")
                return Symbol(text, empty, empty)
        return None

    def value(self, node: onnx.NodeProto, static: Static) -> Symbol:
        """Return a tensor of the network itself: a parameter or a buffer."""
        if static.weight.sources:
            found = self.held(static.weight, static.shape)
            if found:
                return found
            self._refuse_shared(static.weight)
        elif static in self._constants:
            return self._constants[static]
        name = static.weight.sources[0] if static.weight.sources else static.name
        if is_machine_made(name):
            name = ".".join(filter(None, [scope(node), "weight"]))
            name = name if static.trained else f"{name.removesuffix('weight')}constant"
        path = ".".join(part for part in name.replace("/", ".").split(".") if part)
        try:
            kind = torch_type(static.dtype)
        except TypeError:
            raise self.sheet.refuse(f"makes numbers of type {static.dtype}") from None
        weight = static.weight
        if not weight.sources:
            weight = constant(static.array)
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
        found = [h for s in weight.sources for h in self._held.get(s, ())]
        return list(dict.fromkeys(found))

    def _numbers(self, weight: Weight) -> Array:
        """Return which elements of the file a weight has: numbers, one for each."""
        arrays = []
        for source in weight.sources:
            shape = self.shape(source)
            size = int(np.prod(shape, dtype=np.int64))
            start = self._starts.setdefault(source, 1 + sum(self._sizes.values()))
            self._sizes[source] = size
            arrays.append(np.arange(start, start + size, dtype=np.int64).reshape(shape))
        return weight.move(*arrays)

    def _same_layer(self, settings: str, weights: Mapping[str, Weight]) -> str:
        """Return the text of a layer with these settings and elements, if any."""
        sourced = {key: w for key, w in weights.items() if w.sources}
        if not sourced or len(sourced) != len(weights):
            return ""
        texts = []
        for key, weight in sourced.items():
            numbers = None
            for held in self._others(weight):
                if held.settings != settings or held.text != f"{held.layer}.{key}":
                    continue
                numbers = self._numbers(weight) if numbers is None else numbers
                if np.array_equal(numbers, self._numbers(held.weight)):
                    texts.append(held.layer)
        full = texts and len(texts) == len(sourced) and len(set(texts)) == 1
        return texts[0] if full else ""

    def _tie(self, weight: Weight, own: Tensor) -> str:
        """Return the parameter that a new layer's one is, "" where it is its own."""
        if not isinstance(own, nn.Parameter):
            return ""
        for held in self._others(weight):
            mine, theirs = self._numbers(weight), self._numbers(held.weight)
            is_parameter = isinstance(held.tensor, nn.Parameter)
            if is_parameter and np.array_equal(mine, theirs):
                return held.text
        self._refuse_shared(weight)
        return ""

    def _refuse_shared(self, weight: Weight) -> None:
        """Refuse a weight that has elements of another one, for it would be two.

        What is no parameter may be there twice.
        """
        others = [h for h in self._others(weight) if isinstance(h.tensor, nn.Parameter)]
        mine = self._numbers(weight) if others else None
        for held in others:
            assert mine is not None
            if np.intersect1d(mine, self._numbers(held.weight)).any():
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
