"""What a lowered graph says of tiles: each function is a method of the tile's grid.

In generated code `redistribute(x, exchange, tile)` is `self.grid.redistribute(x, ...)`
and a call of a `TileLayer` is `self.grid.batch_norm(x, self.bn1)`. In the interpreter
both take the grid that is current in the thread, or one tile alone, for its shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gemsc.runtime.tiles.grid import (
    AxisWindows,
    Exchange,
    Grid,
    Resize,
    ShapeGrid,
    kept_of,
    reach,
    rows_read,
    taps,
    told_of_sums,
)

__all__ = [
    "FUNCTIONS",
    "REDUCTIONS",
    "AxisWindows",
    "Exchange",
    "Resize",
    "TileLayer",
    "adaptive_pool",
    "all_reduce",
    "amax",
    "amin",
    "average_pool",
    "functional_batch_norm",
    "functional_cross_entropy",
    "functional_dropout",
    "functional_group_norm",
    "functional_instance_norm",
    "functional_layer_norm",
    "functional_linear",
    "global_max",
    "kept_of",
    "max_unpool",
    "on_grid",
    "reach",
    "redistribute",
    "resize",
    "rows_read",
    "softmax",
    "std",
    "told_of_sums",
    "var",
    "whole_positions",
    "with_whole_gradients",
]

_current = threading.local()


@contextmanager
def on_grid(grid: Grid) -> Iterator[None]:
    """Let this thread's graphs run on a grid."""
    before = getattr(_current, "grid", None)
    _current.grid = grid
    try:
        yield
    finally:
        _current.grid = before


def _grid(tile: int = 0) -> Grid:
    grid: Grid | None = getattr(_current, "grid", None)
    return grid if grid is not None else ShapeGrid(tile)


def redistribute(value: Tensor, exchange: Exchange, tile: int) -> Tensor:
    """Return what this tile wants; `tile` is for shapes where no grid is current."""
    return _grid(tile).redistribute(value, exchange)


def all_reduce(value: Tensor, among: tuple[int, ...] = ()) -> Tensor:
    """Return the sum over the tiles, or some of them."""
    return _grid().all_reduce(value, among)


def with_whole_gradients(function: Any, *args: Any, **kwargs: Any) -> Any:
    """See `Grid.with_whole_gradients`."""
    return _grid().with_whole_gradients(function, *args, **kwargs)


def amax(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.amax`."""
    return _grid().amax(*args, **kwargs)


def amin(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.amin`."""
    return _grid().amin(*args, **kwargs)


def var(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.var`."""
    return _grid().var(*args, **kwargs)


def std(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.std`."""
    return _grid().std(*args, **kwargs)


def global_max(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.global_max`."""
    return _grid().global_max(*args, **kwargs)


def softmax(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.softmax`."""
    return _grid().softmax(*args, **kwargs)


def functional_linear(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.functional_linear`."""
    return _grid().functional_linear(*args, **kwargs)


def average_pool(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.average_pool`."""
    return _grid().average_pool(*args, **kwargs)


def whole_positions(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """See `Grid.whole_positions`."""
    return _grid().whole_positions(*args, **kwargs)


def max_unpool(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.max_unpool`."""
    return _grid().max_unpool(*args, **kwargs)


def adaptive_pool(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.adaptive_pool`."""
    return _grid().adaptive_pool(*args, **kwargs)


def resize(value: Tensor, how: Resize) -> Tensor:
    """See `Grid.resize`; for a fake value, too, the weights are real."""
    with unset_fake_temporarily():
        for axis in range(len(how.sizes)):
            taps(how, axis, value.dtype, value.device)
    return _grid().resize(value, how)


def functional_batch_norm(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.functional_batch_norm`."""
    return _grid().functional_batch_norm(*args, **kwargs)


def functional_group_norm(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.functional_group_norm`."""
    return _grid().functional_group_norm(*args, **kwargs)


def functional_instance_norm(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.functional_instance_norm`."""
    return _grid().functional_instance_norm(*args, **kwargs)


def functional_layer_norm(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.functional_layer_norm`."""
    return _grid().functional_layer_norm(*args, **kwargs)


def functional_dropout(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.functional_dropout`."""
    return _grid().functional_dropout(*args, **kwargs)


def functional_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """See `Grid.functional_cross_entropy`."""
    return _grid().functional_cross_entropy(*args, **kwargs)


FUNCTIONS = {
    function: function.__name__
    for function in (
        redistribute,
        all_reduce,
        amax,
        amin,
        var,
        std,
        global_max,
        softmax,
        average_pool,
        adaptive_pool,
        whole_positions,
        max_unpool,
        resize,
        functional_linear,
        functional_batch_norm,
        functional_group_norm,
        functional_instance_norm,
        functional_layer_norm,
        functional_dropout,
        functional_cross_entropy,
    )
}
"""Function of a graph -> the method of `Grid` that it calls with the same arguments.

`redistribute` alone has one argument more, the tile.
"""


REDUCTIONS = {
    "sum": all_reduce,
    "mean": all_reduce,
    "max": amax,
    "min": amin,
    "amax": amax,
    "amin": amin,
    "var": var,
    "std": std,
}
"""Kind of a reduction -> what puts the tiles' parts together."""


class TileLayer(nn.Module):
    """A user's layer that needs all tiles: `grid.<method>(*inputs, layer, *extra)`.

    The inputs of the method `overlapped` are those of `redistribute`.

    `layer` is the user's own, or a copy with other settings; its parameters and
    buffers are this module's, under the same names.
    """

    def __init__(self, layer: nn.Module, method: str, *extra: Any) -> None:
        super().__init__()
        self._parameters = layer._parameters
        self._buffers = layer._buffers
        self._non_persistent_buffers_set = layer._non_persistent_buffers_set
        self.__dict__["layer"] = layer
        self.method = method
        self.extra = extra
        self.training = layer.training

    def train(self, mode: bool = True) -> TileLayer:
        """Set the mode of both."""
        self.__dict__["layer"].train(mode)
        super().train(mode)
        return self

    def forward(self, *inputs: Any) -> Tensor:
        """Run on the current grid."""
        layer = self.__dict__["layer"]
        if self.method == "overlapped":
            value, exchange, tile = inputs  # the tile is as for `redistribute`
            return _grid(tile).overlapped(value, exchange, layer)
        result: Tensor = getattr(_grid(), self.method)(*inputs, layer, *self.extra)
        return result
