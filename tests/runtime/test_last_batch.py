"""A batch that is not full: its whole micro-batches train as they do in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import WIDTH, Net, X, mse, on_ranks, written
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from training_support import pairs, program, run, user_of
from worker_support import worker_of

from gemsc import compile
from gemsc.errors import GemscError
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.worker.reduction import RunningStatistics
from gemsc.weights.read import own_part

NUM = 4  # micro-batches of all replicas
COUNTS = (4, 1, 2, 3, 4)  # of each step
SIZE = 2


def forward(self: Any, x: Tensor) -> Tensor:
    x = torch.tanh(self.norm(self.a(x)))
    x = torch.tanh(self.other(self.b(x)))
    return self.d(torch.relu(self.norm(self.c(x))))  # one norm, twice


def network() -> Net:
    return Net(
        forward, norm=nn.BatchNorm1d(WIDTH), other=nn.BatchNorm1d(WIDTH, 1e-5, None)
    )


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return full batches, of which the last samples may not count."""
    numbers = torch.randn(2, len(COUNTS), NUM * SIZE, WIDTH)
    return [*zip(*numbers, strict=True)]


def in_one_process(
    given: list[tuple[Tensor, Tensor]],
    accumulate: int = 1,
    clip_norm: float | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(network()).double()
    optimizer, losses = sgd(model.parameters()), []
    for step, (count, (x, target)) in enumerate(zip(COUNTS, given, strict=True)):
        parts = [*zip(x.split(SIZE), target.split(SIZE), strict=True)][:count]
        loss = torch.stack([mse(model(a), b) for a, b in parts]).mean()
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


# options, and what a trainer gets
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": ({"schedule": "1f1b", "recompute": ("all",)}, {"clip_norm": 0.1}),
    "mirrored": ({"schedule": "bidirectional"}, {}),
    "deferred": ({"schedule": "zb-h1"}, {"accumulate": 2}),
    "data": (
        {"ranks": 4, "data": 2, "micro_batches": 2, "shard": "optimizer"},
        {},
    ),
    "shards": ({"shards": (2,), "ranks": 2}, {}),
}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_that_no_run_calls_keeps_its_statistics(momentum: float | None) -> None:
    norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
    before = copy.deepcopy(norm.state_dict())
    statistics = RunningStatistics({0: [norm]})
    statistics.remember()
    (transport,) = run_local(1, lambda t: worker_of(t).transport)
    statistics.start(transport, None, 2.0)
    statistics.finish()
    assert all(torch.equal(t, before[n]) for n, t in norm.state_dict().items())


@pytest.mark.slow(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_count_leaves_no_trace(
    way: str, tmp_path: Path, in_double: None
) -> None:
    given, settings = WAYS[way]
    options = {"ranks": 2, "micro_batches": NUM, **given}
    x = torch.randn(SIZE, WIDTH)
    written(tmp_path, network().double(), (x,), target=x, optimizer=sgd, **options)
    data = batches()
    losses, whole = in_one_process(data, **settings)

    def work(trainer: Trainer) -> set[str]:
        actual = [
            trainer.step(x, target, micro_batches=count)
            for count, (x, target) in zip(COUNTS, data, strict=True)
        ]
        assert actual == pytest.approx(losses, rel=1e-12)
        parts = trainer.program.parts
        for name, tensor in trainer.state_dict().items():
            wanted = own_part(whole[name], parts.get(name), name)
            torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-12)
        return {*trainer.state_dict()}

    names = on_ranks(tmp_path, options["ranks"], work, optimizer=sgd, **settings)
    assert set().union(*names) == {*whole}


@pytest.mark.parametrize(
    ("samples", "least", "counts"),
    [(8, 2, [4, 4]), (11, 2, [4, 4, 2]), (9, 2, [4, 4]), (3, 2, [2]), (3, 4, [])],
)
def test_how_many_samples_count(samples: int, least: int, counts: list[int]) -> None:
    data = TensorDataset(torch.arange(samples), torch.arange(samples))
    reader = Batches(data, 4, seed=0, shuffle=True, least=least)
    rows = [row.indices for row in reader.rows(0)]
    assert [len(row) for row in rows] == counts
    batches = zip(reader.epoch(0), counts, strict=True)
    real = [batch.data[0][:count].tolist() for batch, count in batches]
    assert real == rows


@pytest.mark.slow
def test_a_run_trains_on_the_rest_of_each_epoch(tmp_path: Path) -> None:
    seen: list[int] = []
    user = user_of(
        dataset=lambda: pairs(11),
        on_step=lambda trainer, report: seen.append(report.samples),
    )
    program(tmp_path)  # 4 samples a step
    run(tmp_path, user, "--epochs", "2", "--last-batch", "train")
    assert seen[::2] == seen[1::2] == [4, 4, 2] * 2
    seen.clear()
    run(
        tmp_path,
        user_of(dataset=lambda: pairs(3), on_step=user.on_step),
        "--last-batch",
        "train",
    )
    assert seen == [2, 2]


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("data", "options", "says", "advises"),
    [
        ({"dataset": 3}, (), r"dataset\(\) has 3 .* one step takes 4", "--last-batch"),
        (
            {"dataset": 1},
            ("--last-batch", "train"),
            r"dataset\(\) has 1 .* one micro-batch takes 2",
            "smaller example_inputs",
        ),
        (
            {"dataset": 1},
            (),
            r"dataset\(\) has 1 .* one micro-batch takes 2",
            "smaller example_inputs",
        ),
        (
            {"dataset": 4, "eval_dataset": 0},
            (),
            r"eval_dataset\(\) has 0 .* an evaluation takes 1",
            "no eval_dataset",
        ),
    ],
)
def test_too_few_samples_are_named(
    tmp_path: Path,
    data: dict[str, int],
    options: tuple[str, ...],
    says: str,
    advises: str,
) -> None:
    program(tmp_path)
    user = user_of(**{name: lambda n=n: pairs(n) for name, n in data.items()})
    with pytest.raises(GemscError, match=says) as caught:
        run(tmp_path, user, *options)
    assert advises in str(caught.value.help)


def beside_others(self: Any, x: Tensor) -> Tensor:
    x = self.b(torch.tanh(self.a(x)))
    return self.c(x + x.std(0, correction=0))


def test_samples_that_others_change_are_not_scored_beside_what_fills_a_batch(tmp_path):
    compiled = compile(
        Net(beside_others), (X,), loss=mse, example_target=X, ranks=2, micro_batches=1
    )
    assert compiled.plan.mixes_samples
    compiled.write(tmp_path)
    user = user_of(eval_dataset=lambda: pairs(2 * len(X)))
    assert run(tmp_path, user, "--epochs", 1)
    for source in (pairs(len(X) + 1), Stream(len(X) + 1)):
        with pytest.raises(
            GemscError, match=f"_dataset, 1 samples of {len(X)}"
        ) as caught:
            run(tmp_path, user_of(eval_dataset=lambda s=source: s), "--epochs", 1)
        assert caught.value.help == f"give eval_dataset a multiple of {len(X)} samples"


def in_training_alone(self: Any, x: Tensor) -> Tensor:
    x = self.b(torch.tanh(self.a(x)))
    return self.c(x + x.std(0, correction=0) if self.training else x)


def test_what_is_mixed_in_training_alone_does_not_bear_on_evaluation(tmp_path):
    compiled = compile(
        Net(in_training_alone), X, loss=mse, example_target=X, ranks=2, micro_batches=2
    )
    assert "forward mixes samples in training: " in " ".join(compiled.plan.notes)
    compiled.write(tmp_path)
    user = user_of(eval_dataset=lambda: pairs(len(X) + 1))
    assert run(tmp_path, user, "--epochs", 1)


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls.add_(1)  # in evaluation, too
    return self.b(torch.tanh(self.a(x * self.calls)))


@pytest.mark.parametrize("data", [1, 2])
def test_what_fills_up_an_evaluation_is_not_counted(data: int, tmp_path: Path) -> None:
    model = Net(counting, calls=nn.Buffer(torch.zeros(())))
    layout = {"ranks": 2 * data, "data": data, "micro_batches": 4 // data}
    written(tmp_path, model, **layout)
    user = user_of(
        dataset=lambda: pairs(16), eval_dataset=lambda: pairs(8 + len(X) + 1)
    )
    states = run(tmp_path, user, "--epochs", 2, ranks=2 * data)
    calls = [state["calls"] for state in states if "calls" in state]
    assert calls == [2 * (16 + 8 + 4) / len(X)] * len(calls)


class Later(nn.Module):
    """A loss that weighs more with each call, in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return mse(output, target) * self.calls


def test_the_loss_of_a_last_batch_goes_on_from_those_before(tmp_path: Path) -> None:
    layout = {"ranks": 2, "micro_batches": 2}
    written(tmp_path, Net(beside_nothing), loss=Later(), **layout)
    held, losses = pairs(6), []  # a batch of two micro-batches, and half of one
    user = user_of(
        loss=Later(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        eval_dataset=lambda: held,
        on_epoch=lambda trainer, epoch, figures: losses.append(figures["loss"]),
    )
    run(tmp_path, user)
    parts = zip(*(t.split(len(X)) for t in held.tensors), strict=True)
    model, calls = Net(beside_nothing), len(pairs()) // len(X)
    values = [
        mse(model(x), y).item() * (calls + m) for m, (x, y) in enumerate(parts, 1)
    ]
    assert losses[0] == pytest.approx(sum(values) / len(values))


def beside_nothing(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.tanh(self.a(x)))


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.samples = pairs(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples[i] for i in range(len(self.samples)))
