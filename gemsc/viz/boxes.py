"""What the picture of a graph draws as one box: the nodes of a block, or a branch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from gemsc.ir.program import Program, Stage
from gemsc.ir.shards import Branch


@dataclass(eq=False, slots=True)
class Box:
    """Nodes of a stage that are drawn as one.

    `level` counts boxes in the order of the model. The branches of a fork are side by
    side, half a level below what is before them.
    """

    key: str
    name: str
    stage: int
    level: float
    branch: Branch | None = None
    nodes: list[fx.Node] = field(default_factory=list)


def boxes_of(program: Program) -> list[Box]:
    """Return the boxes of all stages, in the order of the model.

    A branch that one of several ranks computes is a box, whatever blocks its nodes are
    in. What else there is of a block is another, or two where branches end in between.
    """
    found: dict[str, Box] = {}
    levels: dict[str, float] = {}
    for stage in program.require_stages():
        for key, name, join, branch, node in _keys(program, stage):
            if key not in found:
                level = float(sum(box.branch is None for box in found.values()))
                if branch is not None:
                    level = levels.setdefault(join, level - 0.5)
                found[key] = Box(key, name, stage.index, level, branch)
            found[key].nodes.append(node)
    return list(found.values())


def _keys(
    program: Program, stage: Stage
) -> Iterator[tuple[str, str, str, Branch | None, fx.Node]]:
    """Yield for each node the key and name of its box, the join and the branch."""
    shards = program.shards.get(stage.index)
    forks = [fork for fork in shards.forks if not fork.reason] if shards else []
    inside = {n: (f.join, b) for f in forks for b in f.branches for n in b.nodes}
    place = {node.name: index for index, node in enumerate(stage.nodes)}
    joins = {fork.join: place[fork.join] for fork in forks}
    place |= {name: joins[fork.join] for fork in forks for name in fork.added}
    for block in stage.blocks:
        parts: list[int] = []
        for node in block.nodes:
            if node.name in inside:
                join, branch = inside[node.name]
                yield f"branch_{branch.nodes[0]}", branch.name, join, branch, node
                continue
            passed = sum(join <= place[node.name] for join in joins.values())
            parts += [passed] if passed not in parts else []
            part = f"_{number}" if (number := parts.index(passed)) else ""
            yield f"block{block.index}{part}", block.name, "", None, node
