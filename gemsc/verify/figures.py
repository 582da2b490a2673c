"""Ask whether the figures of `metrics` are means over samples: evaluations take these.

rmse(8 samples) = 2.6, but (rmse(4 of them) + rmse(the other 4)) / 2 = 2.4
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemsc.runtime.data.metrics import Metrics, first_samples
from gemsc.runtime.training.step_report import concatenated

# of the outputs of one half, and whether it has other targets, too; the first leaves
# shares of 1 what they are
_OTHERS = (0.5, False), (-0.9, False), (-64.0, False), (0.5, True)
_NEAR = 1e-3  # of a figure: rounding is less
_DIGITS = 2, 3, 4  # of figures that are rounded to be printed


def no_means(
    given: Any, scored: tuple[Any, Any], size: int, dims: Sequence[int]
) -> str:
    """Say which figures of an output and a target of `size` samples are no means.

    Half of the samples are taken twice, the second time with other outputs, and perhaps
    targets. "" if all are means, or where this cannot be asked: a metric fails, or says
    something else when it is called again.
    """
    leaves = pytree.tree_leaves(scored)
    if not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
        return ""
    half, notes = max(size // 2, 1), dict[str, str]()
    first = first_samples(scored, half, size, dims)
    for factor, is_other in _OTHERS:
        # whatever a metric says of such outputs
        with suppress(Exception), warnings.catch_warnings(), redirect_stdout(None):
            warnings.simplefilter("ignore")
            parts = [first, _other(first[0], first[1], factor, is_other)]
            both = [concatenated(parts, dims)]
            whole, again = (_figures(given, both, 2 * half) for _ in range(2))
            apart = _figures(given, parts, half)
            for name, value in whole.items() if whole == again else ():
                if not _is_near(value, apart[name]):
                    text = f"{name}: {value:.4g} of a batch, {apart[name]:.4g} as"
                    notes.setdefault(name, f"{text} the mean of its halves")
    return "; ".join(notes.values())


def _is_near(value: float, other: float) -> bool:
    rounded = [10.0**-n for n in _DIGITS if value == round(value, n)]
    allowed = max(rounded, default=0.0)
    return math.isclose(value, other, rel_tol=_NEAR, abs_tol=allowed)


def _other(output: Any, target: Any, factor: float, is_other: bool) -> Any:
    """Return other outputs, and targets: those of a mask stay on one side of 1/2."""

    def scaled(leaf: Any) -> Any:
        return leaf * factor if _is_float(leaf) else leaf

    def replaced(leaf: Any) -> Any:
        if _is_float(leaf):
            return leaf / 2 + 0.75
        return torch.ones_like(leaf) if isinstance(leaf, Tensor) else leaf

    target = pytree.tree_map(replaced, target) if is_other else target
    return pytree.tree_map(scaled, output), target


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _figures(given: Any, batches: Sequence[Any], size: int) -> dict[str, float]:
    """Return those that are finite, of batches of so many samples."""
    metrics = Metrics(given)
    for output, target in batches:
        metrics.add(output, target, size)
    figures = metrics.figures()
    metrics.reset()
    return {name: value for name, (value, _) in figures.items() if math.isfinite(value)}
