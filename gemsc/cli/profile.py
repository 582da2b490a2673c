"""`gemsc profile`: measure this machine, or a program on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemsc.calibrate.machine import (
    calibrate_machine,
    check_output,
    measure_on_ranks,
    write_network,
)
from gemsc.calibrate.network import is_rank
from gemsc.calibrate.network import main as measure_on_this_rank
from gemsc.cli.profile_sharing import check_sharing_options, profile_sharing
from gemsc.cli.terminal import console, progress_bar
from gemsc.errors import GemscError
from gemsc.runtime.process.device import device_named


def profile_command(
    program: Annotated[
        Path | None, typer.Argument(help="with --per-device: a program directory")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="time operators of many shapes")
    ] = False,
    network: Annotated[
        bool,
        typer.Option("--network", help="time messages and all-reduces between ranks"),
    ] = False,
    per_device: Annotated[
        str,
        typer.Option(help="processes per device to run PROGRAM with: 1,2,4"),
    ] = "",
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="file to write; measurements are added to it"
        ),
    ] = Path("hardware.toml"),
    hardware: Annotated[
        str,
        typer.Option(help="machine or file for the figures that are not measured"),
    ] = "",
    ranks: Annotated[
        int, typer.Option(help="with --network: processes to start", min=2)
    ] = 2,
    device: Annotated[
        str, typer.Option(help="with --calibrate: cpu, or cuda for the GPU")
    ] = "cpu",
    threads: Annotated[
        int, typer.Option(help="with --calibrate: threads per rank", min=1)
    ] = 1,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="with --calibrate: takes seconds, less accurate"),
    ] = False,
    steps: Annotated[
        int, typer.Option(help="with --per-device: steps per round", min=1)
    ] = 5,
) -> None:
    """Measure this machine and write a hardware file for `compile --hardware`."""
    counts = check_sharing_options(program, per_device)
    if not (calibrate or network or counts):
        raise GemscError(
            "nothing to measure",
            help="give --calibrate, --network or both, or a program and --per-device",
        )
    check_output(output)
    device_named(device)
    if network and is_rank():
        if (found := measure_on_this_rank()) is not None:
            write_network(found, output, hardware)
        return
    if calibrate:
        with progress_bar() as show:
            calibrate_machine(
                output, hardware, threads, kind=device, quick=quick, progress=show
            )
    if network:
        found = measure_on_ranks(ranks)
        write_network(found, output, hardware)
    if program is not None and counts:
        is_written = calibrate or network  # with the figures of `hardware`
        base = "" if is_written else hardware
        profile_sharing(program, counts, base, output, steps)
    console.print(f"wrote {output}", highlight=False)
