"""Steps as Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gemsc.viz.panel import Panel, Row, Span

Json = dict[str, Any]
INSIDE = 1e-3  # microseconds: arrows begin just before the end of a span


def trace_text(panels: Sequence[Panel]) -> str:
    """Return the JSON text: a process for each panel, a thread for each rank."""
    events = [
        event for pid, panel in enumerate(panels, 1) for event in _all(pid, panel)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _all(pid: int, panel: Panel) -> Iterator[Json]:
    yield _name(pid, 0, "process_name", name=panel.name)
    yield _name(pid, 0, "process_sort_index", sort_index=pid)
    for rank, row in enumerate(panel.rows):
        yield _name(pid, _tid(pid, rank), "thread_name", name=row.name)
        yield _name(pid, _tid(pid, rank), "thread_sort_index", sort_index=rank)
        for span in row.spans:
            yield _span(pid, rank, span)
        yield from _memory(pid, row)
    for number, arrow in enumerate(panel.arrows):
        shared: Json = {
            "name": "message",
            "cat": "message",
            "id": f"{pid}.{number}",
        }
        start = max(0.0, _us(arrow.start) - INSIDE)
        yield {
            **shared,
            "ph": "s",
            "pid": pid,
            "tid": _tid(pid, arrow.source),
            "ts": start,
        }
        end = {"pid": pid, "tid": _tid(pid, arrow.dest), "ts": _us(arrow.end)}
        yield {**shared, "ph": "f", "bp": "e", **end}


def _tid(pid: int, rank: int) -> int:
    """Return a number that no thread of another process has, as on a real machine."""
    return 10_000 * pid + rank


def _name(pid: int, tid: int, what: str, **arguments: object) -> Json:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}


def _span(pid: int, rank: int, span: Span) -> Json:
    action = span.action
    return {
        "ph": "X",
        "pid": pid,
        "tid": _tid(pid, rank),
        "name": span.kind if action is None else str(action),
        "cat": span.kind,
        "ts": _us(span.start),
        "dur": _us(span.seconds),
        "args": {}
        if action is None
        else {
            "stage": action.stage,
            "micro_batch": action.micro_batch,
            "replica": action.replica,
        },
    }


def _memory(pid: int, row: Row) -> Iterator[Json]:
    for seconds, held in row.memory:
        counter = {"name": f"{row.name} bytes", "args": {"bytes": held}}
        yield {"ph": "C", "pid": pid, "ts": _us(seconds), **counter}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
