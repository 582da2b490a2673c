"""What runs have left in their folders, as curves: loss, figures, samples/s, memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gemsc.base.phase import LOSS_OF
from gemsc.errors import GemscError
from gemsc.viz.design import (
    DASHES,
    NUM_SERIES,
    SMALL,
    drawing,
    element,
    line,
    n,
    path,
    round_step,
    sample,
    series,
    text,
    width_of,
)

WIDTH, LEFT, RIGHT = 860, 78, 24
PLOT = WIDTH - LEFT - RIGHT
HEIGHT, GAP, TOP = 210, 72, 46
MOST_POINTS = PLOT // 2  # of a curve; of what falls together, the mean is drawn
LOG_FROM = 20.0  # largest over smallest value, for a logarithmic axis
MOST_MARKS = 10  # of an axis
MOST_DOTS = 60  # of a line
ROW = 18  # of the legend
BOTH = "runs by step: thin lines training, marks held-out"
LONGEST = 60  # of the name of a run
MIB = 2**20
STYLE = """
path.curve { fill: none; stroke-linejoin: round }
path.train, path.rate { stroke-width: 1.3; opacity: 0.85 }
path.memory { stroke-width: 2 }
path.eval { stroke-width: 2.4 }
path.band { opacity: 0.18 }
"""
MARKS = (  # of held-out figures: as different in shape as lines are in dashes
    "M-3.5,0a3.5,3.5 0 1 0 7,0a3.5,3.5 0 1 0 -7,0Z",
    "M-3.2,-3.2h6.4v6.4h-6.4Z",
    "M0,-4.2L4,3.2H-4Z",
    "M0,-4.6L4.6,0L0,4.6L-4.6,0Z",
    "M0,4.2L4,-3.2H-4Z",
    "M-1.3,-4.2h2.6v2.9h2.9v2.6h-2.9v2.9h-2.6v-2.9h-2.9v-2.6h2.9Z",
)
Curve = list[tuple[int, float]]  # step and value
LOG = "log.jsonl"
TAIL = 200  # bytes by which a log is known again


@dataclass(frozen=True, slots=True)
class _Line:
    """A curve: of which series, and what it is of."""

    index: int
    kind: str
    curve: Curve
    name: str = ""


def curves(runs: Sequence[RunLog]) -> str:
    """Return a drawing of the curves of runs, each run in its colour.

    Of a single run the memory of each rank is drawn, of several that of the rank that
    needs most.
    """
    charts = list(_charts(runs))
    steps = max([run.steps for run in runs] or [1]) or 1
    names = [_short(run.name) for run in runs]
    heading = f"{names[0]}: figures by step" if len(runs) == 1 else BOTH
    top = TOP + ROW * len(runs)
    parts = [text(LEFT, 24, heading, "title"), *_legend(runs)]
    for index, (title, lines) in enumerate(charts):
        parts += _chart(title, lines, steps, top + index * (HEIGHT + GAP) + 20)
    height = top + len(charts) * (HEIGHT + GAP) + 6
    title = "curves of " + ", ".join(run.name for run in runs)
    return drawing("curves", WIDTH, height, title, STYLE, parts)


def _charts(runs: Sequence[RunLog]) -> Iterator[tuple[str, list[_Line]]]:
    """Yield the title and the lines of each chart."""

    def lines(kind: str, curves: Iterable[Curve]) -> list[_Line]:
        return [_Line(index, kind, curve) for index, curve in enumerate(curves)]

    losses = lines("train", (run.loss for run in runs))
    held = lines("eval", (run.figures.get("loss", []) for run in runs))
    yield "loss", [trace for pair in zip(losses, held, strict=True) for trace in pair]
    for name in dict.fromkeys(name for run in runs for name in run.phases):
        yield f"loss of {name}", lines("train", [r.phases.get(name, []) for r in runs])
    for name in dict.fromkeys(name for run in runs for name in run.figures):
        if name != "loss":
            figures = [run.figures.get(name, []) for run in runs]
            yield f"held-out {name}", lines("eval", figures)
    if any(run.rates for run in runs):
        yield "samples per second", lines("rate", (run.rates for run in runs))
    if len(runs) == 1 and runs[0].memory:
        yield "peak memory of each rank so far, MiB", list(_memory(runs[0]))
    elif any(run.memory for run in runs):
        most = lines("memory", map(_highest, runs))
        yield "peak memory of the rank that needs most, MiB", most


def _memory(run: RunLog) -> Iterator[_Line]:
    """Yield the memory of each rank, of many only of some."""
    last = [curve[-1][1] for curve in run.memory]
    ranks = sample(len(last), NUM_SERIES, (last.index(max(last)),))
    for index, rank in enumerate(ranks):
        curve = [(step, held / MIB) for step, held in run.memory[rank]]
        yield _Line(index, "memory", curve, f"rank {rank}")


def _highest(run: RunLog) -> Curve:
    most: dict[int, float] = {}
    for curve in run.memory:
        for step, held in curve:
            most[step] = max(most.get(step, 0.0), held / MIB)
    return sorted(most.items())


def _legend(runs: Sequence[RunLog]) -> Iterator[str]:
    for index, run in enumerate(runs):
        y, x = 46 + ROW * index, LEFT
        shown = ["train", "eval"] if "loss" in run.figures else ["train"]
        words = [*shown, ""]
        if len(runs) > 1:
            yield text(x + 90, y, _short(run.name), "")
            words = [""] * 3
        for kind, word in zip(shown, words, strict=False):
            yield from _sample(kind, index, x, y - 4)
            said = {"train": "training", "eval": "held-out"}.get(word, "")
            yield text(x + 36, y, said, "note")
            x += 44 + round(width_of(said, SMALL)) + 8 * bool(said)


def _sample(kind: str, index: int, x: float, y: float) -> Iterator[str]:
    """Yield a short line of a series."""
    yield _drawn_line(kind, index, f"M{n(x)} {n(y)}h30")
    if kind == "eval":
        yield _mark(index, x + 15, y, "")


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def _chart(title: str, lines: Sequence[_Line], steps: int, top: float) -> Iterator[str]:
    values = [value for trace in lines for _, value in trace.curve]
    yield text(LEFT, top - 8, title, "name")
    if not values:
        yield text(LEFT + 8, top + 24, "nothing was logged yet", "note")
        return
    low, high, height_of, marks = _axis(min(values), max(values))

    def x_of(step: float) -> float:
        return LEFT + PLOT * step / steps

    def y_of(value: float) -> float:
        share = (height_of(value) - height_of(low)) / (height_of(high) - height_of(low))
        return top + HEIGHT * (1 - min(max(share, 0.0), 1.0))

    x = LEFT + PLOT - sum(44 + width_of(trace.name, SMALL) for trace in lines)
    for trace in lines:
        if trace.name:
            yield from _sample(trace.kind, trace.index, x, top - 12)
            yield text(x + 36, top - 8, trace.name, "note")
            x += 44 + width_of(trace.name, SMALL)
    for mark in marks:
        yield line("grid", LEFT, y_of(mark), LEFT + PLOT, y_of(mark))
        yield text(LEFT - 8, y_of(mark) + 4, f"{mark:.4g}", "end")
    bottom = top + HEIGHT
    for step in _round_numbers(0, steps, 8):
        if step == int(step):
            yield line("axis", x_of(step), bottom, x_of(step), bottom + 5)
            yield text(x_of(step), bottom + 19, f"{step:,.0f}", "middle")
    yield text(LEFT + PLOT / 2, bottom + 35, "step", "note middle")
    yield line("axis", LEFT, bottom, LEFT + PLOT, bottom)
    yield line("axis", LEFT, top, LEFT, bottom)
    for trace in lines:
        yield from _curve(trace, x_of, y_of)


def _curve(
    drawn: _Line, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> Iterator[str]:
    curve, index = drawn.curve, drawn.index
    if not curve:
        return
    size = -(-len(curve) // MOST_POINTS)
    groups = [curve[at : at + size] for at in range(0, len(curve), size)]
    columns = [tuple(zip(*group, strict=True)) for group in groups]
    means = [(sum(x) / len(x), sum(y) / len(y)) for x, y in columns]
    if size > 1:  # how far apart the values are that fall together
        highs = [(sum(x) / len(x), max(y)) for x, y in columns]
        lows = [(sum(x) / len(x), min(y)) for x, y in columns]
        outline = _points([*highs, *reversed(lows)], x_of, y_of)
        yield path(f"band fill-{series(index)}", f"{outline}Z")
    yield _drawn_line(drawn.kind, index, _points(means, x_of, y_of))
    if len(means) == 1 or (drawn.kind == "eval" and len(means) <= MOST_DOTS):
        for x, y in means:
            yield _mark(index, x_of(x), y_of(y), f"step {x:.0f}: {y:.5g}")


def _drawn_line(kind: str, index: int, points: str) -> str:
    """Return a line of a series, in its colour and with its dashes."""
    dash = DASHES[index % NUM_SERIES]
    dashes = "" if dash == "none" else f' stroke-dasharray="{dash}"'
    kinds = f"curve {kind} stroke-{series(index)}"
    return element("path", f'class="{kinds}"{dashes} d="{points}"')


def _mark(index: int, x: float, y: float, title: str) -> str:
    """Return a mark of a series, and what is said of it."""
    place = f' transform="translate({n(x)},{n(y)})"'
    return path(f"mark fill-{series(index)}", MARKS[index % NUM_SERIES], title, place)


def _points(
    points: Sequence[Sequence[float]],
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
) -> str:
    return "M" + "L".join(f"{n(x_of(x))} {n(y_of(y))}" for x, y in points)


def _axis(
    low: float, high: float
) -> tuple[float, float, Callable[[float], float], list[float]]:
    """Return the ends of an axis, the height of a value on it, and its marks."""
    if low > 0 and high / low > LOG_FROM:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = [k * 10.0**e for e in range(first, last + 1) for k in (1, 2, 5)]
        low = max(k for k in ticks if k <= low)
        high = min(k for k in ticks if k >= high)
        marks = [mark for mark in ticks if low <= mark <= high]
        if len(marks) > MOST_MARKS:  # powers of ten alone
            marks = ticks[:: 3 * -(-(last - first + 1) // MOST_MARKS)]
        return low, high, math.log10, [mark for mark in marks if low <= mark <= high]
    if low == high:
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    marks = _round_numbers(low, high, 5)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    low, high = (
        math.floor(low / step + 1e-9) * step,
        math.ceil(high / step - 1e-9) * step,
    )
    return low, high, float, _round_numbers(low, high, 5)


def _round_numbers(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    step = round_step(0.999 * (high - low) / count or 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


@dataclass
class RunLog:
    """The figures of a run by step, those of evaluations by name, and its options."""

    name: str
    loss: Curve = field(default_factory=list)
    figures: dict[str, Curve] = field(default_factory=dict)
    rates: Curve = field(default_factory=list)  # samples per second
    memory: list[Curve] = field(default_factory=list)  # bytes of each rank
    options: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)  # what was logged last
    last_step: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Curve] = field(default_factory=dict)  # the loss of each

    @property
    def steps(self) -> int:
        """The last step."""
        curves = [self.loss, *self.figures.values()]
        return max((curve[-1][0] for curve in curves if curve), default=0)

    @classmethod
    def read(cls, folder: Path) -> RunLog:
        """Read the log in a run's folder; a line that a kill has cut is left out.

        Raises:
            GemscError: there is none.
        """
        path = folder / LOG
        try:
            text = path.read_text("utf-8", "replace")
        except OSError as error:
            raise GemscError(
                f"{path}: {(error.strerror or 'unreadable').lower()}",
                help="give the folder of a run, as --save names it: PROGRAM/runs/1",
            ) from None
        log = cls(folder.name, options=_options(folder / "run.json"))
        log.add(text)
        return log

    def add(self, text: str) -> None:
        """Add what lines of a log say; those that say nothing are left out."""
        for record in text.splitlines():
            try:
                self._add(json.loads(record))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue

    def _add(self, record: dict[str, Any]) -> None:
        step = int(record["step"])
        self.last = record
        if record["event"] == "step":
            self.last_step = record
            if _is_number(record["loss"]):
                self.loss.append((step, record["loss"]))
            self._add_phases(step, record)
            if _is_number(record.get("samples_per_second")):
                self.rates.append((step, record["samples_per_second"]))
        elif record["event"] == "evaluation":
            for name, value in record["figures"].items():
                if _is_number(value):
                    self.figures.setdefault(str(name), []).append((step, value))
        elif record["event"] == "ranks":
            self.memory += [[] for _ in record["ranks"][len(self.memory) :]]
            for curve, rank in zip(self.memory, record["ranks"], strict=False):
                if _is_number(held := rank["memory_bytes"]):
                    curve.append((step, held))

    def _add_phases(self, step: int, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name.startswith(LOSS_OF) and _is_number(value):
                phase = name.removeprefix(LOSS_OF)
                self.phases.setdefault(phase, []).append((step, value))


class GrowingLog:
    """The log of a run that goes on: each time, only what is new is read."""

    def __init__(self, folder: Path) -> None:
        """Begin at the start; there may be no log yet."""
        self.folder = folder
        self.log = RunLog(folder.name)
        self._file = 0  # its number on the disk
        self._end = 0  # of what was read, in bytes
        self._tail = b""  # the last of it

    def read(self) -> bool:
        """Read on; return whether anything is new.

        A log that was cut or written anew, as `--resume` and `--overwrite` do, is read
        again from its start.
        """
        try:
            with (self.folder / LOG).open("rb") as file:
                return self._read(file)
        except OSError:
            return self._forget()

    def _read(self, file: IO[bytes]) -> bool:
        number = os.fstat(file.fileno()).st_ino
        file.seek(self._end - len(self._tail))
        is_new = number != self._file or file.read(len(self._tail)) != self._tail
        if is_new:
            self._forget()
            file.seek(0)
        self._file = number
        lines, newline, _ = file.read().rpartition(b"\n")  # the last one may grow
        self.log.add(lines.decode("utf-8", "replace"))
        read = lines + newline
        self._end += len(read)
        self._tail = (self._tail + read)[-TAIL:]
        return is_new or bool(read)

    def _forget(self) -> bool:
        had_any = self._end > 0
        self.log = RunLog(self.folder.name)
        self._file, self._end, self._tail = 0, 0, b""
        return had_any


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _options(path: Path) -> dict[str, Any]:
    """Return the options of the last start of a run, as far as they are known."""
    try:
        options = json.loads(path.read_text("utf-8"))["starts"][-1]["options"]
        return {str(name): value for name, value in options.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}
