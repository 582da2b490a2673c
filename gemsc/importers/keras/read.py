"""Read a Keras 3 archive: what it says, as classes of model.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemsc.base.units import show_some
from gemsc.codegen.python_text import literal_text
from gemsc.errors import GemscError
from gemsc.importers.keras import (  # noqa: F401  each has functions of layers
    activation,
    attention,
    conv,
    core,
    images,
    norm,
    operations,
    recurrent,
)
from gemsc.importers.keras.archive import Archive
from gemsc.importers.keras.compiled import regularizer_notes, training_text
from gemsc.importers.keras.config import MODELS, Listed, class_and_config, references
from gemsc.importers.keras.custom import custom_layers, custom_name
from gemsc.importers.keras.graph import Graph, Model
from gemsc.importers.keras.layer import LAYERS, OPERATIONS, Translator
from gemsc.importers.keras.losses import ModelOutput
from gemsc.importers.network import UNEXPECTED, ImportedNetwork, ImportOptions

_SHOWN = 10  # of the layers that are refused


def read_keras(path: Path, options: ImportOptions) -> ImportedNetwork:
    """Return the network of a file that ends in .keras.

    Raises:
        GemscError: it is damaged, or uses layers that gemsc does not support.
    """
    archive = Archive(path)
    custom = custom_layers(options.custom)

    def translator(kind: str, name: str, is_operation: bool) -> Translator | None:
        if is_operation:
            return OPERATIONS.get(kind)
        by_user = custom.get(custom_name(name)) or custom.get(custom_name(kind))
        return by_user or LAYERS.get(kind)

    graph = Graph(archive, options, translator)
    try:
        _check(path, archive.config, graph, _given(options, custom))
        inputs = _inputs(Listed.of(archive.config))
    except UNEXPECTED as error:
        raise GemscError(f"{path}: config.json is damaged: {error!r:.80}") from error
    options.check_names(path.name, inputs)
    model = graph.model(archive.config, "")
    compiled = archive.config.get("compile_config")
    training = training_text(compiled, _outputs(archive.config, model))
    notes = [*dict.fromkeys(graph.notes), *_dtypes(graph)]
    for laid in model.outputs:
        if laid.masked:
            notes.append(
                f"the loss of Keras leaves out steps of an output that '{laid.masked}' "
                "masks: here all of them count"
            )
    if options.channels_first and not any(laid.first for laid in model.inputs):
        notes.append("--channels-first has no effect: no input has its channels last")
    for layer in graph.layers:
        notes += regularizer_notes(layer.name, layer.config)
    return ImportedNetwork(
        [*graph.sheets, model.sheet],
        archive,
        functions=training.functions,
        imports=[f"import {options.custom.stem}"] if options.custom else [],
        notes=[*notes, *training.notes, *_begun(archive, training.functions)],
    )


def _begun(archive: Archive, functions: Sequence[str]) -> Iterator[str]:
    """Say what begins anew of a training that the file is in the middle of."""
    names = archive.variables("optimizer").get("", ())  # counter, rate, moments
    count = archive.table[names[0]] if names else None
    if count is None or count.shape or count.dtype.kind not in "iu":
        return
    updates, defined = int(archive.read(names[0])), "\n".join(functions)
    again = ["its moments"] if len(names) > 2 and "def optimizer" in defined else []
    again += ["the steps of its rate"] if "def scheduler" in defined else []
    if updates and again:
        what = " and ".join(again)
        yield f"optimizer: {updates} updates are in the file: here {what} begin anew"


def _inputs(model: Listed) -> set[str]:
    if model.kind == "Sequential":
        layers = [Listed.of(layer) for layer in model.config["layers"][:1]]
        return {layer.name for layer in layers if layer.kind == "InputLayer"} or {"x"}
    return {name for name, _, _ in references(model.config["input_layers"])}


def _dtypes(graph: Graph) -> Iterator[str]:
    """Say which layers do not compute in float32.

    Raises:
        GemscError: their weights are whole numbers.
    """
    by_policy: dict[str, list[str]] = defaultdict(list)
    for layer in graph.layers:
        policy = layer.config.get("dtype")
        if isinstance(policy, dict):
            policy = class_and_config(policy)[1].get("name")
        if isinstance(policy, str) and layer.kind != "InputLayer":
            by_policy[policy].append(layer.name)
    for policy, names in by_policy.items():
        if "int8" in policy or "int4" in policy or "float8" in policy:
            where = graph.archive.path.name
            raise GemscError(
                f"{where}: {names[0]!r:.60} is quantized, {policy:.30}",
                help="import the model that was quantized",
            )
        if policy != "float32":
            yield (
                f"{len(names)} layers compute in {policy:.30}: here all is float32; "
                "gemsc compile --precision has bfloat16 and float16"
            )


def _outputs(config: Mapping[str, Any], model: Model) -> list[ModelOutput]:
    """Return the outputs by their names in compile(); none if they are nested."""
    entry = Listed.of(config)
    structure: Any = entry.config.get("output_layers")
    if entry.kind != "Sequential" and _is_nested(structure):
        return []
    if entry.kind == "Sequential":
        names, places = [entry.name], [""]
    elif isinstance(structure, dict):
        names = sorted(structure)
        places = [f"[{literal_text(name)}]" for name in names]
    else:
        names = [name for name, _, _ in references(structure)]
        places = [f"[{index}]" for index in range(len(names))]
        places = places if len(names) > 1 else [""]
    if len(names) != len(model.outputs):
        return []
    return [
        ModelOutput(name, laid.value.shape, place, laid.first)
        for name, place, laid in zip(names, places, model.outputs, strict=True)
    ]


def _is_nested(structure: Any) -> bool:
    """Return whether outputs stand in several lists or dicts."""
    items = structure.values() if isinstance(structure, dict) else structure
    inner = [item for item in items if isinstance(item, list | dict)]
    return any(isinstance(i, dict) or len([*references(i)]) > 1 for i in inner)


# what takes all that Keras can compute
_DIRECTLY = (
    "return the Keras model itself from model() in a file, with KERAS_BACKEND=torch, "
    "and compile that file"
)


def _given(options: ImportOptions, custom: Collection[str]) -> str:
    """Return what to do about layers that are not known."""
    if options.custom is None:
        return "or give each with --custom layers.py"
    return f"or with a function in {options.custom.name}, which has " + (
        ", ".join(sorted(custom)) or "none"
    )


def _check(path: Path, config: Mapping[str, Any], graph: Graph, given: str) -> None:
    """Refuse all that is not known at once; `given` is advice."""
    top = Listed.of(config)
    if not top.is_model:
        raise GemscError(
            f"{path} is a {top.kind!r:.60}, a class with a call() of its own",
            help=f"gemsc imports {' and '.join(MODELS[::2])} models; {_DIRECTLY}",
        )
    unknown = [
        f"{entry.name!r:.60} ({entry.kind:.60})"
        for entry in _all(top)
        if not entry.is_model
        and entry.kind != "InputLayer"
        and graph.translator(entry.kind, entry.name, entry.is_operation) is None
    ]
    if unknown:
        makers = [e.name for e in _all(top) if e.config.get("mask_zero")]
        makers += [e.name for e in _all(top) if e.kind == "Masking"]
        masks = f"leave out masks, which are not supported ({', '.join(makers)}); "
        raise GemscError(
            f"{path.name} uses layers that gemsc does not support: "
            f"{show_some(unknown, _SHOWN)}",
            help=f"{masks * bool(makers)}build them of other layers, {given}; the code "
            f"of a Lambda in a file is never run. Or {_DIRECTLY}",
        )


def _all(model: Listed) -> Iterator[Listed]:
    for text in model.config["layers"]:
        entry = Listed.of(text)
        yield entry
        if entry.is_model:
            yield from _all(entry)
