"""Copies of modules and tensors that have shapes but no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from gemsc.base.memory_format import empty, format_of

__all__ = ["fake_copy", "fake_like", "fake_parameters"]


def fake_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of the module's layers whose tensors are fake.

    The module itself, its parameters and its buffers stay as they are.
    """
    holder = nn.Module()
    holder.training = module.training
    for name, child in module.named_children():
        holder.add_module(name, child)
    for name, parameter in module.named_parameters(recurse=False):
        holder.register_parameter(name, parameter)
    for name, buffer in module.named_buffers(recurse=False):
        holder.register_buffer(name, buffer)
    memo = fake_parameters(holder, mode)
    with FakeCopyMode(mode):
        return copy.deepcopy(holder, memo)


def fake_parameters(module: nn.Module, mode: FakeTensorMode) -> dict[int, Any]:
    """Return a fake for the `id` of each parameter: what `deepcopy` takes for it.

    It would come to the same, in three times as many calls.
    """
    return {
        id(parameter): mode.from_tensor(parameter, static_shapes=True)
        for parameter in module.parameters()
    }


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fresh fake leaf with the tensor's shape, format, dtype and device."""
    with mode:
        form = format_of(tensor)
        return empty(tensor.shape, form, dtype=tensor.dtype, device=tensor.device)
