"""Small networks with normalization, by the layers of gemsc.nn and of torch.nn."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import Case, Sample, pictures
from torch import Tensor, nn

import gemsc.nn

__all__ = ["NORM_MODELS"]


def normed(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        gemsc.nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.2),
        nn.ReLU(),
    )


class Normed(nn.Module):
    """Averages with and without momentum, and statistics that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.frozen = normed(3, 8), gemsc.nn.FrozenBatchNorm(8, eps=1e-3)
        self.branches = nn.ModuleList(normed(8, 8) for _ in range(2))
        self.joined = normed(16, 16)
        self.norm = gemsc.nn.BatchNorm2d(16, momentum=None)
        self.hidden = nn.Linear(16, 16)
        self.last = gemsc.nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 10)
        for number, buffer in enumerate(self.frozen.buffers()):
            buffer.uniform_(0.5, 1.5 + number)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.stem(x))
        left, right = (branch(x) for branch in self.branches)
        x = self.norm(F.max_pool2d(self.joined(torch.cat([left, right], 1)), 2))
        x = self.hidden(x.mean((2, 3)))
        return self.head(torch.relu(self.last(x)))


def flattened(norm: Callable[[], nn.Module]) -> nn.Sequential:
    """Return a network whose head takes normalized pixels as features."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), norm(), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, padding=1), norm(), nn.Flatten()),
        nn.Linear(4 * 64, 3),
    )


def scored(batch: int) -> Sample:
    return (torch.randn(batch, 3, 8, 8),), torch.randn(batch, 3)


def averaged() -> nn.Sequential:
    """Return a network whose statistics are plain means of those of all batches."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.SyncBatchNorm(4, momentum=None)),
        *(nn.Flatten(), nn.Linear(4 * 64, 3)),
        nn.BatchNorm1d(3, momentum=None),
    )


CASES = (
    Case("averaged", averaged, scored, F.mse_loss),
    Case("normed", Normed, pictures(8), F.cross_entropy, micro_batch_size=4),
    Case(
        "flat batch", lambda: flattened(lambda: nn.BatchNorm2d(4)), scored, F.mse_loss
    ),
    Case(
        "flat groups", lambda: flattened(lambda: nn.GroupNorm(2, 4)), scored, F.mse_loss
    ),
)
NORM_MODELS = {case.name: case for case in CASES}
