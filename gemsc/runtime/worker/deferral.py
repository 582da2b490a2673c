"""Weight gradients that wait: a backward in two parts, for schedules that split it.

The first part gives the gradients of a stage's inputs, which another rank waits for. It
leaves what the second one needs: the input and the output's gradient of each
convolution and linear layer. The second part fills idle time.

    forward            x --> linear --> y, which later calls may write to, or to views
    first part         autograd runs the node of `linear`: its hook keeps x and the
                       gradient of what `linear` returned, whatever y has become
    end of first part  a call whose nodes autograd ran and that kept nothing is an error
    second part        gradient, x --> those of weight and bias
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gemsc.base.nests import storage_of
from gemsc.base.weighted import WeightedCall, WeightedCalls
from gemsc.errors import InternalError
from gemsc.runtime.memory.meter import ActivationMeter, active_meter


@dataclass
class Deferred:
    """The weight gradients that one backward left for later.

    `where` is for messages. A meter that is active in the forward counts the tensors
    that wait. A call is open until its backward, known by the numbers of what autograd
    recorded for it.
    """

    where: str = "a stage"
    meter: ActivationMeter | None = field(default_factory=active_meter)
    _open: dict[range, WeightedCall] = field(default_factory=dict)
    _waiting: list[tuple[WeightedCall, _Held, _Held]] = field(default_factory=list)

    def forward(self) -> WeightedCalls:
        """Run the forward in this context."""
        return WeightedCalls(self._run)

    def end_backward(
        self, roots: Iterable[GradientEdge], parameters: dict[str, nn.Parameter]
    ) -> None:
        """Say that autograd has gone back from the roots, all the way.

        Raises:
            InternalError: it went through a call of which nothing waits.
        """
        if self._open:
            self._look_for_lost(roots, parameters)
        # autograd may give a parameter the memory of a gradient that waits here, and
        # would add the next micro-batch's to it in place
        grown = {
            storage_of(parameter.grad)
            for parameter in parameters.values()
            if parameter.grad is not None
        }
        for index, (call, x, gradient) in enumerate(self._waiting):
            if storage_of(gradient.tensor) in grown:
                self._waiting[index] = call, x, _Held(gradient.tensor.clone())

    def compute(self) -> None:
        """Add the weight gradients to those of the parameters; keep nothing more."""
        with torch.no_grad():
            for call, x, gradient in self._waiting:
                if x.is_changed or gradient.is_changed:
                    raise InternalError(
                        f"{self.where}: what a deferred gradient {[*call.weight.shape]}"
                        " is computed of has been written to"
                    )
                _add_up(call, *call.weight_gradients(gradient.tensor, x.tensor))
        if self.meter is not None:
            self.meter.sample()
        self._waiting.clear()

    def _run(self, call: WeightedCall, x: Tensor) -> Tensor:
        first = _next_number()
        y: Tensor
        if x.requires_grad:  # autograd computes the input's gradient alone
            y = call.with_constants().run(x)
        else:
            y = _Noted.apply(call, x, call.weight)  # type: ignore[no-untyped-call]
            if not call.shape and x.dim() != y.dim():
                y = y.view(*x.shape[:-1], y.shape[-1])
        # autograd gives a view that is written to another node, not what it is of
        node = (y if y._base is None else y._base).grad_fn
        assert node is not None
        numbers = range(first, _next_number())
        self._open[numbers] = call
        node.register_hook(partial(self._done, numbers, _Held(x)))
        self._follow(x)
        return y

    def _follow(self, tensor: Tensor) -> None:
        if self.meter is not None:
            self.meter.follow([tensor])

    def _done(
        self, numbers: range, x: _Held, _: object, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Keep what autograd had for a call, once it is done with that."""
        call = self._open.pop(numbers)
        (gradient,) = gradients
        if gradient is not None:  # what follows may give none
            self._waiting.append((call, x, _Held(gradient)))
            self._follow(gradient)

    def _look_for_lost(
        self, roots: Iterable[GradientEdge], parameters: dict[str, nn.Parameter]
    ) -> None:
        """Raise if autograd ran a node of a call that is still open.

        It runs what can be reached from the roots; a result that nobody uses cannot.
        """
        names = {id(parameter): name for name, parameter in parameters.items()}
        calls = {n: call for numbers, call in self._open.items() for n in numbers}
        seen = {root.node for root in roots}
        stack = list(seen)
        while stack:
            node = stack.pop()
            call = calls.get(node._sequence_nr())
            if call is not None:
                raise InternalError(
                    f"{self.where}: the deferred gradient of {names[id(call.weight)]} "
                    f"is lost: {node.name()} ran, and nothing waits for it"
                )
            following = {child for child, _ in node.next_functions if child is not None}
            stack += following - seen
            seen |= following


class _Held:
    """A tensor that nobody may write to before it is used."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self._version = tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether it has been written to."""
        return self.tensor._version != self._version


class _Noted(torch.autograd.Function):
    """A weighted call whose input needs no gradient: all of its backward can wait.

    The weight is an argument so that autograd comes here nevertheless. Where the call
    gives a view, this gives what it is of: autograd forbids writing to views that were
    made in here.
    """

    @staticmethod
    def forward(ctx: Any, call: WeightedCall, x: Tensor, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        y = call.run(x)
        return y if y._base is None else y._base

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None, None, None


def _next_number() -> int:
    """Return the number of what autograd records next in this thread."""
    return torch._C._autograd._get_sequence_nr()


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
