"""Batches for a rank: the same samples, and the same augmentation, on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from gemsc.base.digest import digest
from gemsc.base.process import outlast_signals
from gemsc.base.rng import seed_of
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.data.tiled import TiledDataset, Window

__all__ = ["Batch", "Batches", "repeated"]


class _Reproducible(Dataset[Any]):
    """A dataset whose samples depend on nothing but seed, epoch and index.

    Every rank that needs a sample reads it itself, so random crops and flips must come
    out alike: all generators are seeded for each sample. A key is (epoch, index,
    whether to give the sample's digest, too).
    """

    def __init__(self, dataset: Any, seed: int, window: Window | None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.window = window

    def __getitem__(self, key: tuple[int, int, bool]) -> tuple[Any, str]:
        epoch, index, is_compared = key
        seed = seed_of(self.seed, epoch, index)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        if self.window is not None:
            sample = self.dataset.read(index, self.window.box)
        else:
            sample = self.dataset[index]
        return sample, digest(sample) if is_compared else ""


@dataclass(frozen=True)
class Batch:
    """One copy's part of a batch: `data` is collated, the first `real` samples count.

    `is_full` says whether all samples of all parts count. `digests` are those of the
    samples by index, where ranks are to compare them (see `SharedData`).
    """

    data: Any
    real: int
    is_full: bool
    digests: dict[int, str] = field(default_factory=dict)


class Batches:
    """Batches of `size` samples, shuffled anew each epoch or in order.

    Copies of the model share a batch: each reads its own `part` of `num_parts`.
    A last batch that is not full has as many times `least` samples as there are, by
    default none in training (`shuffle`) and all in evaluation. It is filled up with its
    last sample. Of a `TiledDataset` the `window` of each image
    is read. The first batch of an epoch has digests; with `compare_all`, every batch.
    """

    def __init__(
        self,
        dataset: Any,
        size: int,
        *,
        seed: int,
        shuffle: bool,
        workers: int = 0,
        part: int = 0,
        num_parts: int = 1,
        window: Window | None = None,
        compare_all: bool = False,
        least: int | None = None,
    ) -> None:
        if window is None and isinstance(dataset, TiledDataset):
            box = tuple((0, size) for size in dataset.shape)
            window = Window(tuple(dataset.shape), box)
        self.window = window
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.workers = workers
        self.compare_all = compare_all
        self.least = least or (size if shuffle else 1)
        self.num_samples = _length(dataset)
        self._part_size = size // num_parts
        self._start = part * self._part_size
        self._dataset = _Reproducible(dataset, seed, window)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return max((self.num_samples - self.least) // self.size + 1, 0)

    def count(self, batch: int) -> int:
        """Return how many samples of a batch of an epoch count, of all parts."""
        left = self.num_samples - batch * self.size
        return min(left - left % self.least, self.size)

    def indices(self, number: int, batch: int) -> list[int]:
        """Return the samples of a batch of an epoch, those of all parts."""
        return self._order(number)[batch * self.size :][: self.count(batch)]

    def _order(self, number: int) -> list[int]:
        order = list(range(self.num_samples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_of(self.seed, number))
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        return order

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Yield this part of each batch, from the `first` one on."""
        order = self._order(number)
        numbers = range(first, len(self))
        rows = [order[i * self.size :][: self.count(i)] for i in numbers]
        end = self._start + self._part_size
        parts = [(row + row[-1:] * self.size)[self._start : end] for row in rows]
        keys = [
            [(number, index, self.compare_all or i == 0) for index in part]
            for i, part in enumerate(parts)
        ]
        # part 0 reads this one anyway: so those of all copies can be compared
        common = [[(number, rows[0][0], True)]] if self._start and rows else []
        loader = DataLoader(
            self._dataset,
            batch_sampler=common + keys,
            num_workers=self.workers,
            collate_fn=_collate,
            worker_init_fn=outlast_signals,
        )
        read = iter(loader)
        digests = {key[1]: next(read)[1][0] for (key,) in common}
        for row, part, (data, found) in zip(rows, parts, read, strict=True):
            real = min(max(len(row) - self._start, 0), self._part_size)
            digests |= {i: text for i, text in zip(part, found, strict=True) if text}
            yield Batch(data, real, len(row) == self.size, digests)
            digests = {}


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise GemscError(
            f"the dataset is of type {type(dataset).__name__}, which has no len()",
            help="return a map-style Dataset: with len() and [index]",
        ) from None


def _collate(read: list[tuple[Any, str]]) -> tuple[tuple[Any, Any], list[str]]:
    """Join samples to a batch of inputs and one of targets; return the digests, too."""
    samples = [sample for sample, _ in read]
    try:
        batch = default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise GemscError(
            f"samples of the dataset cannot be collated into a batch: {error}",
            help="return samples of the same structure, shapes and dtypes",
        ) from error
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise GemscError(
            "the dataset does not return (input, target) pairs",
            help="return a pair from __getitem__",
        )
    return (batch[0], batch[1]), [text for _, text in read]


def repeated(examples: Any, plan: Plan) -> Any:
    """Return a batch for all micro-batches of a step from the examples of one."""
    size, count = plan.micro_batch_size, plan.data * plan.micro_batches

    def repeat(leaf: Any) -> Any:
        many = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size
        return torch.cat([leaf] * count) if many else leaf

    return pytree.tree_map(repeat, examples)
