"""`gemsc profile`: measure this machine."""

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
from gemsc.calibrate.network_rank import is_rank
from gemsc.calibrate.network_rank import main as measure_on_this_rank
from gemsc.cli.terminal import console, progress_bar
from gemsc.errors import GemscError
from gemsc.runtime.process.device import device_named

__all__ = ["profile_command"]


def profile_command(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="time operators of many shapes")
    ] = False,
    network: Annotated[
        bool,
        typer.Option("--network", help="time messages and all-reduces between ranks"),
    ] = False,
    output: Annotated[Path, typer.Option("-o", "--output")] = Path("hardware.toml"),
    hardware: Annotated[
        str,
        typer.Option(help="machine or file to take figures from that are not measured"),
    ] = "",
    ranks: Annotated[int, typer.Option(help="network: processes to start", min=2)] = 2,
    device: Annotated[
        str, typer.Option(help="calibrate: cpu, or cuda for the GPU of this machine")
    ] = "cpu",
    threads: Annotated[
        int, typer.Option(help="calibrate: threads of one rank", min=1)
    ] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="calibrate: takes seconds, less exact")
    ] = False,
) -> None:
    """Measure this machine and write a hardware file for `compile --hardware`."""
    if not (calibrate or network):
        raise GemscError(
            "nothing to measure", help="give --calibrate, --network or both"
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
    console.print(f"wrote {output}", highlight=False)
