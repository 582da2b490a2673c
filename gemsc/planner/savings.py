"""Fit a rank into its memory: which blocks to recompute or offload, at least cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gemsc.ir import meta
from gemsc.ir.flow import external_inputs
from gemsc.ir.program import Block, Program, Segment, Stage
from gemsc.ir.segments import frees_anything, may_recompute
from gemsc.planner.activations import host_seconds, seconds_until_last_save
from gemsc.schedules import Timeline

__all__ = ["Fit", "Saving", "cheapest", "fit_memory"]

_UNITS = 400  # the steps into which what is needed is divided
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Saving:
    """One block that need not be kept: for one micro-batch, what it frees and costs."""

    block: int
    kind: str
    freed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A program with segments chosen so that it fits, or the leanest there is."""

    program: Program
    timeline: Timeline
    fits: bool

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest rank."""
        return max(self.timeline.peak_bytes)


@dataclass(frozen=True, slots=True)
class _State:
    """The cheapest way known to free so much: its last saving, and those before it."""

    seconds: float
    last: Saving | None = None
    before: _State | None = None

    def savings(self) -> list[Saving]:
        """Return all of them, in the order of blocks."""
        found = []
        state: _State | None = self
        while state is not None and state.last is not None:
            found.append(state.last)
            state = state.before
        return found[::-1]


def cheapest(savings: Sequence[Saving], needed: int) -> tuple[Saving, ...] | None:
    """Return the savings that together free `needed` bytes in the fewest seconds.

    At most one for each block; None if all of them free too little. Exact up to
    rounding: bytes count in steps of 1/400 of what is needed, rounded down.
    """
    unit = -(-max(1, needed) // _UNITS)
    goal = -(-needed // unit)
    best: list[_State | None] = [None] * (goal + 1)
    best[0] = _State(0.0)
    by_block = groupby(sorted(savings, key=lambda s: s.block), lambda s: s.block)
    for _, choices in by_block:
        options = [(saving, saving.freed // unit) for saving in choices]
        for have in range(goal, -1, -1):
            state = best[have]
            if state is None:
                continue
            for saving, units in options:
                then = min(goal, have + units)
                cost = state.seconds + saving.seconds
                known = best[then]
                if then > have and (known is None or cost < known.seconds):
                    best[then] = _State(cost, saving, state)
    found = best[goal]
    return None if found is None else tuple(found.savings())


def fit_memory(
    program: Program,
    cap: int,
    simulate: Callable[[Program], Timeline],
    kinds: Iterable[str] = ("recompute",),
) -> Fit:
    """Choose the blocks of each rank that does not fit, until all do.

    `program` has stages and a placement; blocks that are in segments already stay so.
    `simulate` returns the timeline of a program, without a cap. What a block frees is
    estimated alone, then all are measured together, and if that is not enough more is
    asked for.
    """
    savings = _savings(program, tuple(kinds))
    wanted: Counter[int] = Counter()  # rank -> bytes of one micro-batch
    chosen: dict[int, tuple[Saving, ...]] = {}
    fit = Fit(program, simulate(program), fits=False)
    for _ in range(_ROUNDS):
        over = {r: p - cap for r, p in enumerate(fit.timeline.peak_bytes) if p > cap}
        if not over:
            return _pruned(program, cap, simulate, chosen, replace(fit, fits=True))
        before = dict(chosen)
        for rank, excess in over.items():
            live = max(1, fit.timeline.peak_live[rank])
            wanted[rank] += -(-excess // live)
            mine = savings[rank]
            found = cheapest(mine, wanted[rank])
            chosen[rank] = _leanest(mine) if found is None else found
        if chosen == before:
            break
        marked = _marked(program, chosen)
        fit = Fit(marked, simulate(marked), fits=False)
    everything = {rank: _leanest(mine) for rank, mine in savings.items()}
    marked = _marked(program, everything)
    leanest = Fit(marked, simulate(marked), fits=False)
    return replace(leanest, fits=leanest.peak_bytes <= cap)


def _pruned(
    program: Program,
    cap: int,
    simulate: Callable[[Program], Timeline],
    chosen: dict[int, tuple[Saving, ...]],
    fit: Fit,
) -> Fit:
    """Drop costly savings that turn out not to be needed, a few of each rank."""
    for rank in list(chosen):
        for saving in sorted(chosen[rank], key=lambda s: -s.seconds)[:4]:
            fewer = tuple(s for s in chosen[rank] if s is not saving)
            marked = _marked(program, {**chosen, rank: fewer})
            timeline = simulate(marked)
            if max(timeline.peak_bytes) <= cap:
                chosen[rank] = fewer
                fit = Fit(marked, timeline, fits=True)
    return fit


def _leanest(savings: Sequence[Saving]) -> tuple[Saving, ...]:
    """Return what frees most, for each block."""
    best: dict[int, Saving] = {}
    for saving in savings:
        known = best.setdefault(saving.block, saving)
        if saving.freed > known.freed:
            best[saving.block] = saving
    return tuple(best.values())


def _marked(program: Program, chosen: dict[int, tuple[Saving, ...]]) -> Program:
    names = {block.index: block.name for block in program.blocks or ()}
    found = {s.block: s.kind for savings in chosen.values() for s in savings}
    added = (
        Segment(names[index], kind, (index,)) for index, kind in sorted(found.items())
    )
    segments = sorted((*(program.segments or ()), *added), key=lambda s: s.blocks)
    return replace(program, segments=tuple(segments))


def _savings(program: Program, kinds: tuple[str, ...]) -> dict[int, list[Saving]]:
    """Return what could be saved, by the rank that saves it.

    A stage of two replicas counts for the rank of each.
    """
    placement = program.placement
    assert placement is not None
    taken = {block for segment in program.segments or () for block in segment.blocks}
    found: dict[int, list[Saving]] = {rank: [] for rank in range(placement.num_ranks)}
    for stage in program.require_stages():
        mine = [
            saving
            for saving in _savings_of(program, stage, kinds)
            if saving.block not in taken
        ]
        for rank in {r for row in placement.ranks for r in row[stage.index]}:
            found[rank] += mine
    return found


def _savings_of(program: Program, stage: Stage, kinds: tuple[str, ...]) -> list[Saving]:
    saved = {block.index: _saved(block) for block in stage.blocks}
    users = Counter(key for storages in saved.values() for key in storages)
    found = []
    for block in stage.blocks:
        own = {k: size for k, size in saved[block.index].items() if users[k] == 1}
        inputs = {
            key: size
            for node in external_inputs(block.nodes)
            for key, size in meta.facts(node).storages
        }
        if "offload" in kinds:
            freed = sum(size for k, size in own.items() if k not in inputs)
            seconds = 2 * host_seconds(sum(saved[block.index].values()))
            found.append(Saving(block.index, "offload", freed, seconds))
        runs_twice = frees_anything(block) and may_recompute(program, block)
        if "recompute" in kinds and runs_twice:
            kept = sum(size for key, size in inputs.items() if not users[key])
            freed = sum(size for k, size in own.items() if k not in inputs) - kept
            seconds = seconds_until_last_save(block.nodes)
            found.append(Saving(block.index, "recompute", freed, seconds))
    return [saving for saving in found if saving.freed > 0]


def _saved(block: Block) -> dict[int, int]:
    return {key: size for node in block.nodes for key, size in meta.facts(node).saved}
