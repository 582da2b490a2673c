"""Exact least-maximum partition of a row of weights into contiguous parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
STEEPNESS = 16
DEAREST_CUT = 0.5


def partition(
    weights: Sequence[Sequence[float]],
    *,
    cut_costs: Sequence[float] | None = None,
    slack: float = 0.02,
    begins: Sequence[int] = (),
) -> list[int]:
    """Split `n` items into `k` contiguous, non-empty parts.

    Args:
        weights: `k` rows of `n` weights; row `p` holds what each item weighs in part
            `p` (the rows differ where, say, earlier pipeline stages hold more
            micro-batches; they are all the same row otherwise).
        cut_costs: `n - 1` costs; `cut_costs[i]` is paid for a cut after item `i`.
        slack: among the partitions whose largest part is within this fraction of the
            least possible, the one that is best in all is taken: weights are predicted,
            and a part that is nearly the largest may prove to be it. Each part costs
            its share of the least maximum to the power of 16, a cut half of its share
            of the costliest one: as much as a second part of 0.96 of the largest.
        begins: positions at which a part must begin, at most `k - 1`.

    Returns:
        The `k - 1` positions at which parts 1, 2, ... begin.

    Dynamic programming in O(k n^2): best[p][j], the least maximum of the first `j`
    items in `p` parts, is the minimum over i of max(best[p-1][i], weight of i..j).
    """
    rows = np.asarray(weights, dtype=np.float64)
    parts, items = rows.shape
    if parts > items:
        raise ValueError(f"cannot split {items} items into {parts} parts")
    crossing = np.zeros((items + 1, items), dtype=np.bool_)  # from column to row
    for position in begins:
        crossing[position + 1 :, :position] = True
    sums = np.concatenate([np.zeros((parts, 1)), np.cumsum(rows, axis=1)], axis=1)
    least, cuts = _dynamic_program(sums, crossing, np.maximum)
    if cut_costs is None:
        return cuts
    bound = least * (1.0 + slack)
    price = np.concatenate([[0.0], np.asarray(cut_costs, dtype=np.float64)])
    price *= DEAREST_CUT / max(price.max(), 1e-300)

    def add_prices(before: Array, part: Array) -> Array:
        cost = before + price + (np.minimum(part, bound) / (least or 1.0)) ** STEEPNESS
        return np.where(part <= bound, cost, np.inf)

    _, cuts = _dynamic_program(sums, crossing, add_prices)
    return cuts


def _dynamic_program(
    sums: Array,
    refused: npt.NDArray[np.bool_],
    combine: Callable[[Array, Array], Array],
) -> tuple[float, list[int]]:
    """Return the best value and the cuts.

    `combine(before, part)` values, for each end (rows) and each start `i` (columns) of
    the last part, the best of the first `i` items together with the weight of the part
    from `i` on. A last part that is `refused` is none.
    """
    parts, items = sums.shape[0], sums.shape[1] - 1
    best = np.full(items + 1, np.inf)
    best[0] = 0.0
    starts = np.zeros((parts, items + 1), dtype=np.int64)
    refused = refused | (np.arange(items + 1)[:, None] <= np.arange(items))
    for part in range(parts):
        weight = sums[part, :, None] - sums[part, :-1]
        options = combine(best[:-1], weight)
        options[refused] = np.inf
        starts[part] = np.argmin(options, axis=1)
        best = options[np.arange(items + 1), starts[part]]
    cuts: list[int] = []
    end = items
    for part in range(parts - 1, 0, -1):
        end = int(starts[part, end])
        cuts.append(end)
    return float(best[items]), cuts[::-1]
