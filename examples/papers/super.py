"""SUPER: T5-Large with attention and MLP side by side on 1,024 GPUs, simulated.

python examples/papers/super.py

Each block adds to its input what several branches compute of the same normalized input:
each has an equal part of the heads and of the hidden features. `BRANCHES=1` has all in
one; the parameters and the function are the same. `SAMPLES` are those of a micro-batch.
"""

import math
import os
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BRANCHES = int(os.environ.get("BRANCHES", "4"))
SAMPLES = int(os.environ.get("SAMPLES", "4"))

VOCABULARY, WIDTH, FEATURES, HEADS, HEAD, DEPTH = 32128, 1024, 4096, 16, 64, 24
BUCKETS, FARTHEST = 32, 128  # of distances between tokens
TOKENS = 64  # of a source, and of a target
DROPOUT = 0.1


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Some of the heads, from the first one on; no scaling, as in T5."""

    def __init__(self, first: int, heads: int) -> None:
        super().__init__()
        self.heads = slice(first, first + heads)
        self.query, self.key, self.value = (
            linear(WIDTH, heads * HEAD) for _ in range(3)
        )
        self.out = linear(heads * HEAD, WIDTH)

    def forward(self, x: Tensor, given: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (
            layer(source).unflatten(2, (-1, HEAD)).transpose(1, 2)
            for layer, source in (
                (self.query, x),
                (self.key, given),
                (self.value, given),
            )
        )
        scores = query @ key.transpose(2, 3)
        if bias is not None:
            scores = scores + bias[:, self.heads]
        weights = F.dropout(F.softmax(scores, -1), DROPOUT, self.training)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Branches that see the same input; their sum is added to it."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        heads, features = HEADS // BRANCHES, FEATURES // BRANCHES
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.own, self.crossed = (
            nn.ModuleList(Attention(g * heads, heads) for g in range(count))
            for count in (BRANCHES, BRANCHES * decodes)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(
                linear(WIDTH, features),
                nn.ReLU(),
                nn.Dropout(DROPOUT),
                linear(features, WIDTH),
            )
            for _ in range(BRANCHES)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        outputs = [attention(y, y, bias) for attention in self.own]
        if memory is not None:
            outputs += [attention(y, memory, None) for attention in self.crossed]
        outputs += [mlp(y) for mlp in self.mlps]
        return x + self.dropout(reduce(add, outputs))


class Stack(nn.Module):
    """An encoder or a decoder; one table of distances serves all of its blocks."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.register_buffer("buckets", buckets(decodes), persistent=False)
        self.register_buffer("unseen", unseen(decodes), persistent=False)
        self.distances = nn.Embedding(BUCKETS, HEADS)
        self.blocks = nn.ModuleList(Block(decodes=decodes) for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        bias = self.distances(self.buckets).permute(2, 0, 1).unsqueeze(0) + self.unseen
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, bias, memory)
        return self.dropout(self.norm(x))


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Stack(decodes=False), Stack(decodes=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of the next word after each of the target, b x t x v."""
        memory = self.encoder(self.words(source))
        x = self.decoder(self.words(target), memory)
        return F.linear(x * WIDTH**-0.5, self.words.weight)  # tied, and so scaled


def buckets(decodes: bool) -> Tensor:
    """Return T5's bucket of each distance: near ones alone, far ones in logarithms."""
    places = torch.arange(TOKENS)
    apart = places[None, :] - places[:, None]
    count = BUCKETS if decodes else BUCKETS // 2
    far = -apart.clamp(max=0) if decodes else apart.abs()
    near = count // 2
    steps = torch.log(far.clamp(min=1) / near) / math.log(FARTHEST / near)
    large = (near + (steps * (count - near)).long()).clamp(max=count - 1)
    bucket = torch.where(far < near, far, large)
    return bucket if decodes else bucket + count * (apart > 0)


def unseen(decodes: bool) -> Tensor:
    """Return what hides later words from a decoder."""
    hidden = torch.full((TOKENS, TOKENS), -math.inf) if decodes else torch.zeros(1, 1)
    return hidden.triu(1) if decodes else hidden


def model() -> nn.Module:
    return T5()


def example_inputs() -> tuple[Tensor, Tensor]:
    source, target = torch.randint(VOCABULARY, (2, SAMPLES, TOKENS))
    return source, target


def example_target() -> Tensor:
    return torch.randint(VOCABULARY, (SAMPLES, TOKENS))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    from compare import main

    main(__file__)
