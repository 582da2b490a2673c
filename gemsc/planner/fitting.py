"""From stages to a schedule that keeps to the memory of a rank.

Where that is too little, blocks are recomputed or offloaded: those that cost least.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gemsc.base.units import show_bytes, show_enough_bytes
from gemsc.costs.hardware import Device, Hardware
from gemsc.errors import GemscError
from gemsc.ir.flow import owned_tensors
from gemsc.ir.program import Block, Program, Segment, Stage
from gemsc.ir.segments import frees_anything, may_recompute, segment_name
from gemsc.options import CompileOptions
from gemsc.planner.activations import Storages, given_to, saved_by, seconds_again
from gemsc.planner.layout import StageLayout
from gemsc.planner.predict import schedule_task
from gemsc.schedules import SCHEDULES, Policy, Task, Timeline, run, split_last_backwards

_UNITS = 400  # the steps into which what is needed is divided
_ROUNDS = 12
JOINED = (1, 2, 4)  # neighbouring blocks that are recomputed as one, at most


@dataclass(frozen=True)
class Scheduled:
    """A program cut into stages, what each tile of its grids runs, and the schedule."""

    program: Program
    tiles: tuple[Program, ...]
    task: Task
    timeline: Timeline


@dataclass(frozen=True)
class Scheduling:
    """Who does what when, for a layout, the options and a machine."""

    chosen: StageLayout
    options: CompileOptions
    hardware: Hardware

    def schedule(
        self, program: Program, tiles: tuple[Program, ...], task: Task
    ) -> Scheduled:
        """Return who does what when. `task` is what the stages of the tiles cost.

        Raises:
            GemscError: it does not fit the memory cap.
        """
        options, cap = self.options, self.options.rank_memory
        policy = SCHEDULES[options.schedule].policy
        timeline = run(task, policy)
        if cap is not None and max(timeline.peak_bytes) > cap:
            if "auto" in (*options.recompute, *options.offload):
                fitted = self._fitted(program, tiles, policy, cap)
                program, tiles, task = fitted.program, fitted.tiles, fitted.task
                timeline = fitted.timeline
            else:
                timeline = run(replace(task, memory_cap=cap), policy)
        task = replace(task, memory_cap=cap)
        if not options.torch_compile:  # a compiled backward is in one part
            timeline = split_last_backwards(task, timeline)
        return Scheduled(program, tiles, task, timeline)

    def keeping_whole(
        self, program: Program, tiles: tuple[Program, ...], task: Task
    ) -> Scheduled:
        """Return the schedule where weights in parts stay whole for most stages.

        So they are gathered less often. As many stay as fit; where nothing says how
        much memory there is, those of one stage.
        """
        cap = self.options.rank_memory
        most = max(len({stage for _, stage in lanes}) for lanes in task.lanes)
        for count in range(most, 1, -1) if cap is not None else ():

            def keep(program: Program, count: int = count) -> Program:
                return replace(program, whole_stages=count)

            whole = keep(program), _changed(tiles, keep)
            with suppress(GemscError):  # not one micro-batch fits
                done = self.schedule(*whole, replace(task, whole_stages=count))
                if cap is not None and max(done.timeline.peak_bytes) <= cap:
                    return done
        return self.schedule(program, tiles, task)

    def _fitted(
        self, program: Program, tiles: tuple[Program, ...], policy: Policy, cap: int
    ) -> Scheduled:
        """Keep to the memory cap: fewer micro-batches at a time, or less of each.

        What the first tile saves decides for all of a grid.

        Raises:
            GemscError: neither fits; says what the lowest peak found is.
        """
        kinds = [
            k for k in ("recompute", "offload") if "auto" in getattr(self.options, k)
        ]

        known = _changed(tiles, lambda tile: replace(tile, owned=owned_tensors(tile)))

        def alike(fitted: Program, tiles: Sequence[Program]) -> tuple[Program, ...]:
            return _changed(tiles, lambda tile: replace(tile, segments=fitted.segments))

        def simulate(fitted: Program) -> Timeline:
            whole = alike(fitted, known)
            task = schedule_task(whole, self.chosen, None, self.hardware)
            return run(task, policy)

        ways = []
        task = schedule_task(tiles, self.chosen, cap, self.hardware)
        with suppress(GemscError):  # it does not fit one micro-batch, all of it kept
            ways.append(Scheduled(program, tiles, task, run(task, policy)))
        fit = MemoryFit(tiles[0], cap, simulate, self.hardware.device, kinds).best()
        if fit.fits:
            fitting = alike(fit.program, tiles)
            task = schedule_task(fitting, self.chosen, cap, self.hardware)
            fitted = replace(program, segments=fit.program.segments)
            ways.append(Scheduled(fitted, fitting, task, fit.timeline))
        if not ways:
            raise GemscError(
                f"no choice of blocks for --{' and --'.join(kinds)} fits "
                f"{show_bytes(cap)} on each rank: the lowest peak found is "
                f"{show_enough_bytes(fit.peak_bytes)}",
                help="use more --ranks, smaller micro-batches in example_inputs(), or "
                "a larger --device-memory",
            )
        return min(ways, key=lambda way: way.timeline.makespan)


def _changed(
    tiles: Sequence[Program], change: Callable[[Program], Program]
) -> tuple[Program, ...]:
    """Return the tiles after a change; those that are one program stay one."""
    changed = {id(tile): change(tile) for tile in tiles}
    return tuple(changed[id(tile)] for tile in tiles)


@dataclass(frozen=True, slots=True)
class Saving:
    """What need not be kept: for one micro-batch, what that frees and costs.

    `blocks` are neighbours: one, or some that are recomputed as one.
    """

    blocks: tuple[int, ...]
    kind: str
    freed: int
    seconds: float


Chosen = dict[int, tuple[Saving, ...]]  # by rank


@dataclass(frozen=True, slots=True)
class Fit:
    """A program with segments chosen to fit, or with the lowest peak there is."""

    program: Program
    timeline: Timeline
    fits: bool

    @property
    def peak_bytes(self) -> int:
        """The highest peak of a rank."""
        return max(self.timeline.peak_bytes)

    @property
    def worth(self) -> tuple[bool, float]:
        """What is least for the best choice: one that fits, and is fast or lean."""
        return not self.fits, self.timeline.makespan if self.fits else self.peak_bytes


@dataclass(frozen=True, slots=True)
class _State:
    """The cheapest way known to free so much: its last saving, and those before it."""

    seconds: float = math.inf  # no way is known
    last: Saving | None = None
    before: _State | None = None

    def savings(self) -> tuple[Saving, ...]:
        """Return all of them, in the order of blocks."""
        savings = []
        state: _State | None = self
        while state is not None and state.last is not None:
            savings.append(state.last)
            state = state.before
        return tuple(reversed(savings))


def cheapest(savings: Sequence[Saving], needed: int) -> tuple[Saving, ...] | None:
    """Return the savings that together free `needed` bytes in the fewest seconds.

    At most one for each block; None if all of them free too little. Exact up to
    rounding: bytes count in steps of 1/400 of what is needed, rounded down.

    Dynamic programming over the blocks: best[p][u] is the cheapest way to free `u`
    steps with the first `p` of them.
    """
    unit = -(-max(1, needed) // _UNITS)
    goal = -(-needed // unit)
    blocks = sorted({block for saving in savings for block in saving.blocks})
    after = {block: position for position, block in enumerate(blocks, start=1)}
    starting = defaultdict(list)
    for saving in savings:
        starting[after[saving.blocks[0]] - 1].append(saving)
    best = [[_State()] * (goal + 1) for _ in range(len(blocks) + 1)]
    best[0][0] = _State(0.0)
    for position in range(len(blocks)):
        best[position + 1] = [
            one if one.seconds <= other.seconds else other
            for one, other in zip(best[position + 1], best[position], strict=True)
        ]
        ways = [
            (saving, saving.freed // unit, best[after[saving.blocks[-1]]])
            for saving in starting[position]
        ]
        for have in range(goal, -1, -1):
            state = best[position][have]
            for saving, steps, ends in ways if state.seconds < math.inf else ():
                seconds, then = state.seconds + saving.seconds, min(goal, have + steps)
                if then > have and seconds < ends[then].seconds:
                    ends[then] = _State(seconds, saving, state)
    reached = best[-1][goal]
    return reached.savings() if reached.seconds < math.inf else None


@dataclass(frozen=True)
class MemoryFit:
    """Chooses the blocks of each rank that does not fit, until all do.

    `program` has stages and a placement; blocks that are in segments already stay so.
    `simulate` returns the timeline of a program, without a cap.
    """

    program: Program
    cap: int
    simulate: Callable[[Program], Timeline]
    device: Device
    kinds: Sequence[str]

    def best(self) -> Fit:
        """Return the fastest program that fits, or the leanest one.

        Neighbours recomputed as one free what is between them as well, but need more at
        once: choices of single blocks, of pairs and of longer runs are compared.
        """
        free = self._fit(self.program)
        if free.fits:
            return free
        choices = []
        before = None
        for longest in JOINED:
            savings = self._savings(longest)
            if savings != before:
                choices.append(self._chosen(free, savings))
            before = savings
        best, chosen = min(choices, key=lambda choice: choice[0].worth)
        return self._pruned(chosen, best) if best.fits else best

    def _fit(self, program: Program) -> Fit:
        timeline = self.simulate(program)
        return Fit(program, timeline, fits=max(timeline.peak_bytes) <= self.cap)

    def _chosen(
        self, free: Fit, savings: dict[int, list[Saving]]
    ) -> tuple[Fit, Chosen]:
        """Choose until all ranks fit.

        What a saving frees is estimated alone, then all are measured together, and if
        that is not enough more is asked for. If it never is, all that may be saved is.
        """
        fit = free
        wanted: Counter[int] = Counter()  # rank -> bytes of one micro-batch
        chosen: Chosen = {}
        for _ in range(_ROUNDS):
            if fit.fits:
                return fit, chosen
            before = dict(chosen)
            for rank, peak in enumerate(fit.timeline.peak_bytes):
                if peak > self.cap:
                    live = max(1, fit.timeline.peak_live[rank])
                    wanted[rank] += -(-(peak - self.cap) // live)
                    cheap = cheapest(savings[rank], wanted[rank])
                    chosen[rank] = cheap or _lowest_memory(savings[rank])
            if chosen == before:
                break
            fit = self._fit(self._marked(chosen))
        everything = {rank: _lowest_memory(mine) for rank, mine in savings.items()}
        return self._fit(self._marked(everything)), {}

    def _pruned(self, chosen: Chosen, fit: Fit) -> Fit:
        """Drop costly savings that turn out not to be needed, a few of each rank."""
        for rank in list(chosen):
            for saving in sorted(chosen[rank], key=lambda s: -s.seconds)[:4]:
                fewer = tuple(s for s in chosen[rank] if s is not saving)
                without = self._fit(self._marked({**chosen, rank: fewer}))
                if without.fits:
                    chosen[rank], fit = fewer, without
        return fit

    def _marked(self, chosen: Chosen) -> Program:
        """Return the program with segments for what was chosen."""
        blocks = self.program.blocks or ()
        kinds = {s.blocks: s.kind for savings in chosen.values() for s in savings}
        added = (
            Segment(segment_name([blocks[b] for b in row], blocks), kind, row)
            for row, kind in kinds.items()
        )
        segments = (*(self.program.segments or ()), *added)
        in_order = sorted(segments, key=lambda segment: segment.blocks)
        return replace(self.program, segments=tuple(in_order))

    def _savings(self, longest: int) -> dict[int, list[Saving]]:
        """Return what could be saved, by the rank that saves it.

        A stage of two replicas counts for the rank of each.
        """
        program, placement = self.program, self.program.require_placement()
        taken = {block for s in program.segments or () for block in s.blocks}
        by_rank: dict[int, list[Saving]] = {r: [] for r in range(placement.num_ranks)}
        for stage in program.require_stages():
            mine = [
                saving
                for saving in self._savings_of(stage, longest)
                if saving.freed > 0 and taken.isdisjoint(saving.blocks)
            ]
            for rank in placement.ranks_of(stage.index):
                by_rank[rank] += mine
        return by_rank

    def _savings_of(self, stage: Stage, longest: int) -> Iterator[Saving]:
        """Yield the savings of a stage: up to `longest` neighbours recomputed as one.

        Those are left out that free no more than their blocks do one by one.
        """
        saved = {block.index: saved_by(block.nodes) for block in stage.blocks}
        users = Counter(key for storages in saved.values() for key in storages)
        alone: Counter[int] = Counter()  # what recomputing a block frees
        for block in stage.blocks if "offload" in self.kinds else ():
            freed, _ = _freed([block], saved, users)
            moving = self.device.host_seconds(sum(saved[block.index].values()))
            seconds = _stalled(self.device, block, moving)
            yield Saving((block.index,), "offload", freed, seconds)
        for length in range(1, 1 + longest) if "recompute" in self.kinds else ():
            for row in _rows(self.program, stage, length):
                freed, kept = _freed(row, saved, users)
                indices = tuple(block.index for block in row)
                if length == 1:
                    alone[indices[0]] = max(0, freed - kept)
                elif freed - kept <= sum(alone[index] for index in indices):
                    continue
                nodes = [node for block in row for node in block.nodes]
                seconds = seconds_again(self.program, stage.index, nodes)
                yield Saving(indices, "recompute", freed - kept, seconds)


def _lowest_memory(savings: Sequence[Saving]) -> tuple[Saving, ...]:
    """Return what together frees most, at most one for each block."""
    best: dict[int, tuple[int, tuple[Saving, ...]]] = {-1: (0, ())}
    ending = defaultdict(list)
    for saving in savings:
        ending[saving.blocks[-1]].append(saving)
    for last in range(1 + max(ending, default=-1)):
        best[last] = best[last - 1]
        for saving in ending[last]:
            freed, before = best[saving.blocks[0] - 1]
            if freed + saving.freed > best[last][0]:
                best[last] = freed + saving.freed, (*before, saving)
    return best[max(best)][1]


def _stalled(device: Device, block: Block, moving: float) -> float:
    """Return how long a block waits for what it moves to the host, and back.

    Copies run beside an asynchronous device's work; the block's own hides its own.
    """
    if not device.asynchronous:
        return 2 * moving
    ways = ("forward_seconds", "backward_seconds")
    return sum(max(0.0, moving - float(block.total(way))) for way in ways)


def _rows(program: Program, stage: Stage, length: int) -> Iterator[Sequence[Block]]:
    """Yield neighbouring blocks of a stage that it may help to recompute as one."""
    for start in range(len(stage.blocks) - length + 1):
        row = stage.blocks[start : start + length]
        helps = length > 1 or frees_anything(row[0])
        if helps and all(may_recompute(program, block) for block in row):
            yield row


def _freed(
    row: Sequence[Block], saved: Mapping[int, Storages], users: Counter[int]
) -> tuple[int, int]:
    """Return the bytes that only these blocks save, and those that are kept instead.

    The latter are what comes into them and nobody saves otherwise.
    """
    sizes = {key: size for block in row for key, size in saved[block.index].items()}
    uses = Counter(key for block in row for key in saved[block.index])
    inputs = given_to([n for block in row for n in block.nodes])
    freed = sum(
        size for k, size in sizes.items() if uses[k] == users[k] and k not in inputs
    )
    return freed, sum(size for key, size in inputs.items() if not users[key])
