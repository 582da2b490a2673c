"""The text that follows the model: what its compile() was given, in PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemsc.codegen.python_text import parsed
from gemsc.codegen.writer import Names, Writer
from gemsc.importers.expression import write_statement
from gemsc.importers.keras.graph import MISREAD
from gemsc.importers.keras.losses import (
    LossForm,
    ModelOutput,
    UnknownLossError,
    loss_form,
    metric_form,
    metric_name,
    snake,
)
from gemsc.importers.keras.optimizers import optimizer_text


@dataclass
class TrainingText:
    """Functions for model.py, in text, and what Keras does otherwise."""

    functions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def training_text(config: Any, outputs: Sequence[ModelOutput]) -> TrainingText:
    """Return loss, example_target, metrics, optimizer and scheduler.

    What has no counterpart is left out, with a note.
    """
    if not isinstance(config, Mapping) or not outputs:
        return TrainingText()
    try:
        return _written(config, outputs)
    except MISREAD as why:
        reason = f"{type(why).__name__}: {why}"
        return TrainingText(notes=[f"compile() cannot be read: {reason:.80}"])


def _written(config: Mapping[str, Any], outputs: Sequence[ModelOutput]) -> TrainingText:
    text = TrainingText()
    forms = _losses(config, outputs, text)
    if forms:
        _write_losses(config, outputs, forms, text)
        _write_target(outputs, forms, text)
        _write_metrics(config, outputs, forms, text)
    _write_optimizer(config, text)
    return text


# ------------------------------------------------------------------------------ loss


def _losses(
    config: Mapping[str, Any], outputs: Sequence[ModelOutput], text: TrainingText
) -> dict[ModelOutput, LossForm]:
    """Return the bodies of the losses, by the outputs that have one."""
    forms: dict[ModelOutput, LossForm] = {}
    for output, setting in zip(
        outputs, _each(config.get("loss"), outputs), strict=True
    ):
        if setting is None:
            continue
        try:
            name, settings = _loss_name(setting, output)
            forms[output] = loss_form(name, settings, output)
        except UnknownLossError as why:
            text.notes.append(f"loss: {why}: write loss(output, target) yourself")
            return {}
        if forms[output].whole:
            text.notes.append(
                f"loss {name} is of a whole batch in Keras: here it is the mean of "
                "that of the micro-batches"
            )
    return forms


def _loss_name(setting: Any, output: ModelOutput) -> tuple[str, Mapping[str, Any]]:
    if isinstance(setting, str):
        name = snake(setting)
        if name in ("crossentropy", "ce"):
            name = "binary_crossentropy"
            if output.channels > 1:
                name = "sparse_categorical_crossentropy"
        return name, {}
    config = setting.get("config") if isinstance(setting, Mapping) else None
    if not isinstance(config, Mapping):
        raise UnknownLossError(f"'{config}' is a function of your own")
    kind = str(setting.get("class_name"))
    if kind == "LossFunctionWrapper" and isinstance(config.get("fn"), str):
        kind = str(config["fn"])
    return snake(kind), config


def _each(setting: Any, outputs: Sequence[ModelOutput]) -> list[Any]:
    """Return what is said for each output: one for all, a list, or a dict by names."""
    if isinstance(setting, Mapping) and "class_name" not in setting:
        return [setting.get(output.name) for output in outputs]
    if isinstance(setting, list | tuple):
        return [*setting, *[None] * len(outputs)][: len(outputs)]
    return [setting] * len(outputs)


def _write_losses(
    config: Mapping[str, Any],
    outputs: Sequence[ModelOutput],
    forms: Mapping[ModelOutput, LossForm],
    text: TrainingText,
) -> None:
    if len(outputs) == 1:
        (form,) = forms.values()
        text.functions.append(_function("loss", _title(config, outputs[0]), form.lines))
        return
    weights = _each(config.get("loss_weights"), outputs)
    parts: list[str] = []
    for output, weight in zip(outputs, weights, strict=True):
        if output not in forms:
            continue
        name = f"loss_of_{_word(output, outputs)}"
        form = forms[output]
        text.functions.append(_function(name, _title(config, output), form.lines))
        factor = "" if weight in (None, 1) else f"{float(weight)!r} * "
        parts.append(f"{factor}{name}(output{output.place}, target{output.place})")
    kind = _kind(outputs)
    statements = [("total = ", parts[0])]
    statements += [("total = ", f"total + {part}") for part in parts[1:]]
    text.functions.append(
        _written_out(
            ("def loss(", [f"output: {kind}", f"target: {kind}"], ") -> Tensor:"),
            "Add the losses of the outputs.",
            [*statements, ("return ", "total")],
        )
    )


def _kind(outputs: Sequence[ModelOutput]) -> str:
    """Return the type of what the model gives."""
    if not outputs[0].place:
        return "Tensor"
    is_number = outputs[0].place[1:-1].isdecimal()
    return "tuple[Tensor, ...]" if is_number else "dict[str, Tensor]"


def _title(config: Mapping[str, Any], output: ModelOutput) -> str:
    return f"Return Keras' loss of {output.name!r}."


def _word(output: ModelOutput, outputs: Sequence[ModelOutput]) -> str:
    """Return what an output is called in names of functions: its number, if need be."""
    others = {other.name for other in outputs if other is not output}
    if _is_word(output.name) and output.name not in others:
        return output.name
    return f"output_{outputs.index(output)}"


def _is_word(name: str) -> bool:
    return re.fullmatch(r"\w+", name, flags=re.ASCII) is not None


def _function(name: str, doc: str, lines: Sequence[str]) -> str:
    writer = Writer()
    tensors = ["output: Tensor", "target: Tensor"]
    writer.bracketed(f"def {name}(", tensors, ") -> Tensor:")
    with writer.indented():
        writer.line(_quoted(doc))
        writer.lines("\n".join(lines))
    return writer.text()


def _written_out(
    head: tuple[str, list[str], str], doc: str, statements: Sequence[tuple[str, str]]
) -> str:
    """Return a function of these statements, each in lines that fit."""
    writer, names = Writer(), Names(["output", "target", "total"])
    writer.bracketed(*head)
    with writer.indented():
        writer.docstring(doc)
        for start, expression in statements:
            tree = parsed(expression)
            write_statement(writer, start, tree, lambda: names.unique("part"))
    return writer.text()


def _quoted(doc: str) -> str:
    """Return a docstring, whatever a name of the file has in it."""
    plain = re.sub(r"[^ -~]|[\"\\]", "_", doc)
    return f'"""{plain}"""'


# ---------------------------------------------------------------------------- target


def _write_target(
    outputs: Sequence[ModelOutput],
    forms: Mapping[ModelOutput, LossForm],
    text: TrainingText,
) -> None:
    """Write example_target: zeros that have the shapes and types of targets."""
    parts = [_example(output, forms.get(output)) for output in outputs]
    places = [output.place for output in outputs]
    kind = _kind(outputs)
    if kind.startswith("dict"):
        pairs = (f"{p[1:-1]}: {e}" for p, e in zip(places, parts, strict=True))
        whole = f"{{{', '.join(pairs)}}}"
    else:
        whole = parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
    text.functions.append(
        _written_out(
            ("def example_target(", [], f") -> {kind}:"),
            "Return a target of the shape that loss takes.",
            [("return ", whole)],
        )
    )


def _example(output: ModelOutput, form: LossForm | None) -> str:
    sizes = list(output.shape)
    if form is not None and form.target == "indices":
        del sizes[output.dim]
        return f"torch.zeros({', '.join(map(str, sizes))}, dtype=torch.int64)"
    return f"torch.rand({', '.join(map(str, sizes))})"


# --------------------------------------------------------------------------- metrics


def _write_metrics(
    config: Mapping[str, Any],
    outputs: Sequence[ModelOutput],
    forms: Mapping[ModelOutput, LossForm],
    text: TrainingText,
) -> None:
    """Write `metrics`, with a function for each one of them."""
    entries: dict[str, str] = {}
    for output, setting in _metrics(config, outputs):
        form = forms.get(output)
        try:
            name, kind, settings = metric_name(setting)
            body = metric_form(kind, settings, output, form.target if form else "")
        except UnknownLossError as why:
            text.notes.append(f"metrics: {why}: left out")
            continue
        key = name if _is_word(name) else kind
        if len(outputs) > 1:
            key = f"{_word(output, outputs)}_{key}"
        while key in entries:
            key += "_again"
        doc = f"Return the metric {kind}."
        text.functions.append(_function(f"metric_{key}", doc, body.lines))
        entries[key] = f"metric_{key}(output{output.place}, target{output.place})"
    if entries:
        kind = _kind(outputs)
        arguments = [f"output: {kind}", f"target: {kind}"]
        pairs = ", ".join(f'"{key}": {call}' for key, call in entries.items())
        text.functions.append(
            _written_out(
                ("def metrics(", arguments, ") -> dict[str, Tensor]:"),
                "Return the metrics of a batch.",
                [("return ", f"{{{pairs}}}")],
            )
        )


def _metrics(
    config: Mapping[str, Any], outputs: Sequence[ModelOutput]
) -> Iterator[tuple[ModelOutput, Any]]:
    """Yield each metric with its output."""
    for key in ("metrics", "weighted_metrics"):
        setting = config.get(key)
        if not setting:
            continue
        flat = isinstance(setting, list) and not any(
            isinstance(each, list) for each in setting
        )
        if len(outputs) == 1:
            many: list[Any] = [_flat(setting)]
        elif flat and len(setting) != len(outputs):
            continue
        else:
            many = _each(setting, outputs)
        for output, some in zip(outputs, many, strict=True):
            for each in _flat(some):
                yield output, each


def _flat(setting: Any) -> list[Any]:
    if setting is None:
        return []
    if isinstance(setting, Mapping) and "class_name" not in setting:
        return [each for value in setting.values() for each in _flat(value)]
    if isinstance(setting, list | tuple):
        return [each for some in setting for each in _flat(some)]
    return [setting]


# ------------------------------------------------------------------------- optimizer


def _write_optimizer(config: Mapping[str, Any], text: TrainingText) -> None:
    setting = config.get("optimizer")
    if setting is None:
        return
    kind: Any = setting
    settings: Mapping[str, Any] = {}
    if isinstance(setting, Mapping):
        kind, settings = setting.get("class_name"), setting.get("config") or {}
    try:
        functions, notes = optimizer_text(str(kind), settings)
    except UnknownLossError as why:
        text.notes.append(f"optimizer: {why}: write optimizer(params) yourself")
        return
    text.functions += functions
    text.notes += [f"optimizer: {note}" for note in notes]


# ------------------------------------------------------------------ beside the network


def regularizer_notes(configs: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return a note for each regularizer and constraint of layers, by their names."""
    return [note for name, config in configs for note in _notes(name, config)]


def _notes(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    for key, setting in config.items():
        if not setting:
            continue
        what, _, kind = key.rpartition("_")
        if kind == "regularizer" and what != "activity":
            yield f"'{name}': {_regularizer(what, setting)}"
        elif kind == "constraint":
            yield (
                f"'{name}': {_named(setting)} of its {what} is left out: set "
                "the weight back in on_step(trainer, report)"
            )
        elif key in ("layer", "backward_layer", "cell") and isinstance(
            setting, Mapping
        ):
            inner = setting.get("config")
            if isinstance(inner, Mapping):
                yield from _notes(name, inner)


def _regularizer(what: str, setting: Any) -> str:
    """Return what a regularizer would be in an optimizer."""
    said = f"{_named(setting)} of its {what} is no part of the loss"
    config = setting.get("config") if isinstance(setting, Mapping) else None
    config = config if isinstance(config, Mapping) else {}
    one, two = config.get("l1"), config.get("l2")
    if two and not one:
        return f"{said}: weight_decay={2 * float(two):.6g} is the same under SGD"
    if two:
        return f"{said}: weight_decay={2 * float(two):.6g} under SGD is its l2 alone"
    return said


def _named(setting: Any) -> str:
    if not isinstance(setting, Mapping):
        return str(setting)
    config = setting.get("config")
    settings = config if isinstance(config, Mapping) else {}
    inside = ", ".join(f"{k}={v}" for k, v in settings.items())
    return f"{setting.get('class_name')}({inside})"
