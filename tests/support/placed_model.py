"""A model file: two forks, and all that weights of branches may be.

It kills itself where the environment says so.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SAMPLES = 48  # of a micro-batch


def mlp(inputs: int, hidden: int, outputs: int, *, norm: bool = False) -> nn.Sequential:
    inner = [nn.BatchNorm1d(hidden)] if norm else []
    layers = nn.Linear(inputs, hidden), *inner, nn.ReLU(), nn.Linear(hidden, outputs)
    return nn.Sequential(*layers)


class Forks(nn.Module):
    """Two forks, and all that weights may be: placed, frozen, tied, shared, unused.

    `both` is called in two branches, `seldom` before two of them only. One tensor is
    `one.c.0.weight` and `tail.weight`, in a branch and in the trunk; one has two names
    in a branch. `never` has no gradient at all.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.stem = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
            self.seldom = nn.Linear(8, 16)
            a = mlp(16, 300, 16, norm=True)
            b = mlp(16, 250, 8)
            c = nn.Sequential(nn.Linear(16, 16), *mlp(16, 260, 8, norm=True))
            self.one = nn.ModuleDict({"a": a, "b": b, "c": c})
            d = nn.Sequential(nn.Linear(32, 32), *mlp(32, 250, 32), nn.Linear(32, 32))
            self.two = nn.ModuleDict({"d": d, "e": mlp(32, 300, 32, norm=True)})
            self.both = nn.Linear(16, 16)
            self.tail = nn.Linear(16, 16)
            self.head = nn.Linear(32, 16)
            self.never = nn.Linear(3, 3)
        b[0].requires_grad_(False)
        d[4].weight = d[0].weight
        self.tail.weight = c[0].weight

    def forward(self, x: Tensor) -> Tensor:
        seldom, x = self.seldom(x), self.stem(x)
        a = self.one["a"](self.both(x))
        b = self.one["b"](self.both(x.tanh()).relu())
        c = self.one["c"](x + seldom)
        x = torch.cat([a, b, c], 1)
        x = self.two["d"](x) + self.two["e"](x + seldom.repeat(1, 2))
        return self.tail(self.head(x))


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Drawn by the index; after `LAST` samples the process dies."""

    taken = 0

    def __len__(self) -> int:
        return 4 * SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        Data.taken += 1
        if Data.taken > int(os.environ.get("LAST", str(10**9))):
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(index)
        draw = partial(torch.randn, generator=generator)
        return draw(8), 3 * draw(16)


model = Forks
loss = nn.MSELoss()
optimizer = partial(torch.optim.AdamW, lr=0.01, eps=1e-4, weight_decay=0.1)
dataset = Data


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(SAMPLES, 8),)


def example_target() -> Tensor:
    return torch.randn(SAMPLES, 16)
