"""Programs on a simulated CUDA device: the numbers of the CPU, whatever comes first.

`pytest tests/test_cuda_streams.py --nightly` runs every schedule with all that uses
streams, through the host and with a CUDA-aware library, in eight orders each.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from local_transport import LocalTransport, run_local
from program_support import written
from sim_cuda import DEVICE, DirectTransport, on_device
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport import streams
from gemsc.runtime.transport.streams import CudaStreams
from gemsc.runtime.worker.finite import NotFiniteError
from gemsc.schedules import SCHEDULES

SIZE = 8
SEEDS = 8
USES: dict[str, dict[str, Any]] = {
    "plain": {"ranks": 2},
    "offload": {"ranks": 2, "offload": ("all",)},
    "recompute": {"ranks": 2, "recompute": ("all",)},
    "data 2": {"ranks": 2, "data": 2},
    "state in parts": {"ranks": 2, "data": 2, "shard_optimizer": True},
    "tiles 2x1": {"ranks": 4, "tiles": "2x1,2x1"},
    "tiles 2x2": {"ranks": 4, "tiles": "2x2"},
}
ALL = tuple(product(SCHEDULES, USES))
FEW = (
    ("1f1b", "plain"),
    ("gpipe", "offload"),
    ("1f1b", "recompute"),
    ("zb-h1", "plain"),
    ("interleaved", "plain"),
    ("mast", "data 2"),
    ("bidirectional", "offload"),
    ("1f1b", "state in parts"),
    ("1f1b", "tiles 2x1"),
)


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


@dataclass
class Result:
    """What a rank has in the end, on the host."""

    losses: list[float]
    state: dict[str, Tensor]
    output: Tensor | None
    peak_bytes: int = 0


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
                return result

        return run_local(self.ranks, rank)


def compiled(
    directory: Path, schedule: str, use: str, micro_batches: int = 4
) -> Program:
    x, target = torch.zeros(2, 1, SIZE, SIZE), torch.zeros(2, dtype=torch.long)
    program = written(
        directory,
        Net(),
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
    found = trainer.evaluate(inputs, target)
    assert found.loss is not None
    losses.append(found.loss)
    if found.output is not None:  # as a user does, with targets of the data set
        losses.append(float(F.cross_entropy(found.output, target[: len(found.output)])))
    state = {name: tensor.cpu() for name, tensor in trainer.stages.tensors().items()}
    return Result(losses, state, found.output)


def assert_equal(found: list[Result], expected: list[Result]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.losses == theirs.losses
        assert mine.state.keys() == theirs.state.keys()
        for name, tensor in theirs.state.items():
            assert torch.equal(mine.state[name], tensor), name
        assert (mine.output is None) == (theirs.output is None)
        if mine.output is not None and theirs.output is not None:
            assert torch.equal(mine.output, theirs.output)


@pytest.mark.parametrize(("schedule", "use"), ALL, ids=map(" ".join, ALL))
def test_a_device_gives_the_numbers_of_the_cpu(
    schedule: str, use: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    thorough = request.config.getoption("--nightly")
    if not thorough and (schedule, use) not in FEW:
        pytest.skip("only with --nightly")
    if schedule == "zb-h1" and use not in ("plain", "data 2", "state in parts"):
        with pytest.raises(GemscError, match="cannot be used with"):
            compiled(tmp_path, schedule, use)
        return
    program = compiled(tmp_path, schedule, use)
    for seed in range(SEEDS) if thorough else (0, 1):
        for cuda_aware in (False, True):
            number = seed if thorough else 2 * seed + cuda_aware  # each order once
            found = program.simulated(number, cuda_aware=cuda_aware)
            assert_equal(found, program.on_cpu)


# What must not be left out. Each line of streams.py that lets somebody wait, or keeps a
# tensor, is replaced; then numbers differ in some order.


@dataclass(frozen=True)
class Race:
    line: str
    instead: str
    use: str
    policy: str
    cuda_aware: bool = False
    micro_batches: int = 4


WAIT_FOR_COMPUTE = "        self._outward.wait_event(self.in_place(tensor).event)\n"
TO_HOST_KEEPS = "        self._leaving.append((tensor, event))\n"
RACES = {
    "a copy outward does not wait for the computation": Race(
        WAIT_FOR_COMPUTE, "", "plain", "copies first"
    ),
    "a send before the copy is there": Race(
        "return self.event is None or self.event.query()",
        "return True",
        "plain",
        "copies last",
    ),
    "a copy outward without keeping its tensor": Race(
        TO_HOST_KEEPS, "        self._leaving.clear()\n", "offload", "copies last"
    ),
    "memory goes back before its copy outward": Race(
        "            self._compute.wait_event(oldest)\n", "", "offload", "copies last"
    ),
    "what comes back is used without waiting": Race(
        "        return self._bring(copy.tensor, room)\n",
        "        return Arrival(self._bring(copy.tensor, room).tensor)\n",
        "offload",
        "copies last",
    ),
    "what was received is used without waiting": Race(
        "        return self._bring(buffer, room).take()\n",
        "        return self._bring(buffer, room).tensor\n",
        "plain",
        "copies last",
    ),
    "a copy inward does not wait for its memory": Race(
        "        self._inward.wait_event(room.event)\n", "", "offload", "inward first"
    ),
    "a copy inward does not wait for the copy outward": Race(
        "        self._inward.wait_event(copy.event)\n",
        "",
        "offload",
        "inward first",
        micro_batches=1,  # the backward follows at once
    ),
    "a message is received into memory that is in use": Race(
        "return self.in_place(torch.empty(shape, dtype=dtype, device=self.device))",
        "return Pending(torch.empty(shape, dtype=dtype, device=self.device))",
        "plain",
        "copies first",
        cuda_aware=True,
    ),
}


@pytest.fixture(scope="module")
def gpipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Program]:
    """Return a function that compiles for gpipe: much waits at a time."""

    @cache
    def compile(use: str, micro_batches: int) -> Program:
        folder = tmp_path_factory.mktemp("program")
        return compiled(folder, "gpipe", use, micro_batches)

    return compile


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Race], Any]:
    """Return a function that gives the streams with one line changed."""

    def change(race: Race) -> Any:
        text = inspect.getsource(streams)
        assert text.count(race.line) == 1
        module = ModuleType("changed_streams")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(text.replace(race.line, race.instead), module.__dict__)
        return module.CudaStreams

    return change


@pytest.mark.parametrize("name", RACES)
def test_every_wait_is_needed(
    name: str,
    gpipe: Callable[[str, int], Program],
    changed: Callable[[Race], Any],
) -> None:
    race = RACES[name]
    program, make = gpipe(race.use, race.micro_batches), changed(race)

    def try_orders() -> None:
        for seed in range(SEEDS):
            found = program.simulated(
                seed, cuda_aware=race.cuda_aware, policy=race.policy, make=make
            )
            assert_equal(found, program.on_cpu)

    # other numbers, not finite perhaps, or what is no class of the loss
    with pytest.raises((AssertionError, NotFiniteError, IndexError)):
        try_orders()


# How much memory of the device is in use when the host is far ahead of it.

LARGEST = 2 * 4 * SIZE * SIZE * 4  # bytes: a value that is saved, or sent


def excess(program: Program, **options: Any) -> int:
    """Return by how much a device's peak is above the predicted one, at most."""
    found = program.simulated(0, policy="copies last", **options)
    pairs = zip(found, program.peak_bytes, strict=True)
    return max(result.peak_bytes - predicted for result, predicted in pairs)


def test_offload_frees_the_predicted_memory_however_far_the_host_is_ahead(
    gpipe: Callable[[str, int], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What operators need for a moment is not predicted, and so are copies."""
    moments = excess(gpipe("plain", 12))
    cap = moments + streams.MOST_LEAVING * LARGEST
    assert excess(gpipe("offload", 12)) <= cap
    monkeypatch.setattr(streams, "MOST_LEAVING", 1000)  # until the copies are done
    assert excess(gpipe("offload", 12)) > 3 * cap
