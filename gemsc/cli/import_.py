"""`gemsc import`: a network from a file of Keras or ONNX, or weights for a program."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from gemsc.base.files import sync, write_text
from gemsc.base.nests import tensor_leaves
from gemsc.cli.terminal import say, tell
from gemsc.errors import GemscError
from gemsc.importers.folder import MODEL_FILE, default_folder, import_file, import_once
from gemsc.importers.network import READERS, ImportedNetwork, ImportOptions
from gemsc.importers.write import counts
from gemsc.plan import Plan
from gemsc.runtime.training.starting import first_weights, tensors_of_program
from gemsc.weights.source import WeightFiles, conversions, matched
from gemsc.weights.write import write_stream


def import_command(
    source: Annotated[
        Path, typer.Argument(help="model.keras, model.onnx, or a program directory")
    ],
    weights: Annotated[
        Path | None,
        typer.Argument(
            help="for a program: .safetensors or .pt file, or a Hugging Face model "
            "folder"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="folder for model.py (default: model_keras)"
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help=f"batch size of the example inputs (default: {ImportOptions.batch})",
            min=1,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="shape of an input that the file does not fix: name=2x3x512x512"
        ),
    ] = None,
    channels_first: Annotated[
        bool, typer.Option("--channels-first", help="use PyTorch's layout for images")
    ] = False,
    custom: Annotated[
        Path | None, typer.Option(help="file that defines layers gemsc does not know")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="overwrite an earlier import, discarding your edits"
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option(help="check the import against a reference run")
    ] = True,
) -> None:
    """Turn a Keras or ONNX file into PyTorch, or load weights into a program."""
    if source.suffix not in READERS:
        _import_weights(source, weights)
        return
    if weights is not None:
        raise GemscError(
            f"unexpected argument {weights}: {source} is imported as a whole",
            help=f"to choose the folder: gemsc import {source} -o {weights}",
        )
    folder = output or default_folder(source)
    size = ImportOptions.batch if batch is None else batch
    options = ImportOptions(size, _shapes(shape or []), custom, channels_first)
    network = import_file(source, folder, options, overwrite=overwrite, check=check)
    if batch not in (None, *(x.shape[0] for x in network.model.inputs if x.shape)):
        network.notes.append(
            f"--batch {batch} has no effect: the file, or --shape, has the batch of "
            "each input"
        )
    for line in described(network):
        tell(line)
    model = folder / MODEL_FILE
    tell(f"wrote {model}; next: gemsc compile {model}")


def _import_weights(program: Path, weights: Path | None) -> None:
    refuse_older(program)
    if weights is None:
        raise GemscError(
            f"{program} is not a file that gemsc can import, and no weights are given",
            help="gemsc import model.keras -o net, or gemsc import build/x weights",
        )
    for note in import_weights(program, weights):
        tell(f"note: {note}")
    tell(f"{program} starts from {weights}")


def _shapes(words: list[str]) -> dict[str, tuple[int, ...]]:
    """Read name=2x3x512x512."""
    shapes = {}
    for word in words:
        name, _, text = word.rpartition("=")
        sizes = text.split("x")
        if not name or not all(s.isascii() and s.isdecimal() and int(s) for s in sizes):
            raise GemscError(
                f"--shape {word} is not the shape of an input",
                help="write --shape name=2x3x512x512",
            )
        shapes[name] = tuple(map(int, sizes))
    return shapes


def import_weights(directory: Path, path: Path) -> list[str]:
    """Replace a program's initial weights; return notes about what was converted.

    They are written into a new folder, one tensor at a time, and plan.toml then names
    it: a program starts from all of the old weights, or from all of the new ones. A
    program that has none itself is told where they are: its ranks read them there.

    Raises:
        GemscError: the files are damaged, or not those of the program's model.
    """
    plan = Plan.read(directory / "plan.toml")
    first, stages = first_weights(directory, plan), range(len(plan.stages))
    tables = [first.table(stage) for stage in stages]
    there, files = first.elsewhere, WeightFiles.open(path)
    wanted = tensors_of_program(directory, plan, first)
    keys = matched(files, wanted)
    number = int(plan.weights.partition("-")[2] or 1) + 1
    new = directory / f"weights-{number}"
    shutil.rmtree(new, ignore_errors=True)
    try:
        for stage, table in enumerate(tables):

            def read(name: str, stage: int = stage) -> Tensor:
                if name not in keys:
                    return first.read(stage, name)
                return files.mapped(keys[name]).to(tables[stage][name].dtype)

            if there is not None:
                table = {name: table[name] for name in there.kept(table)}
            write_stream(new / f"stage{stage}.safetensors", table, read, sync=True)
        if there is not None:
            there.now_in(path).write(new, there.stages, directory)
        sync(new)
        plan = replace(plan, weights=new.name)
        write_text(directory / "plan.toml", plan.to_toml(directory))
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    for other in directory.glob("weights*"):  # those before, and what kills have left
        if other != new:
            shutil.rmtree(other)
    return conversions(files, wanted)


SHOWN = 5  # names in a line


def imported(model: str) -> str:
    """Return what a command loads: the model.py of what model.keras is imported to."""
    path = Path(model)
    if path.suffix not in READERS:
        refuse_older(path)
        return model
    folder, network = import_once(path)
    if network is None:
        say(f"{path} is in {folder} already")
    else:
        count = len(network.notes)
        notes = f": {count} note{'s' * (count != 1)} in its import.toml" * bool(count)
        say(f"imported {path} into {folder}{notes}")
    return str(folder / MODEL_FILE)


def refuse_older(path: Path) -> None:
    """Refuse what TensorFlow or an older Keras has written.

    Raises:
        GemscError: it is such a file or folder; it says how to save it anew.
    """
    again = 'keras.models.load_model("{}").save("model.keras")'
    if path.name.endswith(".weights.h5"):
        what = "has weights without layers"
        advice = f'in Keras: model.load_weights("{path}"); model.save("model.keras")'
    elif path.suffix in (".h5", ".hdf5"):
        what = "is of TensorFlow or an older Keras"
        advice = f"save it once with Keras 3: {again.format(path)}"
    elif (path / "saved_model.pb").exists():
        what = "is a SavedModel, which Keras 3 does not load as a model"
        advice = (
            f'with the TensorFlow that wrote it: tf.keras.models.load_model("{path}")'
            f'.save("model.h5"); then with Keras 3: {again.format("model.h5")}'
        )
    else:
        return
    raise GemscError(f"{path} {what}; gemsc reads .keras files", help=advice)


def described(network: ImportedNetwork) -> Iterator[str]:
    """Yield lines that say what was imported: tensors, inputs, outputs, notes."""
    root, sheet = network.model.root, network.model
    yield from counts(root)
    if frozen := [n for n, p in root.named_parameters() if not p.requires_grad]:
        more = ", ..." * (len(frozen) > SHOWN)
        yield f"not trained: {', '.join(frozen[:SHOWN])}{more}"
    for value in sheet.inputs:
        yield f"input {value}: {_shape(value.tensor)}"
    for keys, tensor in tensor_leaves(sheet.empty(sheet.result)):
        yield f"{' '.join(map(str, ('output', *keys)))}: {_shape(tensor)}"
    for note in network.notes:
        yield f"note: {note}"


def _shape(tensor: Tensor) -> str:
    sizes = "x".join(map(str, tensor.shape)) or "a number"
    dtype = "" if tensor.dtype is torch.float32 else f" {tensor.dtype}"
    return sizes + dtype.replace("torch.", "")
