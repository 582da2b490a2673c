"""`gemsc simulate`: its arguments, and what it prints."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gemsc.base.files import write_text
from gemsc.base.units import show_bytes, show_seconds
from gemsc.cli.options import OF_A_PLAN, ModelOrProgram, takes_options
from gemsc.cli.terminal import Answer, check_svg, console, gives_json, tell
from gemsc.costs.collectives import ROUNDS
from gemsc.costs.hardware import Hardware, LinkSpeed, read_hardware
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.passes.share_device import share
from gemsc.simulate.show import draw_curve, show_points, show_sharing
from gemsc.simulate.simulation import (
    Simulation,
    powers_of_two,
    read_counts,
    read_program,
    simulate,
    trace_unfilled,
)
from gemsc.user_model import UserModel, load_user_model


@gives_json
@takes_options((*OF_A_PLAN, "times", "chunks"))
def simulate_command(
    target: ModelOrProgram,
    ranks: Annotated[
        int | None,
        typer.Option(help="total number of processes, as for mpirun -n", min=1),
    ] = None,
    data: Annotated[
        int | None, typer.Option(help="number of data-parallel replicas", min=1)
    ] = None,
    curve: Annotated[
        str, typer.Option(help="numbers of replicas: 1,4,16 (default: powers of two)")
    ] = "",
    given: dict[str, Any] | None = None,
    allreduce: Annotated[
        str,
        typer.Option(
            help=f"all-reduce algorithm: auto, {', '.join(ROUNDS)} (default: the "
            "machine's)"
        ),
    ] = "",
    per_device: Annotated[
        int, typer.Option(help="maximum number of processes per device", min=1)
    ] = 1,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file for the plot: curve.svg")
    ] = None,
) -> Answer:
    """Simulate training on many ranks: real schedule, modelled network."""
    if output is not None:
        check_svg(output)
    user, options = _read(target)
    counts = _counts(options, ranks, data, fixed=Path(target).is_dir())
    options = replace(options, **{**(given or {}), **counts})
    machine = _machine(options.hardware, allreduce)
    if per_device > 1 and options.copy_ranks > 1:
        raise GemscError(
            f"--per-device {per_device} can be simulated only for replicas of one "
            f"rank, but these have {options.copy_ranks}",
            help="leave it out, or give each replica one rank: --ranks 8 --data 8",
        )
    traced = trace_unfilled(user, machine, options.frontend, options.precision)
    copies = read_counts(curve, options.data)
    sim = simulate(traced, options, copies, machine=machine)
    _print(sim)
    sharing = None
    if per_device > 1:
        count, samples = sim.options.micro_batches, sim.last.samples
        shared = share(traced.program, machine.device, count)
        show_sharing(shared, samples // sim.last.copies, per_device, console)
        numbers = powers_of_two(per_device)
        sharing = [{"processes": k, "gain": shared.gain(k)} for k in numbers]
    if output is not None:
        write_text(output, draw_curve(_heading(sim), sim.points))
        tell(f"wrote {output}")
    return _as_data(sim) | {"sharing": sharing}, 0


def _as_data(sim: Simulation) -> dict[str, Any]:
    first, room = sim.points[0], sim.hardware.device.memory_bytes
    return {
        "model": sim.name,
        "hardware": sim.hardware.name,
        "command_line": sim.options.command_line(),
        "points": [
            asdict(point)
            | {
                "step_seconds": point.step_seconds,
                "samples_per_second": point.throughput,
                "efficiency": point.efficiency(first),
            }
            for point in sim.points
        ],
        "peak_bytes": list(sim.timeline.peak_bytes),
        "memory_bytes": room,
        "fits": sim.fits,
    }


def _read(target: str) -> tuple[UserModel, CompileOptions]:
    if Path(target).is_dir():
        return read_program(Path(target))
    return load_user_model(target), CompileOptions()


def _counts(
    options: CompileOptions, ranks: int | None, data: int | None, *, fixed: bool
) -> dict[str, int | None]:
    """Return the options that say how many ranks and replicas there are.

    A program's replica has its ranks already.

    Raises:
        GemscError: the ranks cannot be divided among the replicas.
    """
    if fixed:
        size = options.copy_ranks
        copies = data or (ranks // size if ranks else options.data)
        if ranks not in (None, size * copies):
            raise GemscError(
                f"--ranks {ranks}: each replica of this program has {size} ranks",
                help=f"give a multiple of {size}, or leave out --data",
            )
        return {"ranks": size * copies, "data": copies}
    return {"ranks": ranks, "data": data or 1}


def _machine(name: str, allreduce: str) -> Hardware:
    machine = read_hardware(name)
    if not allreduce:
        return machine
    if allreduce not in ("auto", *ROUNDS):
        raise GemscError(
            f"unknown algorithm '{allreduce}'",
            help=f"choose one of auto, {', '.join(ROUNDS)}",
        )
    sums = replace(machine.network.allreduce, algorithm=allreduce)
    return replace(machine, network=replace(machine.network, allreduce=sums))


def _heading(sim: Simulation) -> str:
    options = sim.options
    return (
        f"{sim.name} on {_many(sim.last.ranks, 'rank')} of {sim.hardware.name}: "
        f"{options.schedule}, {_many(options.data, 'replica')} of "
        f"{_many(options.copy_ranks, 'rank')}"
    )


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count > 1)}"


def _print(sim: Simulation) -> None:
    last, network = sim.last, sim.hardware.network
    console.print(_heading(sim), style="bold", highlight=False)
    tell(
        f"{network.ranks_per_node} ranks per node; inside {_rate(network.intra)}, "
        f"between {_rate(network.inter)}; figures: {sim.hardware.source}",
    )
    for note in sim.hardware.notes:
        tell(f"- {note}")
    show_points(sim.points, console)
    tell(
        f"scaling efficiency {sim.efficiency:.2%} on {_many(last.ranks, 'rank')}, "
        f"compared with {sim.points[0].ranks:,}: {last.throughput:,.1f} samples/s, "
        f"{show_seconds(last.step_seconds)} a step",
    )
    peak, room = max(sim.timeline.peak_bytes), sim.hardware.device.memory_bytes
    verdict = "fits" if sim.fits else "DOES NOT FIT"
    tell(
        f"highest peak memory of a rank: {show_bytes(peak)} of {show_bytes(room)}: "
        f"{verdict}",
    )


def _rate(link: LinkSpeed) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s and {link.latency * 1e6:g} us"
