"""A forward that itself reads the running statistics of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemsc
from gemsc.errors import GemscError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """The last layers look at what the first ones have counted."""

    def __init__(self, read: str, is_frozen: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third, self.fourth = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.read, self.is_frozen = nn.BatchNorm1d(4), read, is_frozen

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.is_frozen:
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = x * (1 + 0.1 * getattr(self.norm, self.read))
        x = torch.relu(self.second(x))
        x = self.third(x) + getattr(self.norm, self.read)
        return self.fourth(torch.relu(x))


def compiled(read: str, is_frozen: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(read, is_frozen).train()
    return gemsc.compile(model, (X,), loss=lambda y: y.square().mean(), **options)


@pytest.mark.slow(2)
@pytest.mark.parametrize("read", ["running_mean", "running_var", "num_batches_tracked"])
def test_they_are_read_on_the_rank_that_updates_them(read: str) -> None:
    program = compiled(read, ranks=2, recompute="all")
    assert program.plan.unchecked == ""  # a step was compared
    first, second = program.rank_modules().values()
    assert f"norm.{read}" in first
    assert "norm" not in second


@pytest.mark.parametrize("options", [{"data": 2}, {"schedule": "mast"}])
def test_replicas_that_update_them_apart_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(GemscError, match=r"forward reads 'norm.running_var'") as caught:
        compiled("running_var", **options)
    assert caught.value.at is not None


@pytest.mark.parametrize(
    ("read", "is_frozen"), [("weight", False), ("running_var", True)]
)
def test_what_does_not_change_within_a_step_is_read_anywhere(
    read: str, is_frozen: bool
) -> None:
    program = compiled(read, is_frozen, ranks=8, data=2, micro_batches=2)
    assert program.plan.unchecked == ""


def test_a_block_that_reads_them_is_not_recomputed() -> None:
    with pytest.raises(GemscError, match="reads statistics"):
        compiled("running_mean", ranks=2, recompute="second")
