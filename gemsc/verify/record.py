"""What training steps left: of one process, or joined from what ranks wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemsc.base.parts import Part
from gemsc.weights.join import pasted
from gemsc.weights.read import read_tensors


@dataclass(frozen=True)
class StepRecord:
    """Losses of some steps, gradients of the first, tensors after the last.

    `unequal` are tensors that all ranks of a grid, or several replicas, hold as a
    whole, but not bit for bit the same: they drift apart, or one rank of them has none.
    `outputs` are what evaluation gives after the steps, where it was asked for.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    activation_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    unequal: frozenset[str] = frozenset()
    outputs: dict[str, Tensor] = field(default_factory=dict)


def read_record(folder: Path, num_ranks: int) -> StepRecord:
    """Join what the ranks wrote (gemsc.runtime.training.verification)."""
    ranks = range(num_ranks)
    losses, *_ = (_read_json(folder / f"losses{rank}.json") for rank in ranks)
    peaks = [_read_json(folder / f"memory{rank}.json") for rank in ranks]
    held = [_read_json(folder / f"held{rank}.json") for rank in ranks]
    parts = [
        {name: Part.read(part) for name, part in each["parts"].items()} for each in held
    ]
    joined: dict[str, dict[str, Tensor]] = {}
    unequal: set[str] = set()
    for kind in ("gradients", "state"):
        files = [folder / f"{kind}{rank}.safetensors" for rank in ranks]
        joined[kind] = pasted(zip(map(read_tensors, files), parts, strict=True))
        for rank, each in enumerate(held):
            if (first := each["grid"][0]) != rank:
                pair = read_tensors(files[first]), read_tensors(files[rank])
                alone = {*each["alone"], *held[first]["alone"]}
                unequal |= _unequal(*pair) - parts[rank].keys() - alone
    unequal |= _drifted(folder, parts, joined["gradients"].keys())
    return StepRecord(
        losses,
        **joined,
        activation_bytes=[activations for activations, _ in peaks],
        peak_bytes=[peak for _, peak in peaks],
        unequal=frozenset(unequal),
    )


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _drifted(
    folder: Path, parts: list[dict[str, Part]], trained: Iterable[str]
) -> set[str]:
    """Return trained parameters that ranks hold as a whole, each with other bits."""
    first: dict[str, Tensor] = {}
    found = set()
    for rank, own in enumerate(parts):
        tensors = read_tensors(folder / f"state{rank}.safetensors")
        for name in tensors.keys() & trained - own.keys():
            if not _same_bits(first.setdefault(name, tensors[name]), tensors[name]):
                found.add(name)
    return found


def _unequal(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> set[str]:
    """Return which tensors are not bit for bit the same."""
    both = {name: (mine.get(name), theirs.get(name)) for name in {*mine, *theirs}}
    return {
        name
        for name, (one, other) in both.items()
        if one is None or other is None or not _same_bits(one, other)
    }


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    pair = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*pair)
