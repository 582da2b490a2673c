"""Models with modules whose forward depends on data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from program_support import batch_of, mse, written
from threads import run_on_threads
from torch import Tensor, nn

from gemsc.compiler import CompiledProgram, compile
from gemsc.verify.compare import TOLERANCE, compare
from gemsc.verify.one_process import reference_steps

EXACT = TOLERANCE[torch.float64]
D = 6
X = torch.randn(8, D, generator=torch.Generator().manual_seed(0))
PICTURE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def adam(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in pairs], 0.02)


class Gate(nn.Module):
    """One of two ways, by the sum of what comes in."""

    def __init__(self, width: int = D, scale: float = 2.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the gate
            return torch.tanh(self.up(x))
        return x * self.scale


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(D, 2 * D)
        self.back = nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(torch.relu(self.wide(x)))
        return out


class Dropping(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class Mixture(nn.Module):
    """Each row goes to the expert with the largest weight; some have no rows."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.route = nn.Linear(D, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights = self.route(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().squeeze(1)  # the experts' rows
            if len(rows):
                share = weights[rows, index].unsqueeze(1)
                out = out.index_add(0, rows, expert(x[rows]) * share)
        return out, {"balance": weights.mean(0).square().sum()}


class Net(nn.Module):
    """A gate and a mixture between other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.gate = Gate()
        self.second = nn.Linear(D, D)
        self.mixture = Mixture()
        self.last = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.gate(torch.tanh(self.first(x)))))
        mixed, extra = self.mixture(x)
        out: Tensor = self.last(x + mixed) + extra["balance"]
        return out


class Around(nn.Module):
    """Layers around a module that a test gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.inner = inner
        self.last = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.inner(torch.tanh(self.first(x))))


def made(cls: Any, *args: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return cls(*args)


def compiled(model: nn.Module, **options: Any) -> CompiledProgram:
    options = {"ranks": 2, **options}
    return compile(model, (X,), loss=mse, example_target=X, **options)


def worst(
    folder: Path,
    model: nn.Module,
    inputs: Tensor = X,
    target: Tensor = X,
    loss: Any = mse,
    *,
    ranks: int = 2,
    micro_batches: int = 4,
    change: Callable[[Tensor], Tensor] = torch.clone,
    **options: Any,
) -> float:
    """Return the largest error of three steps with Adam on threads, in float64.

    The inputs of the second step are the negative ones of the others.
    """
    copies = options.get("data", 1)
    written(
        folder,
        model,
        (inputs,),
        loss,
        target,
        ranks=ranks,
        micro_batches=micro_batches,
        **options,
    )
    count = micro_batches * copies
    given = ((inputs,), target)
    ((numbers,), targets) = batch_of(given, count, len(inputs))
    batches = [((sign * change(numbers),), targets) for sign in (1, -1, 1)]
    actual = run_on_threads(folder, ranks, batches, optimizer=adam)
    wanted = reference_steps(model, loss, batches, count, torch.float64, adam)
    return compare(actual, wanted).worst
