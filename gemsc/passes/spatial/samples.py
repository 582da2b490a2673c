"""Samples and tokens: most operations treat all alike; each tile runs its own.

Example, five samples on two tiles, cut along the first dimension alone:

    %conv = call_module conv(%x)      # before, 5 x 3 x 64 x 64
    %conv = call_module conv(%x)      # on the first tile, 3 x 3 x 64 x 64
"""

from __future__ import annotations

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from gemsc.ir import meta
from gemsc.ir.operators.calls import Call
from gemsc.ir.operators.table import operator_of
from gemsc.passes.spatial.cuts import Axes, are_samples, fits
from gemsc.passes.spatial.emit import call_again
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local, Refused


def by_sample(low: Lowering, call: Call) -> Local | None:
    """Run the call on the tile's samples; None if it does not treat samples alike."""
    if not operator_of(call).by_sample:
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
    if operator_of(call).does == "window":
        return dims == call.rank + 2
    if call.kind == "pad":
        return len(call["pad"]) // 2 < dims
    if call.kind == "channels":
        return dims > 3 or not isinstance(call.layer, nn.Softmax2d)
    if call.kind in ("pixel_shuffle", "pixel_unshuffle"):
        return dims > 3
    return True


# Products and embeddings: of values cut by samples or tokens


_FACTORS = ("input", "other", "mat1", "mat2", "batch1", "batch2")


def product(low: Lowering, call: Call) -> Local:
    """Multiply what is cut alike, or along a dimension that only one of them has.

    What the left one sums over is whole there, and is gathered of the right one.
    """
    names = [name for name in _FACTORS if name in call.arguments]
    left, right = (call[name] for name in names[-2:])
    first, second = _axes(low, left), _axes(low, right)
    if min(len(first), len(second)) < 2:
        raise Refused("it takes a vector")
    if first[-1] is not None:
        raise Refused("it sums over a dimension that is cut")
    result = [*_batch(low, call, left, right), None, None]
    for place, axis in ((-2, first[-2]), (-1, second[-1])):
        result[place] = None if axis in result else axis
    axes = _checked(low, call.node, tuple(result))
    inputs = {
        left: _spread(low, left, (*axes[:-1], None)),
        right: _spread(low, right, (*axes[:-2], None, axes[-1])),
    }
    if call.input not in inputs:  # it is added to the product
        inputs[call.input] = _spread(low, call.input, axes)
    return call_again(low, call, axes, inputs)


def embedding(low: Lowering, call: Call) -> Local:
    """Look up the tile's words in the whole table."""
    if call.get("max_norm") is not None or call.get("scale_grad_by_freq", False):
        raise Refused("it looks at all words")
    axes = low.axes(call.input)
    if axes is None or call.get("sparse", False):
        raise Refused("its weight is cut, or has a sparse gradient")
    return call_again(low, call, (*axes, None), {call.input: low.get(call.input).node})


def _axes(low: Lowering, source: fx.Node) -> Axes:
    axes = low.axes(source)
    return (None,) * len(low.shape(source)) if axes is None else axes


def _batch(low: Lowering, call: Call, *sources: fx.Node) -> list[int | None]:
    """Return how the dimensions before the last two are cut, each by the first."""
    result: list[int | None] = [None] * (len(low.shape(call.node)) - 2)
    for source in sources:
        axes = _axes(low, source)[:-2]
        for dim, axis in enumerate(axes, len(result) - len(axes)):
            if result[dim] is None and axis not in result:
                result[dim] = axis
    return result


def _checked(low: Lowering, node: fx.Node, axes: Axes) -> Axes:
    if all(axis is None for axis in axes) or not fits(low.shape(node), axes, low.grid):
        raise Refused("its result is not cut")
    return axes


def _spread(low: Lowering, source: fx.Node, axes: Axes) -> fx.Node:
    """Return the part of an input that meets a part of the result."""
    shape = low.shape(source)
    own = axes[len(axes) - len(shape) :]
    found = tuple(a if size > 1 else None for size, a in zip(shape, own, strict=True))
    return low.spread(source, found if any(a is not None for a in found) else None)
