"""Pictures of which each rank reads its part: TIFF files, and training from them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from models import MODELS
from program_support import on_ranks
from skimage import data
from test_parity import lowered
from torch import Tensor

from gemsc.base.boxes import Box
from gemsc.codegen.package import write_directory
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.tiff import TiffPicture
from gemsc.runtime.data.tiled import TiledDataset, Window, window_of
from gemsc.runtime.training.trainer import Trainer

BOXES = [
    ((0, 10), (0, 10)),
    ((60, 70), (120, 200)),  # over the edges of the file's tiles
    ((0, 150), (0, 211)),
    ((149, 150), (210, 211)),
    ((5, 5), (0, 0)),
]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_box_of_a_tiff_file(box: Box, channels: int, tmp_path: Path) -> None:
    picture = data.retina()[300:450, 300:511]
    whole = picture if channels == 3 else picture[..., 0]
    tifffile.imwrite(tmp_path / "a.tif", whole, tile=(64, 64), compression=None)
    file = TiffPicture(tmp_path / "a.tif")
    assert file.shape == (150, 211)
    rows, columns = (slice(*interval) for interval in box)
    wanted = picture[rows, columns, :channels].transpose(2, 0, 1)
    assert torch.equal(file.read(box), torch.from_numpy(wanted.copy()))


def test_of_a_large_file_only_a_part_is_in_memory(tmp_path: Path) -> None:
    size, part = 4096, 600
    picture = np.tile(data.retina()[:1024, :1024, 1], (4, 4))
    tifffile.imwrite(tmp_path / "a.tif", picture, tile=(256, 256))
    file = TiffPicture(tmp_path / "a.tif")
    tracemalloc.start()
    found = file.read(((1000, 1000 + part), (2000, 2000 + part)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    wanted = picture[1000 : 1000 + part, 2000 : 2000 + part]
    assert np.array_equal(found[0].numpy(), wanted)
    assert peak < size * size / 8


def test_files_that_cannot_be_read_in_parts(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "strips.tif", np.zeros((64, 64), np.uint8))
    with pytest.raises(GemscError, match="holds no tiled image"):
        TiffPicture(tmp_path / "strips.tif")
    (tmp_path / "text.tif").write_text("no picture")
    with pytest.raises(GemscError, match="not a TIFF file that can be read"):
        TiffPicture(tmp_path / "text.tif")
    with pytest.raises(GemscError, match="not a TIFF file that can be read"):
        TiffPicture(tmp_path / "nowhere.tif")


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
    plan = CompileOptions(ranks=5, tiles=("2x2",), micro_batches=2, fuse_halos="off")
    write_directory(lowered(name, plan).compilation, tmp_path)
    (inputs,), targets = MODELS[name].inputs(2)
    size = inputs.shape[2]
    assert isinstance(Parts(inputs, targets), TiledDataset)

    def in_parts(trainer: Trainer) -> tuple[float, int]:
        dataset = Parts(inputs, targets)
        window = window_of(trainer.worker.inputs.values(), dataset.shape)
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
