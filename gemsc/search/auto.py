"""What `auto` takes: all that agrees with the options is assessed, the best first.

Where nothing fits, its error says what would: that is tried, too, with numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import Any

from gemsc.base.grid_shape import SPLITS
from gemsc.base.units import show_bytes, show_enough_bytes
from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.errors import GemscError
from gemsc.options import CHOICES, CompileOptions, typed
from gemsc.planner.at_best import held_at_best
from gemsc.planner.ending import after_backward, end_of, reduced_bytes
from gemsc.planner.fitting import Scheduled
from gemsc.planner.predict import micro_batch_size, talking
from gemsc.planner.traffic import step_traffic
from gemsc.search.candidates import (
    Candidate,
    alternatives,
    is_open,
    placement_of,
    ranked,
)

SLACK = 0.1  # by which stages that are cut elsewhere may take less work

ROUNDING = 0.02  # an order of which the text is short may be slower
FACTORS = (2, 4, 8)  # how many times more ranks are tried where nothing fits
MANY = 8  # stages of one rank, of which the weights of one at a time are whole
SAVINGS = (("recompute",), ("offload",), ("recompute", "offload"))

Stage = Callable[..., Scheduled]  # of options, and how many ranks are `lowered`
Tell = Callable[[str], None]


def settled(
    options: CompileOptions,
    sizes: tuple[int, ...],
    most_branches: int,
    stage: Stage,
    tell: Tell = lambda text: None,
) -> tuple[tuple[Candidate, ...], CompileOptions]:
    """Return what was compared where something is `auto`, and the options to take.

    `sizes` are those of the image that tiles split, `most_branches` the model's.
    """
    for name in ("recompute", "offload"):
        if "auto" in getattr(options, name) and options.device_memory is None:
            room = read_hardware(options.hardware).device.memory_bytes >> 30
            raise GemscError(
                f"--{name} auto needs to know how much memory a rank has",
                help=f"add --device-memory {room}GiB",
            )
    if not is_open(options):
        return (), options
    candidates = search(options, sizes, most_branches, stage, tell)
    return candidates, candidates[0].options


def search(
    options: CompileOptions,
    sizes: tuple[int, ...],
    most_branches: int,
    stage: Stage,
    tell: Tell = lambda text: None,
) -> tuple[Candidate, ...]:
    """Return all that agrees with the options, best first.

    What does not fit the memory cap, or only in a slower order, is tried again with the
    optimizer's state shared out over replicas, with some blocks recomputed, and with
    both; what does not fit then, with weights in parts. What cannot be faster than
    something that fits is left out. `tell` is told how far this is.

    Raises:
        GemscError: nothing fits; says what would.
    """
    may_loop = options.schedule == "auto" and options.placement in ("auto", "natural")
    compared = _Comparison(stage, tell, may_loop)
    compared.add(alternatives(options, sizes, most_branches))
    candidates = compared.ranked()
    while options.open_splits and candidates[0].fits():
        exact = assess(candidates[0].options, stage, every_tile=True)
        candidates[0] = exact
        if exact.fits():
            break
        candidates = ranked(candidates)
    if not candidates[0].fits():
        candidates = compared.leanest()
        raise nothing_fits(candidates, lambda other: assess(other, stage))
    return tuple(candidates)


@dataclass
class _Comparison:
    """What is found of some choices, and what of others that are left out.

    `too_large` are splits that would not fit if their ranks shared all evenly, `places`
    all that was to be looked at, `changes` what of it is tried again for its memory,
    and `speeds` how fast that may be. A rank that has all of the model has several
    stages of it if it `may_loop`.
    """

    stage: Stage
    tell: Tell
    may_loop: bool
    candidates: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    places: dict[CompileOptions, int] = field(default_factory=dict)
    changes: set[CompileOptions] = field(default_factory=set)
    speeds: dict[CompileOptions, float] = field(default_factory=dict)
    waiting: list[tuple[float, int, Candidate]] = field(default_factory=list)

    def add(self, choices: Sequence[CompileOptions]) -> None:
        """Assess what may be better than all that is found, the fastest at best first.

        What is not split is looked at before all others: that takes little time.
        """
        for number, choice in enumerate(dict.fromkeys(choices)):
            self.tell(f"{number + 1} of {len(choices)} plans")
            self._wait(choice)
        done = 0
        while self.waiting:
            speed, _, bound = heappop(self.waiting)
            done += 1
            if bound.is_too_large():
                self.too_large.append(bound)
                self._change(bound)
            elif self._is_promising(bound.options, -speed):
                self.tell(f"{bound.name} ({done} of {len(self.places)} plans)")
                self._change(self._assess(bound.options))

    def _wait(self, options: CompileOptions) -> None:
        """Let a choice wait for its turn."""
        self.places[options] = place = len(self.places)
        bound, speed = self._at_best(options)
        heappush(self.waiting, (-speed, place, bound))

    def _change(self, candidate: Candidate) -> None:
        """Let what lacks memory be tried again."""
        options = candidate.options
        changes = []
        if candidate.lacks_memory() and options.shard == "off":
            changes.append(replace(options, shard="optimizer"))
        elif candidate.is_too_large():
            changes += self._with_weights_in_parts(options)
        if candidate.may_recompute():
            changes.append(replace(options, recompute=("auto",)))
        for changed in changes:
            if changed not in self.places:
                self.changes.add(changed)
                self._wait(changed)

    def _with_weights_in_parts(self, options: CompileOptions) -> list[CompileOptions]:
        """Return a choice with weights in parts, if ranks have several stages each."""
        several: dict[str, Any] = {}
        if options.copy_ranks == 1 and self.may_loop:
            several = {"schedule": "interleaved", "placement": "looped", "chunks": MANY}
        elif placement_of(options) not in ("looped", "folded"):
            return []
        return [replace(options, shard="weights", **several)]

    def _at_best(self, options: CompileOptions) -> tuple[Candidate, float]:
        """Return what a choice comes to at best, and in how many samples per second.

        With blocks that are recomputed, or updates that are shared out, it is no faster
        than what that is a change of until its last backward.
        """
        bound, speed = Candidate(options), inf
        if any(getattr(options, name) for name in SPLITS):
            bound = at_best(options, self.stage)
            speed = inf if bound.problem else bound.samples_per_second
        return bound, min(speed, self.speeds.get(_unchanged(options), inf))

    def _is_promising(self, options: CompileOptions, speed: float) -> bool:
        """Whether a choice may be faster than all that fits so far.

        No schedule is faster than the ranks' own work: what one takes of a split of
        their work, all others do, but for what the cuts of the stages change.
        """
        fastest = max(
            (c.samples_per_second for c in self.candidates if c.fits()), default=0
        )
        alike = (c for c in self.candidates if _same_work(c.options, options))
        plain = (c for c in alike if not (c.problem or c.options in self.changes))
        busy = next((c.most_samples_per_second for c in plain), inf)
        return fastest < min((1 + ROUNDING) * speed, busy / (1 - SLACK))

    def _assess(self, options: CompileOptions) -> Candidate:
        candidate = assess(options, self.stage)
        if not candidate.problem:
            self.speeds[_unchanged(options)] = candidate.free_samples_per_second
        if not candidate.problem or options not in self.changes:
            self.candidates.append(candidate)
        return candidate

    def ranked(self) -> list[Candidate]:
        """Return what is found, best first; of what is alike what was first to try."""
        return ranked(sorted(self.candidates, key=lambda c: self.places[c.options]))

    def leanest(self) -> list[Candidate]:
        """Return what is found where nothing fits, with what needs least memory."""
        self.too_large.sort(key=lambda bound: bound.peak_bytes)
        for bound in self.too_large:
            peaks = [c.peak_bytes for c in self.candidates if not c.problem]
            if not peaks or bound.peak_bytes < min(peaks):
                self._assess(bound.options)
        return self.ranked()


def _unchanged(options: CompileOptions) -> CompileOptions:
    """Return the options of what is not tried again: no change makes it faster."""
    return replace(options, recompute=(), shard="off")


def _same_work(one: CompileOptions, other: CompileOptions) -> bool:
    """Whether ranks share the work of a sample alike, whatever the schedule is."""
    names = (*SPLITS, "data", "micro_batches", "attention")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@contextmanager
def telling_what_fits(options: CompileOptions, stage: Stage) -> Iterator[None]:
    """Let the error of a program that needs too much memory name what would fit."""
    try:
        yield
    except GemscError as error:
        if options.device_memory is not None:
            tried = assess(options, stage)
            if tried.is_too_large():
                error.help = what_fits(tried, lambda o: assess(o, stage)) or error.help
        raise


def assess(
    options: CompileOptions, stage: Stage, *, every_tile: bool = False
) -> Candidate:
    """Return what is predicted for one choice: by two tiles of a grid, or by all."""
    uncapped = replace(options, device_memory=None)
    lowered = "unlike" if every_tile else "two"
    try:
        done = stage(uncapped, lowered=lowered)
    except GemscError as error:
        return Candidate(options, problem=error.message, cause=error)
    free_seconds = done.timeline.makespan
    if options.rank_memory and max(done.timeline.peak_bytes) > options.rank_memory:
        with suppress(GemscError):  # there may be an order that holds less at a time
            done = stage(options, lowered=lowered)
    peaks = done.timeline.peak_bytes
    first, hardware = done.tiles[0], read_hardware(options.hardware)
    sums = reduced_bytes(first, done.task, options.data)
    ends = after_backward(first, done.task, done.timeline, options.data, hardware)
    highest = max(range(len(peaks)), key=lambda group: peaks[group])
    size = micro_batch_size(done.program)
    sent = step_traffic(done.tiles, done.task)
    return Candidate(
        options,
        seconds=done.timeline.makespan + ends.seconds,
        samples=options.data * sum(done.task.micro_batches) * size,
        micro_batch_size=size,
        peak_bytes=peaks[highest],
        activation_bytes=done.timeline.peak_activation_bytes[highest],
        bubble=done.timeline.bubble,
        talking=_talking_share(done, hardware),
        ending=ends.seconds,
        free_seconds=free_seconds,
        sent_bytes=sent.message_bytes + sent.sum_bytes + sum(sums),
    )


def at_best(options: CompileOptions, stage: Stage) -> Candidate:
    """Return what no split that is chosen so can be better than, unless by rounding."""
    hardware = read_hardware(options.hardware)
    try:
        done = stage(replace(options, device_memory=None), lowered="none")
    except GemscError as error:
        return Candidate(options, problem=error.message, cause=error)
    if options.rank_memory and max(done.timeline.peak_bytes) > options.rank_memory:
        with suppress(GemscError):
            done = stage(options, lowered="none")
    program, timeline = done.program, done.timeline
    held = held_at_best(done.task, options.groups)
    sizes = options.copy_ranks, options.data
    ends = end_of(program, done.task, timeline, held, sizes, hardware)
    return Candidate(
        options,
        seconds=timeline.makespan + ends.seconds,
        samples=options.data * sum(done.task.micro_batches) * micro_batch_size(program),
        peak_bytes=max(timeline.peak_bytes),
    )


def _talking_share(done: Scheduled, hardware: Hardware) -> float:
    """Return the share of a step in which ranks wait for others of their stage."""
    first = done.tiles[0]
    per_batch = sum(
        sum(talking(first, stage, hardware.network)) for stage in first.require_stages()
    )
    total = done.timeline.makespan * len(done.timeline.ranks)
    return sum(done.task.micro_batches) * per_batch / total if total else 0.0


# what would fit, when nothing does

Assess = Callable[[CompileOptions], Candidate]


def nothing_fits(candidates: Sequence[Candidate], assess: Assess) -> GemscError:
    """Return the error where no candidate fits; it names that with the lowest peak."""
    built = [candidate for candidate in candidates if not candidate.problem]
    if not built:
        cause = candidates[0].cause
        assert cause is not None
        return GemscError(
            f"no schedule can be built: {cause.message}",
            at=cause.at,
            help=cause.help or "try another number of --ranks or --micro-batches",
            notes=cause.notes_at,
        )
    lowest = min(built, key=lambda c: c.peak_bytes)
    cap = lowest.options.rank_memory or 0
    return GemscError(
        f"no schedule fits {show_bytes(cap)} on each rank: the lowest peak, of "
        f"{lowest.name}, is {show_enough_bytes(lowest.peak_bytes)}",
        help=what_fits(lowest, assess)
        or "more ranks or smaller micro-batches do not help: raise --device-memory",
    )


def what_fits(candidate: Candidate, assess: Assess) -> str:
    """Return what would make a candidate fit, each way with its peak; "" if nothing."""
    ways = [
        *_more_ranks(candidate, assess),
        *_savings(candidate, assess),
        *_in_parts(candidate, assess),
        *_smaller_micro_batches(candidate, candidate.options.rank_memory or 0),
    ]
    return "; or ".join(ways)


def _more_ranks(lowest: Candidate, assess: Assess) -> list[str]:
    for factor in FACTORS:
        ranks = lowest.options.ranks * factor
        try:
            tried = assess(replace(lowest.options, ranks=ranks))
        except GemscError:  # tiles and shards need another number of ranks
            continue
        if tried.fits():
            return [
                f"use --ranks {ranks} ({tried.name} needs "
                f"{show_bytes(tried.peak_bytes)})"
            ]
    return []


def _savings(lowest: Candidate, assess: Assess) -> list[str]:
    """Activations that are computed again, or wait on the host, or both."""
    for names in SAVINGS:
        if all(getattr(lowest.options, name) == ("auto",) for name in names):
            continue
        auto: dict[str, Any] = dict.fromkeys(names, ("auto",))
        tried = assess(replace(lowest.options, **auto))
        if tried.fits():
            slower = tried.seconds / lowest.seconds - 1 if lowest.seconds else 0.0
            return [
                f"add {' '.join(typed(name, 'auto') for name in names)} ({tried.name} "
                f"then needs {show_bytes(tried.peak_bytes)} and is {slower:.0%} slower)"
            ]
    return []


def _in_parts(lowest: Candidate, assess: Assess) -> list[str]:
    """What ranks with the same weights may keep in parts: the first that is enough."""
    known = CHOICES["shard"]
    for shard in known[known.index(lowest.options.shard) + 1 :]:
        tried = assess(replace(lowest.options, shard=shard))
        if tried.fits():
            return [f"add --shard {shard} ({show_bytes(tried.peak_bytes)} then)"]
    return []


def _smaller_micro_batches(lowest: Candidate, cap: int) -> list[str]:
    """Activations grow with the samples of a micro-batch, the rest does not."""
    resident = lowest.peak_bytes - lowest.activation_bytes
    size = lowest.micro_batch_size
    fitting = int(size * (cap - resident) / max(lowest.activation_bytes, 1))
    if not 0 < fitting < size:
        return []
    return [f"make example_inputs() {fitting} samples instead of {size}"]
