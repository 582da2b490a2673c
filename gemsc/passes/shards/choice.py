"""Choose what is cut in a stage: factors of weights that save most, together.

Two factors that one operation knows of exclude each other: at most one is cut there.
So the choice is a heaviest set of factors of which no two meet; a factor weighs the
seconds that it saves, less those of the sums that it needs. A transformer's factors
are its heads, its hidden features and its words, and none of them meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from gemsc.costs.hardware import LinkSpeed
from gemsc.errors import GemscError, InternalError
from gemsc.ir import meta
from gemsc.ir.operators.table import NO_OPERATOR, OPERATORS
from gemsc.ir.shards import CutTensor, Fork, StageShards, WholeTensor
from gemsc.passes.shards.analysis import Analysis, cut_parts
from gemsc.passes.shards.factors import Factor, leaves
from gemsc.passes.shards.rules import reason_at
from gemsc.passes.spatial.cuts import cut

MUCH = 0.05  # of what the heaviest factor weighs: to leave that whole is refused
LEAST = 1e-3  # of what it saves: what a factor weighs whose sums cost more than that


@dataclass
class _Candidate:
    """A factor that may be cut: its tensors, the nodes that know it, what it weighs."""

    factor: Factor
    names: list[str] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    meets: set[Factor] = field(default_factory=set)
    weight: float = 0.0
    noun: str = "feature"


def choose_cuts(
    analysis: Analysis,
    count: int,
    link: LinkSpeed,
    keep_whole: Mapping[str, str],
    forks: tuple[Fork, ...] = (),
) -> StageShards:
    """Return what is cut over `count` ranks, all else whole.

    `keep_whole` are modules and tensors that stay whole, each with the reason. In the
    branches of `forks` nothing is cut.

    Raises:
        GemscError: what should be cut has fewer units than there are ranks.
    """
    shared = StageShards(count, "whole", (), forks=forks)
    candidates, refused = _candidates(analysis, keep_whole, shared)
    for candidate in candidates.values():
        _weigh(analysis, candidate, count, link)
    chosen = _heaviest(candidates)
    few = [factor for factor in chosen if factor.size < count]
    if few:
        _check_units([candidates[factor] for factor in few], candidates, count)
        names = {
            n: _too_few(candidates[f], count) for f in few for n in candidates[f].names
        }
        return choose_cuts(analysis, count, link, {**keep_whole, **names}, forks)
    cuts = []
    for factor in chosen:
        noun = candidates[factor].noun
        cuts += [
            CutTensor(name, noun, cut_parts(analysis.dims(name), factor, count))
            for name in candidates[factor].names
        ]
    order = list(analysis.parameters)
    cuts.sort(key=lambda tensor: order.index(tensor.name))
    whole = _left_whole(analysis, cuts, refused)
    return replace(shared, cut=tuple(cuts), whole=whole)


def chosen_factors(analysis: Analysis, shards: StageShards) -> dict[Factor, str]:
    """Return the factors that are cut, and what a unit of each is called.

    Raises:
        InternalError: this graph, that of evaluation, does not have them.
    """
    if analysis.chosen is None or analysis.chosen[0] is not shards:
        nouns: dict[Factor, str] = {}
        for tensor, factor in _factors_of(analysis, shards):
            if factor is None:
                raise InternalError(f"'{tensor.name}' is cut in training alone")
            nouns.setdefault(factor, tensor.noun)
        analysis.chosen = shards, nouns
    return analysis.chosen[1]


def not_cut_alike(analysis: Analysis, shards: StageShards) -> list[str]:
    """Return what is cut that another graph, that of evaluation, cannot cut so.

    There two dimensions that are cut may meet, or one may be used as a whole, or is
    that of a parameter which is whole.
    """
    by_factor: dict[Factor, list[str]] = {}
    names = []
    for tensor, factor in _factors_of(analysis, shards):
        if factor is None:
            names.append(tensor.name)
        else:
            by_factor.setdefault(factor, []).append(tensor.name)
    for whole in shards.whole:  # in training it has nothing to do with what is cut
        for dim in analysis.parameters.get(whole.name, ()):
            names += [n for factor in leaves(dim) for n in by_factor.get(factor, ())]
    for node in analysis.stage.nodes:
        known = analysis.roots(node)
        met = [factor for factor in by_factor if factor in known]
        twice = [factor for factor in met[:1] if len(known[factor]) > 1]
        names += [name for factor in (*twice, *met[1:]) for name in by_factor[factor]]
    return names


def _factors_of(
    analysis: Analysis, shards: StageShards
) -> Iterator[tuple[CutTensor, Factor | None]]:
    """Yield what is cut with its factor in this graph, None where it has none such."""
    for tensor in shards.cut:
        if tensor.name not in analysis.parameters:  # of a layer that only training has
            continue
        dims, part = analysis.dims(tensor.name), tensor.parts[0]
        outer = 1
        match: Factor | None = None
        for factor in leaves(dims[part.dim]):
            if (outer, factor.size) == (part.outer, part.units) and not factor.frozen:
                match = factor
            outer *= factor.size
        places = [factor is match for dim in dims for factor in leaves(dim)]
        yield tensor, match if sum(places) == 1 else None


def _too_few(candidate: _Candidate, count: int) -> str:
    return f"{candidate.factor.size} {candidate.noun}s are fewer than {count} ranks"


def _check_units(
    few: Sequence[_Candidate], candidates: Mapping[Factor, _Candidate], count: int
) -> None:
    """Refuse to leave whole what would save much.

    Raises:
        GemscError: names it, and what would work.
    """
    first = max(few, key=lambda candidate: candidate.weight)
    if first.weight < MUCH * max(candidate.weight for candidate in candidates.values()):
        return
    size, noun = first.factor.size, first.noun
    modules = dict.fromkeys(candidate.names[0].rpartition(".")[0] for candidate in few)
    raise GemscError(
        f"--shards {count} cuts {size} {noun}s",
        at=meta.location(first.nodes[0]),
        help=f"use {size} or fewer, or --whole {','.join(modules)}",
    )


def _candidates(
    analysis: Analysis, keep_whole: Mapping[str, str], shared: StageShards
) -> tuple[dict[Factor, _Candidate], dict[Factor, str]]:
    """Return the factors that may be cut, and why others of parameters may not."""
    candidates, refused = _of_parameters(analysis, keep_whole, shared.count)
    for node in analysis.stage.nodes:
        roots = analysis.roots(node)
        for factor, letters in roots.items():
            if factor not in candidates:
                continue
            if node.name in shared.rank_of:
                refused.setdefault(factor, "one rank computes its branch")
            if len(letters) > 1:
                refused.setdefault(factor, f"{reason_at(node)} has it twice")
            candidate = candidates[factor]
            candidate.nodes.append(node)
            candidate.meets |= {other for other in roots if other in candidates}
            kind = analysis.calls[node].kind if node in analysis.calls else ""
            candidate.noun = _noun(candidate.noun, kind, letters)
    for factor in refused:
        candidates.pop(factor, None)
    for factor, candidate in candidates.items():
        candidate.meets &= candidates.keys() - {factor}
    return candidates, refused


def _of_parameters(
    analysis: Analysis, keep_whole: Mapping[str, str], count: int
) -> tuple[dict[Factor, _Candidate], dict[Factor, str]]:
    candidates: dict[Factor, _Candidate] = {}
    refused: dict[Factor, str] = {}
    for name, dims in analysis.parameters.items():
        kept = kept_whole(name, keep_whole)
        factors = [factor for dim in dims for factor in leaves(dim)]
        for factor in factors:
            reason = kept or factor.frozen
            if not reason and factors.count(factor) > 1:
                reason = "two of its dimensions are the same"
            if not reason and factor.takes and factor.size < count:
                reason = f"{factor.size} experts are fewer than {count} ranks"
            if reason:
                refused.setdefault(factor, reason)
            else:
                noun = "expert" if factor.takes else "feature"
                new = _Candidate(factor, noun=noun)
                candidates.setdefault(factor, new).names.append(name)
    return candidates, refused


def kept_whole(name: str, keep_whole: Mapping[str, str]) -> str:
    """Return why a tensor is kept whole, '' if it is not."""
    parts = name.split(".")
    paths = (".".join(parts[:depth]) for depth in range(1, 1 + len(parts)))
    return next((keep_whole[path] for path in paths if path in keep_whole), "")


def _noun(known: str, kind: str, letters: set[str]) -> str:
    """Return what a unit is called: a letter of attention's batch is a head."""
    unit = OPERATORS.get(kind, NO_OPERATOR).unit
    if known in ("head", "expert") or not unit:
        return known
    if kind == "attention" and not letters & {"h", "b0"}:
        return known
    if kind == "embedding" and "v" not in letters:
        return known
    return unit


def _weigh(
    analysis: Analysis, candidate: _Candidate, count: int, link: LinkSpeed
) -> None:
    """Weigh the seconds that a cut saves, and those of its sums, both ways."""
    saved = spent = 0.0
    for node in candidate.nodes:
        both = _saved_and_spent(analysis, candidate.factor, node, count, link)
        saved, spent = saved + both[0], spent + both[1]
    candidate.weight = max(saved - spent, saved * LEAST)


def _saved_and_spent(
    analysis: Analysis, factor: Factor, node: fx.Node, count: int, link: LinkSpeed
) -> tuple[float, float]:
    """Return the seconds that a cut saves in a node, and those of its sum."""
    largest = max(stop - start for start, stop in cut(factor.size, count))
    saved = meta.facts(node).seconds * (1 - largest / factor.size)
    if not analysis.is_summed(node, factor):
        return saved, 0.0
    num_bytes = meta.facts(node).output_bytes * (count - 1) // count
    return saved, 4 * link.seconds(num_bytes)


def saved_by_cuts(
    analysis: Analysis, shards: StageShards, link: LinkSpeed
) -> dict[str, float]:
    """Return the seconds that cuts save in each node, less its sums, by its name."""
    cuts, saved = chosen_factors(analysis, shards), {}
    for node in analysis.stage.nodes:
        for factor in cuts.keys() & analysis.roots(node).keys():
            both = _saved_and_spent(analysis, factor, node, shards.count, link)
            saved[node.name] = both[0] - both[1]
    return saved


def _heaviest(candidates: dict[Factor, _Candidate]) -> list[Factor]:
    """Return the heaviest set of factors of which no two meet: branch and bound.

    A factor that meets none is taken; else the one that meets most is tried both ways,
    which leaves parts that have nothing to do with each other.
    """
    best = _heaviest_of(candidates, frozenset(candidates), {})
    return [factor for factor in candidates if factor in best]


def _heaviest_of(
    candidates: dict[Factor, _Candidate],
    among: frozenset[Factor],
    known: dict[frozenset[Factor], frozenset[Factor]],
) -> frozenset[Factor]:
    if among in known:
        return known[among]
    result: frozenset[Factor] = frozenset()
    for part in _connected(candidates, among):
        hub = max(part, key=lambda f: (len(candidates[f].meets & part), f.size))
        meeting = candidates[hub].meets & part
        if not meeting:
            result |= part
            continue
        with_hub = _heaviest_of(candidates, part - meeting - {hub}, known) | {hub}
        without = _heaviest_of(candidates, part - {hub}, known)
        weights = [
            sum(candidates[f].weight for f in chosen) for chosen in (with_hub, without)
        ]
        result |= with_hub if weights[0] >= weights[1] else without
    known[among] = result
    return result


def _connected(
    candidates: dict[Factor, _Candidate], among: frozenset[Factor]
) -> list[frozenset[Factor]]:
    """Return the parts of which no factor meets one of another part."""
    left, parts = set(among), []
    while left:
        part, reached = set(), {left.pop()}
        while reached:
            part |= reached
            left -= reached
            reached = {n for f in reached for n in candidates[f].meets} & left
        parts.append(frozenset(part))
    return parts


def _left_whole(
    analysis: Analysis, cuts: Sequence[CutTensor], refused: Mapping[Factor, str]
) -> tuple[WholeTensor, ...]:
    """Return the parameters that stay whole, the largest first, and why."""
    are_cut = {tensor.name for tensor in cuts}
    trained = dict(analysis.program.module.named_parameters())
    whole = []
    for name, dims in analysis.parameters.items():
        if name not in are_cut and name in trained:
            factors = [factor for dim in dims for factor in leaves(dim)]
            reasons = [refused[factor] for factor in factors if factor in refused]
            reason = reasons[0] if reasons else "what it meets saves more"
            whole.append(WholeTensor(name, trained[name].nbytes, reason))
    return tuple(sorted(whole, key=lambda tensor: -tensor.num_bytes))
