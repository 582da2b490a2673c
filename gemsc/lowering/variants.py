"""Several graphs of one model that share stages and weights: phases, other shapes.

    graphs = {"": the model, "d": a loss for the discriminator, "g": for the generator}

The graph that costs most decides where cuts fall; the others follow it. What a stage
holds is what any of them needs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gemsc.compilation import Compilation, Followed, Traced
from gemsc.errors import GemscError
from gemsc.ir.flow import owned_tensors
from gemsc.passes.follow_stages import find_twins


def find_largest(graphs: Mapping[str, Traced]) -> str:
    """Return the name of the graph that costs most, the first of equal ones."""

    def seconds(name: str) -> float:
        return sum(b.busy_seconds for b in graphs[name].program.blocks or ())

    return max(graphs, key=seconds)


def knowing_all(graphs: Mapping[str, Traced]) -> dict[str, Traced]:
    """Return the graphs, each with the tensors that any of them changes."""
    changing = frozenset(name for each in graphs.values() for name in each.changing)
    return {name: replace(each, elsewhere=changing) for name, each in graphs.items()}


def followed(
    graphs: Mapping[str, Traced], lowered: Mapping[str, Compilation], name: str
) -> Followed | None:
    """Return what a graph follows: the first one that is lowered, if there is one."""
    if not lowered:
        return None
    first, compilation = next(iter(lowered.items()))
    twins = find_twins(graphs[first].program, graphs[name].program)
    if twins is None:
        return Followed(compilation, None)
    return Followed(compilation, {node.name: twin for node, twin in twins.items()})


def with_one_ownership(
    lowered: Mapping[str, Compilation], largest: str
) -> dict[str, Compilation]:
    """Return the graphs where each stage holds what any of them needs.

    Raises:
        GemscError: ranks share out tensors in another way in another graph.
    """
    if len(lowered) == 1:
        return dict(lowered)
    first = lowered[largest]
    others = [each for each in lowered.values() if each is not first]
    programs = [p for each in (first, *others) for p in (each.program, each.evaluation)]
    owned = owned_tensors(*programs)
    for each in others:
        for one, other in zip(first.tiles, each.tiles, strict=True):
            if one.program.parts != other.program.parts:
                raise GemscError(
                    f"{each.program.name} needs other parts of weights on some rank",
                    help="compile without --shards and --branches",
                )
    return {name: each.with_owned(owned) for name, each in lowered.items()}


def as_family(lowered: Mapping[str, Compilation], largest: str) -> Compilation:
    """Return the graph without a name, with all others as its variants.

    Its plan is that of the one that costs most.
    """
    variants = {name: each for name, each in lowered.items() if name}
    return replace(lowered[""], plan=lowered[largest].plan, variants=variants)
