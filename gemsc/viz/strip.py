"""The predicted step as text: a row for each rank, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from gemsc.base.units import show_ranks, show_seconds
from gemsc.plan import Plan
from gemsc.planner.from_plan import timeline_of
from gemsc.schedules import Action, Kind, Timed
from gemsc.viz.columns import sample
from gemsc.viz.design import TERMINAL

MOST_COLUMNS = 240  # of the grid

PARTS = {  # of a step
    "work": (TERMINAL["B"][0], "="),
    "sums inside stages": (TERMINAL["W"][0], "~"),
    "imbalance": (TERMINAL["F"][1], "+"),
    "filling and draining": ("reverse dim", "."),
    "messages": ("reverse", ">"),
}
FILLS = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.WEIGHT: "~"}


def grid(plan: Plan) -> str:
    """Return the predicted step with all its actions, see `Timeline.grid`."""
    timeline = timeline_of(plan)
    shortest = min(timed.end - timed.start for row in timeline.ranks for timed in row)
    return timeline.grid(max(shortest, timeline.makespan / MOST_COLUMNS) or None)


def bar(parts: Sequence[tuple[str, float]], width: int) -> Text:
    """Return a line of `width` characters that parts share, with names that fit."""
    line, at, end = Text(no_wrap=True), 0, 0.0
    total = sum(seconds for _, seconds in parts) or 1.0
    for name, seconds in parts:
        end += seconds
        cells, at = round(width * end / total) - at, round(width * end / total)
        style, fill = PARTS[name]
        shown = name if len(name) <= cells else ""
        line.append(shown.ljust(cells, fill), style)
    return line


def strips(plan: Plan, width: int, most_ranks: int) -> list[Text]:
    """Return a line for each rank or group of ranks, or for a sample of them.

    An action fills its time with its name, then dashes (forward) or double dashes
    (backward): `F0----B0========`. Idle time is blank.
    """
    timeline = timeline_of(plan)
    ranks = sample(len(timeline.ranks), most_ranks)
    names = [show_ranks(members) for members in plan.members]
    label = max(len(names[rank]) for rank in ranks) + 2
    columns = max(20, width - label)
    per_column = timeline.makespan / columns or 1.0
    lines = [
        _line(names[rank].ljust(label), timeline.ranks[rank], columns, per_column)
        for rank in ranks
    ]
    note = f"0 to {show_seconds(timeline.makespan)}; F forward, B backward, blank idle"
    if len(ranks) < len(timeline.ranks):
        note += f"; {len(ranks)} of {len(timeline.ranks)} ranks"
    return [*lines, Text(" " * label + note, style="dim")]


def _line(
    label: str, actions: Sequence[Timed], columns: int, per_column: float
) -> Text:
    line = Text(label, style="bold", no_wrap=True)
    at = 0
    for timed in actions:
        first = min(columns, round(timed.start / per_column))
        last = min(columns, round(timed.end / per_column))
        first = max(at, first)
        if last <= first:
            continue
        line.append(" " * (first - at), style="not bold")
        line.append(*_cell(timed.action, last - first))
        at = last
    return line


def _cell(action: Action, width: int) -> tuple[str, str]:
    style = TERMINAL[str(action.kind)][action.replica % 2]
    name = f"{action.kind}{action.micro_batch}"
    shown = name if len(name) <= width else str(action.kind)
    return shown[:width].ljust(width, FILLS[action.kind]), f"not bold {style}"
