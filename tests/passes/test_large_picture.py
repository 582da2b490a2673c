"""A picture of 16,384 x 16,384 pixels: each rank reads its part, and trains on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from models import MODELS
from parity_support import lowered
from program_support import on_ranks
from skimage import data
from torch import Tensor

from gemsc.base.boxes import Box
from gemsc.codegen.package import write_directory
from gemsc.options import CompileOptions
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.tiled import window_of
from gemsc.runtime.training.trainer import Trainer

SIZE, PART, HALO = 16384, 512, 3


@pytest.fixture
def picture(tmp_path: Path) -> Iterator[np.ndarray]:
    """A file on disk: a photograph mirrored again and again."""
    free = shutil.disk_usage(tmp_path).free
    if free < 4 * SIZE * SIZE:
        pytest.skip(f"the file takes {SIZE**2 >> 20} MiB, {free >> 20} MiB are free")
    path = tmp_path / "large.tif"
    photo = data.retina()[400 : 400 + PART, 500 : 500 + PART, 1]
    both = np.hstack([photo, photo[:, ::-1]])
    band = np.tile(both, (1, SIZE // (2 * PART)))
    whole = tifffile.memmap(path, shape=(SIZE, SIZE), dtype=np.uint8)
    for first in range(0, SIZE, PART):
        whole[first : first + PART] = band
        band = band[::-1]
    whole.flush()
    yield tifffile.memmap(path, mode="r")
    path.unlink()


class Crops:
    """Crops of the large picture; of each, only the box that a rank needs is read."""

    def __init__(self, picture: np.ndarray, size: int) -> None:
        self.picture, self.shape = picture, (size, size)
        self.origins = ((500, 500), (9000, 16000), (16100, 40), (8190, 8190))
        self.num_pixels = 0

    def __len__(self) -> int:
        return len(self.origins)

    def read(self, index: int, box: Box) -> tuple[Tensor, Tensor]:
        place = tuple(
            slice(start + origin, stop + origin)
            for (start, stop), origin in zip(box, self.origins[index], strict=True)
        )
        part = torch.from_numpy(self.picture[place] / np.float32(255))[None]
        self.num_pixels += part.numel()
        return part.expand(3, -1, -1), (part > 0.4).float()


@pytest.mark.nightly
def test_crops_of_it_train_as_if_each_rank_had_read_all(
    picture: np.ndarray, tmp_path: Path
) -> None:
    plan = CompileOptions(ranks=2, tiles=("2x1",), micro_batches=2)
    program = tmp_path / "program"
    write_directory(lowered("unet", plan).compilation, program)
    size = MODELS["unet"].inputs(1)[0][0].shape[2]

    def step(trainer: Trainer, *, in_parts: bool) -> tuple[float, int]:
        dataset = Crops(picture, size)
        window = window_of(trainer.program.inputs.values(), dataset.shape)
        batches = Batches(
            dataset, 4, seed=0, shuffle=False, window=window if in_parts else None
        )
        (batch,) = batches.epoch(0)
        given, target = batch.data
        loss = trainer.step(given, target, window=batches.window)
        return loss, dataset.num_pixels

    parts = on_ranks(program, 2, lambda trainer: step(trainer, in_parts=True))
    whole = on_ranks(program, 2, lambda trainer: step(trainer, in_parts=False))
    assert [loss for loss, _ in parts] == [loss for loss, _ in whole]
    assert torch.tensor(parts[0][0]).isfinite()
    read = 2 * 4  # the samples of the first batch twice: are they the same again?
    needed = read * (size // 2 + HALO) * size
    assert all(0 < count <= needed for _, count in parts)
    assert all(count == read * size**2 for _, count in whole)
