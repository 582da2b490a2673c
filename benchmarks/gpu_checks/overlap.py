"""Do copies run beside kernels? Read off the profiler's trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

from .lines import Line, Place, judged, skipped
from .speed import turns
from .subjects import SUBJECTS, compiled, sgd

__all__ = ["Trace", "overlap", "read_trace", "share_under"]

Span = tuple[float, float]
HIDDEN = 0.8  # share of the time of copies, of what can be hidden
SLOWER = 1.1  # a step with offload over the shortest that the bus allows
FORWARD = 1 / 3  # share of a step's kernels; the rest is the backward
MICRO_BATCHES, STEPS = 4, 3
LARGEST_TRACE = 12 * 2**20


def share_under(copies: Iterable[Span], kernels: Iterable[Span]) -> float:
    """Return which share of the time of copies lies under kernels; 1 without copies."""
    joined: list[list[float]] = []
    for start, end in sorted(kernels):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([start, end])
    whole = under = 0.0
    for start, end in copies:
        whole += end - start
        under += sum(max(0.0, min(end, b) - max(start, a)) for a, b in joined)
    return under / whole if whole else 1.0


@dataclass(frozen=True)
class Trace:
    """Spans of kernels and of copies to and from pinned memory, in microseconds."""

    kernels: list[Span]
    outward: list[Span]
    inward: list[Span]

    @property
    def hidden(self) -> float:
        """The share of the time of copies under kernels."""
        return share_under(self.outward + self.inward, self.kernels)

    @property
    def shortest(self) -> tuple[float, float]:
        """The least that a step takes, of its kernels, and the share that can hide."""
        work, out, back = map(_total, (self.kernels, self.outward, self.inward))
        forward, backward = FORWARD * work, (1 - FORWARD) * work
        step = max(forward, out) + max(backward, back)
        return step / work, (min(forward, out) + min(backward, back)) / (out + back)


def _total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def read_trace(path: Path) -> Trace:
    """Return what the profiler has written."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]

    def spans(kind: str, name: str = "") -> list[Span]:
        return [
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") == kind and name in event.get("name", "")
        ]

    to_host, to_device = "Device -> Pinned", "Pinned -> Device"
    copies = spans("gpu_memcpy", to_host), spans("gpu_memcpy", to_device)
    return Trace(spans("kernel"), *copies)


def overlap(place: Place) -> Iterator[Line]:
    """Train with all blocks offloaded; ask whether that takes longer, and why."""
    subject = SUBJECTS["encoder"]
    inputs, target = subject.data(place, MICRO_BATCHES)
    for mode in ("plain", "offload"):
        choices = {"offload": ("all",)} if mode == "offload" else {}
        folder = place.scratch / mode
        compiled(
            subject, place, folder, ranks=1, micro_batches=MICRO_BATCHES, **choices
        )

    def train(transport: Transport) -> tuple[float, Path]:
        steps = {}
        for mode in ("plain", "offload"):
            folder = place.scratch / mode
            trainer = Trainer(folder, transport, optimizer=sgd, device=place.device)
            steps[mode] = lambda trainer=trainer: trainer.step(inputs, target)
        slower = turns(place, steps["offload"], steps["plain"], STEPS).ratio
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if place.has_gpu else []
        with profile(activities=kinds) as profiler:
            steps["offload"]()
            place.synchronize()
        path = place.scratch / "trace.json"
        profiler.export_chrome_trace(str(path))
        return slower, path

    ((slower, path),) = run_local(1, train, timeout=600)
    if path.stat().st_size < LARGEST_TRACE:
        (place.kept / "offload_trace.json").write_bytes(path.read_bytes())
    trace = read_trace(path)
    if not (trace.outward and trace.inward):
        figure = f"{slower:.2f} x one without; no copies in the trace"
        if place.has_gpu:
            yield judged("offload", False, figure, "copies to pinned memory")
        else:
            yield skipped("offload", figure)
        return
    shortest, can_hide = trace.shortest
    yield judged(
        "offload copies",
        trace.hidden >= HIDDEN * can_hide,
        f"{100 * trace.hidden:.0f} % of their time under kernels",
        f"{100 * HIDDEN * can_hide:.0f} % of {100 * can_hide:.0f} that can be",
        hidden=trace.hidden,
    )
    yield judged(
        "offload step",
        slower <= SLOWER * shortest,
        f"{slower:.2f} x one without",
        f"{SLOWER * shortest:.2f}: the bus allows {shortest:.2f}",
        slower=slower,
        shortest=shortest,
    )
