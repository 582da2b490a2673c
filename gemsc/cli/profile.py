"""`gemsc profile`: measure this machine, or what processes on one device gain."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gemsc.base.units import show_bytes
from gemsc.calibrate.machine import (
    base_of,
    calibrate_machine,
    check_output,
    measure_on_ranks,
    write_network,
    write_sharing,
)
from gemsc.calibrate.network import is_rank
from gemsc.calibrate.network import main as measure_on_this_rank
from gemsc.cli.compile import compiled
from gemsc.cli.terminal import console, progress_bar, tell
from gemsc.compiler import CompiledProgram
from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError
from gemsc.launch.measure import Load, measure_load, trainable
from gemsc.passes.share_device import share
from gemsc.runtime.process.device import device_named
from gemsc.simulate.simulation import read_program
from gemsc.viz.listings import column, fitted


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
        typer.Option(help="numbers of processes per device to compare: 1,2,4"),
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
        typer.Option("--quick", help="with --calibrate: faster, but less accurate"),
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
        if (measured := measure_on_this_rank()) is not None:
            write_network(measured, output, hardware)
        return
    if calibrate:
        with progress_bar() as show:
            calibrate_machine(
                output, hardware, threads, kind=device, quick=quick, progress=show
            )
    if network:
        measured = measure_on_ranks(ranks)
        write_network(measured, output, hardware)
    if program is not None and counts:
        is_written = calibrate or network  # with the figures of `hardware`
        base = "" if is_written else hardware
        profile_sharing(program, counts, base, output, steps)
    tell(f"wrote {output}")


def check_sharing_options(program: Path | None, numbers: str) -> tuple[int, ...]:
    """Return the numbers of processes to measure, 1 among them; or none.

    Raises:
        GemscError: the numbers are none, or one of both is missing; or the program
            cannot train on its example inputs.
    """
    if not numbers and program is None:
        return ()
    if not numbers or program is None:
        raise GemscError(
            "--per-device measures a program"
            if program is None
            else f"nothing to measure of {program}",
            help="gemsc profile build/program --per-device 1,2,4",
        )
    counts = [text.strip() for text in numbers.split(",")]
    if not all(text.isdecimal() and int(text) > 0 for text in counts):
        raise GemscError(
            f"--per-device {numbers} is not a list of numbers of processes",
            help="write for example --per-device 1,2,4",
        )
    trainable(program)
    return tuple(sorted({1, *map(int, counts)}))


def profile_sharing(
    program: Path, counts: Sequence[int], hardware: str, output: Path, steps: int
) -> None:
    """Measure a program with so many ranks on each device, print it, write it down.

    Raises:
        GemscError: not even one rank on each device can run.
    """
    plan = trainable(program)
    user, options = read_program(program)
    base = base_of(output, hardware or ("" if output.is_file() else options.hardware))
    devices = plan.ranks // (plan.per_device or 1)
    loads: dict[int, Load] = {}
    shared: SharedDevice | None = None
    for count in counts:
        ranks = devices * count
        asked = replace(
            options,
            ranks=ranks,
            data=ranks // plan.copy_ranks,
            per_device=count,
            check=False,
        )
        try:
            made = compiled(user, asked)
            loads[count] = _measured(made, steps)
        except GemscError as error:
            if count == 1:
                raise
            tell(f"note: not {count} processes: {error}")
            break
        if shared is None:
            whole = made.compilation.program
            numbers = options.micro_batches, options.copy_ranks
            shared = share(whole, base.device, *numbers)
    assert shared is not None  # one process is always measured
    rates = {count: load.samples_per_second for count, load in loads.items()}
    shared = replace(shared, rates=rates)
    _show(shared, loads)
    write_sharing(base, shared.name, rates, output)


def _measured(program: CompiledProgram, steps: int) -> Load:
    with tempfile.TemporaryDirectory(prefix="gemsc-sharing-") as name:
        program.write(name)
        return measure_load(Path(name), steps)


def _show(shared: SharedDevice, loads: dict[int, Load]) -> None:
    def cells(value: Callable[[int, Load], object]) -> Iterator[object]:
        return (value(count, load) for count, load in loads.items())

    columns = [
        column("processes", loads),
        column(
            "samples/s",
            cells(lambda k, load: load.samples_per_second),
            "{:,.1f}".format,
        ),
        column("gain", cells(lambda k, _: shared.measured.get(k)), "{:+z.0%}".format),
        column(
            "predicted",
            cells(lambda k, load: shared.gain(k, sums=True)),
            "{:+z.0%}".format,
        ),
        column("cores used", cells(lambda k, load: load.cores), "{:.1f}".format),
        column("GPU used", cells(lambda k, load: load.gpu_used), "{:.0%}".format),
        column("peak of a rank", cells(lambda k, load: load.peak_bytes), show_bytes),
    ]
    if all(load.gpu_used is None for load in loads.values()):
        columns = [c for c in columns if c.title != "GPU used"]
    console.print(fitted("processes that share a device", columns, console.width))
