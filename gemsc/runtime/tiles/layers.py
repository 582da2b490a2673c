"""Layers whose result on one tile depends on the other tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gemsc.base.boxes import Box, Interval, shape_of
from gemsc.runtime.tiles.gradients import with_whole_gradients
from gemsc.runtime.tiles.linear import multiplied
from gemsc.runtime.tiles.losses import cross_entropy
from gemsc.runtime.tiles.norms import normalize, normalize_channels, update_running
from gemsc.runtime.tiles.reductions import extreme, global_max, softmax, variance
from gemsc.runtime.tiles.windows import (
    AxisWindows,
    Resize,
    adaptive_pool,
    average_pool,
    max_unpool,
    resize,
    whole_positions,
)

__all__ = ["LayersOnTiles"]


class LayersOnTiles(ABC):
    """What a grid does besides exchanging values: each method is a layer or function.

    A layer `bn` of the user is `grid.batch_norm(x, bn)`; `F.batch_norm(x, ...)` is
    `grid.functional_batch_norm(x, ...)`.
    """

    tile: int

    @property
    @abstractmethod
    def num_tiles(self) -> int:
        """How many tiles there are."""

    @abstractmethod
    def among(self, tiles: tuple[int, ...]) -> LayersOnTiles:
        """Return the grid of some tiles, of which this is one; () for all."""

    @abstractmethod
    def all_reduce(self, value: Tensor, among: tuple[int, ...] = ()) -> Tensor:
        """Return the sum over the tiles, or some of them, with gradients."""

    @abstractmethod
    def add_up(self, tensor: Tensor) -> Tensor:
        """Put the sum over the tiles into the tensor, without gradients."""

    def rows(self, row: Tensor) -> Tensor:
        """Return a table with a row from each tile: one sum, without gradients."""
        table = row.new_zeros((self.num_tiles, *row.shape))
        table[self.tile] = row
        return self.add_up(table)

    def with_whole_gradients(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return `function(*args, **kwargs)` of whole values, for the user's own code.

        Its backward gets the gradients of all tiles: it need not be linear in them.
        """
        return with_whole_gradients(self, function, args, kwargs)

    def batch_norm(
        self, value: Tensor, layer: _BatchNorm, own: Box | None = None
    ) -> Tensor:
        """Return the layer's result; its statistics are those of all tiles.

        `own` says where the tile's own elements are, if it has more: only these count.
        """
        momentum = layer.momentum
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if momentum is None:  # the plain mean of all batches
                momentum = 1.0 / float(layer.num_batches_tracked)
        return self.functional_batch_norm(
            value,
            layer.running_mean,
            layer.running_var,
            layer.weight,
            layer.bias,
            layer.training or layer.running_mean is None,
            momentum if momentum is not None else 0.0,
            layer.eps,
            own,
        )

    def functional_batch_norm(
        self,
        value: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        own: Box | None = None,
    ) -> Tensor:
        """Return `F.batch_norm` of all tiles' elements."""
        if not training:
            return F.batch_norm(value, running_mean, running_var, weight, bias, eps=eps)
        result, statistics = normalize_channels(self, value, weight, bias, eps, own)
        if running_mean is not None and running_var is not None:
            update_running(statistics, running_mean, running_var, momentum)
        return result

    def group_norm(
        self, value: Tensor, layer: nn.GroupNorm, own: Box | None = None
    ) -> Tensor:
        """Return the layer's result; its statistics are those of all tiles."""
        return self.functional_group_norm(
            value, layer.num_groups, layer.weight, layer.bias, layer.eps, own
        )

    def functional_group_norm(
        self,
        value: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        own: Box | None = None,
    ) -> Tensor:
        """Return `F.group_norm` of all tiles' elements."""
        batch, channels, *rest = value.shape
        groups = value.reshape(batch, num_groups, channels // num_groups, *rest)
        dims = tuple(range(2, groups.dim()))
        shape = (1, num_groups, -1, *(1,) * len(rest))
        if own is not None:
            own = (own[0], (0, num_groups), (0, groups.shape[2]), *own[2:])
        result, _ = normalize(
            self, groups, dims, _view(weight, shape), _view(bias, shape), eps, own
        )
        return result.view(value.shape)

    def instance_norm(
        self, value: Tensor, layer: _InstanceNorm, own: Box | None = None
    ) -> Tensor:
        """Return the layer's result; it must not keep running statistics."""
        return self.functional_instance_norm(
            value, layer.weight, layer.bias, layer.eps, own
        )

    def functional_instance_norm(
        self,
        value: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        own: Box | None = None,
    ) -> Tensor:
        """Return `F.instance_norm` of all tiles' elements."""
        return self.functional_group_norm(value, value.shape[1], weight, bias, eps, own)

    def layer_norm(
        self, value: Tensor, layer: nn.LayerNorm, box: tuple[Interval, ...]
    ) -> Tensor:
        """Return the layer's result; the tile's values are `box` of the last dims."""
        return self.functional_layer_norm(
            value, box, layer.weight, layer.bias, layer.eps
        )

    def functional_layer_norm(
        self,
        value: Tensor,
        box: tuple[Interval, ...],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return `F.layer_norm` over the last dimensions, `box` of which are here."""
        part = tuple(slice(start, stop) for start, stop in box)
        dims = tuple(range(value.dim() - len(box), value.dim()))
        shape = (*(1,) * dims[0], *shape_of(box))
        weight = None if weight is None else weight[part].reshape(shape)
        bias = None if bias is None else bias[part].reshape(shape)
        return normalize(self, value, dims, weight, bias, eps)[0]

    def dropout(
        self,
        value: Tensor,
        layer: nn.Dropout,
        shape: tuple[int, ...],
        box: Box,
    ) -> Tensor:
        """Return the layer's result: see `functional_dropout`."""
        return self.functional_dropout(
            value, layer.p, layer.training, shape=shape, box=box
        )

    def functional_dropout(
        self,
        value: Tensor,
        p: float = 0.5,
        training: bool = True,
        *,
        shape: tuple[int, ...],
        box: Box,
    ) -> Tensor:
        """Return `F.dropout` with the tile's part of the mask of the whole value.

        Every tile draws the same mask of the whole shape: all have the stage's seed.
        """
        if not training:
            return value
        whole = torch.ones(shape, dtype=value.dtype, device=value.device)
        mask = F.dropout(whole, p)[tuple(slice(start, stop) for start, stop in box)]
        return value * mask.clone()

    # ------------------------------------ sums over features or pixels

    def linear(
        self,
        value: Tensor,
        layer: nn.Linear,
        shape: tuple[int, ...],
        box: Box,
        among: tuple[int, ...] = (),
    ) -> Tensor:
        """Return the layer's result: see `functional_linear`."""
        return self.functional_linear(
            value, layer.weight, layer.bias, shape=shape, box=box, among=among
        )

    def functional_linear(
        self,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        shape: tuple[int, ...],
        box: Box,
        among: tuple[int, ...] = (),
    ) -> Tensor:
        """Return `F.linear` of the flattened value of all tiles.

        The features are the last dimensions, flattened: `shape` of the whole value,
        `box` of this tile. It multiplies their columns of the weight, which all tiles
        have as a whole; the products are added up, and the bias once.
        """
        result = self.all_reduce(multiplied(value, weight, shape, box), among)
        return result if bias is None else result + bias

    def amax(
        self,
        value: Tensor,
        dims: tuple[int, ...],
        keepdim: bool = False,
        among: tuple[int, ...] = (),
    ) -> Tensor:
        """Return `value.amax(dims, keepdim)` over the tiles."""
        return extreme(self.among(among), value, dims, keepdim=keepdim, largest=True)

    def amin(
        self,
        value: Tensor,
        dims: tuple[int, ...],
        keepdim: bool = False,
        among: tuple[int, ...] = (),
    ) -> Tensor:
        """Return `value.amin(dims, keepdim)` over the tiles."""
        return extreme(self.among(among), value, dims, keepdim=keepdim, largest=False)

    def var(
        self,
        value: Tensor,
        dims: tuple[int, ...],
        keepdim: bool = False,
        correction: float = 1,
        among: tuple[int, ...] = (),
    ) -> Tensor:
        """Return `value.var(dims, correction=..., keepdim=...)` over the tiles."""
        grid = self.among(among)
        return variance(grid, value, dims, correction, keepdim=keepdim, root=False)

    def std(
        self,
        value: Tensor,
        dims: tuple[int, ...],
        keepdim: bool = False,
        correction: float = 1,
        among: tuple[int, ...] = (),
    ) -> Tensor:
        """Return `value.std(dims, correction=..., keepdim=...)` over the tiles."""
        grid = self.among(among)
        return variance(grid, value, dims, correction, keepdim=keepdim, root=True)

    def softmax(
        self,
        value: Tensor,
        dims: tuple[int, ...],
        log: bool = False,
        among: tuple[int, ...] = (),
    ) -> Tensor:
        """Return `value.softmax(dims)` over the tiles, or `log_softmax`."""
        return softmax(self.among(among), value, dims, log=log)

    def global_max(
        self,
        value: Tensor,
        shape: tuple[int, ...],
        box: Box,
        among: tuple[int, ...] = (),
    ) -> Tensor:
        """Return adaptive max pooling to one element of the tiles' last dimensions.

        These have the size `shape` as a whole, and this tile has `box` of them.
        """
        return global_max(self.among(among), value, shape, box)

    # ------------------------------------------------- losses on tiles

    def cross_entropy(
        self, output: Tensor, target: Tensor, layer: nn.CrossEntropyLoss
    ) -> Tensor:
        """Return the loss of all tiles' pixels."""
        return self.functional_cross_entropy(
            output,
            target,
            layer.weight,
            ignore_index=layer.ignore_index,
            reduction=layer.reduction,
            label_smoothing=layer.label_smoothing,
        )

    def functional_cross_entropy(
        self,
        output: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return `F.cross_entropy` of all tiles' pixels."""
        return cross_entropy(
            self,
            output,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    # ------------------------------------- parts of pooling and resizing

    def average_pool(
        self, value: Tensor, windows: tuple[AxisWindows, ...], include_padding: bool
    ) -> Tensor:
        """Return means of windows some of which reach outside the whole value."""
        return average_pool(value, windows, include_padding=include_padding)

    def adaptive_pool(
        self, value: Tensor, kind: str, windows: tuple[tuple[Interval, ...], ...]
    ) -> Tensor:
        """Return "avg" or "max" of each local window."""
        return adaptive_pool(value, kind, windows)

    def whole_positions(
        self, pooled: tuple[Tensor, Tensor], box: Box, size: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return pooled values with their indices as positions in the whole value.

        They are positions in `box`, which the tile has of the last dimensions, `size`.
        """
        return whole_positions(pooled, box, size)

    def max_unpool(
        self, value: Tensor, indices: Tensor, size: tuple[int, ...], box: Box
    ) -> Tensor:
        """Return `box` of the last dimensions of `F.max_unpool2d`, `size` as a whole.

        Indices are positions in the whole value, all of them in the box.
        """
        return max_unpool(value, indices, size, box)

    def resize(self, value: Tensor, how: Resize) -> Tensor:
        """Return the tile's part of a resized value."""
        return resize(value, how)


def _view(tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if tensor is None else tensor.view(shape)
