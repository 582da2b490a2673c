"""Programs that are trained on simulated devices, and on the CPU to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from program_support import written
from sim_cuda import DEVICE, DirectTransport, on_device
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.transport.streams import CudaStreams

__all__ = ["USES", "Program", "Result", "assert_equal", "compiled", "train"]

SIZE = 8
USES: dict[str, dict[str, Any]] = {
    "plain": {"ranks": 2},
    "offload": {"ranks": 2, "offload": ("all",)},
    "recompute": {"ranks": 2, "recompute": ("all",)},
    "dropout": {"ranks": 2, "recompute": ("all",)},
    "data 2": {"ranks": 4, "data": 2},
    "state in parts": {"ranks": 4, "data": 2, "shard": "optimizer"},
    "one rank": {"ranks": 1, "offload": ("all",)},
    "one block": {"ranks": 1, "offload": ("b",)},
    "tiles 2x1": {"ranks": 4, "tiles": "2x1,2x1"},
    "tiles 2x2": {"ranks": 4, "tiles": "2x2"},
}


class Net(nn.Module):
    """Layers that tiles know, a skip, and few numbers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a = nn.Conv2d(1, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)
            self.b = nn.Conv2d(4, 4, 3, padding=1)
            self.c = nn.Conv2d(4, 4, 3, padding=1)
            self.d = nn.Conv2d(4, 4, 3, padding=1)
            self.e = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.a(x)))
        y = torch.tanh(self.c(torch.tanh(self.b(h))))
        y = torch.tanh(self.d(F.max_pool2d(y + h, 2)))
        return self.e(y.mean((2, 3)))


class Dropping(Net):
    """The same with random numbers in the last layers: one rank draws them."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.a(x)))
        y = torch.tanh(self.c(torch.tanh(self.b(h))))
        y = F.max_pool2d(torch.tanh(self.d(y + h)), 2)
        y = F.dropout(y.mean((2, 3)), 0.4, self.training)
        return self.e(F.dropout(torch.tanh(y), 0.2, self.training))


@dataclass
class Result:
    """What a rank has in the end, on the host."""

    losses: list[float]
    state: dict[str, Tensor]
    output: Tensor | None
    peak_bytes: int = 0
    peak_pinned_bytes: int = 0


@dataclass
class Program:
    """A compiled program, and what it does on the CPU."""

    directory: Path
    ranks: int
    peak_bytes: list[int]  # predicted

    @cached_property
    def on_cpu(self) -> list[Result]:
        """What each rank has after a run on the CPU."""
        cpu = torch.device("cpu")
        return run_local(self.ranks, lambda t: train(self.directory, t, device=cpu))

    def simulated(
        self,
        seed: int,
        *,
        cuda_aware: bool = False,
        policy: str = "",
        make: Callable[..., CudaStreams] = CudaStreams,
    ) -> list[Result]:
        """Return what each rank has, with a device of its own."""

        def rank(inner: LocalTransport) -> Result:
            with on_device(seed + 1000 * inner.rank, policy) as device:
                transport = DirectTransport(inner, device) if cuda_aware else inner
                result = train(self.directory, transport, streams=make(DEVICE, device))
                result.peak_bytes = device.peak_bytes
                result.peak_pinned_bytes = device.peak_pinned_bytes
                return result

        return run_local(self.ranks, rank)


def compiled(
    directory: Path, schedule: str, use: str, micro_batches: int = 4
) -> Program:
    x, target = torch.zeros(2, 1, SIZE, SIZE), torch.zeros(2, dtype=torch.long)
    program = written(
        directory,
        Dropping() if use == "dropout" else Net(),
        (x,),
        F.cross_entropy,
        target,
        schedule=schedule,
        micro_batches=micro_batches,
        **USES[use],
    )
    return Program(directory, program.plan.ranks, program.plan.peak_bytes)


def train(directory: Path, transport: Any, **options: Any) -> Result:
    """Train for two steps and evaluate."""

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1, momentum=0.9)

    trainer = Trainer(directory, transport, optimizer=sgd, clip_norm=0.5, **options)
    size = 2 * trainer.worker.steps.num_micro_batches
    generator = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(size, 1, SIZE, SIZE, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(3)
    ]
    losses = [trainer.step(*batch) for batch in data[:2]]
    inputs, target = data[2]
    final = trainer.evaluate(inputs, target)
    assert final.loss is not None
    losses.append(final.loss)
    if final.output is not None:  # as a user does, with targets of the data set
        losses.append(float(F.cross_entropy(final.output, target[: len(final.output)])))
    state = {name: tensor.cpu() for name, tensor in trainer.stages.tensors().items()}
    return Result(losses, state, final.output)


def assert_equal(actual: list[Result], expected: list[Result]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.losses == theirs.losses
        assert mine.state.keys() == theirs.state.keys()
        for name, tensor in theirs.state.items():
            assert torch.equal(mine.state[name], tensor), name
        assert (mine.output is None) == (theirs.output is None)
        if mine.output is not None and theirs.output is not None:
            assert torch.equal(mine.output, theirs.output)
