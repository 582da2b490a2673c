"""What an optimizer keeps of each parameter, and how: found by letting it step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gemsc.base.cost import StateBytes
from gemsc.base.elementwise import Factory


def optimizer_bytes(
    parameters: Mapping[str, nn.Parameter], factory: Factory | None
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
    try:
        with FakeTensorMode():
            return _after_one_step(trained, factory, small=False)
    except (
        Exception
    ):  # whatever a user's optimizer does with numbers that are not there
        pass
    try:
        return _after_one_step(trained, factory, small=True)
    except Exception:  # it cannot work at all: its first real step will say why
        return {}


def _after_one_step(
    trained: Mapping[str, nn.Parameter], factory: Factory, *, small: bool
) -> dict[str, StateBytes]:
    copies = {}
    for name, parameter in trained.items():
        shape = [min(size, 2) if small else size for size in parameter.shape]
        copies[name] = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))
    optimizer = factory(copies.items())
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
    optimizer.step()
    found = {}
    for name, copy in copies.items():
        sizes = {True: 0, False: 0}
        for tensor in _tensors(optimizer.state.get(copy, {})):
            is_alike = tensor.shape == copy.shape
            sizes[is_alike] += _bytes(tensor, copy, trained[name])
        found[name] = StateBytes(sizes[True], sizes[False])
    return found


def _bytes(tensor: Tensor, copy: Tensor, parameter: Tensor) -> int:
    """Return the bytes of a state whose parameter was `copy` and is `parameter`."""
    if tensor.dim() != copy.dim():
        return tensor.nbytes
    count = 1
    for mine, small, real in zip(
        tensor.shape, copy.shape, parameter.shape, strict=True
    ):
        count *= real if mine == small else mine
    return count * tensor.element_size()


def _tensors(state: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
