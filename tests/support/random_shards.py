"""Random networks of the operations that shards cut, small, for tests of shards."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from random_forms import beside, written
from torch import Tensor, nn

__all__ = ["ShardCase", "random_shards"]

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu,
    F.gelu,
    F.silu,
    torch.tanh,
    lambda x: x * x.sigmoid(),
    lambda x: x.abs() + 0.5 * x,
)
BARRIERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.softmax(-1),
    lambda x: x.cumsum(1) / 4,
    lambda x: x.flip(-1),
    lambda x: x.roll(1, 1) + x.roll(2, 2),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x / (1 + x.amax((1, 2), keepdim=True).abs()),
)
KINDS = (
    *("plain", "plain", "scaled", "norm", "deep"),
    *("chunk", "split", "unbind", "two", "matmul", "einsum", "cat"),
)
BUCKETS = 5


class Mlp(nn.Module):
    """Up, something for each feature, down; `kind` says how two halves meet."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.kind = rng.choice(KINDS)
        self.hidden = rng.randint(4, 14)
        self.act = rng.choice(ACTIVATIONS)
        fused = self.kind in ("chunk", "split", "unbind")
        bias = rng.random() < 0.7
        self.up = nn.Linear(width, self.hidden * (1 + fused), bias=bias)
        self.more = nn.Linear(width, self.hidden, bias=bias)
        self.scale = nn.Parameter(torch.randn(self.hidden))
        self.weight = nn.Parameter(torch.randn(width, self.hidden) / width**0.5)
        self.norm = nn.LayerNorm(self.hidden)
        self.between = nn.Linear(self.hidden, self.hidden)
        inputs = self.hidden * (1 + (self.kind == "cat"))
        self.down = nn.Linear(inputs, width, bias=bias)

    def hidden_values(self, x: Tensor) -> Tensor:
        if self.kind == "matmul":
            return self.act(x @ self.weight)
        if self.kind == "einsum":
            return self.act(torch.einsum("blw,wh->blh", x, self.weight))
        y = self.up(x)
        if self.kind == "two":
            return self.act(y) * self.more(x)
        if self.kind == "cat":
            return torch.cat((self.act(y), self.more(x)), dim=-1)
        if self.kind in ("chunk", "split", "unbind"):
            return self.gated(y)
        y = self.act(y)
        if self.kind == "scaled":
            return y * self.scale + self.scale.cos()
        if self.kind == "norm":
            return self.norm(y)
        return self.act(self.between(y)) if self.kind == "deep" else y

    def gated(self, y: Tensor) -> Tensor:
        if self.kind == "unbind":
            a, b = y.unflatten(-1, (2, self.hidden)).unbind(-2)
        else:
            a, b = y.chunk(2, -1) if self.kind == "chunk" else y.split(self.hidden, -1)
        return self.act(a) * b

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden_values(x))


class Attention(nn.Module):
    """Heads by one layer or by three, mixed by PyTorch's function or by products."""

    def __init__(self, rng: random.Random, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.fused = rng.choice(["chunk", "outer", "inner", "", "", "grouped"])
        self.how = rng.choice(["sdpa", "matmul", "einsum"])
        self.bias = rng.choice(["", "causal", "table", "parameter"])
        groups = [n for n in (1, 2, 3) if heads % n == 0 and n < heads]
        self.kv = rng.choice(groups) if self.fused == "grouped" and groups else heads
        bias = rng.random() < 0.7
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, self.kv * self.size, bias=bias)
        self.value = nn.Linear(width, self.kv * self.size, bias=bias)
        self.table = nn.Embedding(BUCKETS, heads)
        self.shift = nn.Parameter(torch.randn(heads, 1, 1))
        self.out = nn.Linear(width, width, bias=bias)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values: batch x heads x tokens x size."""
        heads, size = self.heads, self.size
        if self.fused == "chunk":
            qkv = self.qkv(x).chunk(3, -1)
            return tuple(p.unflatten(-1, (heads, size)).transpose(1, 2) for p in qkv)
        if self.fused == "outer":
            qkv = self.qkv(x).unflatten(-1, (3, heads, size)).permute(2, 0, 3, 1, 4)
            return qkv.unbind(0)
        if self.fused == "inner":
            qkv = self.qkv(x).view(*x.shape[:2], heads, 3, size).transpose(1, 2)
            return qkv.unbind(3)
        three = self.query(x), self.key(x), self.value(x)
        query, key, value = (
            part.view(*x.shape[:2], -1, size).transpose(1, 2) for part in three
        )
        if self.kv < heads and self.how != "sdpa":
            times = heads // self.kv
            key, value = (
                part[:, :, None]
                .expand(-1, -1, times, -1, -1)
                .reshape(x.shape[0], heads, x.shape[1], size)
                for part in (key, value)
            )
        return query, key, value

    def added(self, length: int) -> Tensor | None:
        """Return what is added to the products."""
        places = torch.arange(length)
        apart = places[None, :] - places[:, None]
        if self.bias == "causal":
            return torch.zeros(length, length).masked_fill(apart > 0, -1e4)
        if self.bias == "table":
            return self.table(apart.clamp(-2, 2) + 2).permute(2, 0, 1)[None]
        if self.bias == "parameter":
            return self.shift * apart
        return None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x)
        bias = self.added(x.shape[1])
        if self.how == "sdpa":
            mixed = F.scaled_dot_product_attention(
                query, key, value, bias, enable_gqa=key.shape[1] < self.heads
            )
            return self.out(mixed.transpose(1, 2).flatten(2))
        if self.how == "matmul":
            scores = query @ key.transpose(-1, -2) / self.size**0.5
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / self.size**0.5
        weights = (scores if bias is None else scores + bias).softmax(-1)
        if self.how == "matmul":
            return self.out((weights @ value).transpose(1, 2).reshape(x.shape))
        mixed = torch.einsum("bhqk,bhkd->bqhd", weights, value)
        return self.out(mixed.flatten(2))


class Convolutions(nn.Module):
    """Over tokens, with channels in groups; a norm of channels between."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        channels = rng.choice([4, 6, 8, 12])
        groups = rng.choice([1, 1, 2, channels])
        kind = rng.choice([nn.Conv1d, nn.Conv1d, nn.ConvTranspose1d])
        norms: list[nn.Module] = [
            nn.BatchNorm1d(channels),
            nn.GroupNorm(2, channels),
            nn.InstanceNorm1d(channels, affine=True),
            nn.Identity(),
        ]
        self.steps = nn.Sequential(
            nn.Conv1d(width, channels, 1),
            rng.choice(norms),
            nn.GELU(),
            kind(channels, channels, 3, padding=1, groups=groups, bias=False),
            rng.choice([nn.ReLU(), nn.AvgPool1d(3, 1, 1), nn.Identity()]),
            nn.Conv1d(channels, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x.transpose(1, 2)).transpose(1, 2)


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)


class Block(nn.Module):
    """Bodies after a norm, alone, one after the other or added; shared or not."""

    def __init__(self, rng: random.Random, width: int, heads: int) -> None:
        super().__init__()
        self.how = rng.choice(["residual", "residual", "plain", "added", "twice"])
        self.barrier = rng.choice(BARRIERS) if rng.random() < 0.2 else None
        norms = [nn.LayerNorm(width), Rms(width), nn.Identity()]
        self.norm = rng.choice(norms)
        kinds: list[Callable[[], nn.Module]] = [
            lambda: Mlp(rng, width),
            lambda: Attention(rng, width, heads),
            lambda: Convolutions(rng, width),
        ]
        weights = (3, 3, 1)
        self.first = rng.choices(kinds, weights)[0]()
        self.second = rng.choices(kinds, weights)[0]()
        aside = beside(rng)
        norms = [nn.LayerNorm(width), Rms(width)]
        self.written = nn.Identity()
        if aside.random() < 0.5:
            self.written = written(aside, (1, 1, width), 2, norms)

    def forward(self, x: Tensor) -> Tensor:
        y = self.written(self.norm(x))
        if self.how == "added":
            y = self.first(y) + self.second(y)
        elif self.how == "twice":
            y = self.first(self.first(y).tanh())
        else:
            y = self.first(y)
        y = y if self.how == "plain" else x + y
        return y if self.barrier is None else self.barrier(y)


class Network(nn.Module):
    """Some blocks over batch x tokens x width, from floats or from words."""

    def __init__(
        self, rng: random.Random, width: int, heads: int, inputs: int, outputs: int
    ) -> None:
        super().__init__()
        # of words there are as many as outputs, and the head may be the embedding
        self.is_text = not inputs
        self.stem: nn.Module = nn.Embedding(outputs, width)
        if inputs:
            self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            Block(rng, width, heads) for _ in range(rng.randint(1, 3))
        )
        self.head: nn.Module = nn.Linear(width, outputs, bias=rng.random() < 0.5)
        if self.is_text and rng.random() < 0.6:
            self.head.weight = self.stem.weight
        aside = beside(rng)
        groups = [g for g in range(2, width) if width % g == outputs % g == 0]
        if groups and aside.random() < 0.5:  # of the outputs, each group makes some
            self.head = nn.Conv1d(width, outputs, 1, groups=aside.choice(groups))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if isinstance(self.head, nn.Conv1d):
            return self.head(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


@dataclass(frozen=True)
class ShardCase:
    """A network with all that a step needs, and how it is cut."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor]
    target: Any
    shards: int
    trunk: str


def _entropy(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def _weighted(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, output.shape[2], dtype=output.dtype)
    return F.cross_entropy(
        output.transpose(1, 2), target, weight, ignore_index=1, label_smoothing=0.1
    )


ENTROPIES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _entropy,
    _weighted,
    lambda o, t: _entropy(o, t, label_smoothing=0.3),
    lambda o, t: _entropy(o, t, reduction="sum", ignore_index=2) / 7,
)
DISTANCES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    F.mse_loss,
    F.smooth_l1_loss,
    lambda o, t: (o * t).sum() + o.square().mean(),
    lambda o, t: F.mse_loss(o.mean(1), t[:, 0]),
    lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid()),
)


def random_shards(seed: int) -> ShardCase:
    """Return the case of a seed; float64 must be the default."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads = rng.choice([2, 3, 4, 6])
    width = heads * rng.choice([2, 4])
    batch, length = rng.randint(1, 5), rng.randint(3, 7)
    shards = rng.choice([2, 3, 4])
    trunks = ["whole", "whole"]
    trunks += ["batch"] if batch >= shards else []
    trunks += ["sequence"] if length >= shards else []
    outputs = rng.randint(5, 13)
    is_text = rng.random() < 0.5
    model = Network(rng, width, heads, 0 if is_text else 5, outputs)
    x = torch.randn(batch, length, 5)
    if is_text:
        x = torch.randint(outputs, (batch, length))
    if rng.random() < 0.6:
        loss, target = rng.choice(ENTROPIES), torch.randint(outputs, (batch, length))
    else:
        loss, target = rng.choice(DISTANCES), torch.randn(batch, length, outputs)
    return ShardCase(model, (x,), loss, target, shards, rng.choice(trunks))
