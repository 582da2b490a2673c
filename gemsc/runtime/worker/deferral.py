"""Weight gradients that wait: a backward in two parts, for schedules that split it.

The first part gives the gradients of a stage's inputs, which another rank waits for. It
leaves what the second one needs: the input and the output's gradient of each
convolution and linear layer. The second part fills idle time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemsc.base.weighted import WeightedCall, WeightedCalls
from gemsc.runtime.memory.meter import ActivationMeter, active_meter

__all__ = ["Deferred"]


@dataclass
class Deferred:
    """The weight gradients that one backward left for later.

    A meter that is active in the forward counts the tensors that wait.
    """

    meter: ActivationMeter | None = field(default_factory=active_meter)
    _waiting: list[tuple[WeightedCall, Tensor, Tensor]] = field(default_factory=list)

    def forward(self) -> WeightedCalls:
        """Run the forward in this context."""
        return WeightedCalls(self._run)

    def compute(self) -> None:
        """Add the weight gradients to those of the parameters; keep nothing more."""
        with torch.no_grad():
            for call, x, gradient in self._waiting:
                _add_up(call, *call.weight_gradients(gradient, x))
        if self.meter is not None:
            self.meter.sample()
        self._waiting.clear()

    def _run(self, call: WeightedCall, x: Tensor) -> Tensor:
        if x.requires_grad:  # autograd computes the input's gradient alone
            y = call.with_constants().run(x)
            self._follow(x)
            assert y.grad_fn is not None
            y.grad_fn.register_hook(partial(self._done, call, x))
            return y
        result: Tensor = _Noted.apply(  # type: ignore[no-untyped-call]
            self, call, x, call.weight
        )
        return result

    def _follow(self, tensor: Tensor) -> None:
        if self.meter is not None:
            self.meter.follow([tensor])

    def _done(
        self, call: WeightedCall, x: Tensor, _: object, gradients: tuple[Tensor, ...]
    ) -> None:
        """Note what autograd had for a call, once it is done with that."""
        self._leave(call, x, gradients[0])

    def _leave(self, call: WeightedCall, x: Tensor, gradient: Tensor) -> None:
        self._waiting.append((call, x.detach(), gradient.detach()))
        self._follow(gradient)


class _Noted(torch.autograd.Function):
    """A weighted call whose input needs no gradient: all of its backward can wait.

    The weight is an argument so that backward comes here nevertheless.
    """

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferred, call: WeightedCall, x: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.deferred, ctx.call = deferred, call
        ctx.save_for_backward(x)
        return call.run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.deferred._leave(ctx.call, x, gradient)
        return None, None, None, None


def _add_up(call: WeightedCall, of_weight: Tensor, of_bias: Tensor | None) -> None:
    _add(call.weight, of_weight)
    if call.bias is not None and of_bias is not None:
        _add(call.bias, of_bias)


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        is_alike = gradient.stride() == parameter.stride()  # as autograd leaves it
        parameter.grad = (
            gradient if is_alike else torch.empty_like(parameter).copy_(gradient)
        )
    else:
        parameter.grad += gradient
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # as autograd
        hook(parameter)
