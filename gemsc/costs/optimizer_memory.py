"""What an optimizer keeps of each parameter, and how: found by letting it step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gemsc.base.cost import StateBytes
from gemsc.base.elementwise import OptimizerFactory


def optimizer_bytes(
    parameters: Mapping[str, nn.Parameter], factory: OptimizerFactory | None
) -> dict[str, StateBytes]:
    """Return, for each trained parameter, the bytes of the optimizer's state of it.

    The optimizer makes one step on fake tensors, which have shapes and no memory. One
    that looks at numbers cannot; then it steps on real tensors with at most two
    elements a dimension, and where its state is as long as those it is taken to be as
    long as the parameter. Without a factory the optimizer is plain SGD, which keeps
    nothing.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if factory is None or not trained:
        return {}
    # whatever a user's optimizer does with numbers that are not there
    with suppress(Exception), FakeTensorMode():
        return _after_one_step(trained, factory, small=False)
    with suppress(Exception):  # if it cannot work at all, its first real step says why
        return _after_one_step(trained, factory, small=True)
    return {}


def _after_one_step(
    trained: Mapping[str, nn.Parameter], factory: OptimizerFactory, *, small: bool
) -> dict[str, StateBytes]:
    copies = {}
    for name, parameter in trained.items():
        shape = [min(size, 2) if small else size for size in parameter.shape]
        copies[name] = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))
    optimizer = factory(copies.items())
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
    optimizer.step()
    kept = {}
    for name, copy in copies.items():
        sizes = {True: 0, False: 0}
        for tensor in pytree.tree_leaves(optimizer.state.get(copy, {})):
            if isinstance(tensor, Tensor):
                is_alike = tensor.shape == copy.shape
                sizes[is_alike] += _bytes(tensor, copy, trained[name])
        kept[name] = StateBytes(sizes[True], sizes[False])
    return kept


def _bytes(state: Tensor, copy: Tensor, parameter: Tensor) -> int:
    """Return the bytes of a state whose parameter was `copy` and is `parameter`."""
    if state.dim() != copy.dim():
        return state.nbytes
    sizes = zip(state.shape, copy.shape, parameter.shape, strict=True)
    real = (full if size == small else size for size, small, full in sizes)
    return prod(real) * state.element_size()
