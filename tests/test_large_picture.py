"""A picture of 16,384 x 16,384 pixels: each rank reads its part, and trains on it."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Iterator
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
from gemsc.options import CompileOptions
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.tiff import TiffPicture
from gemsc.runtime.data.tiled import window_of
from gemsc.runtime.training.trainer import Trainer

SIZE, PART, HALO = 16384, 512, 3


def part_of_file(row: int, column: int, photo: np.ndarray) -> np.ndarray:
    """Return a tile of the file: the photograph mirrored again and again."""
    turned = photo[::-1] if row % 2 else photo
    turned = turned[:, ::-1] if column % 2 else turned
    return np.ascontiguousarray(turned)


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    return data.retina()[400 : 400 + PART, 500 : 500 + PART, 1]


@pytest.fixture(scope="module")
def path(photo: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large")
    free = shutil.disk_usage(folder).free
    if free < 4 * SIZE * SIZE:
        pytest.skip(f"the file takes {SIZE**2 >> 20} MiB, {free >> 20} MiB are free")
    count = range(SIZE // PART)
    tiles = (part_of_file(row, column, photo) for row in count for column in count)
    tifffile.imwrite(
        folder / "large.tif",
        tiles,
        shape=(SIZE, SIZE),
        dtype=np.uint8,
        tile=(PART, PART),
    )
    yield folder / "large.tif"
    (folder / "large.tif").unlink()


def test_each_of_four_tiles_reads_a_quarter(path: Path, photo: np.ndarray) -> None:
    file = TiffPicture(path)
    assert file.shape == (SIZE, SIZE)
    half = SIZE // 2
    sides = (0, half + HALO), (half - HALO, SIZE)
    for rows in sides:
        for columns in sides:
            tracemalloc.start()
            found = file.read((rows, columns))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert found.shape == (1, half + HALO, half + HALO)
            assert peak < 1.1 * found.nbytes
            for y, x in ((0, 0), (half - 1, 7), (half, half), (4000, half + 2)):
                row, column = y + rows[0], x + columns[0]
                tile = part_of_file(row // PART, column // PART, photo)
                assert found[0, y, x] == tile[row % PART, column % PART]


class Crops:
    """Crops of the large picture; of each, only the box that a rank needs is read."""

    def __init__(self, path: Path, size: int) -> None:
        self.file, self.shape = TiffPicture(path), (size, size)
        self.origins = ((500, 500), (9000, 16000), (16100, 40), (8190, 8190))
        self.num_pixels = 0

    def __len__(self) -> int:
        return len(self.origins)

    def read(self, index: int, box: Box) -> tuple[Tensor, Tensor]:
        moved = tuple(
            (start + origin, stop + origin)
            for (start, stop), origin in zip(box, self.origins[index], strict=True)
        )
        part = self.file.read(moved).float() / 255
        self.num_pixels += part.numel()
        return part.expand(3, -1, -1), (part > 0.4).float()


def test_crops_of_it_train_as_if_each_rank_had_read_all(
    path: Path, tmp_path: Path
) -> None:
    plan = CompileOptions(ranks=2, tiles=("2x1",), fuse_halos="off", micro_batches=2)
    write_directory(lowered("unet", plan).compilation, tmp_path)
    size = MODELS["unet"].inputs(1)[0][0].shape[2]

    def step(trainer: Trainer, *, in_parts: bool) -> tuple[float, int]:
        dataset = Crops(path, size)
        window = window_of(trainer.worker.inputs.values(), dataset.shape)
        batches = Batches(
            dataset, 4, seed=0, shuffle=False, window=window if in_parts else None
        )
        (batch,) = batches.epoch(0)
        given, target = batch.data
        loss = trainer.step(given, target, window=batches.window)
        return loss, dataset.num_pixels

    parts = on_ranks(tmp_path, 2, lambda trainer: step(trainer, in_parts=True))
    whole = on_ranks(tmp_path, 2, lambda trainer: step(trainer, in_parts=False))
    assert [loss for loss, _ in parts] == [loss for loss, _ in whole]
    assert torch.tensor(parts[0][0]).isfinite()
    needed = 4 * (size // 2 + HALO) * size
    assert all(0 < count <= needed for _, count in parts)
    assert all(count == 4 * size**2 for _, count in whole)
