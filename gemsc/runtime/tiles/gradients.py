"""Code of the user's whose backward gets the gradients of all tiles, not its tile's.

Of a whole value each tile has a gradient that is an addend of the true one. For what is
linear in the gradient that is all the same; a user's own backward may clip it. So what
comes out of the call adds the gradients up in backward, and what goes in hands on those
of the first tile alone:

    backward:   g0 + g1  -->  the user's backward  -->  the result, on tile 0
                g0 + g1  -->  the user's backward  -->  zeros,      on tile 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from gemsc.base.nests import Path, map_tensors
from gemsc.runtime.tiles.collectives import TileGrid

__all__ = ["with_whole_gradients"]


def with_whole_gradients(
    grid: TileGrid, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return `function(*args, **kwargs)` of whole values, for the user's own code.

    Its backward gets the gradients of all tiles: it need not be linear in them.
    """

    def change(how: Any) -> Callable[[Path, Tensor], Tensor]:
        return lambda path, t: how.apply(t, grid) if t.requires_grad else t

    once, completed = change(_Once), change(_Completed)
    args, kwargs = map_tensors((args, kwargs), once)
    if isinstance(function, nn.Module):
        parameters = map_tensors(dict(function.named_parameters()), once)
        result = functional_call(function, parameters, args, kwargs)
    else:
        result = function(*args, **kwargs)
    return map_tensors(result, completed)


class _Passed(torch.autograd.Function):
    """A value that goes through as it is; subclasses say what its gradient becomes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: TileGrid) -> Tensor:
        ctx.grid = grid
        return value.detach()  # as no view of it, the user's code may write to it


class _Once(_Passed):
    """The true gradient comes in on every tile: the first one hands it on."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.grid.tile == 0 else torch.zeros_like(gradient), None


class _Completed(_Passed):
    """The tiles' gradients are added up: the true one goes on to every tile."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.all_reduce(gradient.clone().contiguous()), None
