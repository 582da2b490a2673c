"""Training on pictures of which each rank reads its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import MODELS
from nightly import at_night
from parity_support import lowered
from program_support import mse, on_ranks, written
from torch import Tensor, nn

from gemsc.base.boxes import Box
from gemsc.codegen.package import write_directory
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.tiled import TiledDataset, Window, window_of
from gemsc.runtime.training.trainer import Trainer


class Parts:
    """The pictures of a batch, of which it notes what was read."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets
        self.shape = tuple(inputs.shape[2:])
        if self.shape[-1] <= 3:  # channels
            self.shape = tuple(inputs.shape[1:-1])
        self.boxes: list[Box] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, index: int, box: Box) -> tuple[Tensor, Tensor]:
        self.boxes.append(box)
        place = tuple(slice(*interval) for interval in box)
        if self.inputs.shape[1:-1] != self.shape:
            place = (slice(None), *place)
        target = self.targets[index]
        return self.inputs[index][place], target[place] if target.dim() > 2 else target


@pytest.mark.slow
@pytest.mark.parametrize("name", ["densecnn", *at_night("unet")])
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

    of_ranks = on_ranks(tmp_path, plan.ranks, in_parts)
    assert [loss for loss, _ in of_ranks] == on_ranks(tmp_path, plan.ranks, whole)
    assert all(size // 2 <= widest <= size // 2 + 3 for _, widest in of_ranks[:4])
    needs = size if name == "unet" else 0  # the target of the last rank
    assert of_ranks[4][1] == needs


class Noisy(Parts):
    """Draws the same numbers whatever is read."""

    def read(self, index: int, box: Box) -> tuple[Tensor, Tensor]:
        input, target = super().read(index, box)
        return input, target + torch.rand(())


@pytest.mark.parametrize(
    ("whole_targets", "are_whole"),
    [("none", [False, False]), ("last", [False, True]), ("all", [True, True])],
)
def test_whole_targets_are_read_beside_parts(
    whole_targets: str, are_whole: list[bool]
) -> None:
    images = torch.arange(3 * 16.0).view(3, 1, 4, 4)
    options = {"seed": 0, "shuffle": False}
    expected = [
        b.data[1] for b in Batches(Noisy(images, images), 2, **options).epoch(0)
    ]
    window = Window((4, 4), ((2, 4), (0, 4)))
    batches = Batches(
        Noisy(images, images), 2, window=window, whole_targets=whole_targets, **options
    )
    for batch, target, is_whole in zip(
        batches.epoch(0), expected, are_whole, strict=True
    ):
        part = target[:, :, 2:]
        assert torch.equal(batch.data[1], part)
        assert torch.equal(batch.targets, target if is_whole else part)


def test_one_process_reads_whole_pictures() -> None:
    (inputs,), targets = MODELS["unet"].inputs(2)
    batches = Batches(Parts(inputs, targets), 4, seed=0, shuffle=False)
    (batch,) = batches.epoch(0)
    assert torch.equal(batch.data[0], inputs)
    assert batches.window == Window((32, 32), ((0, 32), (0, 32)))


class ChannelsLast(nn.Module):
    """Takes and gives pictures as TensorFlow has them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.leave = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = (x * 0.5).permute(0, 3, 1, 2)
        return self.leave(torch.relu(self.enter(first))).permute(0, 2, 3, 1)


def test_pictures_with_their_channels_last_are_cut_by_rows_and_columns(
    tmp_path: Path,
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ChannelsLast()
        inputs, targets = torch.rand(4, 12, 16, 3), torch.rand(4, 12, 16, 1)
    program = written(
        tmp_path,
        model,
        (inputs[:2],),
        target=targets[:2],
        ranks=4,
        tiles=("2x2",),
        micro_batches=2,
    )
    assert not program.plan.barriers

    def in_parts(trainer: Trainer) -> tuple[float, set[Box]]:
        dataset = Parts(inputs, targets)
        window = window_of(trainer.program.inputs.values(), dataset.shape)
        batches = Batches(dataset, 4, seed=0, shuffle=False, window=window)
        (batch,) = batches.epoch(0)
        given, target = batch.data
        return trainer.step(given, target, window=window), set(dataset.boxes)

    of_ranks = on_ranks(tmp_path, 4, in_parts)
    losses, boxes = zip(*of_ranks, strict=True)
    with torch.no_grad():
        assert losses == pytest.approx([float(mse(model(inputs), targets))] * 4)
    rows, columns = ((0, 6), (6, 12)), ((0, 8), (8, 16))
    assert list(boxes) == [{(row, column)} for row in rows for column in columns]


def test_a_part_that_cannot_be_read_is_named_with_the_call_that_reads_it() -> None:
    class Refusing(Parts):
        def read(self, index: int, box: Box) -> tuple[Tensor, Tensor]:
            raise GemscError("rows (0, 4) are not within it", help="read others")

    images, window = torch.zeros(2, 1, 4, 4), Window((4, 4), ((2, 4), (0, 4)))
    dataset = Refusing(images, images)
    batches = Batches(dataset, 2, seed=0, shuffle=False, window=window)
    with pytest.raises(GemscError) as caught:
        next(batches.epoch(0))
    assert caught.value.message == (
        "sample 0 cannot be read: rows (0, 4) are not within it"
    )
    assert "try dataset().read(0, ((2, 4), (0, 4)))" in str(caught.value)
