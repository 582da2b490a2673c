"""A network for batches of several shapes, and samples for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, compile
from gemsc.plan_tables import PlannedShape
from gemsc.runtime.data.shapes import (
    ShapeClasses,
)

WORDS, WIDTH, IGNORED = 11, 4, -100
LENGTHS = (4, 6, 8)
SIZES = (3, 2, 1)  # samples of a micro-batch of each shape
TABLES = {n: torch.full((WIDTH,), 1.0 / n) for n in LENGTHS}  # no part of the model


class Words(nn.Module):
    """Attention to the words before, a tied head, a buffer that counts."""

    def __init__(self, count: bool = True) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.out.weight = self.words.weight
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)
        self.count = count
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        parts = layer(x).unsqueeze(1).chunk(3, -1)
        return x + F.scaled_dot_product_attention(*parts, is_causal=True).squeeze(1)

    def forward(self, words: Tensor) -> Tensor:
        if self.count:
            self.seen += 1
        x = self.attend(self.a, self.words(words))
        x = self.attend(self.b, x)
        return self.out(torch.tanh(self.c(x)))


class Functional(Words):
    """Its forward takes weights when it comes to them."""

    def forward(self, words: Tensor) -> Tensor:
        x = F.embedding(words, self.words.weight)
        x = torch.tanh(F.linear(x, self.c.weight))
        return F.linear(x, self.out.weight)


class Scaled(Words):
    """Another constant for each length."""

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.attend(self.a, self.words(words)) * TABLES[words.shape[1]]
        return self.out(torch.tanh(self.c(self.attend(self.b, x))))


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(
        output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total, (target != IGNORED).sum()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def examples() -> list[tuple[Tensor]]:
    pairs = zip(SIZES, LENGTHS, strict=True)
    return [(torch.arange(size * n).reshape(size, n) % WORDS,) for size, n in pairs]


def texts(count: int = 40, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(count):
        length = int(torch.randint(2, max(LENGTHS) + 1, (), generator=generator))
        line = torch.randint(1, WORDS, (length + 1,), generator=generator)
        pairs.append((line[:-1], line[1:]))
    return pairs


def compiled(folder: Path, model: nn.Module, **options: Any) -> CompiledProgram:
    shapes = examples()
    given: dict[str, Any] = {"ranks": 2, "micro_batches": 2, "check": False}
    program = compile(
        model,
        shapes,
        loss=counted,
        example_target=[x for (x,) in shapes],
        optimizer=sgd,
        **{**given, **options},
    )
    write_directory(program.compilation, folder)
    return program


def planned(length: int, size: int = 1, **sizes: list[int]) -> PlannedShape:
    return PlannedShape(
        name=str(length),
        variant=str(length),
        micro_batch_size=size,
        sizes=sizes or {"input.0": [length], "target": [length]},
        step_seconds=1.0,
        peak_bytes=[1],
    )


def classes_of(**how: Any) -> ShapeClasses:
    return ShapeClasses([planned(n) for n in LENGTHS], **how)
