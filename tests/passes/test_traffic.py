"""Messages, sums and bytes of a training step: predicted is what is counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from parity_support import NETWORKS, lowered
from program_support import Trainer, run_local
from torch import Tensor, device

from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram
from gemsc.options import CompileOptions


class Counting:
    """A transport that counts what it sends, and the sums that tiles begin."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, tensor: Tensor, dest: int, tag: int) -> Any:
        self.counts["messages"] += 1
        self.counts["message_bytes"] += tensor.nbytes
        return self._transport.send(tensor, dest, tag)

    def group(self, ranks: tuple[int, ...], key: str = "") -> Any:
        group = self._transport.group(ranks, key)
        return CountingSums(group, self.counts) if key.startswith("tiles of") else group


class CountingSums:
    """A group that counts its sums."""

    def __init__(self, group: Any, counts: Counter[str]) -> None:
        self._group, self._counts = group, counts
        self.ranks = group.ranks

    def connect(self) -> None:
        self._group.connect()

    def all_reduce(self, tensor: Tensor) -> Any:
        self._counts["sums"] += 1
        self._counts["sum_bytes"] += tensor.nbytes
        return self._group.all_reduce(tensor)


CASES = [
    ("unet", {"ranks": 2, "tiles": "2x1"}),
    ("unet", {"ranks": 4, "tiles": "1x2", "schedule": "mast", "micro_batches": 2}),
    ("unet", {"ranks": 5, "tiles": "3x1,2x1"}),
    ("unet", {"ranks": 3}),
    ("resnet18", {"ranks": 4, "tiles": "2x1"}),
    ("tiled", {"ranks": 4, "tiles": "2x2"}),
    ("tiled", {"ranks": 5, "tiles": "2x2"}),
    ("tiled", {"ranks": 8, "tiles": "3x2,1x2"}),
    ("unet", {"ranks": 2, "tiles": "2x1", "recompute": ("all",)}),
    ("resnet18", {"ranks": 4, "tiles": "2x1", "recompute": ("all",)}),
    ("tiled", {"ranks": 8, "tiles": "3x2,1x2", "recompute": ("all",)}),
    ("gpt", {"ranks": 2, "shards": "2", "trunk": "whole"}),
    ("gpt", {"ranks": 3, "shards": "2,1", "trunk": "batch"}),
    ("gpt", {"ranks": 3, "shards": "3", "trunk": "sequence"}),
    ("resnet", {"ranks": 2, "shards": "2", "trunk": "batch", "recompute": ("all",)}),
    ("llama", {"ranks": 6, "shards": "2,1,3", "trunk": "batch"}),
    ("words", {"ranks": 4, "shards": "4", "trunk": "sequence"}),
]


def counted(
    name: str, program: CompiledProgram, directory: Path
) -> tuple[dict[str, int], dict[str, int]]:
    """Return what a step sends on threads, and what was predicted of it."""
    write_directory(program.compilation, directory)
    plan = program.plan
    inputs, target = NETWORKS[name].inputs(plan.data * plan.micro_batches)

    def main(transport: Any) -> Counter[str]:
        counting = Counting(transport)
        trainer = Trainer(directory, counting, device=device("cpu"))
        counting.counts.clear()
        trainer.step(inputs, target)
        return counting.counts

    counts = sum(run_local(plan.ranks, main), Counter())
    return dict(counts), {name: size for name, size in plan.traffic.items() if size}


@pytest.mark.slow(1)
@pytest.mark.by_day(3)
@pytest.mark.parametrize(("name", "choices"), CASES, ids=str)
def test_what_is_sent_is_what_was_predicted(
    name: str, choices: dict[str, Any], tmp_path: Path
) -> None:
    program = lowered(name, CompileOptions(**{"micro_batches": 2, **choices}))
    sent, predicted = counted(name, program, tmp_path)
    assert sent == predicted
    assert sum(sent.values()) > 0
