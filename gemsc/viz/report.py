"""report.html: everything about a program on one page that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from gemsc.base.files import write_text
from gemsc.base.units import show_bytes, show_flops, show_micro_batches, show_seconds
from gemsc.plan import Plan, PlannedStage
from gemsc.planner.explain import explain
from gemsc.search.candidates import Candidate, reason
from gemsc.viz.columns import sample
from gemsc.viz.html import Cell, bar, card, cell, link, section, table
from gemsc.viz.panel import Panel
from gemsc.viz.plots import busy_map, memory_curves, memory_quantiles
from gemsc.viz.report_style import SCRIPT, STYLE
from gemsc.viz.tables import describe_blocks
from gemsc.viz.timeline import draw_inside, panels_of

__all__ = ["write_report"]

MOST_ROWS = 32  # ranks drawn one by one; more are sampled, and summed up
MOST_SPANS = 6000  # actions drawn one by one
MOST_LINES = 200  # of a table
MOST_BOXES = 24  # stages
MOST_SENT = 5  # other stages that a box of a stage names
MOST_GRAPH = 2_000_000  # characters of graph.svg that are put into the page
QUANTILES = {"least": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "most": 1.0}


def write_report(
    plan: Plan,
    folder: Path,
    candidates: Sequence[Candidate] = (),
    *,
    with_graph: bool = True,
) -> Path:
    """Write report.html into a program directory; return its path.

    The graph is that of graph.svg, if it is there.
    """
    path = folder / "report.html"
    graph = _graph_of(folder) if with_graph else ""
    write_text(path, _page(plan, graph, candidates))
    return path


def _page(plan: Plan, graph: str, candidates: Sequence[Candidate]) -> str:
    (panel,) = panels_of(plan)
    sections = (
        _why(plan, panel),
        _stages(plan),
        _timeline(plan, panel),
        _memory(plan, panel),
        _ranks(plan, panel),
        _skips(plan),
        _transfers(plan),
        _candidates(candidates),
        _graph(graph),
    )
    kept = [part for part in sections if part]
    anchors = [re.findall(r'id="(\w+)"><h2>([^<]+)', part)[0] for part in kept]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in anchors)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(plan.model)} on {plan.ranks} ranks</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{STYLE}</style></head><body><main>",
            _header(plan),
            f"<nav>{links}</nav>",
            *kept,
            f"<footer>Predicted by gemsc {escape(plan.gemsc)} with torch "
            f"{escape(plan.torch)}; seconds: {escape(plan.times)}. "
            "<code>gemsc timeline --measured</code> runs some steps and adds them to "
            "the timeline.</footer>",
            f"</main><script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _header(plan: Plan) -> str:
    whole = plan.step_seconds + plan.ending_seconds
    rate = plan.batch_size / whole if whole else 0.0
    parameters = sum(stage.parameter_bytes for stage in plan.stages)
    copies = f", {plan.data} data-parallel replicas" if plan.data > 1 else ""
    cards = (
        card("one step", show_seconds(whole), f"{plan.batch_size} samples"),
        card("throughput", f"{rate:,.1f} / s", "samples"),
        card("idle", f"{plan.bubble:.0%}", "of the ranks' time"),
        card("highest peak", show_bytes(max(plan.peak_bytes)), "at most"),
        card("parameters", show_bytes(parameters), f"{len(plan.stages)} stages"),
    )
    return (
        f"<header><h1>{escape(plan.model)} on {plan.ranks:,} ranks</h1>"
        f"<p>{escape(plan.schedule)}, {show_micro_batches(plan.micro_batches)} of "
        f"{plan.micro_batch_size}, placement {escape(plan.placement)}{copies}</p>"
        f"<code>{escape(plan.command)}</code>"
        f'<div class="cards">{"".join(cards)}</div></header>'
    )


def _why(plan: Plan, panel: Panel) -> str:
    why = explain(plan)
    total = why.step_seconds or 1.0
    kinds = ("work", "imbalance", "fill", "messages")
    parts = [
        (
            f"{name}: {show_seconds(seconds)}, {seconds / total:.0%}",
            seconds / total,
            kind,
        )
        for (name, seconds), kind in zip(why.parts, kinds, strict=True)
    ]
    legend = "".join(
        f'<li><i class="{kind}"></i>{escape(name)}</li>' for name, _, kind in parts
    )
    line = why.line[:1].upper() + why.line[1:]
    return section(
        "why",
        "Why this split",
        f"<p>{escape(line)}.</p>",
        bar(parts),
        f'<ul class="legend">{legend}</ul>',
    )


def _stages(plan: Plan) -> str:
    longest = max(s.forward_seconds + s.backward_seconds for s in plan.stages) or 1.0
    rows = sample(len(plan.stages), MOST_LINES)
    titles = ("stage", "blocks", "from ... to", "ranks", "work", "parameters", "saved",
              "forward", "backward", "time")  # fmt: skip
    lines = [_stage_line(plan.stages[row], longest) for row in rows]
    note = "Work, bytes and seconds are for one micro-batch."
    if len(rows) < len(plan.stages):
        note += f" {len(rows)} of {len(plan.stages)} stages."
    return section(
        "stages",
        "Stages",
        _row_of_stages(plan),
        table(titles, lines, note=note),
    )


def _stage_line(stage: PlannedStage, longest: float) -> tuple[Cell, ...]:
    seconds = stage.forward_seconds, stage.backward_seconds
    shares = bar(
        [
            (f"forward {show_seconds(seconds[0])}", seconds[0] / longest, "forward"),
            (f"backward {show_seconds(seconds[1])}", seconds[1] / longest, "backward"),
        ]
    )
    return (
        cell(stage.index, stage.index),
        cell(len(stage.blocks), len(stage.blocks)),
        cell(describe_blocks(stage)),
        cell(", ".join(map(str, stage.ranks))),
        cell(show_flops(stage.flops), stage.flops),
        cell(show_bytes(stage.parameter_bytes), stage.parameter_bytes),
        cell(show_bytes(stage.saved_bytes), stage.saved_bytes),
        cell(show_seconds(seconds[0]), seconds[0]),
        cell(show_seconds(seconds[1]), seconds[1]),
        Cell(shares),
    )


def _row_of_stages(plan: Plan) -> str:
    """Return the stages as boxes, and what each sends to which other."""
    sent: dict[int, dict[int, int]] = {}
    for transfer in plan.transfers:
        to = sent.setdefault(transfer.source, {})
        to[transfer.dest] = to.get(transfer.dest, 0) + transfer.num_bytes
    boxes = []
    for index in sample(len(plan.stages), MOST_BOXES):
        stage = plan.stages[index]
        word = "rank" if len(stage.ranks) == 1 else "ranks"
        lines = [
            f"{word} {', '.join(map(str, stage.ranks))}",
            f"{describe_blocks(stage)} ({len(stage.blocks)} blocks)",
        ]
        for dest, size in list(sent.get(index, {}).items())[:MOST_SENT]:
            skip = " (skip)" if dest > index + 1 else ""
            lines.append(f"sends {show_bytes(size)} to stage {dest}{skip}")
        inside = "".join(f"<span>{escape(line)}</span>" for line in lines)
        boxes.append(f'<div class="stage"><b>stage {index}</b>{inside}</div>')
    return f'<div class="stages">{"".join(boxes)}</div>'


def _graph(graph: str) -> str:
    if not graph:
        return ""
    return section("graph", "Graph", f'<div class="paper">{graph}</div>')


def _timeline(plan: Plan, panel: Panel) -> str:
    shown = _drawable(panel)
    notes = []
    if len(shown) < len(panel.rows):
        notes = [
            "<h3>All ranks</h3>",
            f'<div class="picture">{busy_map(panel)}</div>',
            '<ul class="legend"><li><i class="forward"></i>forward</li>'
            '<li><i class="backward"></i>backward</li></ul>',
        ]
        if shown:
            notes.append(f"<h3>{len(shown)} of {len(panel.rows)} ranks</h3>")
    heading = f"{plan.model}: {plan.schedule}"
    one_by_one = ""
    if shown:
        picture = draw_inside(heading, (panel.only(shown),))
        one_by_one = f'<div class="picture">{picture}</div>'
    return section("timeline", "One step", *notes, one_by_one)


def _drawable(panel: Panel) -> list[int]:
    """Return the ranks that are drawn one by one: few enough, with few enough boxes."""
    spans = max(len(row.spans) for row in panel.rows) or 1
    most = min(MOST_ROWS, MOST_SPANS // spans)
    if most < 2 < len(panel.rows):
        return []
    busiest = max(range(len(panel.rows)), key=lambda rank: panel.rows[rank].busy)
    return sample(len(panel.rows), most, (busiest,))


def _memory(plan: Plan, panel: Panel) -> str:
    fullest = max(range(len(panel.rows)), key=lambda r: panel.rows[r].peak_bytes)
    chosen = sample(len(panel.rows), 12, (fullest,))
    cap = plan.options.get("device_memory")
    curves = memory_curves(panel.only(chosen), cap if isinstance(cap, int) else None)
    parts = [f'<div class="picture">{curves}</div>']
    if len(chosen) < len(panel.rows):
        parts = [
            "<h3>All ranks: median, quartiles, minimum and maximum</h3>",
            f'<div class="picture">{memory_quantiles(panel)}</div>',
            f"<h3>{len(chosen)} of {len(panel.rows)} ranks</h3>",
            *parts,
        ]
    legend = (
        '<ul class="legend"><li><i class="resident"></i>weights, gradients</li>'
        '<li><i class="memory"></i>saved for backward</li></ul>'
    )
    return section("memory", "Memory over time", *parts, legend)


def _ranks(plan: Plan, panel: Panel) -> str:
    step = panel.makespan or 1.0
    busy = [row.busy / step for row in panel.rows]
    rows = sample(len(busy), MOST_LINES)
    lines = []
    for rank in rows:
        row = panel.rows[rank]
        stages = ", ".join(f"{stage}{chr(39) * r}" for r, stage in row.lanes)
        lines.append(
            (
                cell(rank, rank),
                cell(stages),
                cell(f"{busy[rank]:.0%}", busy[rank]),
                cell(f"{1 - busy[rank]:.0%}", 1 - busy[rank]),
                cell(show_bytes(row.resident_bytes), row.resident_bytes),
                cell(show_bytes(row.peak_bytes), row.peak_bytes),
                link(f"rank{rank}.py", f"rank{rank}.py"),
            )
        )
    titles = ("rank", "stages", "busy", "idle", "all the time", "peak", "file")
    note = ""
    if plan.data > 1:
        note = f"The {plan.data} data-parallel replicas share these files."
    parts = [table(titles, lines, note=note)]
    if len(rows) < len(busy):
        parts.insert(0, _quantiles(busy, panel))
        parts.insert(1, f"<h3>{len(rows)} of {len(busy)} ranks</h3>")
    return section("ranks", "Ranks", *parts)


def _quantiles(busy: Sequence[float], panel: Panel) -> str:
    peaks = [row.peak_bytes for row in panel.rows]
    lines = [
        (
            cell(name),
            cell(f"{np.quantile(busy, share):.0%}", float(np.quantile(busy, share))),
            cell(
                show_bytes(np.quantile(peaks, share)), float(np.quantile(peaks, share))
            ),
        )
        for name, share in QUANTILES.items()
    ]
    return table((f"of {len(busy)} ranks", "busy", "peak"), lines)


def _skips(plan: Plan) -> str:
    if not plan.skips:
        return ""
    skips = sorted(plan.skips, key=lambda skip: -skip["num_bytes"])
    lines = [
        (
            cell(skip["value"]),
            cell(skip["source"]),
            cell(skip["dest"]),
            cell(show_bytes(skip["num_bytes"]), skip["num_bytes"]),
            cell(skip["kind"]),
        )
        for skip in skips[:MOST_LINES]
    ]
    titles = ("value", "from block", "to block", "bytes", "")
    note = _left_out(len(skips), "the largest")
    return section("skips", "Skips over blocks", table(titles, lines, note=note))


def _transfers(plan: Plan) -> str:
    if not plan.transfers:
        return ""
    found = sorted(plan.transfers, key=lambda t: -t.num_bytes)[:MOST_LINES]
    lines = [
        (
            cell(t.source, t.source),
            cell(t.dest, t.dest),
            cell(", ".join(t.values)),
            cell(show_bytes(t.num_bytes), t.num_bytes),
            cell(show_seconds(t.seconds), t.seconds),
            cell("gradient" if t.gradient else "-"),
        )
        for t in sorted(found, key=lambda t: t.index)
    ]
    titles = ("from stage", "to stage", "values", "bytes", "time", "back")
    note = _left_out(len(plan.transfers), "the largest")
    return section("transfers", "Transfers", table(titles, lines, note=note))


def _candidates(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return ""
    lines = []
    for each in candidates[:MOST_LINES]:
        if each.problem:
            lines.append((cell(each.name), *(cell("-"),) * 5, cell(each.problem)))
            continue
        lines.append(
            (
                cell(each.name),
                cell(f"{each.samples_per_second:.3g}", each.samples_per_second),
                cell(show_seconds(each.seconds), each.seconds),
                cell(show_bytes(each.peak_bytes), each.peak_bytes),
                cell(f"{each.bubble:.0%}", each.bubble),
                cell(show_bytes(each.sent_bytes), each.sent_bytes),
                cell("" if each.fits() else "does not fit"),
            )
        )
    titles = ("schedule", "samples/s", "step", "highest peak", "idle", "sent", "")
    why = f"{candidates[0].name} was chosen: {reason(candidates)}."
    note = _left_out(len(candidates), "the best")
    return section(
        "candidates",
        "What was compared",
        f"<p>{escape(why)}</p>",
        table(titles, lines, note=note),
    )


def _left_out(total: int, which: str) -> str:
    return f"{which} {MOST_LINES} of {total}" if total > MOST_LINES else ""


def _graph_of(folder: Path) -> str:
    """Return the drawn graph without its XML header; "" if there is none."""
    try:
        text = (folder / "graph.svg").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    start = text.find("<svg")
    return text[start:] if start >= 0 and len(text) <= MOST_GRAPH else ""
