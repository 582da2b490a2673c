"""Choose how values outside of the regions are held: whole, or split.

Whole, each rank computes all of norms, dropout and residual additions; split by samples
or by tokens, its part of them. Then what goes into a region is gathered, and what comes
out of it is reduced and scattered: as many bytes as the sums of a whole trunk take
(Korthikanti et al., Reducing activation recomputation in large transformers, 2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.operators.table import operator_of
from gemsc.ir.shards import StageShards
from gemsc.passes.shards.analysis import Analysis, place_of, split_dim
from gemsc.passes.shards.choice import chosen_factors
from gemsc.passes.shards.factors import Dims, Factor, leaves
from gemsc.passes.shards.rules import tensor_inputs

PRODUCTS = ("matmul", "einsum")
GAIN = 0.05  # of a stage's seconds on a rank: what a split must save to be worth it
DIMS = {"batch": 0, "sequence": 1}

Split = tuple[tuple[str, int], ...]


def choose_trunk(
    analysis: Analysis, shards: StageShards, wanted: str
) -> tuple[str, Split]:
    """Return the trunk's kind, and the dimension in which each value is split.

    A value with dimension -1 is whole, computed of split ones.

    Raises:
        GemscError: what is wanted cannot be.
    """
    if wanted == "whole":
        return "whole", ()
    cut = set(chosen_factors(analysis, shards))
    outside = [node for node in analysis.values if node.name not in shards.rank_of]
    outside = [n for n in outside if _learns(n) and _is_outside(analysis, cut, n)]
    if wanted != "auto":
        factor = _factor(analysis, outside, DIMS[wanted], shards.count)
        _check(factor, wanted, shards.count, analysis)
        assert factor is not None
        return wanted, _split(analysis, cut, outside, factor, shards.count)
    everything = (
        sum(meta.facts(node).seconds for node in analysis.stage.nodes) / shards.count
    )
    for kind, dim in DIMS.items():
        factor = _factor(analysis, outside, dim, shards.count)
        if factor is not None and factor.size % shards.count == 0:
            split = _split(analysis, cut, outside, factor, shards.count)
            saved = _saved(analysis, cut, split) * (1 - 1 / shards.count)
            if saved > GAIN * everything:
                return kind, split
    return "whole", ()


def trunk_factor(analysis: Analysis, shards: StageShards) -> Factor | None:
    """Return the factor by which values outside of the regions are split, if any."""
    split = shards.split_dims
    for node in analysis.values:
        if (dim := split.get(node.name, -1)) >= 0:
            return leaves(analysis.dims(node)[dim])[0]
    return None


def least_split(
    analysis: Analysis,
    other: Analysis,
    shards: StageShards,
    twins: Mapping[str, fx.Node],
) -> int:
    """Return how many samples, or tokens, another graph of the same nodes splits.

    `twins` are its nodes by the names of those of the first. A dimension of one is no
    factor there. Without a value that is split, it is the number of ranks.
    """
    sizes = [shards.count]
    for node in analysis.values:
        dim = shards.split_dims.get(node.name, -1)
        if dim >= 0 and node.name in twins:
            ours = leaves(analysis.dims(node)[dim])
            theirs = leaves(other.dims(twins[node.name])[dim])
            sizes.append(theirs[0].size if len(theirs) == len(ours) else 1)
    return min(sizes)


def kept_split(analysis: Analysis, shards: StageShards) -> frozenset[fx.Node]:
    """Return products that know what is cut, but are split as the trunk is.

    Of each, less is sent so. Experts get tokens, and the groups of these are split:

        given = torch.einsum("gtec,gtd->gecd", to, x)

    With its experts' part of `to`, a rank would need all of `x`. Of its own groups it
    computes what all experts are given: that is exchanged (all-to-all), and what they
    found comes back likewise.
    """
    if analysis.kept_split is None or analysis.kept_split[0] is not shards:
        products: set[fx.Node] = set()
        trunk, cut = trunk_factor(analysis, shards), chosen_factors(analysis, shards)
        for node in analysis.stage.nodes if trunk is not None else ():
            known = analysis.roots(node)
            met = [factor for factor in cut if factor in known]
            call = analysis.calls.get(node)
            if met and trunk in known and call and call.kind in PRODUCTS:
                product = _Product(analysis, shards, node, met[0], trunk, products)
                if product.may_be_split and product.sent_split < product.sent_cut:
                    products.add(node)
        analysis.kept_split = shards, frozenset(products)
    return analysis.kept_split[1]


@dataclass(frozen=True)
class _Product:
    """A product that knows a factor that is cut and that of the trunk.

    `others` are products before it that are split. What is sent is told in bytes that
    all ranks receive, less the share that they all have in common.
    """

    analysis: Analysis
    shards: StageShards
    node: fx.Node
    cut: Factor
    trunk: Factor
    others: set[fx.Node]

    @property
    def may_be_split(self) -> bool:
        """Whether the trunk splits it, and all of its inputs that know what is cut.

        They are no parameters: of one that is cut a rank has no more than its part.
        """
        known = [
            n for n in tensor_inputs(self.node) if place_of(self._dims(n), self.cut)
        ]
        all_dims = [self._dims(self.node), *map(self._dims, known)]
        splits = (split_dim(dims, self.trunk, self.shards.count) for dims in all_dims)
        return None not in splits and all(n.op != "get_attr" for n in known)

    @property
    def sent_split(self) -> float:
        """What is sent if each rank computes it of its samples, or tokens."""
        given = [n for n in tensor_inputs(self.node) if self._is_cut(n)]
        given += [self.node] if self._knows(self.node) else []
        return sum(map(_bytes, given)) / self.shards.count

    @property
    def sent_cut(self) -> float:
        """What is sent if each rank computes its part of what is cut."""
        split = [n for n in tensor_inputs(self.node) if self._is_split(n)]
        here = [place_of(self._dims(n), self.cut) for n in split]
        shares = [self.shards.count if place else 1 for place in here]
        sent = [_bytes(n) / share for n, share in zip(split, shares, strict=True)]
        is_summed = self.analysis.is_summed(self.node, self.cut)
        return sum(sent) + (_bytes(self.node) if is_summed else 0)

    def _dims(self, source: fx.Node) -> Dims:
        """Return the dimensions of an input as the product has it."""
        return self.analysis.dims_at(self.node, source)

    def _knows(self, node: fx.Node) -> bool:
        return place_of(self.analysis.dims(node), self.cut) is not None

    def _is_split(self, node: fx.Node) -> bool:
        return self.shards.split_dims.get(node.name, -1) >= 0 or node in self.others

    def _is_cut(self, node: fx.Node) -> bool:
        inside = node in self.analysis.roles and self.cut in self.analysis.roots(node)
        return inside and self._knows(node) and node not in self.others


def _bytes(node: fx.Node) -> int:
    return meta.spec(node).num_bytes


def _factor(
    analysis: Analysis, outside: Iterable[fx.Node], dim: int, count: int
) -> Factor | None:
    """Return the factor that most values outside of the regions have as a dimension.

    One with something for each of `count` ranks comes before all others.
    """
    sizes: Counter[Factor] = Counter()
    for node in outside:
        dims = analysis.dims(node)
        if len(dims) > max(1, dim) and len(factors := leaves(dims[dim])) == 1:
            sizes[factors[0]] += meta.spec(node).num_bytes
    return max(sizes, key=lambda f: (f.size >= count, sizes[f]), default=None)


def _check(factor: Factor | None, wanted: str, count: int, analysis: Analysis) -> None:
    stage = analysis.stage
    if factor is None:
        raise GemscError(
            f"--trunk {wanted}: no dimension is common to the values between blocks of "
            f"stage {stage.index}",
            at=meta.location(stage.nodes[0]),
            help="use --trunk whole or --trunk auto",
        )
    if factor.size < count:
        what = "samples" if wanted == "batch" else "tokens"
        raise GemscError(
            f"--trunk {wanted} splits {factor.size} {what} over {count} ranks",
            at=meta.location(stage.nodes[0]),
            help="put more into example_inputs(), or use --trunk whole",
        )


def _split(
    analysis: Analysis,
    cut: set[Factor],
    outside: Iterable[fx.Node],
    factor: Factor,
    count: int,
) -> Split:
    """Return the values that are split by a factor, each with its dimension."""
    split = []
    for node in outside:
        dims = analysis.dims(node)
        dim = split_dim(dims, factor, count)
        if dim is not None:
            split.append((node.name, dim))
        elif place_of(dims, factor) is None and _sums(analysis, cut, node, factor):
            split.append((node.name, -1))
    return tuple(split)


def _sums(analysis: Analysis, cut: set[Factor], node: fx.Node, factor: Factor) -> bool:
    """Whether a node outside of the regions sums over the factor."""
    call = analysis.calls.get(node)
    if call is None or not operator_of(call).adds_up:
        return False
    known = analysis.roots(node)
    return factor in known and not cut & known.keys()


def _is_outside(analysis: Analysis, cut: set[Factor], node: fx.Node) -> bool:
    """Whether no dimension of a value is cut among the shards."""
    dims = analysis.dims(node)
    return not any(factor in cut for dim in dims for factor in leaves(dim))


def _learns(node: fx.Node) -> bool:
    """Whether a value is a tensor that the gradient of the loss flows back into."""
    return meta.needs_gradient(node) and meta.is_one_tensor(node)


def _saved(analysis: Analysis, cut: set[Factor], split: Split) -> float:
    names = {name for name, _ in split}
    return sum(
        meta.facts(node).seconds
        for node in analysis.stage.nodes
        if node.name in names and not cut & analysis.roots(node).keys()
    )
