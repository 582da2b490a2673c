"""report.html: everything about a program on one page that needs nothing else."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from gemsc.base.files import write_text
from gemsc.base.units import show_bytes, show_micro_batches, show_seconds
from gemsc.plan import Plan, rank_file
from gemsc.planner.explain import explain, seconds_here
from gemsc.search.candidates import Candidate, reason
from gemsc.viz.design import FONT, MONO, sample, series, variables
from gemsc.viz.listings import (
    Column,
    block_names,
    column,
    list_candidates,
    list_plan,
)
from gemsc.viz.panel import Panel, panels_of
from gemsc.viz.timeline import NARROWEST, WIDEST, draw_timeline

MOST_RANKS = 32  # drawn one by one; of more a sample
MOST_SPANS = 6000  # actions drawn one by one
MOST_LINES = 200  # of a table
MOST_STAGES = 24  # that have a box
MOST_SENT = 5  # other stages that a box of a stage names
MOST_GRAPH = 2_000_000  # characters of graph.svg that are put into the page
QUANTILES = {"least": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "most": 1.0}
RUN_MARKER = "<!-- run -->"  # where `gemsc show --open` puts the run that goes on
Section = tuple[str, str, str, list[Sequence[Column]]]  # id, title, note, tables


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
    graph = graph_of(folder) if with_graph else ""
    path = folder / "report.html"
    write_text(path, report(plan, candidates, graph))
    return path


def report(plan: Plan, candidates: Sequence[Candidate] = (), graph: str = "") -> str:
    """Return the page about a program; `graph` is the text of its picture."""
    (panel,) = panels_of(plan)
    why = explain(plan)
    *listings, (_, of_ranks) = list_plan(plan, MOST_LINES)
    seconds = [stage.seconds for stage in plan.stages]
    slowest = seconds.index(max(seconds))
    step, cores = seconds_here(plan) or (plan.step_seconds, 0)
    shown = sample(len(plan.stages), MOST_STAGES, (slowest,))
    return _template().render(
        plan=plan,
        limit=plan.rank_memory,
        micro_batches=show_micro_batches(plan.micro_batches),
        step_seconds=step + plan.ending_seconds,
        on_cores=f"{cores} cores for {plan.ranks} ranks" if cores else "",
        why=why,
        why_parts=[
            (name, seconds, why.step_seconds or 1.0, name.split()[0])
            for name, seconds in why.parts
        ],
        stages=[plan.stages[index] for index in shown],
        slowest=slowest,
        longest=max(seconds) or 1.0,
        sent=_sent(plan),
        **_step(panel),
        sections=[
            *(_section(*listing) for listing in listings),
            ("ranks", "Ranks", "", [*_spread(panel), _ranks(plan, panel, of_ranks)]),
            *_candidates(candidates),
        ],
        graph=graph,
        run_marker=RUN_MARKER,
        light=variables(dark=False),
        dark=variables(dark=True),
        font=FONT,
        mono=MONO,
    )


@functools.cache
def _template() -> jinja2.Template:
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": show_bytes,
        "seconds": show_seconds,
        "block_names": block_names,
        "series": series,
    }
    environment.globals["rows"] = _rows
    return environment.get_template("report.html")


def _rows(columns: Sequence[Column]) -> Iterator[tuple[tuple[Any, str], ...]]:
    """Yield the rows of a table: in each, values and what is shown of them."""
    cells = (zip(c.values, c.cells, strict=True) for c in columns)
    return zip(*cells, strict=True)


def _section(title: str, columns: Sequence[Column]) -> Section:
    heading = re.split(r" \(|: ", title)[0]
    note = title if title != heading else ""
    return heading.split()[0], heading.capitalize(), note, [columns]


def _sent(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Return the bytes that each stage sends to others in one micro-batch."""
    sent: dict[int, dict[int, int]] = {stage.index: {} for stage in plan.stages}
    for transfer in plan.transfers:
        to, dest = sent[transfer.edge.source], transfer.edge.dest
        to[dest] = to.get(dest, 0) + transfer.num_bytes
    return {stage: list(to.items())[:MOST_SENT] for stage, to in sent.items()}


def _step(panel: Panel) -> dict[str, str]:
    """Return the picture of a step that fits the page, and what it leaves out."""
    total = len(panel.rows)
    busiest = max(range(total), key=lambda rank: panel.rows[rank].busy)
    ranks = sample(total, MOST_RANKS, (busiest,))
    shown, note, widest = panel, "", WIDEST
    if len(ranks) < total:
        shown, note = panel.only(ranks), f"{len(ranks)} of {total} ranks."
        widest = NARROWEST
    if sum(len(row.spans) for row in shown.rows) > MOST_SPANS:
        shown, widest = shown.coarse(), NARROWEST
        note += " Too many actions to draw each: colours say what is done most."
    return {"timeline": draw_timeline("", [shown], widest), "step_note": note.strip()}


def _ranks(plan: Plan, panel: Panel, memory: Sequence[Column]) -> list[Column]:
    """Return how busy ranks are, and what they hold without the drawing of it."""
    rows = [panel.rows[plan.members.index(ranks)] for ranks in memory[0].values]
    busy = [row.busy / (panel.makespan or 1.0) for row in rows]
    files = [rank_file(ranks[0]) for ranks in memory[0].values]
    return [
        memory[0],
        column("stages", (row.lanes_text for row in rows)),
        column("busy", busy, "{:.0%}".format),
        column("idle", (1 - share for share in busy), "{:.0%}".format),
        *memory[1:-1],
        column("file", files, Markup('<a href="{0}">{0}</a>').format),
    ]


def _spread(panel: Panel) -> Iterator[list[Column]]:
    """Yield how busy all ranks are and what they hold, if they are not all shown."""
    if len(panel.rows) <= MOST_LINES:
        return
    busy = [row.busy / (panel.makespan or 1.0) for row in panel.rows]
    peaks = [row.peak_bytes for row in panel.rows]
    shares = list(QUANTILES.values())
    yield [
        column(f"of {len(panel.rows)} ranks", QUANTILES),
        column("busy", map(float, np.quantile(busy, shares)), "{:.0%}".format),
        column("peak", map(float, np.quantile(peaks, shares)), show_bytes),
    ]


def _candidates(candidates: Sequence[Candidate]) -> Iterator[Section]:
    if candidates:
        _, columns = list_candidates(candidates, MOST_LINES)
        why = f"{candidates[0].name} was chosen: {reason(candidates)}."
        yield "candidates", "What was compared", why, [columns]


def graph_of(folder: Path) -> str:
    """Return the drawn graph without its XML header; "" if there is none."""
    try:
        text = (folder / "graph.svg").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    start = text.find("<svg")
    return text[start:] if start >= 0 and len(text) <= MOST_GRAPH else ""
