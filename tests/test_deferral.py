"""Weight gradients that wait: the same numbers, in two parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_support import traced
from torch import Tensor, nn

from gemsc import CompileOptions
from gemsc.compiler import lower
from gemsc.errors import GemscError
from gemsc.runtime.memory.meter import ActivationMeter
from gemsc.runtime.worker.deferral import Deferred

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
        deferred = Deferred(meter)
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


def test_an_output_that_is_changed_in_place() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3).double()
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)

    def run() -> list[Tensor | None]:
        given = x.clone().requires_grad_()
        y = layer(given * 2)
        y.mul_(3)
        (torch.tanh(y) ** 2).sum().backward()
        return [given.grad]

    expected = [*run(), *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    deferred = Deferred()
    with deferred.forward():
        found = run()
    deferred.compute()
    found += [p.grad for p in layer.parameters()]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-14)
