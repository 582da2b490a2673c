"""Padding as an operation of its own: the halo holds it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import fx

from gemsc.base.boxes import Box
from gemsc.ir.operators.calls import Call
from gemsc.passes.spatial import need
from gemsc.passes.spatial.cuts import Axes, fits
from gemsc.passes.spatial.emit import crop
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local, Refused


def pad(low: Lowering, call: Call) -> Local:
    """Let each tile want its part of the padded value; negative padding crops."""
    source, node = call.input, call.node
    axes = low.axes(source)
    assert axes is not None
    if not fits(low.shape(node), axes, low.grid):
        raise Refused("the result is smaller than the grid")
    before = _before(call["pad"], len(axes))
    wanted = tuple(
        tuple((a - n, b - n) for (a, b), n in zip(box, before, strict=True))
        for box in low.owned(low.shape(node), axes)
    )
    mode = call.detail or call.get("mode", "constant")
    if mode == "constant":
        part = low.part(source, wanted, float(call.get("value", 0.0)))
    else:
        part = pad_like(low, source, axes, wanted, mode, call)
    return low.stands_for(part, node, axes)


def _before(padding: Any, dims: int) -> tuple[int, ...]:
    """Return the rows before each dimension; PyTorch begins with the last one."""
    starts = [int(n) for n in tuple(padding)[::2]]
    return (*(0,) * (dims - len(starts)), *reversed(starts))


def pad_like(
    low: Lowering,
    source: fx.Node,
    axes: Axes,
    wanted: tuple[Box, ...],
    mode: str,
    call: Call,
) -> fx.Node:
    """Return the node of the wanted boxes; outside the value they follow the mode.

    Each tile takes what is mirrored or repeated, from the edge on, pads it there, and
    crops what it took too much.
    """
    if mode == "circular":
        return low.part(source, wanted, wraps=True)
    if mode not in ("reflect", "replicate"):
        raise Refused(f"no rule for padding mode {mode}")
    shape = low.shape(source)
    taken = tuple(
        tuple(
            need.mirrored(interval, size=size, before=0, mode=mode)
            for interval, size in zip(box, shape, strict=True)
        )
        for box in wanted
    )
    part = low.part(source, taken)
    rank = len(shape) - 2
    if rank < 1:
        raise Refused("it has no batch")
    ours = list(zip(taken[low.place], wanted[low.place], shape, strict=True))
    pads: list[tuple[int, int]] = []
    rows: list[tuple[int, int]] = []
    for (first, last), (start, stop), size in ours[len(shape) - rank :]:
        left, right = max(-start, 0), max(stop - size, 0)
        pads.append((left, right))
        rows.append((start - first + left, last + right - stop))
    local = Local(part, axes)
    if any(left or right for left, right in pads):
        amounts = tuple(n for pair in reversed(pads) for n in pair)
        local = low.create(
            call.node,
            "call_function",
            F.pad,
            (part, amounts),
            {"mode": mode},
            axes,
            partial=True,
        )
    return crop(low, call, local, rows).node
