"""Voxels of another size, as MONAI's `Spacing` makes them: the first one stays.

Along an axis of 4 voxels of 1.5 mm, those of 1 mm:

    o-----o-----o-----o
    o---o---o---o---o-      at 0, 1, 2, 3, 4 mm: the last one is within half of its size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def count_voxels(count: int, old: float, new: float) -> int:
    """Return how many voxels of size `new` replace `count` of size `old`."""
    return int(np.round((count - 1) * old / new + 1))


def steps_of(count: int, old: float, new: float) -> NDArray[Any]:
    """Return where `count` voxels of size `new` lie, counted in those of size `old`."""
    return np.arange(count) * (new / old)


def at_places(data: NDArray[Any], places: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return numbers at these places of the first axes; the edge goes on outside.

    Integers and truth values are those of the nearest voxel, others are interpolated
    linearly.
    """
    is_label = data.dtype.kind in "iub"
    for axis, place in enumerate(places):
        last = data.shape[axis] - 1
        place = place.clip(0, last)
        if is_label:
            data = data.take(np.rint(place).astype(int), axis)
            continue
        low = np.floor(place).astype(int)
        shape = [-1 if n == axis else 1 for n in range(data.ndim)]
        share = (place - low).astype(data.dtype).reshape(shape)
        high = data.take(np.minimum(low + 1, last), axis)
        data = data.take(low, axis) * (1 - share) + high * share
    return data
