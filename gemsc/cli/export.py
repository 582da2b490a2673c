"""`gemsc export`: a checkpoint as one plain file of weights, or as Keras or ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemsc.cli.terminal import console
from gemsc.cli.trained import (
    Trained,
    import_folder,
    load_trained,
    program_of,
    trained_model,
)
from gemsc.errors import GemscError, UsageError
from gemsc.importers.back import write_back
from gemsc.importers.network import READERS
from gemsc.importers.onnx.from_torch import export_onnx
from gemsc.importers.origin import Origin
from gemsc.runtime.checkpoint.folder import MODEL
from gemsc.weights.write import write_stream

KINDS = (".safetensors", *READERS)


def export_command(
    run: Annotated[
        Path, typer.Argument(help="run folder, one of its checkpoints, or a program")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            "--to",
            help="file to write: .safetensors, .onnx, or the format that was imported",
        ),
    ] = None,
    ema: Annotated[
        bool,
        typer.Option(help="the moving average of the weights, as trained with --ema"),
    ] = False,
) -> None:
    """Write the trained weights as one file: .safetensors, .onnx or Keras."""
    if output is None:
        raise UsageError(
            f"the file to write {run} into is not named",
            help=f"for example gemsc export {run} -o {MODEL}",
        )
    if f".{output}" in KINDS:  # --to onnx
        output = Path(f"model.{output}")
    with trained_model(run, averages=ema) as trained:
        try:
            notes = _write(run, output, trained)
        except OSError as error:
            raise GemscError(
                f"{output} cannot be written: {error.strerror}",
                help="give another file with -o",
            ) from None
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    line = f"wrote {output}: {trained.what}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _write(run: Path, output: Path, trained: Trained) -> list[str]:
    """Write the kind of file that the name ends in; return notes."""
    if output.suffix not in READERS:
        write_stream(output, trained.table, trained.read)
        return []
    program = program_of(run)
    folder = import_folder(program)
    if folder is not None and Origin.read(folder).file.endswith(output.suffix):
        shapes = {name: entry.shape for name, entry in trained.table.items()}
        return write_back(folder, output, shapes, trained.read)
    if output.suffix == ".onnx":
        user, model = load_trained(program, trained)
        return export_onnx(model, user.make_inputs(), output)
    raise GemscError(
        f"the model of {program} was not imported from a file that ends in "
        f"{output.suffix}",
        help="give a name that ends in .safetensors or .onnx; if it was imported, "
        "the folder of its model.py has lost its import.toml",
    )
