"""Batches for a rank: the same samples, and the same augmentation, on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["Batches", "seed_of"]


def seed_of(*parts: int) -> int:
    """Return a seed of 32 bits that depends on all parts (FNV-1a)."""
    value = 0x811C9DC5
    for byte in ",".join(map(str, parts)).encode():
        value = ((value ^ byte) * 0x01000193) % 2**32
    return value


class _Reproducible(Dataset[Any]):
    """A dataset whose samples depend on nothing but seed, epoch and index.

    Every rank that needs a sample reads it itself, so random crops and flips must come
    out alike: all generators are seeded for each sample.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed = seed_of(self.seed, epoch, index)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return self.dataset[index]


class Batches:
    """Batches of `size` samples, shuffled anew each epoch or in order.

    A last batch that is not full is dropped in training (`shuffle`); in evaluation it
    is filled up with its last sample, and `real` says how many samples count.
    """

    def __init__(
        self, dataset: Any, size: int, *, seed: int, shuffle: bool, workers: int = 0
    ) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.workers = workers
        self.num_samples = len(dataset)
        self._dataset = _Reproducible(dataset, seed)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        if self.shuffle:
            return self.num_samples // self.size
        return -(-self.num_samples // self.size)

    def epoch(self, number: int) -> Iterator[tuple[Any, int]]:
        """Yield (collated batch, number of real samples)."""
        keys = [[(number, i) for i in row] for row in self._indices(number)]
        loader = DataLoader(self._dataset, batch_sampler=keys, num_workers=self.workers)
        for row, batch in zip(self._indices(number), loader, strict=True):
            yield batch, min(self.size, self.num_samples - self._place(row, number))

    def _place(self, row: Sequence[int], number: int) -> int:
        return 0 if self.shuffle else row[0]

    def _indices(self, number: int) -> list[list[int]]:
        order = list(range(self.num_samples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_of(self.seed, number))
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        rows = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        if self.shuffle:
            return [row for row in rows if len(row) == self.size]
        return [row + row[-1:] * (self.size - len(row)) for row in rows]
