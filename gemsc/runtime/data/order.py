"""Which samples are in each batch of an epoch.

Ten samples of two shape classes, three to a batch of class 0 and two to one of class 1:

    class of each sample    0 0 1 0 1 0 0 1 0 0
    in order                [0 1 3] [5 6 8] [9] [2 4] [7]
    shuffled                [9 8 1] [2 7] [3 5 6]      of class 0 one is left out

All ranks know of all batches: the order depends on a seed and on the classes alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gemsc.base.rng import seed_of


class BatchRow(NamedTuple):
    """The samples that count in a batch, and their shape class."""

    indices: list[int]
    shape: int = 0


class BatchOrder:
    """The batches of each epoch: as many as the samples of each class fill.

    `sizes` are the samples of a batch of each class. A last one of a class that is not
    full has as many times `least` samples as there are. `shapes` are the classes of the
    samples, where there are several. A batch has the same number of samples of the same
    class in each epoch, but not its place, where batches are shuffled.
    """

    def __init__(
        self,
        num_samples: int,
        sizes: Sequence[int],
        least: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        shapes: Tensor | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.sizes = sizes
        self.least = least
        self._seed = seed
        self.shuffle = shuffle
        self._shapes = shapes
        counts = [num_samples]
        if shapes is not None:
            counts = torch.bincount(shapes, minlength=len(sizes)).tolist()
        self.counts = counts  # of samples, by class
        by_class = zip(counts, sizes, least, strict=True)
        self.batches = [max((n - few) // size + 1, 0) for n, size, few in by_class]
        self._ends = [*accumulate(self.batches)]

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self._ends[-1]

    def epoch(self, number: int) -> Epoch:
        """Return the batches of an epoch."""
        samples, places = torch.arange(self.num_samples), None
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed_of(self._seed, number))
            samples = torch.randperm(self.num_samples, generator=generator)
            if self._shapes is not None:
                places = torch.randperm(len(self), generator=generator)
        members = [samples]
        if self._shapes is not None:
            of_samples = self._shapes[samples]
            members = [samples[of_samples == i] for i in range(len(self.sizes))]
        return Epoch(self, members, places)

    def place(self, batch: int) -> tuple[int, int, int]:
        """Return class, first sample and number of samples of an epoch's batch.

        Batches of a class come one after the other here, and samples in its order.
        """
        shape = bisect_right(self._ends, batch)
        size, least = self.sizes[shape], self.least[shape]
        first = (batch - self._ends[shape] + self.batches[shape]) * size
        left = self.counts[shape] - first
        return shape, first, min(left - left % least, size)


@dataclass(frozen=True, eq=False)
class Epoch:
    """The batches of one epoch."""

    _order: BatchOrder
    _members: Sequence[Tensor]  # the samples of each class, in order
    _places: Tensor | None  # what mixes the batches

    def row(self, batch: int) -> BatchRow:
        """Return the samples of a batch that count."""
        place = batch if self._places is None else int(self._places[batch])
        shape, first, count = self._order.place(place)
        indices: list[int] = self._members[shape][first : first + count].tolist()
        return BatchRow(indices, shape)
