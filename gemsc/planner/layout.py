"""How many stages, replicas and micro-batches the options mean, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from gemsc.base.grid_shape import BESIDE, SPLITS, GridShape
from gemsc.errors import GemscError
from gemsc.ir.program import Program
from gemsc.options import CompileOptions, typed
from gemsc.schedules import SCHEDULES, Edge, StageCost, Task, place, run

PLACEMENTS = ("linear", "mirrored", "folded", "looped")
NOT_COMPILED = {  # option -> why it does not go with --torch-compile
    "tiles": "tiles exchange halos inside of a stage",
    "shards": "shards add up inside of a stage",
    "branches": "ranks exchange branches inside of a stage",
    "recompute": "torch.compile decides what is computed again",
    "offload": "torch.compile decides what is kept for backward",
}


@dataclass(frozen=True)
class StageLayout:
    """What the options mean for one schedule.

    `micro_batches` holds the number of micro-batches of each replica, `live` how many
    of them equal stages would hold at most (empty where memory is not balanced).

    The ranks of a grid do the same actions in the same order: a *group*, which the
    schedule takes for one rank. `rows[replica][stage]` is a group; `groups` has the
    shape of each grid.
    """

    placement: str
    num_stages: int
    micro_batches: tuple[int, ...]
    live: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    groups: tuple[GridShape, ...]

    @property
    def num_replicas(self) -> int:
        """How many full copies of the stages share the ranks."""
        return len(self.micro_batches)

    @property
    def grids(self) -> tuple[GridShape, ...]:
        """The shape of each stage's grid."""
        return tuple(self.groups[group] for group in self.rows[0])

    @property
    def most_ranks(self) -> int:
        """The ranks of the stage that has most."""
        return max(grid.size for grid in self.grids)


def stage_layout(options: CompileOptions) -> StageLayout:
    """Read the options.

    Raises:
        GemscError: schedule and placement do not fit, or an odd number of micro-batches
            for two replicas.
    """
    schedule = SCHEDULES[options.schedule]
    if schedule.policy.split_backward:
        _check_split(options)
    if options.torch_compile:
        _check_torch_compile(options)
    kind = schedule.placement if options.placement == "natural" else options.placement
    groups = options.groups
    explicit = _explicit(options, len(groups)) if kind[:1].isdigit() else ()
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
            help="leave --placement out, or use natural",
        )
    num_stages = len(explicit) or stages_per_rank(kind, options.chunks) * len(groups)
    counts = _micro_batches(options, schedule.num_replicas)
    rows: tuple[tuple[int, ...], ...] = (explicit,)
    if not explicit:
        rows = place(kind, num_stages, len(groups), len(counts), mirror=_mirror(groups))
    live: tuple[int, ...] = ()
    if options.balance == "memory":
        equal = (StageCost(1.0, 2.0, 1.0),) * num_stages
        edges = tuple(Edge(s, s + 1, 0.0) for s in range(num_stages - 1))
        task = Task(equal, edges, rows, counts)
        peak = run(task, schedule.policy).peak_live
        live = tuple(-(-peak[group] // rows[0].count(group)) for group in rows[0])
    name = "explicit" if explicit else kind
    return StageLayout(name, num_stages, counts, live, rows, groups)


def stages_per_rank(placement: str, chunks: int) -> int:
    """Return how many stages a rank, or a grid of ranks, has under a placement."""
    return {"folded": 2, "looped": chunks}.get(placement, 1)


def check_blocks(
    options: CompileOptions, chosen: StageLayout, program: Program
) -> None:
    """Refuse more stages than a program has blocks.

    Raises:
        GemscError: names the blocks, and options that the model has enough blocks for.
    """
    model, blocks = program.name, [block.name for block in program.blocks or ()]
    needed, count = chosen.num_stages, len(blocks)
    if count >= needed:
        return
    per_rank = needed // len(chosen.groups)
    kept = chosen.groups[: count // per_rank]
    ranks = sum(group.size for group in kept)
    if chosen.placement == "explicit":
        advice = f"list the ranks of at most {count} stages in --placement"
    elif per_rank > 1:
        advice = f"--schedule 1f1b --placement linear needs {len(chosen.groups)} blocks"
    else:
        advice = f"use --ranks {ranks * options.data}"
        listed = [name for name in BESIDE if len(getattr(options, name)) > 1]
        for name in listed:
            advice += f" {typed(name, tuple(getattr(group, name) for group in kept))}"
        if not listed and options.data == 1 < ranks:
            advice += " or fewer"
        advice += f" --data {options.data}" if options.data > 1 else ""
    raise GemscError(
        f"{needed} stages need at least {needed} blocks, {model} has {count}: "
        + ", ".join(blocks),
        help=advice,
    )


def check_whole(names: Sequence[str], module: nn.Module) -> None:
    """Refuse names of modules and parameters that a model does not have.

    Raises:
        GemscError: names one, and those that look like it.
    """
    known = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    known += (name for name, _ in module.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, cutoff=0.5) or known[:5]
            raise GemscError(
                f"--whole {','.join(names)}: the model has no module '{name}'",
                help=f"the model has {', '.join(close)}",
            )


def _mirror(groups: tuple[GridShape, ...]) -> tuple[int, ...]:
    """Return the group that runs the other replica's stage of each group.

    Only groups of one grid can stand in for each other: of one grid of four tiles and
    two lone ranks the grid stays where it is, and the lone ranks change places.
    """
    alike: dict[GridShape, list[int]] = {}
    for group, grid in enumerate(groups):
        alike.setdefault(grid, []).append(group)
    other = {
        one: two
        for members in alike.values()
        for one, two in zip(members, reversed(members), strict=True)
    }
    return tuple(other[group] for group in range(len(groups)))


def _explicit(options: CompileOptions, num_groups: int) -> tuple[int, ...]:
    """Read `0,1,1,0`: the rank of each stage, or the group where grids count as one."""
    try:
        ranks = tuple(int(part) for part in options.placement.split(","))
    except ValueError:
        ranks = ()
    if set(ranks) != set(range(num_groups)):
        what = "groups of ranks" if any(options.groups) else "ranks"
        raise GemscError(
            f"--placement {options.placement} does not name each of the {what} 0 to "
            f"{num_groups - 1}",
            help="list the rank of each stage, for example --placement 0,1,1,0"
            + ("; each grid counts as one" if any(options.groups) else ""),
        )
    return ranks


def _micro_batches(options: CompileOptions, num_replicas: int) -> tuple[int, ...]:
    total = options.micro_batches
    if options.times is not None:
        pairs = 2 * options.times
        if total not in (pairs, CompileOptions().micro_batches):
            raise GemscError(
                f"--times {options.times} means {pairs} micro-batches, but "
                f"--micro-batches {total} is given",
                help="give only one of them",
            )
        total = pairs
    if total % num_replicas:
        raise GemscError(
            f"--micro-batches {total} cannot be divided between {num_replicas} "
            "mirrored replicas",
            help=f"give a multiple of {num_replicas}",
        )
    return (total // num_replicas,) * num_replicas


def _check_split(options: CompileOptions) -> None:
    """Refuse what does not go with weight gradients that wait."""
    for name in (*SPLITS, "recompute", "offload"):
        if getattr(options, name):
            raise GemscError(
                f"--schedule {options.schedule} cannot be used with --{name}: it keeps "
                "what weight gradients need in a different way",
                help="use 1f1b, interleaved or chimera",
            )


def _check_torch_compile(options: CompileOptions) -> None:
    """Refuse what happens inside of a stage that is compiled as a whole."""
    for name, reason in NOT_COMPILED.items():
        if value := getattr(options, name):
            raise GemscError(
                f"--torch-compile cannot be combined with {typed(name, value)}: "
                f"{reason}",
                help=f"leave out --torch-compile or --{name}",
            )
    if SCHEDULES[options.schedule].policy.split_backward:
        raise GemscError(
            f"--torch-compile cannot be combined with --schedule {options.schedule}: a "
            "compiled backward computes weight gradients together with all others",
            help="leave out --torch-compile, or use --schedule 1f1b",
        )
