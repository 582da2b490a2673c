"""What people write between layers, for random networks: forms, writes, parameters."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Written", "beside", "written"]

Body = Callable[["Written", Tensor], Tensor]


def _write(change: Callable[[Written, Tensor], object]) -> Body:
    """Return a body that changes what a layer gives in place.

    The layer has no parameters: hooks of those that have some forbid it. What it takes
    has a gradient: PyTorch adds none in place to a view without, as AvgPool1d gives it.
    """

    def body(self: Written, x: Tensor) -> Tensor:
        y = self.source(x * self.row)
        change(self, y)
        return y

    return body


def _set(y: Tensor, index: tuple[object, ...], value: Tensor | float) -> None:
    y[index] = value  # type: ignore[index]


def _add(y: Tensor, index: tuple[object, ...], value: Tensor | float) -> None:
    y[index] += value  # type: ignore[index]


ALL = slice(None)
# a row is a parameter: one number for each channel
BODIES: dict[str, Body] = {
    "view_as": lambda self, x: x.flatten(1).tanh().view_as(x) + x,
    "reshape_as": lambda self, x: x.flatten(1).tanh().reshape_as(x) * x,
    "row.expand_as": lambda self, x: self.row.expand_as(x) * x,
    "expand_as": lambda self, x: x - x.mean(self.dim, keepdim=True).expand_as(x),
    "row.type_as": lambda self, x: self.row.type_as(x) + x,
    "type_as": lambda self, x: x.tanh().type_as(self.row),
    "row.to": lambda self, x: self.row.to(x) + x.tanh(),
    "to": lambda self, x: x.tanh().to(self.row),
    "row *": lambda self, x: self.row * x,
    "row -": lambda self, x: self.row - x,
    "row /": lambda self, x: self.row / (1 + x.square()),
    "maximum(row": lambda self, x: torch.maximum(self.row, x),
    "max(row, other=": lambda self, x: torch.max(self.row, other=x),
    "where(row": lambda self, x: torch.where(self.row > 0, self.row, x),
    "lerp(row": lambda self, x: torch.lerp(self.row, x, 0.3),
    "addcmul(row": lambda self, x: torch.addcmul(self.row, x, x.sin(), value=0.5),
    "atan2(row": lambda self, x: torch.atan2(self.row, 2 + x.cos()),
    "linear(row)": lambda self, x: (
        F.linear(self.flat, self.weight).view_as(self.row) + x
    ),
    "layer(row)": lambda self, x: self.layer(self.flat).view_as(self.row) * x,
    "softmax(row)": lambda self, x: F.softmax(self.flat, 0).view_as(self.row) * x,
    "norm of row": lambda self, x: (
        F.layer_norm(self.flat, [self.size]).view_as(self.row) + x
    ),
    "twice": lambda self, x: self.norm(self.norm(x).tanh()),
    "channel +=": _write(lambda self, y: _add(y, self.channels(slice(1)), 1.5)),
    "channel += row": _write(
        lambda self, y: _add(
            y, self.channels(slice(1)), self.row.narrow(-self.left, 0, 1)
        )
    ),
    "channel =": _write(lambda self, y: _set(y, self.channels(slice(1)), 0.5)),
    "= channel": _write(
        lambda self, y: _set(
            y, self.channels(slice(1)), y[self.channels(slice(-1, None))] * 0.5
        )
    ),
    "last.mul_": _write(lambda self, y: y[..., 1:].mul_(0.5)),
    "last = 0": _write(lambda self, y: _set(y, (..., 0), 0.0)),
    "[:, 1:] *=": _write(lambda self, y: y[:, 1:].mul_(0.5)),
    "[:, :2] +=": _write(lambda self, y: _add(y, (ALL, slice(2)), 1.0)),
    "[:, :, ::2] +=": _write(lambda self, y: _add(y, (ALL, ALL, slice(0, None, 2)), 1)),
    "transpose.add_": _write(lambda self, y: y.transpose(1, 2).add_(0.5)),
    "unsqueeze.mul_(row": _write(lambda self, y: y.unsqueeze(0).mul_(self.row)),
    "select.tanh_": _write(lambda self, y: y.select(self.dim, 0).tanh_()),
    "narrow.mul_": _write(lambda self, y: y.narrow(self.dim, 0, 1).mul_(1.5)),
    "mul_(row": _write(lambda self, y: y.mul_(self.row)),
    "view write, then read": _write(
        lambda self, y: y[self.channels(slice(1))].mul_(2).sum()
    ),
}


class Written(nn.Module):
    """A line of code over a value with `size` channels in a dimension."""

    def __init__(
        self, kind: str, shape: tuple[int, ...], dim: int, norm: nn.Module
    ) -> None:
        super().__init__()
        self.kind, self.size, self.dim = kind, (size := shape[dim]), dim
        self.left = len(shape) - dim  # dimensions from the channels on
        self.row = nn.Parameter(torch.randn(size, *(1,) * (self.left - 1)))
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)
        self.layer = nn.Linear(size, size)
        self.norm = norm
        self.source: nn.Module = nn.Softplus()
        if min(shape[dim + 1 :], default=0) > 2:  # of pixels: AvgPool3d wants 3
            self.source = getattr(nn, f"AvgPool{self.left - 1}d")(3, 1, 1)

    @property
    def flat(self) -> Tensor:
        return self.row.view(self.size)

    def channels(self, which: slice) -> tuple[object, ...]:
        return (*(ALL,) * self.dim, which)

    def forward(self, x: Tensor) -> Tensor:
        return BODIES[self.kind](self, x) + self.row

    def extra_repr(self) -> str:
        return self.kind


def written(
    rng: random.Random, shape: tuple[int, ...], dim: int, norms: list[nn.Module]
) -> Written:
    """Return something written over values of a shape, with channels in `dim`."""
    kind = rng.choice(list(BODIES))
    return Written(kind, shape, dim, rng.choice(norms))


def beside(rng: random.Random) -> random.Random:
    """Return a generator of its own: what `rng` draws from here on stays the same."""
    copy = random.Random()
    copy.setstate(rng.getstate())
    return random.Random(copy.random())
