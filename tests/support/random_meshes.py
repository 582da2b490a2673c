"""Random networks whose pictures tiles cut, whose channels or branches ranks share."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F
from random_networks import RandomNetwork, Shape
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape

__all__ = ["JOINS", "Case", "random_forked_mesh", "random_mesh"]

GRIDS = {
    1: [(2,), (3,)],
    2: [(2, 1), (1, 2), (2, 2)],
    3: [(2, 1, 1), (1, 1, 2)],
}


class Dropped(nn.Module):
    """A layer called as a function, with weights of its own."""

    def __init__(self, layer: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class MeshNetwork(RandomNetwork):
    """Blocks that widen and narrow again: what is wide, shards cut."""

    def step(self, shape: Shape, *, simple: bool = False) -> tuple[nn.Module, Shape]:
        if simple or self.rng.random() < 0.25:
            return super().step(shape, simple=simple)
        narrow, wide = shape[1], self.rng.choice([4, 6, 8])
        layers: list[nn.Module] = [self.widened(narrow, wide)]
        now = (shape[0], wide, *shape[2:])
        for _ in range(self.rng.randint(0, 3)):
            layer, after = self.kept(now)
            layers.append(layer)
            now = after
        layers.append(self.narrowed(wide, narrow))
        body = nn.Sequential(*layers)
        try:
            with torch.no_grad():
                result = tuple(body.train()(torch.randn(shape)).shape)
        except (RuntimeError, ValueError):  # too few rows for what it pads or norms
            return super().step(shape, simple=True)
        return body, result

    def kept(self, shape: Shape) -> tuple[nn.Module, Shape]:
        """Return a layer that keeps the channels, mostly one by one."""
        for _ in range(20):
            layer, after = super().step(shape, simple=True)
            mixes = isinstance(layer, nn.modules.conv._ConvNd | nn.LayerNorm)
            if after[1] == shape[1] and not mixes:
                return layer, after
        return nn.ReLU(), shape

    def widened(self, narrow: int, wide: int) -> nn.Module:
        conv = self.layer("Conv")
        kind = self.pick("conv", "conv", "function", "last", "transposed")
        bias = self.pick(True, True, False)
        if kind == "transposed":
            return self.layer("ConvTranspose")(narrow, wide, 3, padding=1, bias=bias)
        if kind == "last":
            return Last(nn.Linear(narrow, wide, bias=bias))
        kernel = self.pick(1, 3, 5)
        layer = conv(narrow, wide, kernel, padding=kernel // 2, bias=bias)
        if kind == "function":
            call = getattr(F, f"conv{self.rank}d")
            return Dropped(layer, lambda x, w, b: call(x, w, b, padding=kernel // 2))
        return layer

    def narrowed(self, wide: int, narrow: int) -> nn.Module:
        kind = self.pick("conv", "conv", "strided", "last", "transposed", "function")
        bias = self.pick(True, True, False)
        if kind == "last":
            return Last(nn.Linear(wide, narrow, bias=bias))
        if kind == "transposed":
            stride = self.pick(1, 2)
            return self.layer("ConvTranspose")(wide, narrow, 3, stride, 1, bias=bias)
        kernel, stride = self.pick(1, 3), 2 if kind == "strided" else 1
        conv = self.layer("Conv")
        mode = self.pick("zeros", "zeros", "reflect", "circular")
        padding = kernel // 2
        layer = conv(
            wide, narrow, kernel, stride, padding, bias=bias, padding_mode=mode
        )
        if kind == "function":
            call = getattr(F, f"conv{self.rank}d")
            return Dropped(layer, lambda x, w, b: call(x, w, b, padding=padding))
        return layer


class Forked(nn.Module):
    """Branches side by side, and how they meet."""

    def __init__(self, how: str, branches: list[nn.Module], narrow: nn.Module) -> None:
        super().__init__()
        self.how, self.branches = how, nn.ModuleList(branches)
        self.narrow = narrow if how == "cat" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        outputs = [branch(x) for branch in self.branches]
        if self.how == "cat":
            return self.narrow(torch.cat(outputs, 1))
        if self.how == "sum":
            return sum(outputs) + x
        return reduce(JOINS[self.how], outputs)


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: a.tanh() * b,
    "largest": torch.maximum,
    "chosen": lambda a, b: torch.where(a > 0, b, b.cos()),
}


class ForkedNetwork(MeshNetwork):
    """Blocks of branches, of which some end in one number for each channel."""

    def step(self, shape: Shape, *, simple: bool = False) -> tuple[nn.Module, Shape]:
        if simple or self.rng.random() < 0.35:
            return super().step(shape, simple=simple)
        how = self.pick("cat", "cat", "sum", *JOINS)
        branches = [self.branch(shape) for _ in range(self.rng.randint(2, 4))]
        narrow = self.layer("Conv")(len(branches) * shape[1], shape[1], 1)
        block = Forked(how, branches, narrow)
        try:
            with torch.no_grad():
                result = tuple(block.train()(torch.randn(shape)).shape)
        except (RuntimeError, ValueError):
            return super().step(shape, simple=True)
        return (block, result) if result == shape else super().step(shape, simple=True)

    def branch(self, shape: Shape) -> nn.Module:
        """Return a branch that keeps the shape, or leaves one pixel of it."""
        channels = shape[1]
        kernel = self.pick(1, 3, 5)
        conv = self.layer("Conv")(channels, channels, kernel, padding=kernel // 2)
        layers: list[nn.Module] = [conv]
        for _ in range(self.rng.randint(0, 2)):
            layer, after = super().step(shape, simple=True)
            layers += [layer] if after == shape else [nn.Dropout(0.3)]
        if self.rng.random() < 0.2:
            layers += [self.layer("AdaptiveAvgPool")(1), nn.Sigmoid()]
        return nn.Sequential(*layers)


class Behind(nn.Sequential):
    """A network behind a layer with weights: all that it computes has a gradient."""

    def __init__(self, network: MeshNetwork, shape: Shape) -> None:
        conv = getattr(nn, f"Conv{network.rank}d")
        super().__init__(conv(shape[1], shape[1], 3, padding=1), network)
        self.out_shape = network.out_shape


class Last(nn.Module):
    """A linear layer of channels, of each pixel alone."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.movedim(1, -1)).movedim(-1, 1)


Case = tuple[nn.Module, tuple[Tensor], Callable[..., Tensor], Tensor, GridShape]


def random_mesh(seed: int, make: type[MeshNetwork] = MeshNetwork) -> Case:
    """Return (model, inputs, loss, target, grid); float64 must be the default."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank = rng.choice([1, 2, 2, 2, 3])
    sizes = {1: range(8, 30), 2: range(6, 16), 3: range(4, 8)}[rank]
    shape = (2, rng.choice([2, 3]), *(rng.choice(sizes) for _ in range(rank)))
    model: nn.Module = make(rng, shape, rng.randint(2, 4))
    if make is ForkedNetwork:
        model = Behind(model, shape)
    with torch.no_grad():  # a norm of one pixel is 0, and a relu of about 0 is chance
        for module in model.modules():
            if isinstance(module, nn.GroupNorm) and module.affine:
                module.bias.add_(0.1)
    x, target = torch.randn(shape), torch.randn(model.out_shape)
    tiles, count = rng.choice(GRIDS[rank]), rng.choice([2, 2, 3])

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        return (output * wanted).mean() + output.square().mean()

    return model, (x,), loss, target, GridShape(tiles, shards=count)


def random_forked_mesh(seed: int) -> Case:
    """Return the same with branches, of which ranks share some tensors, too."""
    *case, grid = random_mesh(seed, ForkedNetwork)
    shards = grid.shards if seed % 3 == 0 else 1
    return *case, GridShape(grid.tiles, shards, branches=grid.shards)
