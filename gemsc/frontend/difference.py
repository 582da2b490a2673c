"""Where a traced graph first computes another value than the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gemsc.errors import SourceLocation
from gemsc.frontend.user_code import user_line
from gemsc.ir.interpret import run_node
from gemsc.ir.meta import location

_ENOUGH = 1e-4  # of a sum's size: what is wrong is off by more, roundings by less


class ValuesByLine(TorchFunctionMode):
    """Sums up what each of the user's lines computes.

    That are the results of torch's functions and of modules.

    A value is known by its shape and the sum of its absolute elements, taken at once:
    it may be overwritten later. `boundary` is the code that calls the model.
    """

    def __init__(self, boundary: CodeType) -> None:
        super().__init__()
        self.boundary = boundary
        self.found: dict[SourceLocation, list[_Sum]] = defaultdict(list)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note((result, args[:1]))  # what was written to is a result, too
        return result

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is computed until the end."""
        hook = register_module_forward_hook(
            lambda module, args, result: self._note(result)
        )
        try:
            with self:
                yield
        finally:
            hook.remove()

    def _note(self, result: Any) -> None:
        line = user_line(self.boundary)
        if line is not None:
            leaves = _tensors(pytree.tree_leaves(result))
            with torch._C.DisableTorchFunction():
                self.found[line.location] += map(_sum, leaves)


def first_difference(
    nodes: Iterable[fx.Node],
    module: torch.nn.Module,
    values: dict[fx.Node, Any],
    known: Mapping[SourceLocation, list[_Sum]],
) -> fx.Node | None:
    """Return the first node with a value that the model has not at the node's line.

    `values` has the placeholders; `module` the layers, parameters and buffers as they
    were before the model ran.
    """
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        values[node] = run_node(node, values, module)
        at = location(node)
        if node.op == "get_attr" or at is None or at not in known:
            continue
        for tensor in _tensors(pytree.tree_leaves(values[node])):
            mine = _sum(tensor)
            if not any(_alike(mine, theirs) for theirs in known[at]):
                return node
    return None


_Sum = tuple[tuple[int, ...], float]


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _sum(tensor: Tensor) -> _Sum:
    plain = tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return tuple(tensor.shape), float(plain.double().abs().sum())


def _alike(mine: _Sum, theirs: _Sum) -> bool:
    (shape, one), (other_shape, other) = mine, theirs
    return shape == other_shape and (
        one == other or abs(one - other) <= _ENOUGH * max(one, other)
    )
