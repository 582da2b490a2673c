"""Sums of gradients that start inside a stage's last backward: same bits, one order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import CompiledProgram, Net, X, batch_of, on_ranks, written
from torch import Tensor, nn

from gemsc.errors import InternalError
from gemsc.planner.ending import start_early
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.worker import reduction, updates
from gemsc.runtime.worker.departures import Departures, leaving_early

STEPS = 4
LAYERS = ("a", "b", "c")
ORDER = ["c.bias", "c.weight", "b.bias", "b.weight", "a.bias", "a.weight"]


def layers() -> dict[str, nn.Parameter]:
    """Return the parameters of three layers, each in a bucket of its own."""
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in LAYERS})
    return dict(model.named_parameters())


def backward(named: dict[str, nn.Parameter], among: tuple[str, ...] = LAYERS) -> None:
    x = torch.ones(2, 3)
    for name in among:
        x = torch.tanh(x @ named[f"{name}.weight"] + named[f"{name}.bias"])
    x.sum().backward()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put each tensor into a bucket of its own."""
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 1)


def test_buckets_leave_in_order_as_soon_as_they_are_complete() -> None:
    named, log = layers(), []
    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: log.append(name)
        )
    sums = Departures(named, lambda some: log.extend(f"sum of {n}" for n in some))
    for _ in range(2):
        log.clear()
        with leaving_early([sums], lambda: None):
            backward(named)
        sums.finish()
    assert [line for line in log if "sum" in line] == [f"sum of {n}" for n in ORDER]
    for name in ORDER[:-2]:
        assert log.index(f"sum of {name}") < log.index("a.weight")


def test_a_first_step_only_looks_at_what_comes() -> None:
    named, gone = layers(), []
    sums = Departures(named, lambda some: gone.extend(some))
    with leaving_early([sums], lambda: None):
        backward(named)
        assert not gone
    sums.finish()
    assert gone == ORDER


def test_what_no_data_reaches_stays_out_and_what_is_frozen_too() -> None:
    named, gone = layers(), []
    sums = Departures(named, lambda some: gone.extend(some))

    def step(among: tuple[str, ...]) -> list[str]:
        gone.clear()
        for parameter in named.values():
            parameter.grad = None
        with leaving_early([sums], lambda: None):
            backward(named, among)
            early = list(gone)
        sums.finish()
        return early

    assert step(("a", "c")) == []
    assert step(("a", "c")) == gone == [n for n in ORDER if n[0] != "b"]
    named["c.weight"].requires_grad = False
    assert step(("a", "c")) == []
    assert gone == [n for n in ORDER if n[0] != "b" and n != "c.weight"]
    assert step(("a", "c")) == gone


def test_one_sum_goes_before_the_other() -> None:
    named, gone = layers(), []
    first = Departures(
        {n: p for n, p in named.items() if n[0] == "a"}, lambda some: gone.extend(some)
    )
    other = Departures(
        {n: p for n, p in named.items() if n[0] != "a"}, lambda some: gone.extend(some)
    )
    for _ in range(2):
        gone.clear()
        with leaving_early([first, other], lambda: None):
            backward(named)
        assert gone in ([], ["a.bias", "a.weight", *ORDER[:4]])
        first.finish()
        other.finish()
    assert gone == ["a.bias", "a.weight", *ORDER[:4]]


def test_a_gradient_that_changes_after_its_sum_began_is_an_error() -> None:
    named = layers()
    sums = Departures(named, lambda some: None)
    with leaving_early([sums], lambda: None):
        backward(named)
    sums.finish()
    with leaving_early([sums], lambda: None):
        backward(named)
        with pytest.raises(InternalError, match=r"'c.bias' changes after its sum"):
            backward(named)


def test_gradients_that_stay_away_are_an_error() -> None:
    named = layers()
    sums = Departures(named, lambda some: None)
    with leaving_early([sums], lambda: None):
        backward(named)
    sums.finish()
    for parameter in named.values():
        parameter.grad = None
    with leaving_early([sums], lambda: None):
        backward(named, ("c",))
    with pytest.raises(InternalError, match="in some steps only"):
        sums.finish()


def forward(self: Any, x: Tensor) -> Tensor:
    x = torch.tanh(self.a(x))
    x = self.norm(self.b(x)) * self.scale
    x = torch.tanh(self.c(torch.tanh(self.b(x))))  # twice
    x = x + self.narrow(torch.tanh(self.wide(x)))
    return self.d(x) + x @ self.a.weight  # tied where it is on two stages


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        layers = {"wide": nn.Linear(4, 6), "narrow": nn.Linear(6, 4)}
        model = Net(forward, norm=nn.BatchNorm1d(4), never=nn.Linear(2, 2), **layers)
    model.scale = nn.Parameter(torch.tensor(1.5))
    return model


def trained(
    folder: Path,
    plan: dict[str, Any],
    model: nn.Module | None = None,
    *,
    freeze: bool = False,
    **trainer: Any,
) -> tuple[list[dict[str, Tensor]], list[int], CompiledProgram]:
    """Return each rank's model after some steps; how many sums began how early."""
    program = written(folder, model or net(), optimizer=adamw, **plan)
    size = program.plan.batch_size // len(X)
    early = []

    def work(runner: Trainer) -> dict[str, Tensor]:
        for sums in runner.worker.updates._departures.values():
            finish = sums.finish

            def noted(sums: Departures = sums, finish: Any = finish) -> None:
                early.append(len(sums._gone))
                finish()

            sums.finish = noted  # type: ignore[method-assign]
        for step in range(STEPS):
            given, wanted = batch_of((X + step, X), size)
            runner.step(given.double(), wanted.double())
            if freeze and step == 0:
                for name, parameter in runner.worker.stages.parameters.items():
                    parameter.requires_grad_("bias" not in name)
        return runner.state_dict()

    options = {"optimizer": adamw, "dtype": torch.float64, **trainer}
    return on_ranks(folder, program.plan.ranks, work, **options), early, program


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data of three": ({"ranks": 3, "data": 3, "micro_batches": 1}, {}),
    "mast": ({"ranks": 2, "schedule": "mast", "micro_batches": 2}, {"clip_norm": 0.05}),
    "chimera and data": ({"ranks": 4, "schedule": "chimera", "data": 2}, {}),
    "deferred": ({"ranks": 4, "schedule": "zb-h1", "data": 2}, {"accumulate": 2}),
    "shares": ({"ranks": 4, "data": 2, "shard": "optimizer"}, {"freeze": True}),
    "recomputed": ({"ranks": 2, "data": 2, "recompute": ("all",)}, {}),
    "shards": ({"ranks": 4, "data": 2, "shards": ("2",)}, {}),
}


@pytest.mark.slow
@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", PLANS)
def test_every_bit_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trainer = PLANS[name]
    with_it, early, _ = trained(tmp_path / "with", plan, **trainer)
    assert any(early)
    never = partial(lambda *_: nullcontext())
    monkeypatch.setattr(updates, "leaving_early", never)
    without, early, _ = trained(tmp_path / "without", plan, **trainer)
    assert not any(early)
    for one, other in zip(with_it, without, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


class Gate(nn.Module):
    """What depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x


def gated(self: Any, x: Tensor) -> Tensor:
    return self.d(self.gate(self.c(self.b(self.a(x)))))


def forked(self: Any, x: Tensor) -> Tensor:
    return self.d(torch.cat([self.one(x), self.two(x)], 1) @ self.join)


def branches() -> Net:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 4))

    model = Net(forked, one=wide(), two=wide())
    model.join = nn.Parameter(torch.ones(8, 4))
    return model


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("model", "plan", "is_early"),
    [
        (net, {"ranks": 2}, True),
        (lambda: Net(gated, gate=Gate()), {"ranks": 2}, False),
        (branches, {"ranks": 2, "branches": ("2",)}, False),
    ],
)
def test_sums_start_early_where_that_is_predicted(
    model: Callable[[], nn.Module], plan: dict[str, Any], is_early: bool, tmp_path: Path
) -> None:
    _, early, program = trained(tmp_path, {**plan, "ranks": 4, "data": 2}, model())
    assert any(early) is is_early
    assert start_early(program.compilation.tiles[0].program) is is_early


def test_parts_of_a_bucket_lie_as_their_tensors_do() -> None:
    """In the order of memory where a tensor has no gaps; else in that of indices."""
    image = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    gaps = torch.randn(6, 4)[:, :2]
    tensors = [image, torch.randn(3), torch.randn(()), gaps, torch.randn(2, 3).t()]
    bucket = torch.empty(sum(tensor.numel() for tensor in tensors))
    parts = reduction.parts_like(tensors, bucket)
    torch._foreach_copy_(parts, tensors)
    for part, tensor in zip(parts, tensors, strict=True):
        assert torch.equal(part, tensor)
        assert part.untyped_storage() == bucket.untyped_storage()
        strides = tensor.contiguous() if tensor is gaps else tensor
        assert part.stride() == strides.stride()
    assert torch.equal(bucket.sort().values, reduction.flat(tensors).sort().values)
