"""Do copies run beside kernels? Read off the profiler's trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

from .lines import Line, Place, judged, skipped
from .speed import turns
from .subjects import SUBJECTS, compiled, sgd

__all__ = ["copies_beside_kernels", "overlap", "share_under"]

Span = tuple[float, float]
HIDDEN = 0.8  # share of the time of copies
SLOWER = 1.1  # a step with offload over one without
MICRO_BATCHES = 4
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


def copies_beside_kernels(trace: Path) -> tuple[float, int, int]:
    """Return the share that is hidden, and the numbers of copies and kernels."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]

    def spans(*kinds: str) -> list[Span]:
        found = (event for event in events if event.get("cat") in kinds)
        return [(event["ts"], event["ts"] + event["dur"]) for event in found]

    copies = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "gpu_memcpy" and "Pinned" in event.get("name", "")
    ]
    kernels = spans("kernel")
    return share_under(copies, kernels), len(copies), len(kernels)


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
        slower = turns(place, steps["offload"], steps["plain"]).ratio
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if place.has_gpu else []
        with profile(activities=kinds) as found:
            steps["offload"]()
            place.synchronize()
        path = place.scratch / "trace.json"
        found.export_chrome_trace(str(path))
        return slower, path

    ((slower, path),) = run_local(1, train, timeout=600)
    if path.stat().st_size < LARGEST_TRACE:
        (place.kept / "offload_trace.json").write_bytes(path.read_bytes())
    hidden, copies, kernels = copies_beside_kernels(path)
    if copies:
        yield judged(
            "offload copies",
            hidden >= HIDDEN,
            f"{100 * hidden:.0f} % of {copies} copies under {kernels} kernels",
            f"at least {100 * HIDDEN:.0f} %",
            hidden=hidden,
        )
    else:
        yield skipped("offload copies", "no copies to pinned memory in the trace")
    yield judged(
        "offload step",
        slower <= SLOWER or not place.has_gpu,
        f"{slower:.2f} x one without",
        f"{SLOWER}" if place.has_gpu else "none: the CPU copies itself",
        slower=slower,
    )
