"""Outputs of layers that are changed in place, as models of others do: exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import against_one_process, mse
from torch import Tensor, nn

from gemsc.verify.compare import TOLERANCE

EXACT = TOLERANCE[torch.float64]
WIDTH = 4
WORDS = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, WIDTH, 5, 5, generator=torch.Generator().manual_seed(0))


def boxes(self: Any, x: Tensor) -> Tensor:
    """As Deformable DETR moves its reference points."""
    y = self.one(x)
    y[..., :2] += x[..., -2:].sigmoid()
    return self.two(y.sigmoid())


def sizes(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    y[..., 2:].exp_()
    z = self.two(y)
    z[:, 1:][..., 0].mul_(0.5)
    return z


def shifted(self: Any, x: Tensor) -> Tensor:
    """As T5 shifts the tokens of its decoder."""
    y = self.one(x)
    z = y.new_zeros(y.shape)
    z[:, 1:] = y[:, :-1].clone()
    z[:, 0] = 0.5
    return self.two(z)


def halves(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    gate, value = y[..., :2], y[..., 2:]
    gate.mul_(2)
    value += 0.5
    return self.two(y)


def chunks(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    a, b = y.chunk(2, -1)
    z = self.two(torch.cat([a.tanh(), b], -1))
    with torch.no_grad():
        left, right = z.chunk(2, 1)
        left.mul_(1.5)
        right.clamp_(-1, 1)
    return z


def data(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    y.data.clamp_(-0.5, 0.5)
    y = self.two(y)
    y.data[:, 0] = 0.25
    return y


def activations(self: Any, x: Tensor) -> Tensor:
    y = F.relu(self.one(x), inplace=True)
    y = F.leaky_relu_(self.two(y), 0.2)
    return (y * 0.5).mul_(3).div_(2)


def masked(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    y.masked_fill_(x > 1, -1.0)
    y[:, -1].zero_()
    y = self.two(y)
    return y.index_fill_(1, torch.tensor([0], device=x.device), 0.5)


def transposed(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    y.transpose(0, 1)[0].mul_(3)
    y.flatten(0, 1)[1:].add_(0.2)
    return self.two(y)


def chosen(self: Any, x: Tensor) -> Tensor:
    """As loralib fills up the rows of a merged layer."""
    y = self.one(x)
    mask = torch.arange(y.shape[1], device=x.device) % 2 == 0
    count = (y.shape[1] + 1) // 2
    z = torch.zeros_like(y)
    z[:, mask] = y[:, :count] * 2
    rows = torch.zeros_like(y[0])
    rows[mask] = y[1, -count:]
    z[:, ~mask] = y.mean(1, keepdim=True)  # the same for all
    z[x > 1] = y.mean()  # of a mask that depends on data, too
    z[mask.expand(2, -1), 0] = y[:, :count, 1].flatten(0, 1)
    return self.two(z + rows)


IDIOMS = (
    *(boxes, sizes, shifted, halves, chunks, data, activations, masked, transposed),
    chosen,
)
PLANS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"ranks": 2, "micro_batches": 1},
    "1f1b": {"ranks": 3, "schedule": "1f1b"},
    "gpipe": {"ranks": 2, "schedule": "gpipe"},
    "zb-h1": {"ranks": 3, "schedule": "zb-h1"},
    "zb-v": {"ranks": 2, "schedule": "zb-v"},
    "mast": {"ranks": 2, "schedule": "mast", "micro_batches": 2},
}


Forward = Callable[[Any, Tensor], Tensor]


class Written(nn.Module):
    def __init__(self, forward: Forward, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.one, self.two = layer(), layer()
        self.steps = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(self, x)


LAYERS = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), WORDS),
    "no bias": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), WORDS),
    "convolution": (lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1), IMAGES),
}
ROWS = [(idiom, layer, plan) for plan in PLANS for layer in LAYERS for idiom in IDIOMS]


def error_of(directory: Path, idiom: Forward, layer: str, plan: str) -> float:
    """Return the largest error of training four times the same idiom."""
    make, x = LAYERS[layer]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(Written(idiom, make) for _ in range(4)))
    return against_one_process(directory, model, (x,), mse, x, **PLANS[plan]).worst


@pytest.mark.slow(1)
@pytest.mark.parametrize("idiom", [boxes, sizes, chunks])
def test_no_deferred_gradient_of_what_is_written_to_is_lost(
    idiom: Forward, tmp_path: Path
) -> None:
    assert error_of(tmp_path, idiom, "linear", "1f1b") < EXACT
    text = "".join(path.read_text() for path in tmp_path.glob("rank*.py"))
    assert "deferred={" in text


def test_what_a_mask_chooses_gets_values(tmp_path: Path) -> None:
    assert error_of(tmp_path, chosen, "linear", "1f1b") < EXACT


@pytest.mark.slow(1)
@pytest.mark.by_day(8)
@pytest.mark.parametrize(
    ("idiom", "layer", "plan"), ROWS, ids=lambda v: getattr(v, "__name__", v)
)
def test_what_is_written_to_trains_exactly(
    idiom: Forward, layer: str, plan: str, tmp_path: Path
) -> None:
    assert error_of(tmp_path, idiom, layer, plan) < EXACT
