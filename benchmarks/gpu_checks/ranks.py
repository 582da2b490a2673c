"""Several ranks on one GPU: started by gemsc's launcher, they run rank_process.py."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemsc.launch.launch import launch

from .lines import Line, Place, judged
from .subjects import SUBJECTS, compiled, unet

__all__ = ["devices", "sharing", "transports"]

PROGRAM = Path(__file__).parents[1] / "gpu_rank.py"
START = 60.0  # seconds that a start and some steps may take
MIB = 2**20


def on_ranks(
    count: int, place: Place, work: Mapping[str, Any], env: Mapping[str, str] = {}
) -> list[dict[str, Any]] | None:
    """Start ranks; return what each of them reports, None if one has failed."""
    folder = Path(tempfile.mkdtemp(dir=place.scratch))
    text = json.dumps({**work, "device": place.device.type, "into": str(folder)})
    words = [sys.executable, str(PROGRAM), text]
    seconds = START if place.has_gpu else 3 * START
    if launch(count, words, env=env, timeout=seconds) != 0:
        return None
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def transports(place: Place) -> Iterator[Line]:
    """Send memory of the device to another rank: through the host, and directly."""
    size = MIB if place.is_tiny else 64 * MIB
    found = {}
    for name, setting in (("staged", "0"), ("as it is chosen", "")):
        env = {"GEMSC_CUDA_AWARE": setting}
        ranks = on_ranks(2, place, {"kind": "messages", "bytes": size}, env)
        if ranks is None:
            yield judged(name, False, "the ranks failed", "")
            continue
        found[name] = max(rank["seconds"] for rank in ranks)
        direct = all(rank["direct"] for rank in ranks)
        yield judged(
            name,
            all(rank["equal"] for rank in ranks),
            f"{2 * size / found[name] / 1e9:.2f} GB/s there and back, "
            + ("straight from the device" if direct else "through the host"),
            "the same bytes",
            seconds=found[name],
            direct=direct,
        )


def devices(place: Place) -> Iterator[Line]:
    """Find the largest picture on one small device, and on four with tiles."""
    cap = (48 if place.is_tiny else 4096) * MIB
    base, grain = (4, 32) if place.is_tiny else (32, 64)
    largest = {}
    for ranks, tiles in ((1, ""), (4, "2x2")):
        choices = {"ranks": ranks, "micro_batches": 1, "tiles": tiles}
        largest[ranks] = _largest_side(place, cap, base, grain, choices)
    ratio = (largest[4] / largest[1]) ** 2 if largest[1] else 0.0
    yield judged(
        "four small devices",
        ratio >= 3.5,
        f"{largest[4]} x {largest[4]} pixels with {cap // MIB} MiB each, "
        f"{largest[1]} x {largest[1]} with one: {ratio:.2f} times as many",
        "3.5",
        ratio=ratio,
        one=largest[1],
        four=largest[4],
    )


def _largest_side(
    place: Place, cap: int, base: int, grain: int, choices: dict[str, Any]
) -> int:
    """Return the largest side that was trained: from what is predicted, up or down."""

    def peak(side: int) -> int:
        subject, folder = unet(side, base), place.scratch / f"{side}-{choices['ranks']}"
        plan = compiled(subject, place, folder, **choices).plan
        return max(plan.peak_bytes) - plan.workspace_bytes

    def fits(side: int) -> bool:
        peak(side)
        folder = place.scratch / f"{side}-{choices['ranks']}"
        work = {"kind": "steps", "directory": str(folder), "cap": cap, "steps": 2}
        work |= {"picture": side, "turns": 1}
        return on_ranks(choices["ranks"], place, work) is not None

    small, large = 4 * grain, 8 * grain
    low, high = peak(small), peak(large)
    slope = (high - low) / (large**2 - small**2)
    side = ((cap - low) / slope + small**2) ** 0.5
    step = max(grain, int(0.06 * side) // grain * grain)
    side = int(side) // step * step
    direction = step if fits(side) else -step
    for _ in range(4):
        side += direction
        if fits(side) != (direction > 0):
            return side - step if direction > 0 else side
    return side


def sharing(samples: int, place: Place) -> Iterator[Line]:
    """Let 1, 2 and 4 copies share the GPU: against one, and one with all samples."""
    counts = (2,) if place.is_tiny else (2, 4)
    alone = {k: _copies(place, 1, k * samples) for k in (1, *counts)}
    one = _rate(alone[1])
    for shares in (False, True):
        for count in counts:
            name = f"{count} x {samples} samples"
            name += ", --per-device" if shares else ", in turns"
            ranks = _copies(place, count, samples, shares=shares)
            found, large = _rate(ranks), _rate(alone[count])
            if not (found and one and large):
                yield judged(name, False, "ranks failed", "")
                continue
            kind = "MPS" if ranks and ranks[0]["mps"] else "no MPS"
            yield judged(
                name,
                True,
                f"{found:.1f} samples/s ({kind}): {found / one:.2f} of one process, "
                f"{found / large:.2f} of one with {count * samples} samples",
                "",
                samples_per_second=found,
                one=one,
                one_large=large,
            )


def _copies(
    place: Place, copies: int, samples: int, *, shares: bool = False
) -> list[dict[str, Any]] | None:
    """Train copies of a model, each with its samples; None if they fail."""
    subject = SUBJECTS["resnet50"]
    folder = place.scratch / f"{copies}-{samples}"
    resized = replace(subject, batch=samples, tiny=samples)
    compiled(resized, place, folder, ranks=copies, data=copies, micro_batches=1)
    work = {"kind": "steps", "directory": str(folder), "subject": "resnet50"}
    work |= {"samples": copies * samples, "steps": 2 if place.is_tiny else 20}
    work |= {"turns": 3, "is_tiny": place.is_tiny}
    work |= {"per_device": copies} if shares else {}
    path = f"{os.environ.get('PATH', '')}:/usr/local/nvidia/bin"  # of the daemon
    return on_ranks(copies, place, work, {"PATH": path})


def _rate(ranks: list[dict[str, Any]] | None) -> float:
    """Return the samples per second of all ranks; 0 if they failed."""
    if not ranks:
        return 0.0
    return float(ranks[0]["samples"]) / max(rank["seconds"] for rank in ranks)
