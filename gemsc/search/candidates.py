"""What `auto` tries, and how the best of it is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, prod
from typing import Any

from gemsc.base.grid_shape import BESIDE, SPLITS
from gemsc.base.units import show_bytes, show_seconds
from gemsc.errors import GemscError
from gemsc.ir.program import Program
from gemsc.options import AUTO, CompileOptions
from gemsc.schedules import SCHEDULES

PAIRS = (
    ("basic", "linear"),
    ("gpipe", "linear"),
    ("1f1b", "linear"),
    ("1f1b", "folded"),
    ("zb-h1", "linear"),
    ("zb-v", "folded"),
    ("v-half", "folded"),
    ("interleaved", "looped"),
    ("master", "mirrored"),
    ("bidirectional", "mirrored"),
    ("chimera", "mirrored"),
)
BOTH = ("compute", "memory")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MOST_SHAPES = 3  # of as many tiles


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train, with what is predicted for one step of all copies.

    `samples` are those of a step, in micro-batches of `micro_batch_size`. `peak_bytes`
    is the highest of all ranks, `activation_bytes` the part of it that grows with the
    micro-batches; `sent_bytes` counts values, gradients and sums of gradients of one
    copy of the model. `bubble` and `talking` are the shares of the ranks' time until
    the last backward in which they wait for other stages, and for ranks of their own
    stage; `ending` are the seconds that follow. `free_seconds` are those until the last
    backward in a schedule that heeds no cap, with nothing recomputed if that is `auto`.
    `problem` says why it cannot be, the message of its `cause`.
    """

    options: CompileOptions
    seconds: float = 0.0
    samples: int = 0
    micro_batch_size: int = 1
    peak_bytes: int = 0
    activation_bytes: int = 0
    bubble: float = 0.0
    talking: float = 0.0
    ending: float = 0.0
    free_seconds: float = 0.0
    sent_bytes: int = 0
    problem: str = ""
    cause: GemscError | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """For example `1f1b folded x2, M=4`: two copies, four micro-batches each."""
        chosen = self.options
        placement = ""
        if chosen.placement not in ("natural", SCHEDULES[chosen.schedule].placement):
            placement = f" {chosen.placement}"
        copies = f" x{chosen.data}" if chosen.data > 1 else ""
        way = f"{chosen.schedule}{placement}" if _has_stages(chosen) else "one stage"
        if chosen.copy_ranks == 1:
            way = "one rank"
        split = ((name, getattr(chosen, name)) for name in SPLITS)
        parts = [
            *(f"{name} {','.join(given)}" for name, given in split if given),
            f"{way}{copies}",
            f"M={chosen.micro_batches}",
            "by memory" if chosen.balance == "memory" else "",
            "recompute" if "auto" in chosen.recompute else "",
            "ring" if chosen.attention == "ring" else "",
            f"sharded {chosen.shard}" if chosen.shard != "off" else "",
        ]
        return ", ".join(part for part in parts if part)

    @property
    def samples_per_second(self) -> float:
        """What counts: candidates may differ in the samples of a step."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def most_samples_per_second(self) -> float:
        """What it came to if no rank ever waited for another stage."""
        busy = (self.seconds - self.ending) * (1 - self.bubble)
        return self.samples / busy if busy else 0.0

    @property
    def free_samples_per_second(self) -> float:
        """What it came to in all the memory there is, without updates."""
        return self.samples / self.free_seconds if self.free_seconds else inf

    @property
    def spent(self) -> dict[str, float]:
        """What a rank's part of the seconds goes to, in words: they add up to them."""
        step = self.seconds - self.ending
        return {
            "the ranks' own work takes": step * (1 - self.bubble - self.talking),
            "ranks are idle": step * self.bubble,
            "messages and sums inside stages take": step * self.talking,
            "sums of gradients and the update take": self.ending,
        }

    def fits(self) -> bool:
        """Whether it can be built and stays below the memory cap."""
        cap = self.options.rank_memory
        return not self.problem and (cap is None or self.peak_bytes <= cap)

    def is_too_large(self) -> bool:
        """Whether all that is wrong with it is the memory that it needs."""
        return not self.problem and not self.fits()

    def lacks_memory(self) -> bool:
        """Whether it needs too much memory, or is slower so that it does not."""
        waits = 0 < self.free_seconds < (1 - 1e-9) * (self.seconds - self.ending)
        return self.is_too_large() or (self.fits() and waits)

    def may_recompute(self) -> bool:
        """Whether recomputed blocks may help; nobody has asked for any yet."""
        asked = self.options.recompute or self.options.offload
        return self.lacks_memory() and not asked


def placement_of(options: CompileOptions) -> str:
    """Return where the stages are."""
    is_natural = options.placement == "natural"
    return SCHEDULES[options.schedule].placement if is_natural else options.placement


def is_open(options: CompileOptions) -> bool:
    """Whether anything is left to the compiler."""
    names = options.schedule, options.placement, options.balance, options.attention
    numbers = (options.data, options.micro_batches)
    return bool(options.open_splits) or "auto" in names or AUTO in numbers


def alternatives(
    options: CompileOptions, sizes: tuple[int, ...] = (), most_branches: int = 1
) -> list[CompileOptions]:
    """Return what to try: all that agrees with what the user has fixed.

    `sizes` are those of the image that grids split, along each spatial axis; no more
    than `most_branches` are side by side.
    Where the number of copies is open, `micro_batches` are those of all copies
    together; what cannot be divided is left out. Where several splits are open, shards
    and branches are also tried on the same ranks, and on those of each tile.

    Raises:
        GemscError: nothing agrees.
    """
    pairs = [
        (schedule, placement)
        for schedule, placement in PAIRS
        if options.schedule in ("auto", schedule)
        and options.placement in ("auto", "natural", placement)
    ]
    if options.schedule != "auto" and options.placement != "auto":
        pairs = [(options.schedule, options.placement)]
    balances: tuple[str, ...] = (options.balance,)
    if options.balance == "auto":  # what is balanced by memory is never faster
        balances = ("compute",) if options.device_memory is None else BOTH
    first = *pairs[0], balances[0]
    choices = [
        replace(choice, schedule=s, placement=placement, balance=balance, attention=how)
        for choice in _shared(options, sizes, most_branches)
        for (s, placement), balance in product(pairs, balances)
        if _has_stages(choice) or (s, placement, balance) == first
        for how in _attentions(choice)
    ]
    if not choices:
        _ = options.groups  # says so where no number of copies fits tiles and shards
        raise GemscError(
            f"no plan is possible with both --schedule {options.schedule} and "
            f"--placement {options.placement}",
            help="give only one of them",
        )
    return choices


def _has_stages(options: CompileOptions) -> bool:
    """Whether more than one stage is left to schedule."""
    return len(options.groups) > 1


def _attentions(options: CompileOptions) -> tuple[str, ...]:
    """Return the ways to try in which attention to cut tokens gets its keys."""
    is_open = options.attention == "auto"
    return ("gather", "ring") if is_open else (options.attention,)


def _shared(
    options: CompileOptions, sizes: tuple[int, ...], most_branches: int
) -> Iterator[CompileOptions]:
    """Yield the options for each number of copies, and each split of their ranks."""
    for data, micro_batches in _shares(options):
        for split in _splits(options, options.ranks // data, sizes, most_branches):
            with suppress(GemscError):  # they do not come to so many ranks
                yield _split(options, data, micro_batches, split)


def _split(
    options: CompileOptions, data: int, micro_batches: int, split: dict[str, Any]
) -> CompileOptions:
    """Return the options of one split, without those that have no effect on it."""
    given = {name: getattr(options, name) for name in SPLITS} | split
    tiles, beside = given["tiles"], any(given[name] for name in BESIDE)
    return replace(
        options,
        data=data,
        micro_batches=micro_batches,
        local_batchnorm=options.local_batchnorm and bool(tiles),
        fuse_halos=options.fuse_halos if tiles else 0,
        attention=options.attention if tiles or given["shards"] else "gather",
        trunk=options.trunk if beside else "auto",
        whole=options.whole if beside else (),
        **split,
    )


def _splits(
    options: CompileOptions, ranks: int, sizes: tuple[int, ...], most_branches: int
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the tiles, shards and branches to try where they are open: first none."""
    opened = set(options.open_splits)
    none: dict[str, tuple[str, ...]] = dict.fromkeys(opened, ())
    for grid in ((), *(grids(ranks, sizes) if "tiles" in opened else ())):
        tiles = none | ({"tiles": ("x".join(map(str, grid)),)} if grid else {})
        yield tiles
        for count in range(2, ranks // prod(grid) + 1):
            few = () if count > most_branches else (("branches",), BESIDE)
            for names in (("shards",), *few):
                if opened.issuperset(names):
                    yield tiles | dict.fromkeys(names, (str(count),))


def grids(ranks: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return grids that split an image of these sizes, few tiles first.

    All ranks are one grid, or half of them, a quarter, ...; ranks that are left have a
    stage each. Of all shapes with as many tiles those with the shortest inner edges
    are taken: over edges halos travel.

    Example: 4 ranks, 512 x 512 pixels: 1x2, 2x1, 2x2, 1x4, 4x1.
    """
    counts = {ranks}
    counts.update(2**power for power in range(1, ranks.bit_length()))
    chosen = []
    for count in sorted(counts - {1}):
        if count > ranks or not sizes:
            continue
        shapes = (
            grid
            for grid in _shapes(count, len(sizes))
            if all(tiles <= size for tiles, size in zip(grid, sizes, strict=True))
        )
        chosen += sorted(shapes, key=lambda grid: _edges(grid, sizes))[:MOST_SHAPES]
    return chosen


def image_sizes(program: Program) -> tuple[int, ...]:
    """Return the sizes of the first image among the inputs: () if there is none."""
    for item in program.inputs:
        if item.path[0] == "input" and len(item.spec.shape) > 2:
            return tuple(item.spec.shape[2:])
    return ()


def _shapes(count: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of so many factors."""
    if num_axes == 1:
        yield (count,)
        return
    for factor in range(1, count + 1):
        if count % factor == 0:
            for others in _shapes(count // factor, num_axes - 1):
                yield (factor, *others)


def _edges(grid: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """Return the elements along all edges between tiles."""
    pairs = zip(grid, sizes, strict=True)
    return sum((tiles - 1) * prod(sizes) / size for tiles, size in pairs)


def _shares(options: CompileOptions) -> Iterator[tuple[int, int]]:
    """Yield numbers of copies, each with the micro-batches of one of them."""
    copies: Iterable[int] = (options.data,)
    if options.data == AUTO:
        copies = (d for d in range(1, options.ranks + 1) if options.ranks % d == 0)
    for data in copies:
        counts: Sequence[int] = (options.micro_batches,)
        if options.micro_batches == AUTO:
            counts = MICRO_BATCHES
        elif options.data == AUTO:
            divides = options.micro_batches % data == 0
            counts = (options.micro_batches // data,) if divides else ()
        yield from ((data, count) for count in counts)


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates, best first: those that fit, by samples per second.

    What comes within 1 % is as fast; of those the one that needs less memory is first.
    Of candidates that come to the same only the first is kept.
    """
    candidates = _distinct(candidates)
    built = [c for c in candidates if not c.problem]
    fastest = max((c.samples_per_second for c in built if c.fits()), default=0.0)

    def order(candidate: Candidate) -> tuple[bool, bool, float, int]:
        speed = candidate.samples_per_second
        if speed > 0.99 * fastest:
            speed = fastest
        return (
            bool(candidate.problem),
            not candidate.fits(),
            -speed,
            candidate.peak_bytes,
        )

    return sorted(candidates, key=order)


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    known: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        o = candidate.options
        split = (getattr(o, name) for name in SPLITS)
        chosen = (o.schedule, o.placement, *split, o.data, o.micro_batches)
        same = (*chosen, candidate.problem)
        figures = (candidate.seconds, candidate.peak_bytes, candidate.sent_bytes)
        known.setdefault((*same, *figures), candidate)
    return list(known.values())


def reason(candidates: Sequence[Candidate]) -> str:
    """Say why the first of the ranked candidates won."""
    first = candidates[0]
    rivals = [c for c in candidates[1:] if not c.problem]
    fitting = [c for c in rivals if c.fits()]
    faster = [c for c in rivals if c.samples_per_second > first.samples_per_second]
    parts = []
    if not rivals:
        parts.append("the only one that can be built")
    elif not fitting:
        parts.append("the only one that fits")
    else:
        second = fitting[0]
        gain = first.samples_per_second / second.samples_per_second - 1
        if abs(gain) < 0.01:
            mine, its = (show_bytes(c.peak_bytes) for c in (first, second))
            memory = f" with {mine} instead of {its}"
            parts.append(
                f"as fast as {second.name}"
                + (", with the same peak memory" if mine == its else memory)
            )
        else:
            parts.append(
                f"{gain:.0%} faster than {second.name}: {_saved(first, second)}"
            )
    tight = [c for c in faster if not c.fits() and first.fits()]
    if tight:
        other = max(tight, key=lambda c: c.samples_per_second)
        parts.append(
            f"{other.name} would take {show_seconds(other.seconds)} a step, but needs "
            f"{show_bytes(other.peak_bytes)} on a rank"
        )
    return "; ".join(parts)


def _saved(first: Candidate, second: Candidate) -> str:
    """Say in what the first one saves most time."""
    mine, its = (
        {what: 1e3 * seconds / c.samples for what, seconds in c.spent.items()}
        for c in (first, second)
    )
    what = max(mine, key=lambda what: its[what] - mine[what])
    shares = [c.spent[what] / c.seconds for c in (first, second)]
    if what == next(iter(mine)):
        seconds = (show_seconds(spent[what]) for spent in (mine, its))
        return f"{what} {' instead of '.join(seconds)} for 1000 samples"
    return f"{what} {shares[0]:.0%} of the time instead of {shares[1]:.0%}"
