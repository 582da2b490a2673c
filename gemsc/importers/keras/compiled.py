"""The text that follows the model: what its compile() was given, in PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemsc.codegen.python_text import parsed
from gemsc.codegen.writer import Names, Writer
from gemsc.importers.expression import write_statement
from gemsc.importers.keras.config import class_and_config
from gemsc.importers.keras.losses import (
    UNSAVED,
    LossForm,
    ModelOutput,
    UnknownLossError,
    kind_and_settings,
    loss_form,
    metric_form,
)
from gemsc.importers.keras.optimizers import optimizer_text
from gemsc.importers.network import UNEXPECTED


@dataclass
class TrainingText:
    """Functions for model.py, in text, and what Keras does otherwise.

    `config` is what compile() was given, and `forms` has the losses of outputs.
    """

    config: Mapping[str, Any]
    outputs: Sequence[ModelOutput]
    functions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    forms: dict[ModelOutput, LossForm] = field(default_factory=dict)

    def write(self) -> None:
        """Write all functions."""
        self.forms = self.losses()
        if self.config.get("loss") and not self.outputs:
            self.notes.append("loss: the outputs are nested: write loss and metrics")
        if self.forms:
            self.write_losses()
            self.write_target()
            self.write_metrics()
        self.write_optimizer()

    def function(
        self,
        name: str,
        doc: str,
        lines: Sequence[str],
        *,
        takes: str = "Tensor",
        gives: str = "Tensor",
    ) -> None:
        """Add a function of statements, each in as many lines as it needs."""
        writer, names = Writer(), Names(["output", "target", "total"])
        arguments = [f"output: {takes}", f"target: {takes}"] if takes else []
        writer.bracketed(f"def {name}(", arguments, f") -> {gives}:")
        with writer.indented():
            plain = re.sub(r"[^ -~]|[\"\\]", "_", doc)  # whatever a name has in it
            writer.line(f'"""{plain}"""')
            for line in lines:
                if len(line) <= writer.room:
                    writer.line(line)
                    continue
                start = line.partition(" ")[0]
                head = "return " if start == "return" else f"{start} = "
                tree = parsed(line.removeprefix(head))
                write_statement(writer, head, tree, lambda: names.unique("part"))
        self.functions.append(writer.text())

    # -------------------------------------------------------------------------- loss

    def losses(self) -> dict[ModelOutput, LossForm]:
        """Return the bodies of the losses, by the outputs that have one."""
        forms: dict[ModelOutput, LossForm] = {}
        for output, setting in self.by_output(self.config.get("loss")):
            if setting is None:
                continue
            try:
                name, settings = kind_and_settings(setting)
                if name in ("crossentropy", "ce"):
                    name = "binary_crossentropy"
                    if output.channels > 1:
                        name = "sparse_categorical_crossentropy"
                forms[output] = loss_form(name, settings, output)
            except UnknownLossError as why:
                self.notes.append(f"loss: {why}: write loss(output, target) yourself")
                return {}
            what, value = UNSAVED.get(name, ("", None))
            if what and isinstance(setting, Mapping) and what not in settings:
                self.notes.append(
                    f"loss {name}: Keras saves no {what}: here it is {value}, as in "
                    "Keras once the file is loaded"
                )
            if forms[output].whole:
                self.notes.append(
                    f"loss {name} is of a whole batch in Keras: here it is the mean of "
                    "that of the micro-batches"
                )
        return forms

    def by_output(self, setting: Any) -> Iterator[tuple[ModelOutput, Any]]:
        """Yield what is said for each output: one for all, a list, a dict by names.

        Of an only output, Keras heeds no name.
        """
        for number, output in enumerate(self.outputs):
            if isinstance(setting, Mapping) and len(self.outputs) == len(setting) == 1:
                yield output, next(iter(setting.values()))
            elif isinstance(setting, Mapping) and "class_name" not in setting:
                yield output, setting.get(output.name)
            elif isinstance(setting, list | tuple):
                yield output, setting[number] if number < len(setting) else None
            else:
                yield output, setting

    def write_losses(self) -> None:
        """Write `loss`, with a function for each output if there are several."""
        parts: list[str] = []
        for output, weight in self.by_output(self.config.get("loss_weights")):
            if output not in self.forms:
                continue
            is_only = not output.place
            name = "loss" if is_only else f"loss_of_{self.word(output)}"
            doc = f"Return Keras' loss of {output.name!r}."
            factor = "" if weight in (None, 1) else f"{float(weight)!r} * "
            *lines, last = self.forms[output].lines
            if is_only:
                last = last.replace("return ", f"return {factor}", 1)
            self.function(name, doc, [*lines, last])
            parts.append(f"{factor}{name}(output{output.place}, target{output.place})")
        if self.outputs[0].place:
            sums = [f"total = total + {part}" for part in parts[1:]]
            lines = [f"total = {parts[0]}", *sums, "return total"]
            doc = "Add the losses of the outputs."
            self.function("loss", doc, lines, takes=self.kind)

    @property
    def kind(self) -> str:
        """The type of what the model gives."""
        place = self.outputs[0].place
        if not place:
            return "Tensor"
        is_number = place[1:-1].isdecimal()
        return "tuple[Tensor, ...]" if is_number else "dict[str, Tensor]"

    def word(self, output: ModelOutput) -> str:
        """Return an output in names of functions: its number, if need be."""
        others = {other.name for other in self.outputs if other is not output}
        if _is_word(output.name) and output.name not in others:
            return output.name
        return f"output_{self.outputs.index(output)}"

    # ------------------------------------------------------------- target and metrics

    def write_target(self) -> None:
        """Write example_target: numbers that have the shapes and types of targets."""
        parts = [self.example(output) for output in self.outputs]
        whole = parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
        if self.kind.startswith("dict"):
            pairs = zip(self.outputs, parts, strict=True)
            items = (f"{output.place[1:-1]}: {part}" for output, part in pairs)
            whole = f"{{{', '.join(items)}}}"
        self.function(
            "example_target",
            "Return a target of the shape that loss takes.",
            [f"return {whole}"],
            takes="",
            gives=self.kind,
        )

    def example(self, output: ModelOutput) -> str:
        """Return an output's target."""
        sizes, form = list(output.shape), self.forms.get(output)
        if form is not None and form.target == "indices":
            del sizes[output.dim]
            return f"torch.zeros({', '.join(map(str, sizes))}, dtype=torch.int64)"
        return f"torch.rand({', '.join(map(str, sizes))})"

    def write_metrics(self) -> None:
        """Write `metrics`, with a function for each one of them."""
        entries: dict[str, str] = {}
        for output, setting in self.metrics():
            form = self.forms.get(output)
            try:
                kind, settings = kind_and_settings(setting)
                body = metric_form(kind, settings, output, form.target if form else "")
            except UnknownLossError as why:
                self.notes.append(f"metrics: {why}: left out")
                continue
            name = setting if isinstance(setting, str) else settings.get("name", kind)
            key = name if _is_word(str(name)) else kind
            if len(self.outputs) > 1:
                key = f"{self.word(output)}_{key}"
            while key in entries:
                key += "_again"
            self.function(f"metric_{key}", f"Return the metric {kind}.", body.lines)
            entries[key] = f"metric_{key}(output{output.place}, target{output.place})"
        if entries:
            pairs = ", ".join(f'"{key}": {call}' for key, call in entries.items())
            self.function(
                "metrics",
                "Return the metrics of a batch.",
                [f"return {{{pairs}}}"],
                takes=self.kind,
                gives="dict[str, Tensor]",
            )

    def metrics(self) -> Iterator[tuple[ModelOutput, Any]]:
        """Yield each metric with its output."""
        for key in ("metrics", "weighted_metrics"):
            setting = self.config.get(key)
            if not setting:
                continue
            is_flat = isinstance(setting, list) and not any(
                isinstance(entry, list) for entry in setting
            )
            if len(self.outputs) == 1:
                setting = [_flat(setting)]
            elif is_flat and len(setting) != len(self.outputs):
                continue
            for output, several in self.by_output(setting):
                for metric in _flat(several):
                    yield output, metric

    def write_optimizer(self) -> None:
        """Write `optimizer`, and `scheduler` if there is one."""
        setting = self.config.get("optimizer")
        if setting is None:
            return
        try:
            functions, notes = optimizer_text(*class_and_config(setting))
        except UnknownLossError as why:
            self.notes.append(f"optimizer: {why}: write optimizer(params) yourself")
            return
        self.functions += functions
        self.notes += [f"optimizer: {note}" for note in notes]


def training_text(config: Any, outputs: Sequence[ModelOutput]) -> TrainingText:
    """Return loss, example_target, metrics, optimizer and scheduler.

    What has no counterpart is left out, with a note.
    """
    text = TrainingText(config, outputs)
    try:
        if isinstance(config, Mapping):
            text.write()
    except UNEXPECTED as why:
        reason = f"{type(why).__name__}: {why}"
        return TrainingText({}, [], notes=[f"compile() cannot be read: {reason:.80}"])
    return text


def _is_word(name: str) -> bool:
    return re.fullmatch(r"\w+", name, flags=re.ASCII) is not None


def _flat(setting: Any) -> list[Any]:
    if setting is None:
        return []
    if isinstance(setting, Mapping) and "class_name" not in setting:
        return [metric for value in setting.values() for metric in _flat(value)]
    if isinstance(setting, list | tuple):
        return [metric for some in setting for metric in _flat(some)]
    return [setting]


# ------------------------------------------------------------------ beside the network


def regularizer_notes(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each regularizer, constraint and rank of a layer."""
    for key, setting in config.items():
        if not setting:
            continue
        what, _, kind = key.rpartition("_")
        if kind == "regularizer" and what != "activity":
            yield f"'{name}': {_regularizer(what, setting)}"
        elif kind == "constraint":
            yield (
                f"'{name}': {_named(setting)} of its {what} is left out: set the "
                "weight back in a register_step_post_hook of optimizer(params)"
            )
        elif key == "lora_rank":
            yield (
                f"'{name}': lora_rank={setting} trains two matrices in Keras, and not "
                "the weight that they are added to: here that is trained"
            )
        elif key in ("layer", "backward_layer", "cell", "cells"):
            for held in setting if isinstance(setting, list) else [setting]:
                yield from regularizer_notes(name, class_and_config(held)[1])


def _regularizer(what: str, setting: Any) -> str:
    """Return what a regularizer would be in an optimizer."""
    said = f"{_named(setting)} of its {what} is not part of the loss"
    config = class_and_config(setting)[1]
    one, two = config.get("l1"), config.get("l2")
    if two and not one:
        return f"{said}: weight_decay={2 * float(two):.6g} is the same under SGD"
    if two:
        return f"{said}: weight_decay={2 * float(two):.6g} under SGD is its l2 alone"
    return said


def _named(setting: Any) -> str:
    kind, config = class_and_config(setting)
    inside = ", ".join(f"{k}={v}" for k, v in config.items())
    return f"{kind}({inside})" if isinstance(setting, Mapping) else kind
