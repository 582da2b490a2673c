"""Fit seconds as a sum of features, each times a number that is not negative."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
ROUNDS = 25
NEGLIGIBLE = 1e-3  # what no sample owes a larger part of its time to is left out
OUTLIER = 0.3  # beyond this error, in log seconds, a sample pulls no harder


def fit_seconds(
    features: Sequence[dict[str, float]], seconds: Sequence[float]
) -> dict[str, float]:
    """Return a coefficient for each feature that takes time.

    The model is t = sum of c_i x_i with c_i >= 0, so that predictions are positive and
    grow with every feature. It minimises the error of log t (a small operator counts as
    much as a large one) by Gauss-Newton: around the current prediction p,
    log(t') = log p + (t' - p) / p, which makes each round a non-negative least squares
    problem with rows x / p and right sides 1 + log(t / p). Samples whose error is
    beyond `OUTLIER` count less (Huber 1964).
    """
    names = sorted({name for row in features for name in row})
    rows = np.array([[row.get(name, 0.0) for name in names] for row in features])
    times = np.asarray(seconds, dtype=np.float64)
    used = np.flatnonzero(rows.max(axis=0) > 0)
    scale = rows[:, used].max(axis=0)
    rows = rows[:, used] / scale
    found = least_squares(rows / times[:, None], np.ones(len(times)))
    for _ in range(ROUNDS):
        predicted = np.maximum(rows @ found, 1e-3 * times)
        error = np.log(times / predicted)
        weight = np.sqrt(np.minimum(1.0, OUTLIER / np.maximum(np.abs(error), 1e-12)))
        step = least_squares(
            rows * (weight / predicted)[:, None], weight * (1.0 + error)
        )
        found = 0.5 * (found + step)
    shares = (rows * found / (rows @ found)[:, None]).max(axis=0)
    found[shares < NEGLIGIBLE] = 0.0
    pairs = zip(used, found / scale, strict=True)
    return {names[index]: float(f"{value:.5g}") for index, value in pairs if value > 0}


def least_squares(matrix: Array, right: Array) -> Array:
    """Return x >= 0 that minimises |matrix x - right| (Lawson and Hanson 1974, 23.3).

    Variables enter the free set one by one, the one whose gradient promises most first;
    a step that would make a free one negative stops where the first becomes zero.
    """
    num = matrix.shape[1]
    x = np.zeros(num)
    free = np.zeros(num, dtype=bool)
    tolerance = 1e-12 * float(np.abs(matrix.T @ right).max(initial=1e-300))
    for _ in range(3 * num):
        gradient = matrix.T @ (right - matrix @ x)
        if free.all() or gradient[~free].max() <= tolerance:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            trial = np.zeros(num)
            trial[free] = np.linalg.lstsq(matrix[:, free], right, rcond=None)[0]
            bad = free & (trial <= 0)
            if not bad.any():
                break
            ratio = x[bad] / np.maximum(x[bad] - trial[bad], 1e-300)
            x = x + float(ratio.min()) * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = trial
    return x
