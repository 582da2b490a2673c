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

import torch

from gemsc.launch.launch import launch
from gemsc.runtime.transport.torch_distributed import MANY_ON_A_GPU

from .lines import Line, Place, judged, skipped
from .subjects import SUBJECTS, compiled, unet

__all__ = ["devices", "sharing", "sums", "transports"]

PROGRAM = Path(__file__).parents[1] / "gpu_rank.py"
SHARED = {MANY_ON_A_GPU: "1"}
SAME = 1e-4  # relative, of losses in float32
START = 40.0  # seconds that a start and some steps may take
MIB = 2**20


def on_ranks(
    count: int,
    place: Place,
    work: Mapping[str, Any],
    env: Mapping[str, str] = {},
    engine: str = "mpi",
) -> list[dict[str, Any]] | None:
    """Start ranks; return what each of them reports, None if one has failed."""
    folder = Path(tempfile.mkdtemp(dir=place.scratch))
    text = json.dumps({**work, "device": place.device.type, "into": str(folder)})
    words = [sys.executable, str(PROGRAM), text]
    seconds = START if place.has_gpu else 3 * START
    path = f"{os.environ.get('PATH', '')}:/usr/local/nvidia/bin"  # of MPS' daemon
    env = {"PATH": path, **env}
    if launch(count, words, env=env, timeout=seconds, engine=engine) != 0:
        return None
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def transports(place: Place) -> Iterator[Line]:
    """Send memory of the device to another rank: through the host, and directly."""
    size = MIB if place.is_tiny else 64 * MIB
    seconds = {}
    for name, setting in (("staged", "0"), ("as it is chosen", "")):
        env = {"GEMSC_CUDA_AWARE": setting}
        ranks = on_ranks(2, place, {"kind": "messages", "bytes": size}, env)
        if ranks is None:
            yield judged(name, False, "the ranks failed", "")
            continue
        seconds[name] = max(rank["seconds"] for rank in ranks)
        direct = all(rank["direct"] for rank in ranks)
        yield judged(
            name,
            all(rank["equal"] for rank in ranks),
            f"{2 * size / seconds[name] / 1e9:.2f} GB/s there and back, "
            + ("straight from the device" if direct else "through the host"),
            "the same bytes",
            seconds=seconds[name],
            direct=direct,
        )


def nccl_shares() -> bool:
    """Whether NCCL lets ranks share a GPU: from 2.30 on, or in place of PyTorch's."""
    return torch.cuda.nccl.version() >= (2, 30) or "nccl" in os.environ.get(
        "LD_PRELOAD", ""
    )


def sums(place: Place) -> Iterator[Line]:
    """Sum what is on GPUs: with NCCL, several ranks on one GPU, and through the host.

    That NCCL takes them needs version 2.30. With MPS their kernels run at once: they
    wait for each other.
    """
    if place.has_gpu and not nccl_shares():
        yield skipped("sums", "needs NCCL 2.30, or LD_PRELOAD=<its libnccl.so.2>")
        return
    size = MIB if place.is_tiny else 16 * MIB
    for count in (2, 4):
        work = {"kind": "sums", "bytes": size, "per_device": count}
        staged = on_ranks(count, place, work)
        ranks = on_ranks(count, place, work, SHARED, "torch")
        if staged is None or ranks is None:
            yield judged(f"sums of {count} ranks", False, "the ranks failed", "")
            continue
        seconds, host = (
            max(rank["seconds"] for rank in group) for group in (ranks, staged)
        )
        on_device = all(rank["on_device"] for rank in ranks)
        yield judged(
            f"sums of {count} ranks",
            all(rank["equal"] for rank in (*ranks, *staged))
            and on_device == place.has_gpu,
            f"{size / seconds / 1e9:.2f} GB/s with torch.distributed "
            + ("and NCCL" if on_device else "and gloo")
            + f", {size / host / 1e9:.2f} with MPI through the host",
            "equal sums, on the GPU",
            seconds=seconds,
            host=host,
            on_device=on_device,
        )
    for name, choices in (
        ("data parallel", {"data": 2}),
        ("sharded optimizer", {"data": 2, "shard_optimizer": True}),
        ("two shards", {"shards": 2}),
    ):
        yield _two_engines(name, choices, place)


def _two_engines(name: str, choices: Mapping[str, Any], place: Place) -> Line:
    """Train a program of two ranks with MPI and with torch.distributed; compare."""
    folder = place.scratch / name.replace(" ", "-")
    subject = SUBJECTS["encoder"]
    compiled(subject, place, folder, ranks=2, micro_batches=1, **choices)
    copies = choices.get("data", 1)
    work = {"kind": "steps", "directory": str(folder), "subject": "encoder"}
    work |= {"samples": copies * subject.size(place), "steps": 2, "turns": 3}
    work |= {"is_tiny": place.is_tiny, "per_device": 2}
    staged = on_ranks(2, place, work)
    ranks = on_ranks(2, place, work, SHARED, "torch")
    if staged is None or ranks is None:
        return judged(name, False, "the ranks failed", "")
    pairs = [*zip(ranks[0]["losses"], staged[0]["losses"], strict=True)]
    error = max(abs(one - other) / other for one, other in pairs)
    on_device = all(rank["sums_on_device"] for rank in ranks)
    faster = _rate(ranks) / _rate(staged)
    return judged(
        name,
        error <= SAME and on_device == place.has_gpu,
        f"losses differ by {error:.1e}, {faster:.2f} of the samples/s of MPI",
        f"{SAME:.0e}",
        error=error,
        faster=faster,
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
    ways = [(", in turns", {}), (", --per-device", {"shares": True})]
    if not place.has_gpu or nccl_shares():
        ways.append((", --per-device, NCCL", {"shares": True, "engine": "torch"}))
    for way, how in ways:
        for count in counts:
            name = f"{count} x {samples} samples{way}"
            ranks = _copies(place, count, samples, **how)
            rate, large = _rate(ranks), _rate(alone[count])
            if not (rate and one and large):
                yield judged(name, False, "ranks failed", "")
                continue
            kind = "MPS" if ranks and ranks[0]["mps"] else "no MPS"
            yield judged(
                name,
                True,
                f"{rate:.1f} samples/s ({kind}): {rate / one:.2f} of one process, "
                f"{rate / large:.2f} of one with {count * samples} samples",
                "",
                samples_per_second=rate,
                one=one,
                one_large=large,
            )


def _copies(
    place: Place,
    copies: int,
    samples: int,
    *,
    shares: bool = False,
    engine: str = "mpi",
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
    env = SHARED if engine == "torch" else {}
    return on_ranks(copies, place, work, env, engine)


def _rate(ranks: list[dict[str, Any]] | None) -> float:
    """Return the samples per second of all ranks; 0 if they failed."""
    if not ranks:
        return 0.0
    return float(ranks[0]["samples"]) / max(rank["seconds"] for rank in ranks)
