"""Networks of every shape, small, for the passes that find skips and blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

WIDTH = 8
PICTURE = torch.zeros(2, WIDTH, 16, 16)
TEXT = torch.zeros(2, 6, WIDTH)


def conv(inputs: int = WIDTH, outputs: int = WIDTH, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2)


class Residual(nn.Module):
    """Two or three layers and the sum with their input; `down` changes the width."""

    def __init__(self, *, bottleneck: bool = False, down: bool = False) -> None:
        super().__init__()
        sizes = (1, 3, 1) if bottleneck else (3, 3)
        self.convs = nn.ModuleList(conv(size=size) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in sizes)
        self.down = nn.Sequential(conv(size=1), nn.BatchNorm2d(WIDTH)) if down else None

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for layer, norm in zip(self.convs, self.norms, strict=True):
            out = norm(layer(out))
            if layer is not self.convs[-1]:
                out = F.relu(out)
        if self.down is not None:
            x = self.down(x)
        out += x
        return F.relu(out)


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
        self.conv1, self.conv2 = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(out))) + x


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = conv(WIDTH, 2, 1)
        self.three = nn.Sequential(conv(WIDTH, 4, 1), conv(4, 2, 3))
        self.five = nn.Sequential(conv(WIDTH, 4, 1), conv(4, 2, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), conv(WIDTH, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.less, self.more = conv(WIDTH, 2, 1), conv(2, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        gate = F.relu(self.less(h.mean((2, 3), keepdim=True)))
        return x + h * torch.sigmoid(self.more(gate))


class FlatUNet(nn.Module):
    """All in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = conv(), conv(), conv()
        self.mid = conv()
        self.up3, self.up2, self.up1 = (conv(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        e1 = F.relu(self.down1(x))
        e2 = F.relu(self.down2(F.max_pool2d(e1, 2)))
        e3 = F.relu(self.down3(F.max_pool2d(e2, 2)))
        m = F.relu(self.mid(F.max_pool2d(e3, 2)))
        d3 = F.relu(self.up3(torch.cat([e3, F.interpolate(m, scale_factor=2)], 1)))
        d2 = F.relu(self.up2(torch.cat([e2, F.interpolate(d3, scale_factor=2)], 1)))
        return self.up1(torch.cat([e1, F.interpolate(d2, scale_factor=2)], 1))


class Level(nn.Module):
    """One level of a U-Net around the next smaller one (module inside module)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.down, self.inner, self.up = conv(), inner, conv(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        e = F.relu(self.down(x))
        small = self.inner(F.avg_pool2d(e, 2))
        big = F.interpolate(small, scale_factor=2)
        return F.relu(self.up(torch.cat([e, big], 1)))


class Dense(nn.Module):
    def __init__(self, layers: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(WIDTH + 2 * i, 2) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return torch.cat(features, 1)


class FlatTransformer(nn.Module):
    """Lists of layers and one forward: no module is a block."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(layers))
        self.thin = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for i, qkv in enumerate(self.qkv):
            q, k, v = qkv(self.norm[2 * i](x)).chunk(3, -1)
            weights = torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, -1)
            x = x + self.out[i](weights @ v)
            x = x + self.thin[i](F.gelu(self.wide[i](self.norm[2 * i + 1](x))))
        return x


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.right = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.join(torch.cat([self.left(a), self.right(b)], -1))


def rows(*layers: Any) -> nn.Sequential:
    """Return layers one after the other, between two plain ones."""
    return nn.Sequential(conv(), *layers, conv())


def mean(output: Any) -> Tensor:
    """Return a loss that takes no target, of the first output."""
    leaf = next(t for t in pytree.tree_leaves(output) if isinstance(t, Tensor))
    return leaf.float().square().mean()


TOKENS = torch.zeros(2, 6, dtype=torch.int64)


class TiedEncoder(nn.Module):
    """The projection to words is the embedding."""

    def __init__(self, words: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(F.dropout(x, 0.1, self.training))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Tiled(nn.Module):
    """A halo, sums over tiles, rows and columns, and features: what tiles do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = conv(), nn.BatchNorm2d(WIDTH)
        self.around = nn.Conv2d(WIDTH, 4, 3, padding=1, padding_mode="circular")
        self.fc = nn.Linear(4 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = x * x.mean(2, keepdim=True).sigmoid()
        x = self.around(F.max_pool2d(x, 2))
        x = x - x.amax((2, 3), keepdim=True)
        return self.fc(torch.flatten(x, 1))
