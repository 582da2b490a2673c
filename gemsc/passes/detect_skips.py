"""Detect skips: values that are needed again after other layers have run.

Example, a residual block inside a U-Net level:
    e1 = conv(x); h = conv(e1); r = h + e1; p = pool(r); m = mid(p); cat([up(m), r])
    # e1 is a short skip (joined within a few layers), r a long one
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from gemsc.base.dtypes import is_real
from gemsc.ir import meta
from gemsc.ir.constants import constant_nodes
from gemsc.ir.program import Program, Skip
from gemsc.passes.base import Pass


@dataclass(frozen=True)
class DetectSkips(Pass):
    """Find the values that skip over heavy nodes and tell short from long.

    A skip is short, so that no cut should fall inside it, if it spans at most
    `short_layers` heavy nodes or `short_share` of the predicted time. It is long
    whatever its span if what it joins has come down in resolution and up again (an
    encoder level that its mirror in the decoder joins), or if several layers further on
    join it, each anew (dense connections), or if it is an index or a mask (the edges of
    a graph). What any stage can make of constants, as a mask, skips nothing.
    """

    requires = ("facts",)
    provides = ("skips",)

    short_layers: int = 4
    short_share: float = 1 / 8

    def apply(self, program: Program) -> Program:
        """Return the program with its skips, in the order of their values."""
        order = {node: i for i, node in enumerate(program.compute_nodes)}
        seconds = [meta.facts(node).seconds for node in order]
        total = sum(seconds)
        nodes = tuple(order)
        constant = constant_nodes(program)
        skips = []
        for node in nodes:
            if node in constant:
                continue
            uses = sorted(order[user] for user in node.users if user in order)
            if not uses:
                continue
            span = nodes[order[node] + 1 : uses[-1]]
            heavy = [other for other in span if meta.facts(other).heavy]
            if not heavy:
                continue
            share = sum(meta.facts(other).seconds for other in span) / total
            last = nodes[uses[-1]]
            short = len(heavy) <= self.short_layers or share <= self.short_share
            if _hourglass(node, span, last):
                short = False
            if _is_joined_again_and_again(nodes, uses) or not _is_real(node):
                short = False
            size = meta.facts(node).output_bytes
            skips.append(Skip(node, last, num_bytes=size, long=not short))
        return replace(program, skips=tuple(skips))


def _hourglass(value: fx.Node, span: tuple[fx.Node, ...], last: fx.Node) -> bool:
    """Whether the last use joins the value with what came down in resolution and up.

    There may be no other way at full resolution, as around squeeze and excitation, and
    what is joined must be at full resolution itself, not a factor for each channel.
    """
    inside = set(span)
    others = [source for source in last.all_input_nodes if source in inside]
    high = _resolution(value)
    if high is None or not others:
        return False
    full = {value}
    lowest = high
    for node in span:
        resolution = _resolution(node)
        if resolution is None:
            continue
        lowest = min(lowest, resolution)
        if resolution >= high and not full.isdisjoint(node.all_input_nodes):
            full.add(node)
    return lowest < high and all(
        (_resolution(other) or 0) >= high and other not in full for other in others
    )


def _is_joined_again_and_again(nodes: tuple[fx.Node, ...], uses: list[int]) -> bool:
    """Whether two joins of the value with others have a heavy node between them."""
    joins = [use for use in uses if _num_values(nodes[use]) > 1]
    if len(joins) < 2:
        return False
    between = nodes[joins[0] + 1 : joins[-1]]
    return any(meta.facts(other).heavy for other in between)


def _is_real(node: fx.Node) -> bool:
    fake = meta.value(node)
    return not isinstance(fake, torch.Tensor) or is_real(fake.dtype)


def _num_values(node: fx.Node) -> int:
    return sum(source.op != "get_attr" for source in node.all_input_nodes)


def _resolution(node: fx.Node) -> int | None:
    """Return the number of pixels (voxels, steps), None for what is no image."""
    fake = meta.value(node)
    if not isinstance(fake, torch.Tensor) or fake.dim() < 4:
        return None
    return int(torch.Size(fake.shape[2:]).numel())
