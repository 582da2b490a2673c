"""Weight gradients that wait: the same numbers, in two parts."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_support import traced
from program_support import against_one_process, trunk
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from worker_support import RUN, worker_of

from gemsc import CompileOptions
from gemsc.compiler import lower
from gemsc.errors import GemscError, InternalError
from gemsc.runtime.memory.meter import ActivationMeter
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.worker.deferral import Deferred
from gemsc.runtime.worker.worker import Worker

LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (3, 6)),
    "linear of sequences": (lambda: nn.Linear(6, 5), (2, 4, 6)),
    "no bias": (lambda: nn.Linear(6, 5, bias=False), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 7, 8)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False), (2, 4, 7, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 7, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1)), (1, 2, 4, 5, 6)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dilation=2),
        (2, 4, 5, 6),
    ),
    "by name": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 7, 8)),
    "circular": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        (2, 4, 7, 8),
    ),
    "no batch": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 8)),
}


class Counter(ActivationMeter):
    """Counts what it is told to follow."""

    count = 0

    def follow(self, tensors: Any, besides: Any = ()) -> None:
        self.count += len(list(tensors))


def gradients(layer: nn.Module, x: Tensor, *, split: bool) -> tuple[list[Any], int]:
    """Return the input's and the parameters' gradients, and how many tensors waited."""
    meter = Counter(tuple)
    given = x.clone().requires_grad_()
    for scale in (1.0, 0.5):
        deferred = Deferred(meter=meter)
        if split:
            with deferred.forward():
                y = layer(given)
        else:
            y = layer(given)
        torch.autograd.backward(y, torch.cos(y.detach()) * scale)
        deferred.compute()
    return [given.grad, *(p.grad for p in layer.parameters())], meter.count


@pytest.mark.parametrize("name", LAYERS)
def test_both_parts_give_the_gradients_of_one(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().double()
    x = torch.randn(*shape, dtype=torch.float64)
    whole, _ = gradients(layer, x, split=False)
    layer.zero_grad()
    parts, waiting = gradients(layer, x, split=True)
    for one, two in zip(whole, parts, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-13, atol=1e-14)
    # of each of two backwards, the input and the output's gradient
    assert waiting == (0 if name in ("by name", "no batch") else 4)


def test_the_first_part_leaves_weights_without_gradients() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    deferred = Deferred()
    x = torch.randn(3, 4, requires_grad=True)
    with deferred.forward():
        y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert layer[0].weight.grad is None
    assert layer[1].weight.grad is not None
    deferred.compute()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_frozen_weights_and_evaluation_are_left_alone() -> None:
    layer = nn.Linear(4, 2)
    layer.weight.requires_grad_(False)
    with Deferred().forward():
        y = layer(torch.randn(3, 4))
        assert type(y.grad_fn).__name__ == "AddmmBackward0"
        with torch.no_grad():
            assert layer(torch.randn(3, 4)).grad_fn is None


def test_a_shared_weight_adds_up() -> None:
    layer = nn.Linear(4, 4).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    layer(torch.tanh(layer(x))).sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    deferred = Deferred()
    with deferred.forward():
        y = layer(torch.tanh(layer(x)))
    y.sum().backward()
    deferred.compute()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-14)


def test_the_plan_knows_which_part_of_the_backward_can_wait() -> None:
    program = lower(traced("resnet18"), CompileOptions(ranks=2, schedule="zb-h1"))
    for stage in program.plan.stages:
        assert 0.3 < stage.cost.weight / stage.cost.backward < 0.7
        assert 0 < stage.cost.waiting_gradient_bytes < stage.cost.gradient_bytes
    assert any("W" in row for row in program.plan.order)


@pytest.mark.slow
def test_it_fills_idle_time_of_the_model() -> None:
    options = CompileOptions(ranks=4, micro_batches=8, schedule="zb-h1")
    split = lower(traced("unet"), options).plan
    whole = lower(
        traced("unet"), CompileOptions(ranks=4, micro_batches=8, schedule="1f1b")
    ).plan
    assert split.step_seconds < whole.step_seconds


@pytest.mark.parametrize("choice", [{"tiles": ("2x1",)}, {"recompute": ("all",)}])
def test_what_does_not_go_with_it_is_refused(choice: dict[str, Any]) -> None:
    options = CompileOptions(ranks=2, schedule="zb-h1", **choice)
    with pytest.raises(GemscError, match="cannot be used with --"):
        lower(traced("unet"), options)


# ---------------------------------------------------- outputs that are written to


def of_no_gradient(change: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """Return what changes a tensor without a trace in its graph."""

    def changed(y: Tensor) -> None:
        with torch.no_grad():
            change(y)

    return changed


WRITES: dict[str, Callable[[Tensor], object]] = {
    "whole": lambda y: y.mul_(3).add_(1),
    "activation": lambda y: nn.functional.elu_(y),
    "zeros": lambda y: y.zero_(),
    "slice": lambda y: y[..., :2].mul_(2),
    "slices": lambda y: (y[..., 2:].add_(1), y[..., :2].exp_()),
    "view of a view": lambda y: y.flatten(0, -2)[1:].t()[1:].mul_(2),
    "set": lambda y: y.__setitem__((..., 1), 2.0),
    "by index": lambda y: y.index_add_(0, torch.tensor([0]), torch.ones_like(y[:1])),
    "mask": lambda y: y.masked_fill_(y.detach() > 0, 2.0),
    "data": lambda y: y.data[..., :2].mul_(2),
    "detached": lambda y: y.detach()[..., :2].mul_(2),
    "no gradient": of_no_gradient(lambda y: y[..., :2].mul_(2)),
    "chunks": of_no_gradient(lambda y: y.chunk(2, -1)[0].mul_(2)),
    "shape": lambda y: y.unsqueeze_(0),
}
OUTPUTS = {
    **{name: LAYERS[name] for name in ("linear", "linear of sequences", "conv2d")},
    "linear of rows of sequences": (lambda: nn.Linear(6, 5), (2, 3, 4, 6)),
    "sequences, no bias": (lambda: nn.Linear(6, 5, bias=False), (2, 4, 6)),
    "a vector": (lambda: nn.Linear(6, 5), (6,)),
}


@pytest.mark.parametrize("learns", [True, False], ids=["hidden", "input"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_may_be_written_to(name: str, learns: bool) -> None:
    torch.manual_seed(0)
    make, shape = OUTPUTS[name]
    layer = make().double()
    x = torch.randn(*shape, dtype=torch.float64)

    def run(write: Callable[[Tensor], object]) -> Tensor:
        y = layer(x.clone().requires_grad_(learns))
        write(y)
        return (torch.sin(y) ** 2).sum()

    for how, write in WRITES.items():
        if how in ("by index", "view of a view") and x.dim() == 1:
            continue
        run(write).backward()
        expected = [p.grad for p in layer.parameters()]
        layer.zero_grad()
        deferred = Deferred()
        with deferred.forward():
            loss = run(write)
        end(deferred, loss, layer)
        for parameter, gradient in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(
                parameter.grad, gradient, rtol=1e-13, atol=1e-14, msg=how
            )
        layer.zero_grad()


def end(deferred: Deferred, loss: Tensor, stage: nn.Module) -> None:
    """Run both parts of a backward."""
    edge = get_gradient_edge(loss)
    loss.backward()
    deferred.end_backward([edge], dict(stage.named_parameters()))
    deferred.compute()


def test_a_waiting_gradient_is_no_parameter_s_gradient() -> None:
    """Autograd gives `places.grad` the memory of the gradient that waits for weight."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(4, 5))
            self.linear = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            places = self.places.view(1, 4, 5)
            return self.linear(x) + places

    torch.manual_seed(0)
    stage = Sum().double()
    inputs = [torch.randn(1, 4, 6, dtype=torch.float64) for _ in range(3)]
    for x in inputs:
        torch.sin(stage(x)).sum().backward()
    expected = [p.grad for p in stage.parameters()]
    stage.zero_grad()
    several = []
    for x in inputs:
        several.append(Deferred())
        with several[-1].forward():
            loss = torch.sin(stage(x.requires_grad_())).sum()
        edge = get_gradient_edge(loss)
        loss.backward()
        several[-1].end_backward([edge], dict(stage.named_parameters()))
    for deferred in several:
        deferred.compute()
    for parameter, gradient in zip(stage.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-14)


def test_what_a_waiting_gradient_is_computed_of_must_not_change() -> None:
    layer = nn.Linear(4, 2)
    for changes in (True, False):
        x = torch.randn(3, 4)
        deferred = Deferred("stage 1, micro-batch 2")
        with deferred.forward():
            loss = layer(x).sum()
        loss.backward()
        if changes:
            x.add_(1)
            with pytest.raises(InternalError, match=r"1, micro-batch 2: .*\[2, 4\]"):
                deferred.compute()
        else:
            deferred.compute()


# ------------------------------------------------------------ nothing gets lost


class Forgetful(Deferred):
    """Loses what autograd had for a call."""

    def _done(self, *_: object) -> None:
        pass


class Half(nn.Module):
    """Its second result may be left unused."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.beside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.beside(x)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_a_lost_gradient_is_an_error(shape: tuple[int, ...], learns: bool) -> None:
    stage = Half()
    deferred = Forgetful("stage 0")
    with deferred.forward():
        loss = stage(torch.randn(shape, requires_grad=learns))[0].exp().sum()
    with pytest.raises(InternalError, match=r"stage 0: .* gradient of used\.weight is"):
        end(deferred, loss, stage)


def test_a_result_without_a_gradient_loses_none() -> None:
    stage = Half()
    deferred = Deferred()
    with deferred.forward():
        used, beside = stage(torch.randn(3, 4, requires_grad=True))
        loss = used.sum() + beside.detach().sum()
    end(deferred, loss, stage)
    assert stage.used.weight.grad is not None
    assert stage.beside.weight.grad is None


@pytest.mark.parametrize("learns", [True, False])
def test_a_call_that_autograd_runs_without_a_gradient(learns: bool) -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    stage = Half()
    deferred = Deferred()
    with deferred.forward():
        used, beside = stage(torch.randn(3, 4, requires_grad=learns))
        stopped: Tensor = Stop.apply(beside)  # type: ignore[no-untyped-call]
        loss = used.sum() + stopped.sum()
    end(deferred, loss, stage)
    assert stage.used.weight.grad is not None
    assert stage.beside.weight.grad is None


def test_a_worker_finds_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(worker: Worker, *, weights: bool) -> None:
        worker.begin({}, training=True)
        y = worker.run(RUN, 0, torch.randn(3, 4, requires_grad=True))
        worker.add_loss(torch.zeros(()))
        worker.backward(RUN, 0, torch.ones_like(y))
        if weights:
            worker.weights(RUN, 0)
        worker.update()

    def run(weights: bool) -> None:
        stage, deferred = nn.Linear(4, 2), {RUN: (0,)}
        run_local(
            1, lambda t: step(worker_of(t, stage, deferred=deferred), weights=weights)
        )

    run(weights=True)
    with pytest.raises(Exception, match="stage 0, micro-batch 0: the weight gradients"):
        run(weights=False)
    monkeypatch.setattr("gemsc.runtime.worker.worker.Deferred", Forgetful)
    with pytest.raises(Exception, match="stage 0, micro-batch 0: the deferred"):
        run(weights=True)


# --------------------------------------------------------------------- odd layers


def test_complex_weights_are_left_to_autograd() -> None:
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    x = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
    deferred = Deferred()
    with deferred.forward():
        layer(x).abs().sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
@pytest.mark.parametrize("shape", [(2,), (2, 4), ()])
def test_an_empty_weight(sizes: tuple[int, int], shape: tuple[int, ...]) -> None:
    layer = nn.Linear(*sizes)
    deferred = Deferred()
    with deferred.forward():
        loss = layer(torch.randn(*shape, sizes[0], requires_grad=True)).sum()
    end(deferred, loss, layer)
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, prod(shape)))


class Given(nn.Module):
    """A layer of weights that an earlier stage has computed."""

    def __init__(self, given: str) -> None:
        super().__init__()
        self.given = given
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.source = nn.Linear(4, 4)
        self.trunk = trunk(4)
        self.weight = nn.Parameter(self.source.weight.detach() * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.source.weight * 2 if self.given == "weight" else self.weight
        bias = self.source.bias.exp() if self.given == "bias" else None
        return F.linear(self.trunk(self.source(x)), weight, bias)


@pytest.mark.slow(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("given", ["weight", "bias"])
def test_the_gradient_of_a_weight_that_came_from_another_stage_does_not_wait(
    given: str, schedule: str, tmp_path: Path
) -> None:
    model = Given(given)
    assert against_one_process(tmp_path, model, schedule=schedule).worst < 1e-9
