"""Training on pictures of which each rank reads its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import MODELS
from parity_support import lowered
from program_support import on_ranks
from torch import Tensor

from gemsc.base.boxes import Box
from gemsc.codegen.package import write_directory
from gemsc.options import CompileOptions
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.tiled import TiledDataset, Window, window_of
from gemsc.runtime.training.trainer import Trainer


class Parts:
    """The pictures of a batch, of which it notes what was read."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets
        self.shape = tuple(inputs.shape[2:])
        self.boxes: list[Box] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, index: int, box: Box) -> tuple[Tensor, Tensor]:
        self.boxes.append(box)
        place = (slice(None), *(slice(*interval) for interval in box))
        target = self.targets[index]
        return self.inputs[index][place], target[place] if target.dim() > 2 else target


@pytest.mark.parametrize("name", ["unet", "densecnn"])
def test_ranks_that_read_their_parts_train_like_those_that_read_all(
    name: str, tmp_path: Path
) -> None:
    plan = CompileOptions(ranks=5, tiles=("2x2",), micro_batches=2)
    write_directory(lowered(name, plan).compilation, tmp_path)
    (inputs,), targets = MODELS[name].inputs(2)
    size = inputs.shape[2]
    assert isinstance(Parts(inputs, targets), TiledDataset)

    def in_parts(trainer: Trainer) -> tuple[float, int]:
        dataset = Parts(inputs, targets)
        window = window_of(trainer.program.inputs.values(), dataset.shape)
        batches = Batches(dataset, 4, seed=0, shuffle=False, window=window)
        (batch,) = batches.epoch(0)
        given, target = batch.data
        loss = trainer.step(given, target, window=batches.window)
        return loss, max((b - a for box in dataset.boxes for a, b in box), default=0)

    def whole(trainer: Trainer) -> float:
        return trainer.step(inputs, targets)

    found = on_ranks(tmp_path, plan.ranks, in_parts)
    assert [loss for loss, _ in found] == on_ranks(tmp_path, plan.ranks, whole)
    assert all(size // 2 <= widest <= size // 2 + 3 for _, widest in found[:4])
    needs = size if name == "unet" else 0  # the target of the last rank
    assert found[4][1] == needs


def test_one_process_reads_whole_pictures() -> None:
    (inputs,), targets = MODELS["unet"].inputs(2)
    batches = Batches(Parts(inputs, targets), 4, seed=0, shuffle=False)
    (batch,) = batches.epoch(0)
    assert torch.equal(batch.data[0], inputs)
    assert batches.window == Window((32, 32), ((0, 32), (0, 32)))
