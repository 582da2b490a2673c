"""Insert communication: every value that a later stage uses gets a transfer.

Example, a U-Net on four stages:
    stage 0 -> 1  pool1          # the next stage
    stage 0 -> 3  enc1           # a long skip goes straight to its consumer, once
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod

from torch import fx

from gemsc.ir import meta
from gemsc.ir.program import Program, Transfer
from gemsc.passes.base import Pass


@dataclass(frozen=True)
class InsertComms(Pass):
    """Turn the edges that the stages cut into transfers.

    Each value goes once to each stage that uses it, straight from where it is computed.
    Values below `pack_bytes` for the same stage travel packed in one message; larger
    ones travel alone, because a message more costs less than the copy into a pack.

    With `outputs` (for evaluation) the model's outputs travel to the stage of the loss.
    `known` are transfers that are there already; indices begin at `first_index`.
    """

    requires = ("stages",)
    provides = ("transfers",)

    pack_bytes: int = 64 * 1024
    outputs: bool = False
    known: tuple[Transfer, ...] = ()
    first_index: int = 0

    def apply(self, program: Program) -> Program:
        """Return the program with its transfers, in order of source and destination."""
        stage_of = program.stage_of
        users = {
            node: {stage_of[u] for u in node.users if u in stage_of}
            for node in stage_of
        }
        for node in program.outputs if self.outputs else ():
            if node in users:  # inputs and parameters need no transfer
                users[node].add(program.home)
        known = {(value, t.dest) for t in self.known for value in t.values}
        cut: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
        for node, source in stage_of.items():
            for dest in sorted(users[node] - {source}):
                if (node, dest) not in known:
                    cut[source, dest].append(node)
        transfers: list[Transfer] = list(self.known)
        for (source, dest), values in sorted(cut.items(), key=lambda item: item[0]):
            for group in self._pack(values):
                index = self.first_index + len(transfers)
                transfers.append(Transfer(index, source, dest, group))
        return replace(program, transfers=tuple(transfers))

    def _pack(self, values: list[fx.Node]) -> list[tuple[fx.Node, ...]]:
        groups: list[tuple[fx.Node, ...]] = []
        small: list[fx.Node] = []
        for value in values:
            if _bytes_on_first_tile(value) < self.pack_bytes:
                small.append(value)
            else:
                groups.append((value,))
        return [*groups, tuple(small)] if small else groups


def _bytes_on_first_tile(value: fx.Node) -> int:
    """Return the bytes of a value: all tiles pack as the first one does."""
    spec, layout = meta.spec(value), meta.layout(value)
    if layout is None:
        return spec.num_bytes
    return prod(layout.local_shape(0)) * spec.dtype.itemsize
