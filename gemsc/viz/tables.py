"""`gemsc show`: a plan as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gemsc.base.cores import num_cores
from gemsc.base.units import show_bytes, show_flops, show_micro_batches, show_seconds
from gemsc.costs.hardware import DEFAULT_HARDWARE
from gemsc.plan import Plan, PlannedStage
from gemsc.planner.explain import explain, shared_seconds
from gemsc.search.candidates import Candidate, reason
from gemsc.viz.columns import Column, column, fitted, sample
from gemsc.viz.strip import strips

__all__ = [
    "describe_blocks",
    "notes",
    "show",
    "show_activations",
    "show_candidates",
]

MOST_ROWS = 40  # of stages and ranks; more are sampled
_MOST_NAMES = 8  # of stages in a line
MOST_SKIPS = 60
WIDEST = 160  # of what fills the width that there is
PARTS = {  # of a peak, besides activations: their titles
    "parameters": "weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "messages": "messages",
    "workspace": "libraries",
}


def show(plan: Plan, console: Console) -> None:
    """Print why it is cut so, stages, skips, transfers, memory and the order."""
    width = console.width
    console.print(_summary(plan))
    parts = [
        _stages(plan, width),
        _skips(plan, width),
        _transfers(plan, width),
        _memory(plan, width),
        _timeline(plan, width),
        _order(plan, width),
    ]
    if plan.groups:
        parts[1:1] = _tiles(plan, width)
    if any(stage.recompute or stage.offload for stage in plan.stages):
        parts.insert(1, _not_kept(plan, width))
    for part in parts:
        console.print()
        console.print(part)


def show_candidates(
    candidates: Sequence[Candidate], console: Console, most: int = 8
) -> None:
    """Print what `auto` has compared, best first, and why the first won."""
    shown = candidates[:most]

    def cells(show: Callable[[Candidate], str]) -> list[str]:
        return ["-" if c.problem else show(c) for c in shown]

    def memory(candidate: Candidate) -> str:
        return show_bytes(candidate.peak_bytes) + ("" if candidate.fits() else " !")

    columns = [
        column("schedule", (c.name for c in shown), left=True, shrinks=True),
        column("samples/s", cells(lambda c: _speed(c.samples_per_second))),
        column("step", cells(lambda c: show_seconds(c.seconds))),
        column("highest peak", cells(memory)),
        column("idle", cells(lambda c: f"{c.bubble:.0%}"), drop=2),
        column("sent", cells(lambda c: show_bytes(c.sent_bytes)), drop=1),
    ]
    if any(c.problem for c in shown):
        problems = (c.problem for c in shown)
        columns.append(column("problem", problems, left=True, shrinks=True))
    console.print(fitted("candidates (predicted)", columns, console.width))
    if len(candidates) > most:
        console.print(f"and {len(candidates) - most} more")
    if not all(candidate.fits() for candidate in shown):
        console.print("! does not fit --device-memory")
    console.print(f"chosen: {candidates[0].name}", highlight=False)
    console.print(f"why: {reason(candidates)}", highlight=False)


def _speed(samples_per_second: float) -> str:
    if samples_per_second >= 100:
        return f"{samples_per_second:,.0f}"
    return f"{samples_per_second:.3g}"


def show_activations(plan: Plan, measured: Sequence[int], console: Console) -> None:
    """Print the peaks of live activations that were predicted and found."""
    ratios = [
        found / predicted
        for found, predicted in zip(
            measured, plan.by_rank(plan.activation_bytes) * plan.data, strict=True
        )
    ]
    peaks = ", ".join(map(show_bytes, measured))
    console.print(
        f"peak of live activations on each rank: {peaks}; "
        f"measured / predicted {min(ratios):.3f} to {max(ratios):.3f}",
        highlight=False,
    )


def describe_blocks(stage: PlannedStage) -> str:
    """Return the names of a stage's blocks, of many only the first and the last."""
    names = stage.blocks
    return ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"


def _summary(plan: Plan) -> RenderableType:
    why = explain(plan)
    copies = f" in each of {plan.data} data-parallel replicas" if plan.data > 1 else ""
    return Group(
        Text(f"{plan.model}: {plan.ranks} ranks, {plan.schedule}, "
             f"{show_micro_batches(plan.micro_batches)}{copies}, "
             f"placement {plan.placement}", style="bold"),
        Text(plan.command, style="dim"),
        Text(
            f"predicted ({plan.times}): {show_seconds(plan.step_seconds)} a step, "
            f"{plan.bubble:.0%} of the ranks' time idle; then "
            f"{show_seconds(plan.ending_seconds)} for gradient all-reduces and the "
            "update"
        ),
        *_here(plan),
        Text(f"why this split: {why.line}"),
        Text(f"a step: {why.parts_line}"),
        *_head_starts(plan),
        *_traffic(plan),
        *map(Text, notes(plan)),
    )  # fmt: skip


def _here(plan: Plan) -> list[Text]:
    """Return what the prediction leaves out, if it may be meant for this machine."""
    if plan.options.get("hardware") not in (None, "", DEFAULT_HARDWARE):
        return []
    found, cores = [], num_cores()
    if plan.times != "measured":
        found = [
            f"note: {DEFAULT_HARDWARE} is a default, not this machine: "
            "`gemsc profile --calibrate` measures it, for --hardware"
        ]
    if plan.ranks > cores:
        found.append(
            f"note: predicted with a core for each rank; {plan.ranks} ranks on the "
            f"{cores} cores of this machine take at least "
            f"{show_seconds(shared_seconds(plan, cores))} a step"
        )
    return list(map(Text, found))


def notes(plan: Plan) -> list[str]:
    """Return what differs from the model: for a module that stays whole, also why."""
    whole = [
        f"note: {each['line']}: '{each['module']}' stays whole on {_where(each)}: "
        f"{each['reason']}; its time and memory are those of one real "
        "run on example_inputs"
        for each in plan.opaque
    ]
    return [*whole, *(f"note: {note}" for note in plan.notes)]


def _where(opaque: dict[str, Any]) -> str:
    """Return the stages that call a module: each has a copy, if several do."""
    stages = opaque["stages"]
    return f"stage{'s' * (len(stages) > 1)} {_join(stages)}"


def _head_starts(plan: Plan) -> list[Text]:
    """Return which stages defer weight gradients in their last backward."""
    found = [stage for stage in plan.stages if stage.head_start_layers]
    if not found:
        return []
    most = show_seconds(max(stage.head_start_seconds for stage in found))
    which = _join([stage.index for stage in found])
    if len(found) > _MOST_NAMES:
        which = f"{found[0].index} to {found[-1].index}"
    line = "deferred weight gradients: in its last backward, "
    line += f"stage {which} first sends the gradients of its inputs"
    return [Text(f"{line}, up to {most} earlier")]


def _traffic(plan: Plan) -> list[Text]:
    """Return what the ranks of a copy send in a step: of values and gradients."""
    found = plan.traffic
    if not found or not found["messages"]:
        return []
    line = f"sent: {found['messages']} messages a step with "
    line += show_bytes(found["message_bytes"])
    if found["sums"]:
        calls = found["sums"]
        line += f", {calls} all-reduces over tiles, {show_bytes(found['sum_bytes'])}"
    return [Text(line)]


def _stages(plan: Plan, width: int) -> RenderableType:
    seconds = [s.forward_seconds + s.backward_seconds for s in plan.stages]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    rows = sample(len(plan.stages), MOST_ROWS, (slowest,))
    stages = [plan.stages[row] for row in rows]
    total = sum(seconds) or 1.0
    marks = ["<- slowest" if row == slowest else "" for row in rows]
    columns = (
        column("stage", rows, left=True),
        column("blocks", (len(s.blocks) for s in stages), drop=6),
        column("from ... to", map(describe_blocks, stages), left=True, shrinks=True),
        column("ranks", (_join(s.ranks) for s in stages)),
        column("work", (show_flops(s.flops) for s in stages), drop=3),
        column("weights", (show_bytes(s.parameter_bytes) for s in stages), drop=2),
        column("saved", (show_bytes(s.saved_bytes) for s in stages), drop=1),
        column("forward", (show_seconds(s.forward_seconds) for s in stages)),
        column("backward", (show_seconds(s.backward_seconds) for s in stages)),
        column("share", (f"{seconds[row] / total:.0%}" for row in rows), drop=4),
        column("", marks, drop=5, left=True),
    )
    title = "stages (one micro-batch)"
    if len(rows) < len(plan.stages):
        title += f": {len(rows)} of {len(plan.stages)}"
    return fitted(title, columns, width)


def _not_kept(plan: Plan, width: int) -> RenderableType:
    """Return the blocks whose activations are computed again or wait on the host."""
    stages = [stage for stage in plan.stages if stage.recompute or stage.offload]
    columns = (
        column("stage", (s.index for s in stages), left=True),
        column(
            "recomputed", (_join(s.recompute) for s in stages), left=True, shrinks=True
        ),
        column(
            "offloaded", (_join(s.offload) for s in stages), left=True, shrinks=True
        ),
    )
    return fitted("blocks that keep no activations", columns, width)


def _tiles(plan: Plan, width: int) -> list[RenderableType]:
    """Return what split stages send from tile to tile, and what they had to gather."""
    stages = [stage for stage in plan.stages if stage.tiles]
    gathered = [sum(b["stage"] == s.index for b in plan.barriers) for s in stages]
    halos = (
        column("stage", (s.index for s in stages), left=True),
        column("grid", (" x ".join(map(str, s.tiles)) for s in stages), left=True),
        column("exchanges", (s.exchanges for s in stages)),
        column("from tile to tile", (show_bytes(s.halo_bytes) for s in stages)),
        column("overlapped", (len(s.overlapped) for s in stages), drop=2),
        column("unfused", map(_unfused, stages), drop=1),
        column("gathered", gathered),
    )
    found: list[RenderableType] = [fitted("tiles (one micro-batch)", halos, width)]
    if plan.barriers:
        sizes = (show_bytes(b["num_bytes"]) for b in plan.barriers)
        columns = (
            column("value", (b["value"] for b in plan.barriers), left=True),
            column("bytes", sizes),
            column("line", (b["line"] for b in plan.barriers), left=True),
            column(
                "why", (b["reason"] for b in plan.barriers), left=True, shrinks=True
            ),
        )
        found.append(fitted("values that every tile has to gather", columns, width))
    return found


def _unfused(stage: PlannedStage) -> str:
    """Return the exchanges and bytes that there would be, if that is another number."""
    if stage.unfused_exchanges == stage.exchanges:
        return "the same"
    return f"{stage.unfused_exchanges}, {show_bytes(stage.unfused_halo_bytes)}"


def _name(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _skips(plan: Plan, width: int) -> RenderableType:
    if not plan.skips:
        return Text("no skips over blocks")
    shown = sorted(plan.skips, key=lambda s: -s["num_bytes"])[:MOST_SKIPS]
    skips = [skip for skip in plan.skips if skip in shown]
    columns = (
        column("value", (s["value"] for s in skips), left=True, shrinks=True),
        column("from", (s["source"] for s in skips), left=True, shrinks=True),
        column("to", (s["dest"] for s in skips), left=True, shrinks=True),
        column("bytes", (show_bytes(s["num_bytes"]) for s in skips)),
        column("kind", (s["kind"] for s in skips), left=True),
    )
    title = "skips over blocks"
    if len(skips) < len(plan.skips):
        title += f": the largest {len(skips)} of {len(plan.skips)}"
    return fitted(title, columns, width)


def _transfers(plan: Plan, width: int) -> RenderableType:
    if not plan.transfers:
        return Text("no transfers between stages")
    rows = sample(len(plan.transfers), MOST_SKIPS)
    found = [plan.transfers[row] for row in rows]
    back = ("gradient" if t.gradient else "-" for t in found)
    columns = (
        column("from stage", (t.source for t in found), left=True),
        column("to", (t.dest for t in found), left=True),
        column("values", (_join(t.values) for t in found), left=True, shrinks=True),
        column("bytes", (show_bytes(t.num_bytes) for t in found)),
        column("seconds", (show_seconds(t.seconds) for t in found), drop=1),
        column("back", back, drop=2),
    )
    title = "transfers (each micro-batch)"
    if len(rows) < len(plan.transfers):
        title += f": {len(rows)} of {len(plan.transfers)}"
    return fitted(title, columns, width)


def _memory(plan: Plan, width: int) -> RenderableType:
    """Draw each rank's peak, and say what it consists of."""
    fullest = max(plan.peak_bytes, default=1) or 1
    most = plan.peak_bytes.index(max(plan.peak_bytes)) if plan.peak_bytes else 0
    ranks = sample(len(plan.peak_bytes), MOST_ROWS, (most,))
    activations = [p["activations"] for p in plan.memory] or plan.activation_bytes
    title = "# weights, gradients  + activations"
    room = len(title)
    bars = []
    for rank in ranks:
        size, live = plan.peak_bytes[rank], activations[rank]
        whole = max(1, round(room * size / fullest))
        held = min(whole, round(room * (size - live) / fullest))
        bars.append(("#" * held + "+" * (whole - held)).ljust(room))
    columns = (
        column("rank", (_name(plan.members[r]) for r in ranks), left=True),
        column("peak", (show_bytes(plan.peak_bytes[r]) for r in ranks)),
        *_memory_parts(plan, ranks),
        column("activations", (show_bytes(activations[r]) for r in ranks)),
        column(title, bars, left=True),
    )
    title = "predicted peak memory"
    if len(ranks) < len(plan.peak_bytes):
        title += f": {len(ranks)} of {len(plan.peak_bytes)} ranks"
    return fitted(title, columns, width)


def _memory_parts(plan: Plan, ranks: Sequence[int]) -> list[Column]:
    """Return what ranks hold at their peaks besides activations."""
    if not plan.memory:  # a plan of an older gemsc
        return []
    return [
        column(title, (show_bytes(plan.memory[r][key]) for r in ranks), drop=drop)
        for drop, (key, title) in enumerate(PARTS.items(), start=1)
        if key != "workspace" or plan.workspace_bytes
    ]


def _timeline(plan: Plan, width: int) -> RenderableType:
    title = Text("predicted step", style="bold")
    return Group(title, *strips(plan, min(width, WIDEST), MOST_ROWS))


def _order(plan: Plan, width: int) -> Table:
    ranks = sample(len(plan.order), MOST_ROWS)
    texts = [_cut(plan.order[rank], min(width, WIDEST) - 20) for rank in ranks]
    columns = (
        column("rank", (_name(plan.members[r]) for r in ranks), left=True),
        column("", texts, left=True),
    )
    title = "order of one step (2F0: stage 2, forward, micro-batch 0)"
    return fitted(title, columns, width)


def _cut(text: str, width: int) -> str:
    """Return as many whole words as fit, and how many are left out."""
    words = text.split(" ")
    if len(text) <= width:
        return text
    shown: list[str] = []
    while len(" ".join([*shown, words[len(shown)]])) <= width - 12:
        shown.append(words[len(shown)])
    return f"{' '.join(shown)} ... {len(words) - len(shown)} more"


def _join(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
