"""How many stages, replicas and micro-batches the options mean, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.schedules import SCHEDULES, StageCost, Task, place, run

__all__ = ["PLACEMENTS", "Layout", "layout"]

PLACEMENTS = ("linear", "mirrored", "folded", "looped")


@dataclass(frozen=True)
class Layout:
    """What the options mean for one schedule.

    `micro_batches` holds the number of micro-batches of each replica, `live` how many
    of them equal stages would hold at most (empty where memory is not balanced).
    `explicit` lists the rank of each stage where the user gave them.
    """

    placement: str
    num_stages: int
    micro_batches: tuple[int, ...]
    live: tuple[int, ...]
    explicit: tuple[int, ...] = ()

    @property
    def num_replicas(self) -> int:
        """How many full copies of the stages share the ranks."""
        return len(self.micro_batches)


def layout(options: CompileOptions, *, simulated: bool = False) -> Layout:
    """Read the options; `simulated` if no text is to be written.

    Raises:
        GemscError: schedule and placement do not fit, or an odd number of micro-batches
            for two replicas.
    """
    schedule = SCHEDULES[options.schedule]
    if schedule.policy.split_backward and not simulated:
        raise GemscError(
            f"--schedule {options.schedule} can be simulated, but not compiled yet: "
            "PyTorch computes both kinds of gradients of a stage in one go",
            help="use 1f1b, interleaved or chimera",
        )
    kind = schedule.placement if options.placement == "natural" else options.placement
    explicit = _explicit(options) if kind[0].isdigit() else ()
    if not explicit and kind not in PLACEMENTS:
        raise GemscError(
            f"unknown placement '{kind}'",
            help=f"choose one of natural, {', '.join(PLACEMENTS)}, or list the rank of "
            "each stage: 0,1,1,0",
        )
    two = schedule.num_replicas == 2
    if two != (kind == "mirrored"):
        raise GemscError(
            f"--placement {kind} does not fit --schedule {options.schedule}, which has "
            + ("two mirrored replicas" if two else "one replica"),
            help="leave --placement out",
        )
    per_rank = {"folded": 2, "looped": options.chunks}.get(kind, 1)
    num_stages = len(explicit) or per_rank * options.ranks
    counts = _micro_batches(options, schedule.num_replicas)
    rows: tuple[tuple[int, ...], ...] = (explicit,)
    if not explicit:
        rows = place(kind, num_stages, options.ranks, len(counts))
    live: tuple[int, ...] = ()
    if options.balance == "memory":
        equal = [StageCost(1.0, 2.0, 1.0)] * num_stages
        task = Task.chain(equal, counts, placement=rows)
        peak = run(task, schedule.policy).peak_live
        live = tuple(-(-peak[rank] // rows[0].count(rank)) for rank in rows[0])
    name = "explicit" if explicit else kind
    return Layout(name, num_stages, counts, live, explicit)


def _explicit(options: CompileOptions) -> tuple[int, ...]:
    """Read `0,1,1,0`: the rank of each stage."""
    try:
        ranks = tuple(int(part) for part in options.placement.split(","))
    except ValueError:
        ranks = ()
    if set(ranks) != set(range(options.ranks)):
        raise GemscError(
            f"--placement {options.placement} does not name each of the ranks 0 to "
            f"{options.ranks - 1}",
            help="list the rank of each stage, for example --placement 0,1,1,0",
        )
    return ranks


def _micro_batches(options: CompileOptions, num_replicas: int) -> tuple[int, ...]:
    total = options.micro_batches
    if options.schedule == "mast":
        total = 2
    if options.times is not None:
        total = 2 * options.times
    if total % num_replicas:
        raise GemscError(
            f"--micro-batches {total} cannot be shared by {num_replicas} replicas",
            help=f"give a multiple of {num_replicas}",
        )
    return (total // num_replicas,) * num_replicas
