"""Replicas and data-parallel copies stay alike; optimizers, clipping, accumulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS
from parity_support import lowered
from program_support import Net, against_one_process

from gemsc.base.nests import Mean, as_loss
from gemsc.codegen.package import write_directory
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.verify.one_process import divide_gradients

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    torch.set_default_dtype(DOUBLE)
    yield
    torch.set_default_dtype(torch.float32)


def compiled(name: str, directory: Path, **options: Any) -> Plan:
    program = lowered(name, CompileOptions(**options))
    write_directory(program.compilation, directory)
    return program.plan


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    pairs = list(parameters)
    biases = [(n, p) for n, p in pairs if n.endswith("bias")]
    others = [(n, p) for n, p in pairs if not n.endswith("bias")]
    groups = [{"params": others}, {"params": biases, "lr": 0.2, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.05, weight_decay=1e-2)


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", ["resnet18", "encoder"])
def test_all_copies_are_bit_identical_after_20_steps(
    name: str, optimizer: Callable[[Any], Any], tmp_path: Path
) -> None:
    plan = compiled(name, tmp_path, ranks=4, schedule="master", times=2, data=2)
    inputs, target = MODELS[name].inputs(plan.data * plan.micro_batches, DOUBLE)

    def train(transport: LocalTransport) -> dict[str, list[torch.Tensor]]:
        trainer = Trainer(tmp_path, transport, optimizer=optimizer, dtype=DOUBLE)
        for _ in range(20):
            trainer.step(inputs, target)
        made = trainer.worker.updates.optimizer
        assert made is not None
        return {
            f"{key}/{name}": [tensor.detach(), *states(made, tensor)]
            for key, stage in trainer.stages.items()
            for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]
        }

    def states(made: torch.optim.Optimizer, tensor: torch.Tensor) -> list[torch.Tensor]:
        state = made.state.get(tensor, {})
        return [value for _, value in sorted(state.items()) if torch.is_tensor(value)]

    known: dict[str, list[torch.Tensor]] = {}
    copies = 0
    for rank in run_local(plan.ranks, train, timeout=300):
        for key, tensors in rank.items():
            name = key.split("/")[1]
            if name not in known:
                known[name] = tensors
                continue
            copies += 1
            pairs = zip(known[name], tensors, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), key
    assert copies >= 3 * len(known)  # two replicas times two copies


def one_process(
    name: str,
    batches: list[Any],
    num_micro_batches: int,
    optimizer: Callable[[Any], Any],
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    scheduler: Callable[[Any], Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Train the plain model as a person would, over the same micro-batches."""
    case = MODELS[name]
    model = case.build().to(DOUBLE)
    update = optimizer(model.named_parameters())
    steps = scheduler(update) if scheduler else None
    mean = Mean()
    for number, (inputs, target) in enumerate(batches):
        parts = [t.chunk(num_micro_batches) for t in (*inputs, target)]
        for *given, wanted in zip(*parts, strict=True):
            mean.add(as_loss(case.loss(model(*given), wanted))).backward()
        if (number + 1) % accumulate:
            continue
        divide_gradients(model.parameters(), mean.divisor)
        mean = Mean()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        update.step()
        update.zero_grad()
        if steps is not None:
            steps.step()
    return {n: t.detach() for n, t in model.state_dict().items()}


CASES: list[dict[str, Any]] = [
    {"clip_norm": 0.05},
    {"accumulate": 2},
    {"clip_norm": 0.05, "accumulate": 2},
    {"scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.3)},
]


@pytest.mark.slow
@pytest.mark.by_day(5)
@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 3, "micro_batches": 2},
        {"ranks": 4, "schedule": "master", "times": 1, "data": 2},
        {"ranks": 3, "schedule": "mast", "micro_batches": 2},
        {"ranks": 4, "placement": "folded", "micro_batches": 2, "data": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("extra", CASES, ids=["clip", "accumulate", "both", "lr"])
@pytest.mark.parametrize("name", ["resnet18", "encoder"])
def test_clipping_accumulation_and_learning_rates_are_those_of_one_process(
    name: str, extra: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    plan = compiled(name, tmp_path, **options)
    count = plan.data * plan.micro_batches
    inputs, target = MODELS[name].inputs(4 * count, DOUBLE)
    quarters = [t.chunk(4) for t in (*inputs, target)]
    batches = [(tuple(given), wanted) for *given, wanted in zip(*quarters, strict=True)]

    def train(transport: LocalTransport) -> dict[str, torch.Tensor]:
        trainer = Trainer(tmp_path, transport, optimizer=grouped, dtype=DOUBLE, **extra)
        for batch in batches:
            trainer.step(*batch)
        return trainer.state_dict()

    expected = one_process(name, batches, count, grouped, **extra)
    for state in run_local(plan.ranks, train, timeout=120):
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-9, atol=1e-12)


def test_a_tied_weight_may_have_a_gradient_on_one_of_its_ranks_only(
    tmp_path: Path,
) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(net.a(x)).detach()
        result: torch.Tensor = net.d(torch.tanh(net.c(torch.tanh(net.b(x)))))
        return result

    model = Net(forward)
    model.d.weight = model.a.weight
    assert against_one_process(tmp_path, model).worst <= 1e-9


@pytest.mark.slow
def test_training_reaches_a_lower_loss_than_guessing(tmp_path: Path) -> None:
    plan = compiled("resnet18", tmp_path, ranks=2, schedule="master", times=2)
    inputs, target = MODELS["resnet18"].inputs(plan.micro_batches, DOUBLE)

    def train(transport: LocalTransport) -> float:
        trainer = Trainer(tmp_path, transport, optimizer=adamw, dtype=DOUBLE)
        return [trainer.step(inputs, target) for _ in range(30)][-1]

    losses = run_local(plan.ranks, train, timeout=120)
    assert losses[0] == losses[1]
    assert losses[0] < 0.5 * torch.log(torch.tensor(10.0))
