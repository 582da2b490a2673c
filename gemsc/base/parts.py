"""Parts: what one rank holds of a tensor that the ranks of a stage share out.

Example, a weight of 384 x 128 that makes queries, keys and values of 4 heads, each 32
wide, on two ranks: dimension 0 is 3 x 4 heads x 32, and the first rank has

    Part((384, 128), dim=0, outer=3, units=4, rows=(0, 2))    # 192 x 128

A tensor that one rank alone holds is one unit: that rank has `Part((384, 128))`, the
others have `Part.nothing((384, 128))`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemsc.base.boxes import Interval


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the units of one dimension of a tensor, and all of its other dimensions.

    `shape` is that of the whole tensor. Its dimension `dim` is a product: `outer` times
    `units` times what is left; `rows` are the units that are meant, in each of the
    `outer` repetitions. With the defaults it is the whole tensor, of any shape: `()`
    counts as one row.
    """

    shape: tuple[int, ...]
    dim: int = 0
    outer: int = 1
    units: int = 1
    rows: Interval = (0, 1)

    def __str__(self) -> str:
        """Return it as Python: what a rank's file has."""
        if self == Part(self.shape):
            return f"Part({self.shape})"
        names = "dim", "outer", "units", "rows"
        named = [f"{name}={getattr(self, name)}" for name in names]
        return f"Part({self.shape}, {', '.join(named)})"

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Part:
        """Return the part that was written as JSON, with lists for tuples."""
        tuples = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
        return cls(**{**fields, **tuples})

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> Part:
        """Return no rows of a tensor: what ranks have of it that do not hold it."""
        return cls(shape, rows=(0, 0))

    @property
    def is_alone(self) -> bool:
        """Whether it is all of the tensor or nothing of it."""
        return self.units == 1

    @property
    def inner(self) -> int:
        """How many elements a unit has along the dimension."""
        return self._sizes[self.dim] // (self.outer * self.units)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        start, stop = self.rows
        if stop - start == self.units:
            return self.shape
        size = self.outer * (stop - start) * self.inner
        return (*self._sizes[: self.dim], size, *self._sizes[self.dim + 1 :])

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The parts of dimension `dim` that it takes, one for each repetition."""
        unit, size = self.inner, self.units * self.inner
        starts = (repeat * size for repeat in range(self.outer))
        first, last = self.rows
        return tuple((start + first * unit, start + last * unit) for start in starts)

    @property
    def share(self) -> float:
        """Which share of all elements it is."""
        return (self.rows[1] - self.rows[0]) / self.units

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor: a new tensor, contiguous."""
        part = self.view(whole).clone(memory_format=torch.contiguous_format)
        return part.view(self.local_shape)

    def view(self, whole: Tensor) -> Tensor:
        """Return the part as a view; its dimension is outer, rows and inner apart."""
        sizes = self.outer, self.units, self.inner
        around = self._sizes[: self.dim], self._sizes[self.dim + 1 :]
        split = whole.view(*around[0], *sizes, *around[1])
        start, stop = self.rows
        return split.narrow(self.dim + 1, start, stop - start)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copy a part to its place in a whole tensor."""
        target = self.view(whole)
        target.copy_(part.reshape(target.shape))

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The sizes of all dimensions, one at least."""
        return self.shape or (1,)


def rows_of(tensor: Tensor, rows: Interval) -> Tensor:
    """Return some rows of a tensor as a view; a number is one row."""
    start, stop = rows
    return (tensor if tensor.dim() else tensor.view(1))[start:stop]


def make_whole(parts: Collection[Part]) -> bool:
    """Whether parts of a tensor are all of it, and no element is in two of them."""
    forms = {(part.shape, part.dim, part.outer, part.units) for part in parts}
    rows = sorted(part.rows for part in parts)
    stops = [0, *(stop for _, stop in rows)]
    starts = [*(start for start, _ in rows), *(units for *_, units in forms)]
    return starts == stops


def by_path(placed: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Return who holds tensors alone by the shortest paths, `names` are those of all.

    A path stands for all tensors under it: `one.b` for `one.b.weight`, `one.b.bias`.
    """
    holders: dict[str, set[int | None]] = defaultdict(set)
    for name in names:
        for path in _paths(name):
            holders[path].add(placed.get(name))
    ranks = {}
    for name, rank in placed.items():
        ranks[next(p for p in _paths(name) if holders[p] == {rank})] = rank
    return ranks


def holder_of(name: str, placed: Mapping[str, int]) -> int | None:
    """Return who alone holds a tensor, if `placed` has it, by paths as in `by_path`."""
    return next((placed[path] for path in _paths(name) if path in placed), None)


def _paths(name: str) -> list[str]:
    """Return the paths of a tensor and of all modules that it is in, from above."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(1, len(words) + 1)]


def parts_of(stage: str) -> str:
    """Return how the sums of gradients of a stage's parts are called: `stage2 parts`.

    Those of parameters that one rank of the stage alone holds are among them.
    Parameters that all ranks of a stage hold as a whole are added up as `stage2`.
    """
    return f"{stage} parts"


def sums_in_order(stages: Iterable[int]) -> list[str]:
    """Return the sums of some stages' gradients in the order of every rank.

    The last stage is complete first; of a stage, its parts are the larger sum.
    """
    names = (f"stage{stage}" for stage in sorted(stages, reverse=True))
    return [key for name in names for key in (parts_of(name), name)]
