"""A plan, its predicted step, what was compared and measured: on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from gemsc.base.process import num_cores
from gemsc.base.units import show_bytes, show_micro_batches, show_ranks, show_seconds
from gemsc.costs.hardware import DEFAULT_HARDWARE
from gemsc.plan import Plan
from gemsc.planner.explain import explain, seconds_here, speed, timeline_of
from gemsc.schedules import Action, Kind, Timed
from gemsc.search.candidates import Candidate, reason
from gemsc.viz.design import TERMINAL, sample
from gemsc.viz.listings import column, fitted, list_candidates, list_plan
from gemsc.viz.panel import Panel

MOST_RANKS = 40  # of the strip
_MOST_NAMES = 8  # of stages in a line
WIDEST = 160  # of what fills the width that there is
MOST_COLUMNS = 240  # of the grid
PARTS = {  # of a step
    "work": (TERMINAL["B"][0], "="),
    "sums inside stages": (TERMINAL["W"][0], "~"),
    "imbalance": (TERMINAL["F"][1], "+"),
    "filling and draining": ("reverse dim", "."),
    "messages": ("reverse", ">"),
}
FILLS = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.WEIGHT: "~"}


def show(plan: Plan, console: Console) -> None:
    """Print why it is cut so, stages, skips, transfers, memory and the step."""
    why, width = explain(plan), min(console.width, WIDEST)

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False)

    say(_heading(plan), "bold")
    say(plan.command, "dim")
    say(f"why this split: {why.line}", "bold")
    say(f"a step: {why.parts_line}")
    console.print(bar(why.parts, width))
    for line in _summary(plan):
        say(line)
    for listing in list_plan(plan):
        console.print()
        console.print(fitted(*listing, console.width))
    if not plan.skips:
        console.print("no skips over blocks")
    console.print("\npredicted step", style="bold")
    for row in strips(plan, width, MOST_RANKS):
        console.print(row)


def show_candidates(
    candidates: Sequence[Candidate], console: Console, most: int = 8
) -> None:
    """Print what `auto` has compared, best first, and why the first won."""
    console.print(fitted(*list_candidates(candidates, most), console.width))
    console.print(f"chosen: {candidates[0].name}", highlight=False)
    console.print(f"why: {reason(candidates)}", highlight=False)


def show_activations(plan: Plan, measured: Sequence[int], console: Console) -> None:
    """Print the peaks of live activations that were predicted and found."""
    predicted = plan.by_rank(plan.activation_bytes) * plan.data
    pairs = [*zip(measured, predicted, strict=True)]
    ratios = [peak / bytes for peak, bytes in pairs if bytes] or [1.0]
    peaks = ", ".join(map(show_bytes, measured))
    console.print(
        f"peak of live activations on each rank: {peaks}; "
        f"measured / predicted {min(ratios):.3f} to {max(ratios):.3f}",
        highlight=False,
    )


def show_shares(predicted: Panel, measured: Panel, console: Console) -> None:
    """Print step times, and what share of the step each rank computed and waited."""
    ratio = measured.makespan / predicted.makespan if predicted.makespan else 0.0
    console.print(
        f"step: predicted {show_seconds(predicted.makespan)}, measured "
        f"{show_seconds(measured.makespan)} ({ratio:.2f} times as long)",
        highlight=False,
    )
    rows, cores = measured.rows, num_cores()
    if len(rows) > cores:
        console.print(
            f"note: {len(rows)} ranks share {cores} cores; the prediction gives each "
            "rank one of its own",
            highlight=False,
        )

    def shares(*kinds: str) -> list[float]:
        return [row.seconds(*kinds) / measured.makespan for row in rows]

    share_of = {
        "busy": [row.busy / measured.makespan for row in rows],
        "all-reduce, update": shares("reduction", "update"),
        "send": shares("send"),
        "wait": shares("wait"),
    }
    idle = [1 - sum(parts) for parts in zip(*share_of.values(), strict=True)]
    planned = [row.busy / predicted.makespan for row in predicted.rows]
    planned = planned * (len(rows) // len(planned))
    percent = "{:.0%}".format
    columns = [
        column("rank", (row.name.partition(" ")[2] for row in rows), left=True),
        column("predicted busy", planned, percent),
        *(column(title, values, percent) for title, values in share_of.items()),
        column("idle", idle, percent),
    ]
    console.print(fitted("share of the measured step", columns, console.width))


def _heading(plan: Plan) -> str:
    copies = f" in each of {plan.data} data-parallel replicas" if plan.data > 1 else ""
    return (
        f"{plan.model}: {plan.ranks} ranks, {plan.schedule}, "
        f"{show_micro_batches(plan.micro_batches)}{copies}, placement {plan.placement}"
    )


def _summary(plan: Plan) -> Iterator[str]:
    yield (
        f"predicted ({plan.times}): {show_seconds(plan.step_seconds)} a step, "
        f"{plan.bubble:.0%} of the ranks' time idle; then "
        f"{show_seconds(plan.ending_seconds)} for gradient all-reduces and the update"
    )
    yield f"that is {speed(plan)}"
    yield from _options(plan)
    yield from of_this_machine(plan)
    yield from _deferred(plan)
    yield from _traffic(plan)
    yield from notes(plan)


def of_this_machine(plan: Plan) -> Iterator[str]:
    """Yield what the prediction leaves out, if it may be meant for this machine."""
    if plan.options.get("hardware") not in (None, "", DEFAULT_HARDWARE):
        return
    if plan.times != "measured":
        yield (
            f"note: {DEFAULT_HARDWARE} is a default, not this machine: "
            "`gemsc profile --calibrate` measures it, for --hardware"
        )
    if (estimate := seconds_here(plan)) is not None:
        seconds, cores = show_seconds(estimate[0]), estimate[1]
        yield (
            f"note: predicted with a core for each rank; {plan.ranks} ranks on the "
            f"{cores} cores of this machine take at least {seconds} a step"
        )


def notes(plan: Plan) -> list[str]:
    """Return what differs from the model: for a module that stays whole, also why."""
    whole = []
    for entry in plan.opaque:
        stages = f"stage{'s' * (len(entry['stages']) > 1)} "
        stages += ", ".join(map(str, entry["stages"]))  # each of several has a copy
        whole.append(
            f"note: {entry['line']}: '{entry['module']}' stays whole on {stages}: "
            f"{entry['reason']}; its time and memory are those of one real run on "
            "example_inputs"
        )
    return [*whole, *(f"note: {note}" for note in plan.notes)]


def _options(plan: Plan) -> Iterator[str]:
    """Yield what options change, and what the prediction knows of it."""
    if plan.precision != "float32":
        scaled = "; the loss is scaled" if plan.precision == "float16" else ""
        yield (
            f"precision: {plan.precision} within autocast, weights and their gradients "
            f"float32{scaled}"
        )
    if plan.memory_format != "as-given":
        known = "predicted times are those of contiguous tensors: --profile measures"
        if plan.options.get("profile"):
            known = "times were measured in it"
        yield f"memory format: {plan.memory_format}; {known}"
    if plan.torch_compile:
        yield "torch.compile: predicted times and memory are those without it"
    shard = plan.options.get("shard", "off")
    if shard != "off":
        most = max(part["optimizer"] for part in plan.memory)
        yield (
            "optimizer state in parts: ranks that hold the same weights each update "
            f"some rows, with at most {show_bytes(most)} of state on a rank"
        )
    if shard in ("gradients", "weights"):
        yield "gradients in parts: they are added up after each backward"
    if shard == "weights":
        count = plan.whole_stages
        stages = "one stage" if count == 1 else f"{count} stages"
        ahead = "" if count == 1 else ", the next are on their way"
        at_once = f"those of {stages} of a rank at a time are whole{ahead}"
        yield f"weights in parts: {at_once}"


def _deferred(plan: Plan) -> Iterator[str]:
    """Yield which stages send gradients before they compute those of weights."""
    actions = [Action.parse(word) for row in plan.order for word in row.split()]
    stages = sorted({action.stage for action in actions if action.kind is Kind.WEIGHT})
    if not stages:
        return
    most = show_seconds(max(plan.stages[stage].cost.weight for stage in stages))
    which = ", ".join(map(str, stages))
    if len(stages) > _MOST_NAMES:
        which = f"{stages[0]} to {stages[-1]}"
    yield (
        f"deferred weight gradients: stage {which} first sends the gradients of its "
        f"inputs, up to {most} earlier"
    )


def _traffic(plan: Plan) -> Iterator[str]:
    """Yield what the ranks of a copy send in a step: of values and gradients."""
    traffic = plan.traffic
    if not traffic or not traffic["messages"]:
        return
    line = f"sent: {traffic['messages']} messages a step with "
    line += show_bytes(traffic["message_bytes"])
    if traffic["sums"]:
        calls = traffic["sums"]
        line += f", {calls} all-reduces inside stages with "
        line += show_bytes(traffic["sum_bytes"])
    yield line


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
