"""A loss, or a network in it, that is in evaluation mode stays so, as in a loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc import compile

X, TARGET = torch.randn(4, 3), torch.randn(4, 2)


class Perceptual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.net.requires_grad_(False).eval()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.net(output), self.net(target))


@pytest.mark.slow(1)
@pytest.mark.parametrize("whole", [False, True])
def test_a_network_that_a_loss_has_in_evaluation_mode(whole: bool) -> None:
    loss = Perceptual().train(mode=False) if whole else Perceptual()
    options = {"example_target": TARGET, "ranks": 1, "micro_batches": 2}
    program = compile(nn.Linear(3, 2), (X,), loss=loss, **options)  # it is compared
    assert loss.training is not whole
    assert not any("compared" in note for note in program.plan.notes)
