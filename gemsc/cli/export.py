"""`gemsc export`: a checkpoint as one plain file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemsc.cli.terminal import console
from gemsc.runtime.checkpoint.export import export_model
from gemsc.runtime.checkpoint.folder import MODEL

__all__ = ["export_command"]


def export_command(
    run: Annotated[
        Path, typer.Argument(help="the folder of a run, or one of its step- folders")
    ],
    output: Annotated[Path, typer.Option("-o", "--output")] = Path(MODEL),
    ema: Annotated[
        bool, typer.Option(help="the averages of the weights that --ema has made")
    ] = False,
) -> None:
    """Write a checkpoint as one state_dict under the names of your model."""
    step = export_model(run, output, averages=ema)
    console.print(f"wrote {output}: the model of step {step}", highlight=False)
