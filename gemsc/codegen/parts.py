"""The parts of a stage's forward: plain lines, and blocks that keep less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from gemsc.codegen.writer import Names
from gemsc.ir.program import Segment

__all__ = ["Part", "Segments", "split_parts"]

Segments = tuple[tuple[Segment, tuple[fx.Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive nodes that are written in one way.

    `kind` is "plain", "offload" or "recompute", whose nodes are the `method` of that
    name; `name` is what the user calls them.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    name: str = ""
    method: str = ""


def split_parts(
    nodes: Sequence[fx.Node], segments: Segments, methods: Names
) -> list[Part]:
    """Return the parts of a row of nodes, in order."""
    segment_of = {node: item for item in segments for node in item[1]}
    parts: list[Part] = []
    plain: list[fx.Node] = []
    for node in nodes:
        if node not in segment_of:
            plain.append(node)
            continue
        segment, inside = segment_of[node]
        if node is not inside[0]:
            continue
        if plain:
            parts.append(Part("plain", tuple(plain)))
            plain = []
        method = ""
        if segment.kind == "recompute":
            method = methods.unique(f"{segment.name}_block")
        parts.append(Part(segment.kind, inside, segment.name, method))
    if plain:
        parts.append(Part("plain", tuple(plain)))
    return parts
