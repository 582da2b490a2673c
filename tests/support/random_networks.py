"""Random networks of one, two or three dimensions, small, for tests of tiles."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F
from nightly import at_night
from random_forms import beside, written
from torch import Tensor, nn

__all__ = ["RandomNetwork", "is_fixed", "random_case", "seeds"]

Shape = tuple[int, ...]
MODES = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}


class Function(nn.Module):
    """A function as a step of a network."""

    def __init__(self, function: Callable[[Tensor], Tensor], text: str) -> None:
        super().__init__()
        self.function = function
        self.text = text

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.text


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Branches(nn.Module):
    """Several bodies side by side, joined along the channels."""

    def __init__(self, *bodies: nn.Module) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([body(x) for body in self.bodies], 1)


class Level(nn.Module):
    """A level of a U-Net: smaller, a body, larger again, joined with the input."""

    def __init__(self, down: nn.Module, body: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.body, self.up = down, body, up

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.body(self.down(x)))
        y = F.interpolate(y, size=x.shape[2:]) if y.shape[2:] != x.shape[2:] else y
        return torch.cat([x, y], 1)


class Gate(nn.Module):
    """Channel attention."""

    def __init__(self, channels: int, rank: int) -> None:
        super().__init__()
        self.conv = getattr(nn, f"Conv{rank}d")(channels, channels, 1)
        self.pool = getattr(nn, f"AdaptiveAvgPool{rank}d")(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv(self.pool(x)).sigmoid()


class ChannelsLast(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.linear = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.movedim(1, -1))).movedim(-1, 1)


class Reduced(nn.Module):
    """A reduction over some dimensions, joined with the input or in its place."""

    def __init__(self, name: str, dims: tuple[int, ...], how: str) -> None:
        super().__init__()
        self.name, self.dims, self.how = name, dims, how

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(x, self.name)(self.dims, keepdim=True)
        if self.how == "alone":
            return y
        return x * y.sigmoid() if self.how == "gate" else x - y

    def extra_repr(self) -> str:
        return f"{self.name} {self.dims} {self.how}"


class Features(nn.Module):
    """Flattened, multiplied, and a small picture again, or added to the input."""

    def __init__(self, shape: Shape, size: int, dropout: bool) -> None:
        super().__init__()
        self.size = (size,) * (len(shape) - 2)
        between = [nn.ReLU(), nn.Dropout(0.0)] if dropout else []
        outputs = 2 * size ** len(self.size)
        self.steps = nn.Sequential(
            nn.Flatten(), *between, nn.Linear(torch.Size(shape[1:]).numel(), outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x).view(x.shape[0], 2, *self.size)


class Pooled(nn.Module):
    """Channels weighted by a statistic of their flattened pixels."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(x.flatten(2).tanh(), self.name)(-1)
        return x * y.view(*x.shape[:2], *(1,) * (x.dim() - 2))


class RandomNetwork(nn.Sequential):
    """The layers that a seed gives for an input shape N x C x ..."""

    def __init__(self, rng: random.Random, shape: Shape, steps: int) -> None:
        super().__init__()
        self.rng = rng
        self.rank = len(shape) - 2
        aside = beside(rng)
        for step in range(steps):
            layer, shape = self.step(shape)
            self.add_module(f"s{step}", layer)
            if aside.random() < 0.35:
                norms = [
                    self.layer("BatchNorm")(shape[1]),
                    nn.GroupNorm(1, shape[1]),
                    nn.LayerNorm(shape[1:]),
                ]
                self.add_module(f"w{step}", written(aside, shape, 1, norms))
        self.out_shape = shape
        del self.rng

    def step(self, shape: Shape, *, simple: bool = False) -> tuple[nn.Module, Shape]:
        """Return a layer that gives at least one row, and what it gives."""
        makers = [self.conv, self.conv, self.pool, self.norm, self.activation]
        makers += [self.resize, self.transposed, self.pad, self.other, self.reduction]
        if not simple:
            makers += [self.residual, self.branches, self.level]
        for _ in range(50):
            try:
                layer = self.rng.choice(makers)(shape)
                with torch.no_grad():
                    result = layer.train()(torch.randn(shape))
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            large = max(result.shape[2:], default=0) > 40 or result.shape[1] > 24
            if result.dim() == len(shape) and result.numel() and not large:
                return layer, tuple(result.shape)
        return nn.Identity(), shape

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def each(self, *choices: int) -> Any:
        """Return one number, or one per dimension."""
        if self.rng.random() < 0.6:
            return self.pick(*choices)
        return tuple(self.pick(*choices) for _ in range(self.rank))

    def layer(self, name: str) -> Any:
        return getattr(nn, f"{name}{self.rank}d")

    def conv(self, shape: Shape) -> nn.Module:
        channels = shape[1]
        groups = self.pick(1, 1, channels if channels < 5 else 1)
        outputs = groups * self.pick(1, 2) if groups > 1 else self.pick(2, 3, 4)
        kernel = self.each(1, 2, 3, 3, 4, 5)
        if self.rng.random() < 0.2:
            padding, stride = "same", 1
        else:
            padding, stride = self.each(0, 1, 1, 2), self.each(1, 1, 2, 3)
        mode = self.pick("zeros", "zeros", "zeros", "reflect", "replicate", "circular")
        return self.layer("Conv")(
            channels,
            outputs,
            kernel,
            stride,
            padding,
            dilation=self.each(1, 1, 2),
            groups=groups,
            padding_mode=mode,
            bias=self.pick(True, False),
        )

    def transposed(self, shape: Shape) -> nn.Module:
        return self.layer("ConvTranspose")(
            shape[1],
            self.pick(2, 3),
            self.each(1, 2, 3, 4),
            self.each(1, 2, 2, 3),
            padding=self.each(0, 0, 1),
            output_padding=self.each(0, 0, 1),
            dilation=self.each(1, 1, 2),
            bias=self.pick(True, False),
        )

    def pool(self, shape: Shape) -> nn.Module:
        kernel, stride = self.each(1, 2, 2, 3, 4), self.each(1, 2, 2, 3)
        padding, ceil = self.each(0, 0, 1), self.pick(False, False, True)
        kind = self.pick("max", "avg", "lp", "adaptive", "adaptive")
        if kind == "max":
            dilation = self.each(1, 1, 2)
            if min(shape[2:]) < 4:  # a window without elements crashes PyTorch
                dilation, padding = 1, 0
            return self.layer("MaxPool")(
                kernel, stride, padding, dilation, ceil_mode=ceil
            )
        if kind == "avg":
            return self.layer("AvgPool")(
                kernel,
                stride,
                padding,
                ceil_mode=ceil,
                count_include_pad=self.pick(True, False),
            )
        if kind == "lp":
            return self.layer("LPPool")(2, kernel, stride, ceil_mode=ceil)
        size = self.pick(1, *range(2, 8))
        return self.layer(self.pick("AdaptiveAvgPool", "AdaptiveMaxPool"))(size)

    def norm(self, shape: Shape) -> nn.Module:
        channels = shape[1]
        kind = self.pick("batch", "batch", "group", "instance", "layer", "function")
        if kind == "batch":
            options = {
                "momentum": self.pick(0.1, 0.3),
                "affine": self.pick(True, False),
            }
            return self.layer("BatchNorm")(channels, **options)
        if kind == "group":
            groups = self.pick(
                *(g for g in range(1, channels + 1) if channels % g == 0)
            )
            return nn.GroupNorm(groups, channels)
        # with a batch of one and a gradient of channels last, its backward in PyTorch
        # is wrong
        if kind == "instance" and shape[0] > 1:
            return self.layer("InstanceNorm")(channels, affine=self.pick(True, False))
        if kind == "layer":
            return nn.LayerNorm(shape[self.pick(1, 2) :])
        return Function(
            lambda x: F.batch_norm(x, None, None, training=True), "batch_norm"
        )

    def activation(self, shape: Shape) -> nn.Module:
        functions = {
            "relu": F.relu,
            "gelu": F.gelu,
            "tanh": torch.tanh,
            "softmax": lambda x: F.softmax(x, 1),
            "leaky": lambda x: F.leaky_relu(x, 0.1),
            "hardswish": F.hardswish,
        }
        name = self.pick(*functions, "PReLU", "SiLU", "Softplus")
        if name == "PReLU":
            return nn.PReLU(shape[1])
        return (
            Function(functions[name], name)
            if name in functions
            else getattr(nn, name)()
        )

    def resize(self, shape: Shape) -> nn.Module:
        mode = self.pick(*MODES[self.rank])
        options: dict[str, Any] = {"mode": mode}
        if "linear" in mode or mode == "bicubic":
            options["align_corners"] = self.pick(True, False, None)
            if mode in ("bilinear", "bicubic") and self.rng.random() < 0.3:
                options |= {"antialias": True, "align_corners": False}
        kind = self.pick("scale", "scale", "size", "float")
        if kind == "scale":
            options["scale_factor"] = self.pick(2, 2, 3)
        elif kind == "size":
            options["size"] = [self.pick(*range(2, 14)) for _ in range(self.rank)]
        else:
            options["scale_factor"] = self.pick(0.5, 1.5, 0.7, 1.3)
            options["recompute_scale_factor"] = self.pick(True, None)
            if "antialias" in options:
                # PyTorch's own backward is wrong for a given factor (see gradcheck)
                options["recompute_scale_factor"] = True
        return Function(lambda x: F.interpolate(x, **options), f"interpolate {options}")

    def pad(self, shape: Shape) -> nn.Module:
        mode = self.pick("constant", "constant", "reflect", "replicate", "circular")
        choices = (-1, 0, 1, 2) if mode == "constant" else (0, 1, 2)
        amounts = [self.pick(*choices) for _ in range(2 * self.rank)]
        value = self.pick(0.0, 1.5) if mode == "constant" else None
        return Function(
            lambda x: F.pad(x, amounts, mode, value), f"pad {mode} {amounts}"
        )

    def other(self, shape: Shape) -> nn.Module:
        kind = self.pick(
            *("gate", "crop", "step", "shuffle", "channels", "last"),
            *("roll", "flip", "softmax"),
        )
        if self.rng.random() < 0.2:
            return Features(shape, self.pick(3, 4, 6), self.pick(True, False))
        if kind == "gate":
            return Gate(shape[1], self.rank)
        if kind == "crop":
            return Function(
                lambda x: x[..., 1:-1] if x.shape[-1] > 4 else x[:, :], "crop"
            )
        if kind == "step":
            return Function(lambda x: x[:, :, ::2], "step")
        if kind == "shuffle" and self.rank == 2:
            if shape[1] % 4 == 0:
                return nn.PixelShuffle(2)
            return nn.PixelUnshuffle(2)
        if kind == "channels":
            return Function(
                lambda x: torch.cat(x.split(1, 1)[::-1], 1) + x[:, :1], "split"
            )
        if kind == "last":
            return ChannelsLast(shape[1])
        return self.along_rows(kind)

    def along_rows(self, kind: str) -> nn.Module:
        dims = self.some_dims()
        if kind == "flip":
            return Function(lambda x: x.flip(dims), f"flip {dims}")
        if kind == "softmax":
            return Function(lambda x: x.softmax(dims[0]), f"softmax {dims[0]}")
        shifts = tuple(self.pick(-5, -1, 1, 2, 9) for _ in dims)
        return Function(lambda x: x.roll(shifts, dims), f"roll {shifts} {dims}")

    def some_dims(self) -> tuple[int, ...]:
        """Return spatial dimensions, one at least."""
        count = self.pick(*range(1, self.rank + 1))
        return tuple(self.rng.sample(range(2, 2 + self.rank), count))

    def reduction(self, shape: Shape) -> nn.Module:
        name = self.pick("mean", "sum", "amax", "amin", "var", "std")
        if self.rng.random() < 0.3:
            return Pooled(name)
        dims = self.some_dims()
        # all alone, the gradient of a norm that follows is hardly more than rounding
        how = self.pick("gate", "less", "alone" if len(dims) < self.rank else "less")
        return Reduced(name, dims, how)

    def body(self, shape: Shape, count: int) -> tuple[nn.Sequential, Shape]:
        layers = []
        for _ in range(count):
            layer, shape = self.step(shape, simple=True)
            layers.append(layer)
        return nn.Sequential(*layers), shape

    def same(self, shape: Shape) -> nn.Module:
        """Return a body that keeps the resolution."""
        channels = shape[1]
        kernel = self.pick(1, 3, 5)
        conv = self.layer("Conv")(channels, channels, kernel, padding=kernel // 2)
        return nn.Sequential(conv, self.norm(shape), self.activation(shape))

    def residual(self, shape: Shape) -> nn.Module:
        return Residual(self.same(shape))

    def branches(self, shape: Shape) -> nn.Module:
        pool = self.layer("MaxPool")(3, 1, 1)
        return Branches(self.same(shape), self.same(shape), pool)

    def level(self, shape: Shape) -> nn.Module:
        down = self.pool(shape)
        small = down(torch.zeros(shape)).shape
        body, inner = self.body(tuple(small), 1)
        up = self.pick(self.transposed, self.resize)(inner)
        return Level(down, body, up)


def dice(output: Tensor, target: Tensor) -> Tensor:
    dims = tuple(range(2, output.dim()))
    both = (output * target).sum(dims)
    return 1 - (2 * both / (output.sum(dims) + target.sum(dims))).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted": lambda o, t: (o * t).mean() + o.square().mean(),
    "mse": F.mse_loss,
    "l1": lambda o, t: F.smooth_l1_loss(o, t) + F.l1_loss(o, t, reduction="sum"),
    "bce": lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid()),
    "entropy": lambda o, t: F.cross_entropy(
        o, t.argmax(1), torch.arange(1.0, 1 + o.shape[1], dtype=o.dtype), ignore_index=1
    ),
    "smooth": lambda o, t: F.cross_entropy(o, t.softmax(1), label_smoothing=0.1),
    "dice": lambda o, t: dice(o.sigmoid(), t.sigmoid()),
}


def seeds(now: int, nightly: int, size: int) -> list[Any]:
    """Return the first seed of each test; those of a night are new ones every day.

    They begin with the date. GEMSC_TEST_DAY=20261231 gives those of another day.
    """
    day = int(os.environ.get("GEMSC_TEST_DAY") or f"{date.today():%Y%m%d}")
    fresh = range(1000 * day, 1000 * day + nightly - now, size)
    return [*range(0, now, size), *at_night(*fresh)]


def is_fixed(seed: int) -> bool:
    """Whether a seed is the same every day: it is known what its network has."""
    return seed < 1000


def random_case(
    seed: int,
) -> tuple[nn.Module, tuple[Tensor], Callable[..., Tensor], Tensor, tuple[int, ...]]:
    """Return (model, inputs, loss, target, grid); float64 must be the default."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank = rng.choice([1, 2, 2, 2, 3])
    sizes = {1: range(5, 30), 2: range(5, 20), 3: range(4, 10)}[rank]
    shape = (rng.choice([1, 2]), rng.choice([1, 2, 4]))
    shape += tuple(rng.choice(sizes) for _ in range(rank))
    model = RandomNetwork(rng, shape, rng.randint(2, 6))
    grids = {
        1: [(2,), (3,)],
        2: [(2, 2), (2, 1), (1, 3), (3, 2)],
        3: [(2, 1, 2), (1, 2, 1)],
    }
    x = torch.randn(shape)
    target = torch.randn(model.out_shape)
    loss = LOSSES[rng.choice(list(LOSSES))]
    return model, (x,), loss, target, rng.choice(grids[rank])
