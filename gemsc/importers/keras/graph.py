"""Models as classes of model.py: their layers in Keras' order, call by call.

A model within a model becomes a class of its own. Its values keep the order of axes
that they have where it is called: no line permutes at its border.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from gemsc.importers.keras.archive import Archive
from gemsc.importers.keras.config import (
    MODELS,
    Listed,
    found_in,
    plain,
    references,
    with_numbers,
)
from gemsc.importers.keras.core import check_activity, mask_after
from gemsc.importers.keras.layer import Laid, Layer, LayerCall, Translator
from gemsc.importers.network import UNEXPECTED, ImportOptions
from gemsc.importers.sheet import Sheet, sheet_of


class _NotYetError(Exception):
    """A value that a later line gives."""


@dataclass(eq=False)
class Model:
    """A class, with what it takes and gives."""

    sheet: Sheet
    inputs: Sequence[Laid]
    outputs: Sequence[Laid]


@dataclass(eq=False)
class Graph:
    """An archive on its way to classes.

    `translator` finds the function for a class and a name, of a layer or an operation.
    `layers` are all that were called, and `notes` are for the user's eyes.
    """

    archive: Archive
    options: ImportOptions
    translator: Callable[[str, str, bool], Translator | None]
    layers: list[Layer] = field(default_factory=list)
    sheets: list[Sheet] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    called: dict[Layer, Model] = field(default_factory=dict)

    @cached_property
    def channels_first(self) -> bool:
        """Whether images come and go as PyTorch has them, and Keras does otherwise."""
        is_stated = '"data_format": "channels_first"' in json.dumps(self.archive.config)
        return self.options.channels_first and not is_stated

    @cached_property
    def frozen(self) -> bool:
        """Whether nothing is trained: of a model within it, its layers say so."""
        return Listed.of(self.archive.config).config.get("trainable") is False

    # ------------------------------------------------------------------- models

    def model(
        self,
        text: Mapping[str, Any],
        path: str,
        *,
        given: Sequence[Laid] | None = None,
    ) -> Model:
        """Return a model as a class; its values are `given` if it is within another.

        Raises:
            GemscError: it has a layer that PyTorch or gemsc has not.
        """
        entry = Listed.of(text)
        words = f"{entry.kind} model {entry.name!r} of {self.archive.path.name}"
        sheet = Sheet(entry.name, words, self.archive.path.name)
        with sheet.place(f"{entry.kind} {entry.name!r}"), _readable(sheet):
            entries = [Listed.of(layer) for layer in entry.config["layers"]]
            calls = _Calls(self, sheet, path, entries, given)
            if entry.kind == "Sequential":
                outputs, structure = calls.in_a_row(entry.config), None
            else:
                structure = entry.config["output_layers"]
                outputs = calls.connected(entry.config)
            if given is None:
                first = self.channels_first
                outputs = [_at_the_end(sheet, laid, first) for laid in outputs]
            if given is None and structure is not None:
                sheet.returns(_structure(structure, iter(outputs)))
            else:
                sheet.returns(", ".join(str(laid.value) for laid in outputs))
        return Model(sheet, calls.inputs, outputs)

    # -------------------------------------------------------------------- calls

    def translate(self, call: LayerCall) -> Laid | Sequence[Laid]:
        """Add the lines of a call."""
        layer = call.layer
        with (
            call.sheet.place(f"{layer.kind.split('>')[-1]} {layer.name!r}"),
            _readable(call.sheet),
        ):
            if layer.text is not None:
                return self._nested(call)
            check_activity(call)
            translator = self.translator(layer.kind, layer.name, layer.is_operation)
            if translator is None:
                raise call.refuse(
                    "is not a layer that gemsc supports",
                    help="build it of other layers, or give it with --custom layers.py",
                )
            return mask_after(call, translator(call))

    def _nested(self, call: LayerCall) -> Laid | Sequence[Laid]:
        """Call a model within a model: one object, however often it is called."""
        layer, given = call.layer, found_in([call.arguments, call.keywords], Laid)
        assert layer.text is not None
        model = self.called.get(layer)
        if model is not None:
            given = [
                Laid(laid.ordered(call.sheet, first=of.first), of.first, of.masked)
                for laid, of in zip(given, model.inputs, strict=True)
            ]
        counts = len(self.layers), len(self.sheets)
        again = self.model(layer.text, layer.path, given=given)
        if model is None:
            model = self.called[layer] = again
            self.sheets.append(model.sheet)
            layer.added[""] = call.sheet.network(layer.name, model.sheet)
        else:
            del self.layers[counts[0] :], self.sheets[counts[1] :]
            if _lines(model.sheet) != _lines(again.sheet):
                raise call.refuse(
                    "is called with images of two sizes, for which it is two networks",
                    help="build it once for each size",
                )
        return _results(call, model, layer.added[""], given)

    def layer(self, entry: Listed, path: str, *, name: str = "") -> Layer:
        """Return a layer of the archive, with its variables."""
        is_frozen = entry.config.get("trainable") is False and not entry.holds_layers
        layer = Layer(
            entry.kind,
            name or entry.name,
            entry.config,
            {} if entry.is_operation else self.archive.variables(path),
            self.archive.table,
            path,
            self.frozen or is_frozen,
            text=entry.text if entry.is_model else None,
            is_operation=entry.is_operation,
        )
        self.layers.append(layer)
        return layer

    def within(self, outer: Layer, text: Mapping[str, Any], part: str) -> Layer:
        """Return a layer that another one holds."""
        path, name = f"{outer.path}/{part}", f"{outer.name}.{part.replace('/', '.')}"
        return self.layer(Listed.of(text), path, name=name)


def _at_the_end(sheet: Sheet, laid: Laid, channels_first: bool) -> Laid:
    """Return an output in Keras' order of axes, or images in PyTorch's."""
    first = laid.first and channels_first and len(laid.value.shape) in (4, 5)
    return Laid(laid.ordered(sheet, first=first), first, laid.masked)


def _lines(sheet: Sheet) -> tuple[Any, ...]:
    """Return what a class does, to compare with another one."""
    modules: list[Any] = []
    for name, module in sheet.root.named_modules():
        inner = sheet_of(module)
        if inner is not None and inner is not sheet:
            modules.append((name, _lines(inner)))
        elif inner is None:
            modules.append((name, type(module).__name__, module.extra_repr()))
    return [line.text for line in sheet.lines], modules, sheet.result


def _structure(structure: Any, outputs: Iterator[Laid]) -> str:
    """Return what the model returns: a list of one is its only value."""
    if isinstance(structure, dict):
        texts = {key: "" for key in structure}
        for key, item in sorted(structure.items()):
            texts[key] = _structure(item, outputs)
        return f"{{{', '.join(f'{key!r}: {text}' for key, text in texts.items())}}}"
    if list(references(structure)) == [tuple(structure)]:
        return str(next(outputs).value)
    texts_ = [_structure(item, outputs) for item in structure]
    return texts_[0] if len(texts_) == 1 else f"({', '.join(texts_)})"


class _Calls:
    """The calls of one model, in an order in which each has its inputs."""

    def __init__(
        self,
        graph: Graph,
        sheet: Sheet,
        path: str,
        entries: Sequence[Listed],
        given: Sequence[Laid] | None,
    ) -> None:
        self.graph, self.sheet = graph, sheet
        self.given, self.entries = given, entries
        self.inputs: list[Laid] = []
        self.values: dict[tuple[str, int], Sequence[Laid]] = {}
        held = [e for e in entries if not e.is_operation and e.kind != "InputLayer"]
        words = with_numbers(entry.snake for entry in held)
        folder = f"{path}/layers" if path else "layers"
        places = {e.name: f"{folder}/{w}" for e, w in zip(held, words, strict=True)}
        self.layers = {
            entry.name: graph.layer(entry, places.get(entry.name, ""))
            for entry in entries
        }

    def in_a_row(self, config: Mapping[str, Any]) -> Sequence[Laid]:
        """Call each layer with what the one before gives."""
        entries = list(self.entries)
        shape, dtype, name = config.get("build_input_shape"), "float32", "x"
        if entries and entries[0].kind == "InputLayer":
            entry = entries.pop(0)
            shape, dtype = entry.config["batch_shape"], entry.config["dtype"]
            name = entry.name
        if shape is None:
            raise self.sheet.refuse(
                "does not say what it is given",
                help="build it before it is saved: model.build(shape)",
            )
        values: Sequence[Laid] = [self._input(name, shape, dtype)]
        for entry in entries:
            values = self._call(self.layers[entry.name], [list(values)], {})
        return values

    def connected(self, config: Mapping[str, Any]) -> Sequence[Laid]:
        """Call the layers of a Functional model."""
        by_name = {entry.name: entry for entry in self.entries}
        for name, _, _ in references(config["input_layers"]):
            settings = by_name[name].config
            shape, dtype = settings["batch_shape"], settings["dtype"]
            self.values[name, 0] = [self._input(name, shape, dtype)]
        left = {e.name: list(e.text.get("inbound_nodes") or ()) for e in self.entries}
        while any(left.values()):
            count = sum(map(len, left.values()))
            for name, calls in left.items():
                self._ready(name, calls)
            if count == sum(map(len, left.values())):
                stuck = next(name for name, calls in left.items() if calls)
                raise self.sheet.refuse(f"never has the inputs of {stuck!r}")
        outputs = []
        for name, node, index in references(config["output_layers"]):
            # a model's own call is counted there, and not where it is an input
            node -= by_name[name].is_model and by_name[name].kind != "Sequential"
            outputs.append(self.values[name, node][index])
        return outputs

    def _ready(self, name: str, calls: list[Any]) -> None:
        """Make those calls of a layer whose inputs are there; take them off."""
        layer = self.layers[name]
        done = sum(1 for known, _ in self.values if known == name)
        while calls:
            with self.sheet.place(f"{layer.kind} {name!r}"), _readable(self.sheet):
                try:
                    arguments = plain(calls[0]["args"], self._value)
                    keywords = plain(calls[0].get("kwargs") or {}, self._value)
                except _NotYetError:
                    return
            self.values[name, done] = self._call(layer, arguments, keywords)
            done += 1
            calls.pop(0)

    def _value(self, name: str, node: int, index: int) -> Laid:
        if name not in self.layers:
            raise ValueError(f"no layer {name!r:.60}")
        if (name, node) not in self.values:
            raise _NotYetError
        return self.values[name, node][index]

    def _call(
        self, layer: Layer, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Sequence[Laid]:
        keywords = {key: item for key, item in keywords.items() if item is not None}
        # Keras itself puts that of the whole model in its place
        training = keywords.pop("training", None)
        if training is False and layer.kind in (*MODELS, "BatchNormalization"):
            self.graph.notes.append(
                f"{layer.name!r} is called with training=False, which Keras 3 does not "
                "heed within a model that is trained: set trainable=False in Keras"
            )
        inputs, graph = found_in(arguments, Laid), self.graph
        functions = graph.translate, graph.within
        call = LayerCall(self.sheet, layer, inputs, keywords, arguments, *functions)
        outputs = graph.translate(call)
        return [outputs] if isinstance(outputs, Laid) else outputs

    def _input(self, name: str, shape: Any, dtype: str) -> Laid:
        """Add an argument of forward: what the model is given, or a new one."""
        if self.given is not None:
            number = len(self.inputs)
            if number >= len(self.given):
                raise self.sheet.refuse("is given fewer inputs than it has")
            of = self.given[number]
            value = self.sheet.input(name, of.value.shape, of.value.tensor.dtype)
            laid = Laid(value, of.first, of.masked)
        else:
            laid = self._new_input(name, shape, dtype)
        self.inputs.append(laid)
        return laid

    def _new_input(self, name: str, shape: Any, dtype: str) -> Laid:
        with self.sheet.place(f"InputLayer {name!r}"):
            sizes = [*self.graph.options.shape(self.sheet, name, shape)]
        first = self.graph.channels_first and len(sizes) in (4, 5)
        if first:
            sizes.insert(1, sizes.pop())
        return Laid(self.sheet.input(name, sizes, _torch_dtype(dtype)), first)


def _torch_dtype(name: str) -> torch.dtype:
    if name in ("float16", "bfloat16", "float32", "float64"):
        return torch.float32  # as the network
    if name in ("bool", "uint8"):
        return torch.bool if name == "bool" else torch.uint8
    if re.fullmatch(r"u?int\d+", name):
        return torch.int64
    raise ValueError(f"dtype {name!r:.40}")


def _results(
    call: LayerCall, model: Model, text: str, given: Sequence[Laid]
) -> Sequence[Laid]:
    text = f"{text}({', '.join(str(laid.value) for laid in given)})"
    count = len(model.outputs)
    outputs = call.several(text, count) if count > 1 else [call.gives(text)]
    return [
        Laid(laid.value, of.first, of.masked)
        for laid, of in zip(outputs, model.outputs, strict=True)
    ]


@contextmanager
def _readable(sheet: Sheet) -> Iterator[None]:
    """Turn what a damaged config raises into an error that names the layer."""
    try:
        yield
    except UNEXPECTED as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0]:.80}"
        raise sheet.refuse(
            f"has settings that gemsc cannot read ({what})",
            help="save the model again with a newer Keras",
        ) from error
