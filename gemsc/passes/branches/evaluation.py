"""The forks of another graph: ranks compute what their weights are needed for.

Training and evaluation may be different graphs, as where heads beside the trunk are
there in training only; so may the phases of a step. Which rank holds a weight was
decided in the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.flow import layer_path, used_tensors
from gemsc.ir.program import Program, Stage
from gemsc.ir.shards import Fork, StageShards
from gemsc.passes.branches.assignment import ALL
from gemsc.passes.branches.candidates import ForkChoice, heaviest
from gemsc.passes.branches.forks import Finder, ForkWindow


def follow_forks(
    program: Program, stage: Stage, training: StageShards, what: str
) -> tuple[Fork, ...]:
    """Return forks in which each rank computes what it alone holds the weights of.

    Raises:
        GemscError: a layer that one rank holds is in no branch in this graph.
    """
    holders = dict(training.placed)
    owners = {
        node: {holders[n] for n in used_tensors(program, [node]) if n in holders}
        for node in stage.nodes
    }
    finder = Finder(program, stage, {})
    ends = {finder.position[node] for node in stage.nodes if owners[node]}
    found = [
        candidate
        for join, added in finder.joins()
        for window in finder.windows(join, added, ends)
        for candidate in _followed(finder, window, owners)
    ]
    forks = tuple(each.fork() for each in heaviest(found))
    inside = {name for fork in forks for b in fork.branches for name in b.nodes}
    needed = [node for node in stage.nodes if owners[node] and node.name not in inside]
    if needed:
        paths = dict.fromkeys(map(layer_path, needed))
        raise GemscError(
            f"'{layer_path(needed[0])}' is in a branch of one rank in training, and in "
            f"{what} all ranks need it",
            at=meta.location(needed[0]),
            help=f"keep it whole: --whole {','.join(paths)}",
        )
    return tuple(replace(fork, saved=0.0) for fork in forks)


def _followed(
    finder: Finder, window: ForkWindow, owners: dict[fx.Node, set[int]]
) -> Iterator[ForkChoice]:
    """Yield the window as a fork, if each component needs what one rank holds."""
    needed = [{r for n in c.nodes for r in owners[n]} for c in window.components]
    ranks = [next(iter(each), ALL) for each in needed]
    stays = [c.stays for c, r in zip(window.components, ranks, strict=True) if r != ALL]
    if stays and not any(stays) and all(len(each) < 2 for each in needed):
        covered = sum(bool(owners[n]) for c in window.components for n in c.nodes)
        yield ForkChoice.of(finder, window, ranks, float(covered))
