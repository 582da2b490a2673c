"""Random networks in series and in parallel, small, for tests of branches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import mul

import torch
import torch.nn.functional as F
from random_forms import beside, written
from random_shards import ACTIVATIONS, BARRIERS, Attention, Convolutions, Mlp, Rms
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape

__all__ = ["BranchCase", "random_branches"]

Make = Callable[[], nn.Module]
# by the ways that branches meet, the fewest and the most of them
JOINS: dict[str, tuple[int, int]] = {
    "cat": (2, 5),
    "sum": (2, 5),
    "left to right": (2, 5),
    "mean of stack": (2, 4),
    "product": (2, 3),
    "largest": (2, 4),
    "chosen": (3, 3),
    "attention": (3, 3),
    "weighted": (2, 4),
}


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Transposed(nn.Module):
    """A layer of channels, over batch x tokens x channels."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Layers:
    """Makes layers over batch x tokens x width, some of which were there before."""

    def __init__(self, rng: random.Random, width: int, heads: int) -> None:
        self.rng, self.width, self.heads = rng, width, heads
        self.made: list[nn.Module] = []
        self.linears: list[nn.Linear] = []

    def linear(self) -> nn.Module:
        layer = nn.Linear(self.width, self.width, bias=self.rng.random() < 0.5)
        if self.linears and self.rng.random() < 0.15:
            layer.weight = self.rng.choice(self.linears).weight  # tied
        self.linears.append(layer)
        return layer

    def layer(self) -> nn.Module:
        """Return a layer with weights, now and then one that is somewhere else, too."""
        rng, width = self.rng, self.width
        if self.made and rng.random() < 0.12:
            return rng.choice(self.made)
        kinds: list[Make] = [
            self.linear,
            lambda: Mlp(rng, width),
            lambda: Attention(rng, width, self.heads),
            lambda: Convolutions(rng, width),
        ]
        self.made.append(rng.choices(kinds, (3, 3, 1, 1))[0]())
        return self.made[-1]

    def light(self) -> nn.Module:
        """Return what takes little time."""
        rng, width = self.rng, self.width
        kinds: list[Make] = [
            lambda: Function(rng.choice(ACTIVATIONS)),
            lambda: Function(rng.choice(BARRIERS)),
            lambda: Function(lambda x: F.relu(x + 0.1, inplace=True)),
            lambda: nn.Dropout(0.3),
            lambda: nn.LayerNorm(width),
            lambda: Rms(width),
            lambda: Transposed(nn.BatchNorm1d(width)),
        ]
        return rng.choices(kinds, (3, 1, 1, 2, 2, 1, 2))[0]()


class Series(nn.Module):
    """One after the other; the first is never done in place of what came in."""

    def __init__(self, layers: Layers, depth: int, *, length: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        aside, width = beside(layers.rng), layers.width
        for index in range(length):
            chance = layers.rng.random()
            if depth and chance < 0.4:
                part: nn.Module = Parallel(layers, depth - 1)
            elif index and chance < 0.7:
                part = layers.light()
            else:
                part = layers.layer()
            self.parts.append(part)
            if aside.random() < 0.2:
                norms = [nn.LayerNorm(width), Rms(width)]
                self.parts.append(written(aside, (1, 1, width), 2, norms))

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        last = before
        for part in self.parts:
            y = part(x, last) if isinstance(part, (Series, Parallel)) else part(x)
            last, x = x, y
        return x


class Parallel(nn.Module):
    """Branches that begin at one of two values, and how they meet."""

    def __init__(self, layers: Layers, depth: int) -> None:
        super().__init__()
        rng = layers.rng
        self.how = rng.choice(list(JOINS))
        count = rng.randint(*JOINS[self.how])
        self.branches: nn.ModuleList = nn.ModuleList(
            Series(layers, depth, length=rng.choice([1, 1, 2, 3])) for _ in range(count)
        )
        self.empty = rng.randrange(count) if rng.random() < 0.2 and count > 2 else None
        self.earlier = [rng.random() < 0.2 for _ in range(count)]
        self.residual = rng.random() < 0.4
        self.down = nn.Linear(count * layers.width, layers.width)
        self.gate = nn.Linear(layers.width, count)
        self.width = layers.width

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        outputs = []
        for index, branch in enumerate(self.branches):
            entry = before if self.earlier[index] else x
            outputs.append(entry if index == self.empty else branch(entry, before))
        y = self.joined(outputs, x)
        return x + y if self.residual else y

    def joined(self, outputs: list[Tensor], x: Tensor) -> Tensor:
        if self.how == "cat":
            return self.down(torch.cat(outputs, -1))
        if self.how == "sum":
            return sum(outputs) / len(outputs)
        if self.how == "left to right":
            return reduce(torch.add, outputs[1:], outputs[0]).tanh()
        if self.how == "mean of stack":
            return torch.stack(outputs, 1).mean(1)
        if self.how == "product":
            return reduce(mul, (y.tanh() for y in outputs))
        if self.how == "largest":
            return reduce(torch.maximum, outputs)
        if self.how == "chosen":
            return torch.where(outputs[0] > 0, outputs[1], outputs[2])
        if self.how == "attention":
            return F.scaled_dot_product_attention(*(y.tanh() for y in outputs))
        gate = self.gate(x).softmax(-1)
        return sum(gate[..., i, None] * y for i, y in enumerate(outputs))


class Network(nn.Module):
    """A stem, a body with forks within forks, and a head."""

    def __init__(self, layers: Layers, inputs: int, outputs: int) -> None:
        super().__init__()
        width, rng = layers.width, layers.rng
        self.stem = nn.Linear(inputs, width)
        self.fork = Parallel(layers, depth=1)  # there is one at least
        depth = rng.choice([0, 1, 1, 2])
        self.body = Series(layers, depth, length=rng.randint(1, 2))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.fork(x, x.sin())
        return self.head(self.body(y, x))


@dataclass(frozen=True)
class BranchCase:
    """A network with all that a step needs, and how its ranks share it."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor]
    target: Tensor
    grid: GridShape
    trunk: str


LOSSES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    F.mse_loss,
    F.smooth_l1_loss,
    lambda o, t: (o * t).sum() + o.square().mean(),
    lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(0, 1).argmax(-1)),
)


def random_branches(seed: int) -> BranchCase:
    """Return the case of a seed; float64 must be the default."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads = rng.choice([2, 3])
    layers = Layers(rng, heads * rng.choice([2, 3]), heads)
    batch, length, outputs = rng.randint(1, 5), rng.randint(3, 5), rng.randint(3, 6)
    ranks = rng.choice([2, 2, 3, 4])
    trunks = ["whole", *["batch"] * (batch >= ranks), *["sequence"] * (length >= ranks)]
    model = Network(layers, 5, outputs)
    x, target = torch.randn(batch, length, 5), torch.randn(batch, length, outputs)
    grid = GridShape(shards=ranks if rng.random() < 0.2 else 1, branches=ranks)
    loss, trunk = rng.choice(LOSSES), rng.choice(trunks)
    return BranchCase(model, (x,), loss, target, grid, trunk)
