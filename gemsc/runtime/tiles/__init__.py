"""Operations on tiles: what lowered graphs and generated stages call.

An operation that needs the other tiles takes the grid as its first argument; layers and
functions are the same operation, of parameters and settings.
"""

from gemsc.runtime.tiles.collectives import all_reduce, redistribute
from gemsc.runtime.tiles.convolution import convolution
from gemsc.runtime.tiles.gradients import with_whole_gradients
from gemsc.runtime.tiles.linear import linear
from gemsc.runtime.tiles.losses import cross_entropy
from gemsc.runtime.tiles.norms import (
    batch_norm,
    functional_batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
)
from gemsc.runtime.tiles.reductions import amax, amin, global_max, softmax, std, var
from gemsc.runtime.tiles.windows import (
    adaptive_pool,
    average_pool,
    dropout,
    max_unpool,
    resize,
    whole_positions,
)

__all__ = [
    "adaptive_pool",
    "all_reduce",
    "amax",
    "amin",
    "average_pool",
    "batch_norm",
    "convolution",
    "cross_entropy",
    "dropout",
    "functional_batch_norm",
    "global_max",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "max_unpool",
    "redistribute",
    "resize",
    "softmax",
    "std",
    "var",
    "whole_positions",
    "with_whole_gradients",
]
