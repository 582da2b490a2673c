"""Numbers that are not finite: found before they reach a weight, and named.

Each rank looks at its losses and, in one pass, at its gradients. One sum over all ranks
before the optimizer's step has the losses and the number of such ranks. Then "stop"
raises, "skip" leaves the update out, and "warn" makes it. In float16, what is too large
may be the factor of the loss: see `LossScale`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.base.units import show_some
from gemsc.errors import GemscError

MOST_NAMED = 3
ADVICE = "try a smaller learning rate, or --clip-norm 1; look at the data"
_IGNORED = (
    "; if all labels of a micro-batch are ignored, let the loss return a sum and a "
    "count"
)


@dataclass(frozen=True)
class Problem:
    """What is not finite in a step, the same on every rank.

    step: its number since the first start, from 1.
    losses: by micro-batch of the whole batch, those that are not finite.
    gradients: names of the parameters whose gradients are not finite.
    phase: that of the step which found it first, where a step has several.
    """

    step: int
    losses: Mapping[int, float]
    gradients: tuple[str, ...]
    phase: str = ""

    @classmethod
    def of_ranks(
        cls,
        step: int,
        ranks: Iterable[tuple[Mapping[int, float], Iterable[str]]],
        phase: str = "",
    ) -> Problem:
        """Return what all ranks have found: losses and gradients of each."""
        losses: dict[int, float] = {}
        gradients: dict[str, None] = {}
        for of_rank, names in ranks:
            losses |= of_rank
            gradients |= dict.fromkeys(names)
        return cls(step, dict(sorted(losses.items())), tuple(gradients), phase)

    def __str__(self) -> str:
        """Return `the loss is nan at step 12, in micro-batch 3`, or the like."""
        losses, what = [*self.losses.items()], "the loss"
        if self.phase:
            what += f" of phase {self.phase}"
        if losses:
            numbers = show_some([str(m) for m, _ in losses], MOST_NAMED)
            plural = "es" * (len(losses) > 1)
            return (
                f"{what} is {losses[0][1]} at step {self.step}, in micro-batch"
                f"{plural} {numbers}"
            )
        if not self.gradients:  # each loss is finite, their sum is not
            return f"{what} is not finite at step {self.step}"
        names = show_some([f"'{name}'" for name in self.gradients], MOST_NAMED)
        return f"the gradient of {names} is not finite at step {self.step}"


class NotFiniteError(GemscError):
    """A step whose loss or gradient is not finite; its update was not made."""

    def __init__(self, problem: Problem) -> None:
        """Keep what was found."""
        is_nan = any(map(math.isnan, problem.losses.values()))
        super().__init__(str(problem), help=f"{ADVICE}{_IGNORED * is_nan}")
        self.problem = problem


def all_finite(parameters: Iterable[nn.Parameter], factor: float = 1.0) -> bool:
    """Multiply all gradients by a factor; return whether all of them are finite.

    It is one pass over them, and one number for the host.
    """
    gradients = [_real(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return True
    like: Any = {"device": gradients[0].device, "dtype": torch.float32}
    found_inf, by = torch.zeros((), **like), torch.tensor(factor, **like)
    # what torch.amp.GradScaler calls
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, by)
    return not found_inf.item()


def not_finite(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of parameters whose gradients are not finite."""
    named = ((name, p.grad) for name, p in parameters.items() if p.grad is not None)
    return [name for name, grad in named if not _real(grad).isfinite().all()]


def rows_not_finite(batch: Any) -> list[int]:
    """Return the numbers of a batch's samples that hold a NaN or an infinity."""
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
    wrong = [
        ~leaf.isfinite().reshape(len(leaf), -1).all(1) for leaf in leaves if len(leaf)
    ]
    return sorted({row for rows in wrong for row in rows.nonzero().flatten().tolist()})


def _real(gradient: Tensor) -> Tensor:
    """Return the numbers that a gradient keeps, in its memory."""
    gradient = gradient.detach()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


FIRST = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
SMALLEST = 1.0  # of a mean's: below it, what overflows is not what was scaled
INTERVAL = 2000  # updates between two growths


@dataclass
class LossScale:
    """The factor of the loss, with which float16 gradients neither vanish nor overflow.

    float16 ends at 65504 and loses what is below 6e-8. So the loss is multiplied by a
    large factor before the backward, and the gradients of the weights, which are in
    float32, are divided by it. Where one of them is not finite the factor was too
    large: then no rank makes its update, and the factor is halved. It doubles after
    2000 updates in a row. That is what torch.amp.GradScaler does, which knows the
    gradients of one process only. `good` counts the updates since the factor last
    changed, `skipped` all that were left out.
    """

    factor: float = FIRST
    good: int = 0
    skipped: int = 0

    def take(self, *, is_overflow: bool, terms: float = 0.0) -> bool:
        """Change the factor after an update, or after one that is left out.

        Gradients are those of a sum of so many `terms`; 0: they are of a mean. Returns
        whether a smaller factor may help: it cannot where none is left.
        """
        if not is_overflow:
            self.good += 1
            if self.good == INTERVAL:
                self.factor *= GROWTH
                self.good = 0
            return True
        self.good = 0
        self.skipped += 1
        self.factor *= BACKOFF
        return self.factor * max(terms, 1.0) >= SMALLEST

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps, as numbers for JSON."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.factor = float(state["factor"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])
