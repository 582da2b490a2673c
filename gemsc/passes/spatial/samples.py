"""Samples: most operations treat all alike, so that each tile runs them on its own.

Example, five samples on two tiles, cut along the first dimension alone:

    %conv = call_module conv(%x)      # before, 5 x 3 x 64 x 64
    %conv = call_module conv(%x)      # on the first tile, 3 x 3 x 64 x 64
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.ir import meta
from gemsc.passes.spatial.calls import Call
from gemsc.passes.spatial.cuts import are_samples
from gemsc.passes.spatial.emit import call_again
from gemsc.passes.spatial.lowering import Local, Lowering

__all__ = ["by_sample"]

_KINDS = frozenset(
    [
        "channels",
        "group_norm",
        "interpolate",
        "pad",
        "pixel_shuffle",
        "pixel_unshuffle",
    ]
)
_WINDOWS = frozenset(
    [
        "conv",
        "conv_transpose",
        "max_pool",
        "max_unpool",
        "avg_pool",
        "lp_pool",
        "adaptive_avg_pool",
        "adaptive_max_pool",
    ]
)


def by_sample(low: Lowering, call: Call) -> Local | None:
    """Run the call on the tile's samples; None if it does not treat samples alike."""
    if call.kind not in _KINDS | _WINDOWS:
        return None
    source = call.input
    axes = low.axes(source)
    if not are_samples(axes) or not _has_samples(call, len(axes)):
        return None
    leaves = pytree.tree_leaves(meta.value(call.node))
    rank = next(leaf.dim() for leaf in leaves if isinstance(leaf, Tensor))
    inputs = {source: low.get(source).node}
    if call.kind == "max_unpool":
        inputs[call["indices"]] = low.spread(call["indices"], axes)
    return call_again(low, call, (axes[0], *(None,) * (rank - 1)), inputs)


def _has_samples(call: Call, dims: int) -> bool:
    """Whether the first of `dims` dimensions has samples that a call treats alike."""
    if call.kind in _WINDOWS:
        return dims == call.rank + 2
    if call.kind == "pad":
        return len(call["pad"]) // 2 < dims
    if call.kind == "channels":
        return dims > 3 or not isinstance(call.layer, nn.Softmax2d)
    if call.kind in ("pixel_shuffle", "pixel_unshuffle"):
        return dims > 3
    return True
