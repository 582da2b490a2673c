"""Weighted calls: convolutions and linear layers, whose two gradients are apart.

The gradient of the input is what earlier stages wait for; that of the weight can wait.
PyTorch computes both in one go, so a schedule that tells them apart has to take such
calls apart (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gemsc.base.dtypes import lowered

_CONVOLUTIONS: dict[Any, tuple[int, bool]] = {
    F.conv1d: (1, False),
    F.conv2d: (2, False),
    F.conv3d: (3, False),
    F.conv_transpose1d: (1, True),
    F.conv_transpose2d: (2, True),
    F.conv_transpose3d: (3, True),
}
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_NAMES[:5], "output_padding", "groups", "dilation")


@dataclass(frozen=True, slots=True)
class WeightedCall:
    """A call of a convolution or a linear layer.

    `shape` is (stride, padding, dilation, transposed, output_padding, groups) of a
    convolution, as `torch.ops.aten.convolution` takes it; () of a linear layer. Weight
    and bias are taken in the dtype of the input, as under autocast.
    """

    weight: Tensor
    bias: Tensor | None
    shape: tuple[Any, ...]

    def run(self, x: Tensor) -> Tensor:
        """Return what the layer computes of x."""
        call = self.within(x.dtype)
        if not self.shape:
            return F.linear(x, call.weight, call.bias)
        return torch.convolution(x, call.weight, call.bias, *self.shape)

    def within(self, dtype: torch.dtype) -> WeightedCall:
        """Return the call of a weight and a bias in a dtype, as autocast makes them."""
        if self.weight.dtype is dtype:
            return self
        bias = self.bias.to(dtype) if self.bias is not None else None
        return WeightedCall(self.weight.to(dtype), bias, self.shape)

    def with_constants(self) -> WeightedCall:
        """Return the call of a weight and a bias that need no gradients."""
        bias = self.bias.detach() if self.bias is not None else None
        return WeightedCall(self.weight.detach(), bias, self.shape)

    def weight_gradients(
        self, gradient: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the weight and of the bias, where there is one."""
        with_bias = self.bias is not None and self.bias.requires_grad
        if not self.shape:
            rows = _rows(gradient)
            weight, bias = rows.t().mm(_rows(x)), rows.sum(0) if with_bias else None
            return self._as_own(weight, bias)
        _, weight, bias = torch.ops.aten.convolution_backward(
            gradient,
            x,
            self.weight.to(x.dtype),
            [self.bias.numel()] if self.bias is not None else None,
            *self.shape,
            [False, True, with_bias],
        )
        return self._as_own(weight, bias if with_bias else None)

    def _as_own(
        self, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        dtype = self.weight.dtype
        return weight.to(dtype), bias.to(dtype) if bias is not None else None


class WeightedCalls(TorchFunctionMode):
    """While it is on, `seen(call, input)` computes what calls that train a weight do.

    Left alone are paddings given by name; inputs without a batch; weights that are
    computed, here or by another stage, not parameters; complex ones; those with hooks,
    which autograd calls; what `torch.vmap` maps.
    """

    def __init__(self, seen: Callable[[WeightedCall, Tensor], Tensor]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weighted = _weighted(func, args, kwargs)
        return func(*args, **kwargs) if weighted is None else self._seen(*weighted)


def _weighted(func: Any, args: Any, kwargs: Any) -> tuple[WeightedCall, Tensor] | None:
    dims, transposed = _CONVOLUTIONS.get(func, (0, False))
    if not dims and func is not F.linear:
        return None
    names = _TRANSPOSED if transposed else _NAMES
    given = dict(zip(names, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if (
        not torch.is_grad_enabled()
        or not (isinstance(weight, nn.Parameter) and weight.requires_grad)
        or not _may_wait(bias)
        or weight.is_complex()
        or any(_has_hooks(tensor) for tensor in (weight, bias) if tensor is not None)
        or isinstance(given.get("padding"), str)
        or (dims and x.dim() != dims + 2)
        or torch._C._functorch.maybe_current_level() is not None
    ):
        return None
    shape: tuple[Any, ...] = ()
    if dims:
        shape = (
            _per_dim(given.get("stride", 1), dims),
            _per_dim(given.get("padding", 0), dims),
            _per_dim(given.get("dilation", 1), dims),
            transposed,
            _per_dim(given.get("output_padding", 0), dims),
            given.get("groups", 1),
        )
    return WeightedCall(weight, bias, shape), lowered(x)


def _may_wait(bias: Tensor | None) -> bool:
    """Whether no other stage, which may have computed it, waits for its gradient."""
    return bias is None or isinstance(bias, nn.Parameter) or not bias.requires_grad


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _per_dim(value: Any, dims: int) -> list[int]:
    """Return one number for each dimension."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * dims if len(values) == 1 else values


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])
