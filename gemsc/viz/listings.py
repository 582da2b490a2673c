"""What there is to know of a plan, as tables for the terminal and for report.html.

On a terminal a table fits the width: its least important columns go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gemsc.base.units import show_bytes, show_flops, show_seconds
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedFork, PlannedStage
from gemsc.planner.explain import show_rate
from gemsc.search.candidates import Candidate
from gemsc.viz.design import sample

MOST_ROWS = 40  # of stages and ranks; more are sampled
SLOWEST = "<- slowest"
TOO_LARGE = "does not fit --device-memory"
BAR = "# weights, gradients  + activations"
PARTS = {  # of a peak, besides activations: their titles
    "parameters": "weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "working": "on their way",
    "messages": "messages",
    "workspace": "libraries",
}
NARROW = 17  # what a column that may shrink is left with


def list_plan(plan: Plan, most: int = MOST_ROWS) -> Iterator[Listing]:
    """Yield all tables in which there is anything; of long ones a sample of lines."""
    for listing in (
        *(
            _list_shapes,
            _list_stages,
            _list_not_kept,
            _list_tiles,
            _list_shared,
            _list_forks,
        ),
        *(_list_whole, _list_barriers, _list_skips, _list_made, _list_transfers),
        _list_ranks,
    ):
        title, columns = listing(plan, most)
        if columns[0].values:
            yield title, columns


def list_candidates(candidates: Sequence[Candidate], most: int) -> Listing:
    """Return the first of what was compared, and what is wrong with it."""
    shown = candidates[:most]

    def values(value: Callable[[Candidate], float]) -> list[float | None]:
        return [None if c.problem else value(c) for c in shown]

    problems = [c.problem or ("" if c.fits() else TOO_LARGE) for c in shown]
    columns = [
        column("schedule", (c.name for c in shown), left=True, shrinks=True),
        column("samples/s", values(lambda c: c.samples_per_second), show_rate),
        column("step", values(lambda c: c.seconds), show_seconds),
        column("highest peak", values(lambda c: c.peak_bytes), show_bytes),
        column(
            "idle",
            values(lambda c: c.spent["ranks are idle"] / c.seconds),
            "{:.0%}".format,
            drop=2,
        ),
        column("sent", values(lambda c: c.sent_bytes), show_bytes, drop=1),
    ]
    if any(problems):
        columns.append(column("problem", problems, left=True, shrinks=True))
    return "candidates (predicted)" + _of(shown, candidates), columns


def block_names(stage: PlannedStage) -> str:
    """Return the names of a stage's blocks, of many only the first and the last."""
    names = stage.blocks
    return ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"


def _list_shapes(plan: Plan, most: int) -> Listing:
    """Return what a step takes of each shape that batches may have."""
    numbers = sample(len(plan.shapes), most)
    shapes = [plan.shapes[number] for number in numbers]
    samples = [plan.batch_sizes[number] for number in numbers]
    rates = zip(samples, shapes, strict=True)
    return "shapes: a step of each; all else is about the largest one", [
        column("shape", (shape.name for shape in shapes), left=True),
        column("samples", samples),
        column("step", (shape.step_seconds for shape in shapes), show_seconds),
        column(
            "samples/s",
            (count / shape.step_seconds for count, shape in rates),
            show_rate,
        ),
        column("highest peak", (max(s.peak_bytes) for s in shapes), show_bytes),
    ]


def _list_stages(plan: Plan, most: int) -> Listing:
    """Return what each stage holds and takes; the slowest one is among them."""
    seconds = [stage.seconds for stage in plan.stages]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    rows = sample(len(plan.stages), most, (slowest,))
    stages = [plan.stages[row] for row in rows]
    total = sum(seconds) or 1.0
    columns: tuple[Column, ...] = (
        column("stage", rows, left=True),
        column("blocks", (len(s.blocks) for s in stages), drop=6),
        column("from ... to", map(block_names, stages), left=True, shrinks=True),
        column("ranks", (s.ranks for s in stages), _join),
        column("work", (s.flops for s in stages), show_flops, drop=3),
        column("weights", (s.parameter_bytes for s in stages), show_bytes, drop=2),
        column("saved", (s.cost.saved_bytes for s in stages), show_bytes, drop=1),
        column("forward", (s.cost.forward for s in stages), show_seconds),
        column("backward", (s.cost.backward for s in stages), show_seconds),
        column("share", (seconds[r] / total for r in rows), "{:.0%}".format, drop=4),
    )
    if len(plan.stages) > 1:
        marks = (SLOWEST * (r == slowest) for r in rows)
        columns += (column("", marks, drop=5, left=True),)
    return "stages (one micro-batch)" + _of(rows, plan.stages), columns


def _of(shown: Sized, whole: Sized, what: str = "") -> str:
    """Return how many are shown, unless all are."""
    few = len(shown) < len(whole)
    return f": {len(shown)} of {len(whole)}{what}" if few else ""


def _list_not_kept(plan: Plan, most: int) -> Listing:
    """Return the blocks whose activations are computed again or wait on the host."""
    stages = [stage for stage in plan.stages if stage.recompute or stage.offload]
    recomputed, offloaded = (s.recompute for s in stages), (s.offload for s in stages)
    columns = (
        column("stage", (s.index for s in stages), left=True),
        column("recomputed", recomputed, _join, left=True, shrinks=True),
        column("offloaded", offloaded, _join, left=True, shrinks=True),
    )
    return "blocks that keep no activations", columns


def _list_tiles(plan: Plan, most: int) -> Listing:
    """Return what split stages send from tile to tile."""
    stages = [stage for stage in plan.stages if stage.tiles]
    gathered = [sum(b["stage"] == s.index for b in plan.barriers) for s in stages]
    columns = (
        column("stage", (s.index for s in stages), left=True),
        column("grid", (" x ".join(map(str, s.tiles)) for s in stages), left=True),
        column("exchanges", (s.exchanges for s in stages)),
        column("from tile to tile", (s.halo_bytes for s in stages), show_bytes),
        column("overlapped", (len(s.overlapped) for s in stages), drop=2),
        column("unfused", map(_unfused, stages), drop=1),
        column("gathered", gathered),
    )
    return "tiles (one micro-batch)", columns


def _list_shared(plan: Plan, most: int) -> Listing:
    """Return what the ranks of a stage share, and what they send each other for it."""
    stages = [stage for stage in plan.stages if stage.grid.beside > 1]
    columns = (
        column("stage", (s.index for s in stages), left=True),
        column("shared by", (str(s.grid) for s in stages), left=True),
        column("of", (s.units or None for s in stages), left=True, shrinks=True),
        column("trunk", (s.trunk for s in stages), left=True),
        column("sums", (s.sums // s.grid.beside for s in stages)),
        column("with", (s.sum_bytes for s in stages), show_bytes, drop=1),
        column("messages", (s.messages for s in stages)),
        column("with", (s.message_bytes for s in stages), show_bytes, drop=1),
        column("take", (s.talking_seconds for s in stages), show_seconds),
    )
    return "inside stages (one micro-batch, forward and backward)", columns


def _list_forks(plan: Plan, most: int) -> Listing:
    """Return which rank has which branches, what that saves, or why it is not done."""
    pairs = [(stage, fork) for stage in plan.stages for fork in stage.forks]
    rows = sample(len(pairs), most)
    forks = [pairs[row][1] for row in rows]
    seconds = (None if fork.reason else fork.saved_seconds for fork in forks)
    columns = [
        column("stage", (pairs[row][0].index for row in rows), left=True),
        column("fork", (fork.name for fork in forks), left=True, shrinks=True),
        column("branches of each rank", map(_placed, forks), left=True, shrinks=True),
        column("take", (fork.total_seconds for fork in forks), show_seconds, drop=2),
        column("balance", (fork.balance for fork in forks), "{:.0%}".format, drop=1),
        column("saves", seconds, show_seconds),
    ]
    if any(fork.reason for fork in forks):
        why = (fork.reason for fork in forks)
        columns.append(column("not shared out", why, left=True, shrinks=True))
    title = "branches (one micro-batch, forward and backward)"
    return title + _of(rows, pairs), columns


def _placed(fork: PlannedFork) -> str:
    """Return `b 71%  |  a 9%, c 20%`: the branches of each rank, and their shares."""
    total = fork.total_seconds or 1.0
    shares = zip(fork.branches, fork.seconds, strict=True)
    texts = {name: f"{name} {seconds / total:.0%}" for name, seconds in shares}
    ranks = fork.placed or [fork.branches]
    return " | ".join(_join([texts[name] for name in names]) or "-" for names in ranks)


def _list_whole(plan: Plan, most: int) -> Listing:
    """Return the parameters that all ranks of a stage hold, the largest first."""
    pairs = [(s.index, e) for s in plan.stages for e in s.whole]
    pairs.sort(key=lambda pair: -pair[1].num_bytes)
    shown = pairs[:most]
    columns = (
        column("stage", (index for index, _ in shown), left=True),
        column("parameters", (len(e.names) for _, e in shown)),
        column("bytes", (e.num_bytes for _, e in shown), show_bytes),
        column("the first", (e.names[0] for _, e in shown), left=True, shrinks=True),
        column("because of", (e.reason for _, e in shown), left=True, shrinks=True),
    )
    return "whole on every rank of a stage" + _of(shown, pairs), columns


def _list_barriers(plan: Plan, most: int) -> Listing:
    barriers = plan.barriers
    columns = (
        column("value", (b["value"] for b in barriers), left=True),
        column("bytes", (b["num_bytes"] for b in barriers), show_bytes),
        column("line", (b["line"] for b in barriers), left=True),
        column("why", (b["reason"] for b in barriers), left=True, shrinks=True),
    )
    return "values that every rank of a stage has to gather", columns


def _unfused(stage: PlannedStage) -> str:
    """Return the exchanges and bytes that there would be, if that is another number."""
    if stage.unfused_exchanges == stage.exchanges:
        return "the same"
    return f"{stage.unfused_exchanges}, {show_bytes(stage.unfused_halo_bytes)}"


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _list_skips(plan: Plan, most: int) -> Listing:
    """Return what jumps over a block, at least the largest."""
    shown = sorted(plan.skips, key=lambda s: -s["num_bytes"])[:most]
    skips = [skip for skip in plan.skips if skip in shown]
    columns = (
        column("value", (s["value"] for s in skips), left=True, shrinks=True),
        column("from", (s["source"] for s in skips), left=True, shrinks=True),
        column("to", (s["dest"] for s in skips), left=True, shrinks=True),
        column("bytes", (s["num_bytes"] for s in skips), show_bytes),
        column("kind", (s["kind"] for s in skips), left=True),
    )
    return "skips over blocks" + _of(skips, plan.skips), columns


def _list_made(plan: Plan, most: int) -> Listing:
    shown = plan.made[:most]
    columns = (
        column("value", (m["value"] for m in shown), left=True, shrinks=True),
        column("bytes", (m["num_bytes"] for m in shown), show_bytes),
        column("on stages", (m["stages"] for m in shown), _join, left=True),
        column("when", (m["when"] for m in shown), left=True),
    )
    return "computed on each rank instead of sent" + _of(shown, plan.made), columns


def _list_transfers(plan: Plan, most: int) -> Listing:
    rows = sample(len(plan.transfers), most)
    transfers = [plan.transfers[row] for row in rows]
    back = ("gradient" if t.edge.gradient else None for t in transfers)
    columns = (
        column("from stage", (t.edge.source for t in transfers), left=True),
        column("to", (t.edge.dest for t in transfers), left=True),
        column("values", (t.values for t in transfers), _join, left=True, shrinks=True),
        column("bytes", (t.num_bytes for t in transfers), show_bytes),
        column("seconds", (t.edge.seconds for t in transfers), show_seconds, drop=1),
        column("back", back, drop=2),
    )
    return "transfers (each micro-batch)" + _of(rows, plan.transfers), columns


def _list_ranks(plan: Plan, most: int) -> Listing:
    """Return each rank's peak and what it consists of; the highest is among them."""
    highest = plan.peak_bytes.index(max(plan.peak_bytes)) if plan.peak_bytes else 0
    ranks = sample(len(plan.peak_bytes), most, (highest,))
    activations = [p["activations"] for p in plan.memory] or plan.activation_bytes
    columns = (
        column("rank", (plan.members[r] for r in ranks), _span, left=True),
        column("peak", (plan.peak_bytes[r] for r in ranks), show_bytes),
        *_memory_parts(plan, ranks),
        column("activations", (activations[r] for r in ranks), show_bytes),
        column(BAR, (_bar(plan, r, activations[r]) for r in ranks), left=True),
    )
    return "predicted peak memory" + _of(ranks, plan.peak_bytes, " ranks"), columns


def _bar(plan: Plan, rank: int, activations: int) -> str:
    size, most = plan.peak_bytes[rank], max(plan.peak_bytes) or 1
    whole = max(1, round(len(BAR) * size / most))
    held = min(whole, round(len(BAR) * (size - activations) / most))
    return ("#" * held + "+" * (whole - held)).ljust(len(BAR))


def _memory_parts(plan: Plan, ranks: Sequence[int]) -> list[Column]:
    """Return what ranks hold at their peaks besides activations."""
    if not plan.memory:  # a plan of an older gemsc
        return []
    return [
        column(title, (plan.memory[r][key] for r in ranks), show_bytes, drop=drop)
        for drop, (key, title) in enumerate(PARTS.items(), start=1)
        if key != "workspace" or plan.workspace_bytes
    ]


def _join(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True, slots=True)
class Column:
    """A column with all its cells, and the values that they show.

    Columns of the largest `drop` are left out first where there is no room; those of 0
    always stay. `shrinks` columns are folded into lines before anything is left out.
    """

    title: str
    values: tuple[Any, ...]
    cells: tuple[str, ...]
    drop: int = 0
    left: bool = False
    shrinks: bool = False

    @property
    def width(self) -> int:
        """The characters of the longest cell."""
        return max(map(len, (self.title, *self.cells)))

    @property
    def least(self) -> int:
        """The characters without which it makes no sense."""
        if not self.shrinks:
            return self.width
        return min(self.width, max(NARROW, len(self.title)))


Listing = tuple[str, Sequence[Column]]  # a title, and columns of equal length


def column(
    title: str,
    values: Iterable[Any],
    show: Callable[[Any], str] = str,
    *,
    drop: int = 0,
    left: bool = False,
    shrinks: bool = False,
) -> Column:
    """Return a column of anything that can be shown; None is a dash."""
    values = tuple(values)
    cells = tuple("-" if value is None else show(value) for value in values)
    return Column(title, values, cells, drop, left, shrinks)


def fitted(title: str, columns: Sequence[Column], width: int) -> Table:
    """Return a table of at most `width` characters, if need be of fewer columns."""
    kept = list(columns)
    while _width(c.least for c in kept) > width and any(c.drop for c in kept):
        kept.remove(max(kept, key=lambda c: c.drop))
    widths = _shrunk(kept, width)
    table = Table(title=title, title_justify="left", title_style="bold")
    for column, most in zip(kept, widths, strict=True):
        table.add_column(
            column.title,
            justify="left" if column.left else "right",
            no_wrap=not column.shrinks,
            overflow="fold",
            max_width=most,
        )
    for row in zip(*(c.cells for c in kept), strict=True):
        table.add_row(*row)
    return table


def _shrunk(columns: Sequence[Column], width: int) -> list[int]:
    """Return the widths of columns: the widest that may shrink does so first."""
    widths = [column.width for column in columns]
    while _width(widths) > width:
        room = [w if w > c.least else 0 for w, c in zip(widths, columns, strict=True)]
        if not any(room):
            break
        widths[room.index(max(room))] -= 1
    return widths


def _width(widths: Iterable[int]) -> int:
    """Return the characters of a table: each column has a border and two blanks."""
    sizes = list(widths)
    return sum(sizes) + 3 * len(sizes) + 1
