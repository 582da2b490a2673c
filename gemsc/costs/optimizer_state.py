"""What an optimizer keeps of each parameter, and how: found by letting it step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gemsc.base.cost import StateBytes
from gemsc.errors import GemscError

__all__ = ["check_elementwise", "optimizer_bytes", "updated_whole"]

STEPS = 2  # one uses what the one before has left
SIZES = (4, 6, 2, 2, 2)  # of what is tried, along each dimension
ROUNDING = 1e-9  # in float64, relative to the largest step

Factory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


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


def updated_whole(
    parameters: Mapping[str, nn.Parameter], factory: Factory | None
) -> dict[str, float]:
    """Return the parameters that an optimizer does not update element by element.

    Halves of them step otherwise than the whole does: by how much, relative to the
    largest step. That is tried on small random tensors, cut both ways, in float64. An
    optimizer that cannot step there may do anything. Without a factory it is plain SGD.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if factory is None or not trained:
        return {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = [{n: _small(p) for n, p in trained.items()} for _ in range(1 + STEPS)]
        try:
            return _differences(drawn, factory)
        except Exception:  # its first real step will say why
            return dict.fromkeys(trained, math.inf)


def check_elementwise(differences: Mapping[str, float], names: Iterable[str]) -> None:
    """Make sure that parameters may be cut; `differences` are from `updated_whole`.

    Raises:
        GemscError: the optimizer does not update one of them element by element.
    """
    wrong = {name: differences[name] for name in names if name in differences}
    if not wrong:
        return
    name, difference = next(iter(wrong.items()))
    text = f"looks across '{name}' (its halves step differently, by {difference:.0e})"
    if math.isinf(difference):
        text = f"cannot be tried on parts of '{name}'"
    modules = dict.fromkeys(each.rpartition(".")[0] or each for each in wrong)
    raise GemscError(
        f"optimizer() {text}",
        help=f"use an elementwise optimizer, or --whole {','.join(modules)}",
    )


def _differences(
    drawn: Sequence[Mapping[str, Tensor]], factory: Factory
) -> dict[str, float]:
    """Return by how much halves step otherwise, of the first tensors, where they do."""
    whole, found = _after_steps(drawn, factory), dict[str, float]()
    for way in (0, 1):
        halves = [
            _after_steps(
                [{n: _half(t, way, half) for n, t in each.items()} for each in drawn],
                factory,
            )
            for half in (0, 1)
        ]
        for name, before in drawn[0].items():
            step = float((whole[name] - before).abs().max())
            error = max(
                float((_half(whole[name], way, half) - part[name]).abs().max())
                for half, part in enumerate(halves)
            )
            if not error <= ROUNDING * step:
                found[name] = max(found.get(name, 0.0), error / (step or 1.0))
    return found


def _small(parameter: Tensor) -> Tensor:
    """Return random numbers of a parameter's kind, of as many dimensions."""
    shape = [SIZES[min(dim, len(SIZES) - 1)] for dim in range(parameter.dim())]
    dtype = torch.promote_types(parameter.dtype, torch.float64)
    return torch.randn(shape, dtype=dtype)


def _half(tensor: Tensor, way: int, half: int) -> Tensor:
    """Return a half of the rows or columns; numbers have none and lists no columns."""
    if not tensor.dim():
        return tensor
    return tensor.chunk(2, min(way, tensor.dim() - 1))[half]


def _after_steps(
    drawn: Sequence[Mapping[str, Tensor]], factory: Factory
) -> dict[str, Tensor]:
    """Let an optimizer step: first there are the tensors, then their gradients."""
    copies = {n: nn.Parameter(t.clone().contiguous()) for n, t in drawn[0].items()}
    optimizer = factory(copies.items())
    for gradients in drawn[1:]:
        for name, copy in copies.items():
            copy.grad = gradients[name].clone().contiguous()
        optimizer.step()
    return {name: copy.detach() for name, copy in copies.items()}
