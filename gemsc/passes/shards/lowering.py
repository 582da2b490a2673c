"""Lower a stage whose ranks share heads, channels, features or words.

Where an operation knows a factor that is cut, a rank computes its part:

    %qkv = call_module attention.qkv(%norm1)     # 8 x 64 x 384
    %qkv = call_module attention.qkv(%norm1)     # 8 x 64 x 192: heads 0 to 2 of 4

An operation that sums over the factor gives an addend; the ranks add theirs up at once,
to the whole value, or to each rank's samples where the trunk is split:

    %out = linear(%mixed, %attention.out.weight)       # an addend
    %out_1 = all_reduce(grid, %out)
    %out_2 = add(%out_1, %attention.out.bias)

All others are outside of the regions: they are lowered as on tiles.
"""

from __future__ import annotations

from torch import fx

from gemsc.ir import meta
from gemsc.ir.mutation import elements
from gemsc.passes.shards.analysis import Analysis, analysis_of, split_dim
from gemsc.passes.shards.choice import chosen_factors
from gemsc.passes.shards.factors import Dims, Factor
from gemsc.passes.shards.inside import Inside
from gemsc.passes.shards.operations import compute
from gemsc.passes.shards.trunk import kept_split, trunk_factor
from gemsc.passes.spatial.cuts import Axes
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules.lower_call import lower_call
from gemsc.passes.spatial.values import Local


def trunk_axes(low: Lowering, node: fx.Node) -> Axes | None:
    """Return how a trunk that is split cuts a value: by samples or tokens, or not."""
    if low.shards is None or not low.shards.split:
        return None
    analysis = analysis_of(low.program, low.stage)
    trunk = trunk_factor(analysis, low.shards)
    return _axes(analysis.dims(node), trunk, low.shards.count)


def lower_on_shards(low: Lowering, node: fx.Node) -> Local:
    """Lower a node of a stage that is split: on tiles, or among shards.

    Raises:
        Refused: its inputs must be gathered.
    """
    if low.shards is None:
        return lower_call(low, node)
    analysis = analysis_of(low.program, low.stage)
    known = analysis.roots(node)
    stays_split = node in kept_split(analysis, low.shards)
    for factor in () if stays_split else chosen_factors(analysis, low.shards):
        if factor in known:  # no two that are cut meet
            return compute(Inside(low, analysis, factor, node))
    return _outside(low, analysis, node)


def _outside(low: Lowering, analysis: Analysis, node: fx.Node) -> Local:
    """Lower a node outside of the regions: of split values where the trunk is split."""
    assert low.shards is not None
    split = low.shards.split_dims
    is_split = node.name in split or node in kept_split(analysis, low.shards)
    if not meta.is_one_tensor(node):  # parts of a value that is split
        is_split = any(source.name in split for source in node.all_input_nodes)
    trunk = trunk_factor(analysis, low.shards) if is_split else None
    given: dict[fx.Node, Local] = {}
    for source in elements(node):
        if low.flattened(source) is not None:
            continue  # held with other dimensions: as on tiles
        if source.op != "get_attr" and meta.is_one_tensor(source):
            local = low.local(source)
            if low.pictures:
                given[source] = low.shared(source, ())
                continue
            axes = _axes(analysis.dims(source), trunk, low.shards.count)
            if local.axes != axes or local.parts:
                given[source] = low.split_again(source, axes)
    with low.instead(given):
        return lower_call(low, node)


def _axes(dims: Dims, trunk: Factor | None, count: int) -> Axes | None:
    """Return how a value is cut where all that has the trunk's factor is split."""
    split = split_dim(dims, trunk, count) if trunk is not None else None
    if split is None:
        return None
    return tuple(0 if dim == split else None for dim in range(len(dims)))
