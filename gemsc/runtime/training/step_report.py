"""What a step of training, or of evaluation, gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gemsc.base.dtypes import whole
from gemsc.base.nests import ONCE, Mean, with_attributes
from gemsc.runtime.data.metrics import along_samples
from gemsc.runtime.worker.finite import Problem


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation step.

    mean: of the losses of the batch, on every rank; None for a program without a loss.
    output: what the model returns for this copy's part of the batch, in the host's
        memory, on the rank that has it (the one of the loss); None elsewhere. In mixed
        `precision` it is in float32, and `for_loss` as it was computed.
    """

    mean: Mean | None
    for_loss: Any
    precision: torch.dtype | None = None

    @property
    def output(self) -> Any:
        """What the model returns, as metrics get it."""
        return self.for_metrics(self.for_loss)

    def for_metrics(self, output: Any) -> Any:
        """Return an output of mixed precision in float32, others as they are."""
        return output if self.precision is None else whole(output)

    @property
    def autocast(self) -> torch.autocast:
        """What the loss is computed within, in the host's memory."""
        is_mixed = self.precision is not None
        return torch.autocast("cpu", dtype=self.precision, enabled=is_mixed)

    @property
    def loss(self) -> float | None:
        """The mean over the batch, on every rank; None for a program without a loss."""
        return self.mean.value if self.mean is not None else None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of training.

    step: its number since the first start, from 1.
    loss: mean over the batch, the same on every rank.
    samples: how many of them count, in all replicas.
    seconds: from the call to the end of this rank's part.
    losses: those of the phases of the step, if it has several; `loss` is the last one.
    problem: what is not finite; the update was made or not, as `on_nonfinite` says.
    shape: the number of the batch's shape, where the program has several.
    """

    step: int
    loss: float
    samples: int
    seconds: float
    losses: Mapping[str, float] = field(default_factory=dict)
    problem: Problem | None = None
    shape: int = 0


def as_structure(value: Any) -> Any:
    """Return inputs as a tuple or dict: a lone tensor is the only positional input."""
    return value if isinstance(value, tuple | list | Mapping) else (value,)


def concatenated(outputs: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    """Join the micro-batches' outputs by samples (scalars are stacked), on the CPU.

    Samples count in dimension 0, or where `Plan.sample_dims` says. None of none.
    There the batch's targets are, and the user's metrics. Dicts, which stand for any
    object with fields, have these as attributes.
    """

    def join(dim: int, *parts: Any) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        parts = tuple(part.cpu() for part in parts)
        if dim == ONCE:
            return parts[0]
        if parts[0].dim() == 0:
            return torch.stack(parts)
        return torch.cat(parts, max(dim, 0))

    return with_attributes(along_samples(join, dims, *outputs)) if outputs else None
