"""Which labels a loss leaves out, so that micro-batches may have unlike many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from gemsc.ir.flow import makers
from gemsc.ir.meta import location, spec
from gemsc.ir.operators.calls import Call, call_of
from gemsc.ir.program import Program

NOTHING = -100  # PyTorch's `ignore_index`, where none is given
_ATEN = ("input", "target", "weight", "reduction", "ignore_index")
_NLL = ("input", "target", "weight", "size_average", "ignore_index")
_NAMES: dict[Any, tuple[str, ...]] = {  # of arguments, of losses that are in no table
    F.nll_loss: _NLL,
    torch.ops.aten.nll_loss_nd.default: _ATEN,
    torch.ops.aten.cross_entropy_loss.default: _ATEN,
}
_MEAN = ("mean", 1)


def ignored_labels(program: Program) -> list[dict[str, Any]]:
    """Return each label that a mean over labels leaves out: its tensor, value, line.

    Such a mean weighs the labels of a micro-batch with few more than others. There are
    none where the loss returns a sum and a count, or compile says that it is no mean.
    """
    if program.loss is None or spec(program.loss).shape:
        return []
    if program.halves and not program.mixes_samples:
        return []
    inputs = {leaf.name: leaf for leaf in program.inputs}
    return [
        {"path": list(leaf.path), "label": label, "at": _place(node)}
        for node, labels, label in _means(program)
        for made_of in [{node.name for node in makers(labels)}]
        for name, leaf in inputs.items()  # in their order, not in that of a set
        if name in made_of and not leaf.spec.dtype.is_floating_point
    ]


def _place(node: fx.Node) -> str:
    at = location(node)
    return f"at {at}" if at else "function"


def _means(program: Program) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """Yield the losses that are means over labels, with these, and what they skip."""
    for node in program.compute_nodes:
        call = call_of(node, program.module)
        layer = vars(call.layer) if type(call.layer) is nn.NLLLoss else {}
        if names := _NLL if layer else _NAMES.get(node.target):
            given = layer | dict(zip(names, node.args, strict=False)) | node.kwargs
            call = Call(node, "cross_entropy", given)
        labels, how = call.get("target"), call.get("reduction", "mean")
        is_mean = call.kind == "cross_entropy" and how in _MEAN
        if is_mean and isinstance(labels, fx.Node):
            yield node, labels, int(call.get("ignore_index", NOTHING))
