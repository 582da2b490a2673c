"""Lower a stage whose ranks share branches: each rank has the nodes of its own.

What a branch begins with is there as a whole; a trunk that is split is gathered. What
the branches give is exchanged at once, right before their join: side by side in one
row, or, where the join adds them up, as a sum:

    %row = pack((%a, %c), (6144,))                # on the rank that has a and c
    %row_1 = redistribute(grid, %row, ...)        # what others have: b
    %row_2 = unpack(%row_1, ...)

A rank without a branch gives nothing, and takes part in all exchanges: in backward as
well, since what it gives needs a gradient.

On tiles, one of the ranks that share a tile computes its part of the branch; halos go
from tile to tile among those that compute the same branch. A row is then a row of rows,
one for each tile.
"""

from __future__ import annotations

from torch import fx

from gemsc.passes.branches.joins import JoinHere
from gemsc.passes.shards.lowering import lower_on_shards
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local


def lower_node(low: Lowering, node: fx.Node) -> Local | None:
    """Lower a node: of a branch, of a join, or of what is between them.

    None for what this rank does not compute.

    Raises:
        Refused: its inputs must be gathered.
    """
    fork = low.shards.fork_of.get(node.name) if low.shards is not None else None
    if fork is None:
        return lower_on_shards(low, node)
    at = JoinHere(low, fork)
    if low.is_in_branch(node):
        return at.branch(node)
    if node.name == fork.join:
        return at.sum(node) if fork.added else at.join(node)
    return None  # an addition before the last: the rank adds up all at once
