"""`gemsc profile build/x --per-device 1,2,4`: what processes on one device gain."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gemsc.base.units import show_bytes
from gemsc.calibrate.machine import base_of, write_sharing
from gemsc.cli.compile import compiled
from gemsc.cli.terminal import console
from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError
from gemsc.launch.measure import Load, measure_load, trainable
from gemsc.passes.share_device import share
from gemsc.result import CompiledProgram
from gemsc.simulate.simulation import read_program
from gemsc.viz.listings import column, fitted


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
            help="for example --per-device 1,2,4",
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
            console.print(f"note: not {count} processes: {error}", highlight=False)
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
    def each(value: Callable[[int, Load], object]) -> Iterator[object]:
        return (value(count, load) for count, load in loads.items())

    def gain(count: int, load: Load) -> float | None:
        return shared.measured.get(count)

    columns = [
        column("processes", loads),
        column("samples/s", each(lambda k, load: load.samples_per_second), _rate),
        column("gain", each(gain), _percent),
        column("predicted", each(lambda k, load: shared.gain(k, sums=True)), _percent),
        column("cores used", each(lambda k, load: load.cores), "{:.1f}".format),
        column("GPU used", each(lambda k, load: load.gpu_used), "{:.0%}".format),
        column("peak of a rank", each(lambda k, load: load.peak_bytes), show_bytes),
    ]
    if all(load.gpu_used is None for load in loads.values()):
        columns = [each for each in columns if each.title != "GPU used"]
    console.print(fitted("processes that share a device", columns, console.width))


def _rate(samples: float) -> str:
    return f"{samples:,.1f}"


def _percent(gain: float) -> str:
    return f"{gain:+.0%}"
