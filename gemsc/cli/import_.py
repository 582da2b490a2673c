"""`gemsc import`: a network from a file of Keras or ONNX, or weights for a program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemsc.cli.import_weights import import_weights
from gemsc.cli.imported import described, refuse_older
from gemsc.cli.terminal import console
from gemsc.errors import GemscError
from gemsc.importers.folder import default_folder, import_file
from gemsc.importers.network import READERS
from gemsc.importers.options import ImportOptions
from gemsc.importers.origin import MODEL_FILE


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
            help="shape of an input that the file leaves open: name=2x3x512x512"
        ),
    ] = None,
    channels_first: Annotated[
        bool, typer.Option("--channels-first", help="images in the layout of PyTorch")
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
            f"{source} is imported as a whole, and {weights} is one argument too many",
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
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    model = folder / MODEL_FILE
    line = f"wrote {model}; next: gemsc compile {model}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _import_weights(program: Path, weights: Path | None) -> None:
    refuse_older(program)
    if weights is None:
        raise GemscError(
            f"{program} is no file that gemsc imports, and there are no weights",
            help="gemsc import model.keras -o net, or gemsc import build/x weights",
        )
    for note in import_weights(program, weights):
        console.print(f"note: {note}", highlight=False)
    console.print(f"{program} starts from {weights}", highlight=False)


def _shapes(words: list[str]) -> dict[str, tuple[int, ...]]:
    """Read name=2x3x512x512."""
    found = {}
    for word in words:
        name, _, text = word.rpartition("=")
        sizes = text.split("x")
        if not name or not all(s.isascii() and s.isdecimal() and int(s) for s in sizes):
            raise GemscError(
                f"--shape {word} is not the shape of an input",
                help="write --shape name=2x3x512x512",
            )
        found[name] = tuple(map(int, sizes))
    return found
