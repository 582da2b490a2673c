"""Random networks that make tokens of a picture: tiles cut them, shards cut heads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc.base.grid_shape import GridShape

__all__ = ["TokenCase", "random_classifier", "random_tokens"]

TokenCase = tuple[nn.Module, tuple[Tensor, ...], Any, Tensor | None, GridShape]
GRIDS = [(2, 1), (2, 1), (3, 1), (1, 2), (2, 2), (4, 1)]
WIDTH, HEADS = 12, 4


class Attention(nn.Module):
    """Attention in one of the ways in which people write it."""

    def __init__(self, how: str, tokens: int) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, tokens, tokens))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        size = q.shape[-1] ** -0.5
        if self.how == "product":
            weights = (q @ k.transpose(-2, -1) * size + self.bias).softmax(-1)
            y = (weights @ v).transpose(1, 2).flatten(2)
        elif self.how == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * size
            y = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v).flatten(2)
        elif self.how == "linear":  # keys times values first: a sum over tokens
            kv = torch.einsum("bhkd,bhke->bhde", k.softmax(-1), v)
            y = torch.einsum("bhqd,bhde->bqhe", q, kv).flatten(2) / k.shape[-2]
        else:
            settings: dict[str, Any] = {
                "plain": {},
                "causal": {"is_causal": True},
                "biased": {"attn_mask": self.bias},
                "dropout": {"dropout_p": 0.3 if self.training else 0.0},
            }[self.how]
            y = F.scaled_dot_product_attention(q, k, v, **settings)
            y = y.transpose(1, 2).flatten(2)
        return x + self.out(y)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Mixer(nn.Module):
    """A layer over the tokens: it sums over what tiles cut."""

    def __init__(self, tokens: int, how: str) -> None:
        super().__init__()
        self.how, self.mix = how, nn.Parameter(torch.randn(tokens, tokens) / tokens)
        self.linear = nn.Linear(tokens, tokens)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "linear":
            return x + self.linear(x.transpose(1, 2)).transpose(1, 2)
        if self.how == "einsum":
            return x + torch.einsum("nm,bmc->bnc", self.mix, x)
        return x + self.mix @ x


class Windowed(nn.Module):
    """A sum over windows of rows, as of Swin."""

    def __init__(self, rows: int, columns: int, window: int) -> None:
        super().__init__()
        self.rows, self.columns, self.window = rows, columns, window
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = self.window
        y = x.reshape(len(x), self.rows // size, size, self.columns, WIDTH)
        y = y.softmax(2).mul(self.linear(y))
        return x + y.reshape(x.shape)


class Back(nn.Module):
    """A convolution of tokens that are a picture again."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.sizes = rows, columns
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        picture = x.transpose(1, 2).reshape(len(x), WIDTH, *self.sizes)
        return x + self.conv(picture).flatten(2).transpose(1, 2)


class Pairs(nn.Module):
    """Tokens two by two, as of a patch that is merged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(len(x), -1, 2 * WIDTH)).reshape(x.shape)


class Tokens(nn.Module):
    """Patches, perhaps tokens before or after them, layers, and what is taken."""

    def __init__(self, rng: random.Random, rows: int, columns: int) -> None:
        super().__init__()
        self.extra_at = rng.choice(["before", "before", "after", "none", "none"])
        self.take = rng.choice(
            ["mean", "first", "last", "few", "max", "all", "strided"]
        )
        self.embed = nn.Conv2d(3, WIDTH, 2, 2)
        count = rows * columns + (self.extra_at != "none")
        self.extra = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.place = nn.Parameter(torch.randn(1, count, WIDTH))
        how = ["plain", "causal", "biased", "dropout", "product", "einsum", "linear"]
        makes: list[Callable[[], nn.Module]] = [
            lambda: Attention(rng.choice(how), count),
            lambda: Attention(rng.choice(how), count),
            Perceptron,
            lambda: Mixer(count, rng.choice(["linear", "einsum", "product"])),
        ]
        if self.extra_at == "none":
            makes.append(lambda: Back(rows, columns))
            if rows % 2 == 0:
                makes.append(lambda: Windowed(rows, columns, 2))
            if count % 2 == 0:
                makes.append(Pairs)
        self.layers = nn.Sequential(
            *(rng.choice(makes)() for _ in range(rng.randint(1, 4)))
        )
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        extra = self.extra.expand(len(x), -1, -1)
        if self.extra_at == "before":
            x = torch.cat([extra, x], 1)
        elif self.extra_at == "after":
            x = torch.cat([x, extra], 1)
        x = self.layers(x + self.place)
        taken = {
            "mean": lambda: x.mean(1),
            "first": lambda: x[:, 0],
            "last": lambda: x[:, -1],
            "few": lambda: x[:, 1:3].sum(1),
            "max": lambda: x.amax(1),
            "all": lambda: x,
            "strided": lambda: x[:, ::2].square().mean(1),
        }[self.take]()
        return self.head(taken)


def random_tokens(seed: int) -> TokenCase:
    """Return a network, its inputs, its loss and target, and how ranks share it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, columns = rng.choice([4, 6, 8]), rng.choice([2, 3, 4])
    batch = rng.choice([1, 2])
    model = Tokens(rng, rows, columns)
    inputs = (torch.randn(batch, 3, 2 * rows, 2 * columns),)
    with torch.no_grad():
        shape = model(*inputs).shape
    target: Tensor | None = torch.randn(shape)
    loss: Any = F.mse_loss
    if len(shape) == 2 and rng.random() < 0.5:
        loss, target = F.cross_entropy, torch.randint(0, 6, shape[:1])
    tiles = rng.choice([g for g in GRIDS if g[0] <= rows and g[1] <= columns])
    shards = rng.choice([1, 2, 2]) if tiles != (4, 1) else 1
    return model, inputs, loss, target, GridShape(tiles, shards=shards)


class Classifier(nn.Module):
    """Convolutions, all that they give in a row, and layers of that: as of AlexNet."""

    def __init__(self, rng: random.Random, rows: int, columns: int) -> None:
        super().__init__()
        wide, features = rng.choice([4, 6, 8]), rng.choice([6, 8])
        stride = rng.choice([1, 2])
        self.conv = nn.Conv2d(3, wide, 3, stride, padding=1, bias=rng.random() < 0.7)
        self.middle = rng.choice([nn.Identity(), nn.BatchNorm2d(wide), nn.Dropout(0.4)])
        self.how = rng.choice(["flatten", "flatten", "view", "late"])
        held = wide * -(-rows // stride) * -(-columns // stride)
        act = rng.choice([nn.ReLU(), nn.Softmax(1), nn.LayerNorm(held), nn.Identity()])
        self.act = act if self.how != "late" else nn.ReLU()
        self.first = nn.Linear(held, features, bias=rng.random() < 0.7)
        self.last = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(F.relu(self.conv(x)))
        if self.how == "late":
            return self.last(self.act(self.first(self.act(x).flatten(1))))
        flat = x.flatten(1) if self.how == "flatten" else x.view(len(x), -1)
        return self.last(F.relu(self.first(self.act(flat))))


def random_classifier(seed: int) -> TokenCase:
    """Return a network that flattens pictures, and how ranks share it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, columns = rng.choice([4, 6, 8]), rng.choice([4, 5])
    model = Classifier(rng, rows, columns)
    inputs = (torch.randn(rng.choice([1, 2]), 3, rows, columns),)
    tiles = rng.choice([(2, 1), (1, 2), (2, 2)])
    target = torch.randn(len(inputs[0]), 3)
    return model, inputs, F.mse_loss, target, GridShape(tiles, shards=2)
