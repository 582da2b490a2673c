"""`gemsc show`: a plan as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from gemsc.plan import Plan
from gemsc.planner.candidates import Candidate, reason
from gemsc.units import show_bytes, show_flops, show_seconds

__all__ = ["show", "show_activations", "show_candidates"]

BAR = 40
ACTIONS = 24


def show(plan: Plan, console: Console) -> None:
    """Print stages, skips, transfers, memory and the order of each rank."""
    console.print(_summary(plan))
    parts = [_stages(plan), _skips(plan), _transfers(plan), _memory(plan), _order(plan)]
    if plan.groups:
        parts.insert(1, _tiles(plan))
    for part in parts:
        console.print()
        console.print(part)


def show_candidates(
    candidates: Sequence[Candidate], console: Console, most: int = 8
) -> None:
    """Print what `auto` has compared, best first, and why the first won."""
    table = _table(
        "candidates (predicted)",
        "schedule",
        "samples/s",
        "step",
        "fullest rank",
        "idle",
        "sent",
    )
    table.columns[0].overflow = "fold"
    for candidate in candidates[:most]:
        if candidate.problem:
            table.add_row(candidate.name, candidate.problem)
            continue
        table.add_row(
            candidate.name,
            f"{candidate.samples_per_second:.3g}",
            show_seconds(candidate.seconds),
            show_bytes(candidate.peak_bytes) + ("" if candidate.fits() else " !"),
            f"{candidate.bubble:.0%}",
            show_bytes(candidate.sent_bytes),
        )
    console.print(table)
    if len(candidates) > most:
        console.print(f"and {len(candidates) - most} more")
    if not all(candidate.fits() for candidate in candidates[:most]):
        console.print("! does not fit --device-memory")
    console.print(f"chosen: {candidates[0].name}", highlight=False)
    console.print(f"why: {reason(candidates)}", highlight=False)


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


def _summary(plan: Plan) -> RenderableType:
    return Group(
        Text(f"{plan.model}: {plan.ranks} ranks, {plan.schedule}, "
             f"{plan.micro_batches} micro-batches, placement {plan.placement}",
             style="bold"),
        Text(plan.command, style="dim"),
        Text(
            f"predicted: {show_seconds(plan.step_seconds)} a step, "
            f"{plan.bubble:.0%} of the ranks' time idle"
        ),
    )  # fmt: skip


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        texts = ("blocks", "to", "value", "values", "grid", "why")
        numeric = index > 0 and column not in texts
        justify: JustifyMethod = "right" if numeric else "left"
        table.add_column(column, justify=justify, no_wrap=numeric)
    return table


def _stages(plan: Plan) -> Table:
    table = _table(
        "stages (one micro-batch)",
        "stage", "blocks", "ranks", "work", "parameters", "kept", "forward", "backward",
        "share",
    )  # fmt: skip
    total = sum(s.forward_seconds + s.backward_seconds for s in plan.stages)
    for stage in plan.stages:
        names = stage.blocks
        shown = ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"
        seconds = stage.forward_seconds + stage.backward_seconds
        table.add_row(
            str(stage.index),
            f"{shown} ({len(names)})",
            ", ".join(map(str, stage.ranks)),
            show_flops(stage.flops),
            show_bytes(stage.parameter_bytes),
            show_bytes(stage.saved_bytes),
            show_seconds(stage.forward_seconds),
            show_seconds(stage.backward_seconds),
            f"{seconds / total:.0%}",
        )
    return table


def _tiles(plan: Plan) -> RenderableType:
    """Return what split stages send from tile to tile, and what they had to gather."""
    table = _table(
        "tiles (one micro-batch)", "stage", "grid", "from tile to tile", "gathered"
    )
    for stage in plan.stages:
        if stage.tiles:
            table.add_row(
                str(stage.index),
                " x ".join(map(str, stage.tiles)),
                show_bytes(stage.halo_bytes),
                str(sum(b["stage"] == stage.index for b in plan.barriers)),
            )
    if not plan.barriers:
        return table
    why = _table("values that every tile gathers whole", "value", "bytes", "why")
    for barrier in plan.barriers:
        at = f" ({barrier['line']})" if barrier["line"] else ""
        size = show_bytes(barrier["num_bytes"])
        why.add_row(barrier["value"], size, barrier["reason"] + at)
    return Group(table, Text(), why)


def _name(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _skips(plan: Plan) -> RenderableType:
    if not plan.skips:
        return Text("no skip jumps over a block")
    table = _table("skips over blocks", "value", "from", "to", "bytes", "kind")
    for skip in plan.skips:
        table.add_row(
            skip["value"],
            skip["source"],
            skip["dest"],
            show_bytes(skip["num_bytes"]),
            skip["kind"],
        )
    return table


def _transfers(plan: Plan) -> RenderableType:
    if not plan.transfers:
        return Text("nothing travels between ranks")
    table = _table(
        "transfers (each micro-batch)", "from stage", "to", "values", "bytes", "back"
    )
    for transfer in plan.transfers:
        table.add_row(
            str(transfer.source),
            str(transfer.dest),
            ", ".join(transfer.values),
            show_bytes(transfer.num_bytes),
            "gradient" if transfer.gradient else "-",
        )
    return table


def _memory(plan: Plan) -> Table:
    table = _table("predicted peak memory", "rank", "bytes", "of the fullest")
    fullest = max(plan.peak_bytes, default=1) or 1
    for rank, size in enumerate(plan.peak_bytes):
        bar = "#" * max(1, round(BAR * size / fullest))
        name = _name(plan.members[rank])
        table.add_row(name, show_bytes(size), Text(bar.ljust(BAR)))
    return table


def _order(plan: Plan) -> Table:
    table = _table(
        "order of one step (2F0: stage 2, forward, micro-batch 0)", "rank", ""
    )
    table.columns[1].justify = "left"
    for rank, text in enumerate(plan.order):
        actions = text.split(" ")
        shown = " ".join(actions[:ACTIONS])
        if len(actions) > ACTIONS:
            shown += f" ... {len(actions) - ACTIONS} more"
        table.add_row(_name(plan.members[rank]), shown)
    return table
