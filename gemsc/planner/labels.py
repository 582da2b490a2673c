"""Which labels a loss leaves out, so that micro-batches may have unlike many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from gemsc.ir.meta import location, spec
from gemsc.ir.operators.calls import Call, call_of
from gemsc.ir.program import Program

NOTHING = -100  # PyTorch's `ignore_index`, where none is given
_NLL = "input target weight size_average ignore_index"


def ignored_labels(program: Program) -> list[dict[str, Any]]:
    """Return each label that a mean over labels leaves out: its tensor, value, line.

    Such a mean weighs the labels of a micro-batch with few more than others. There are
    none where the loss returns a sum and a count, or compile says that it is no mean.
    """
    if program.loss is None or spec(program.loss).shape or program.halves:
        return []
    inputs = {each.name: each for each in program.inputs}
    return [
        {"path": list(inputs[name].path), "label": label, "at": str(location(node))}
        for node, labels, label in _means(program)
        for name in _sources(labels)
        if name in inputs and not inputs[name].spec.dtype.is_floating_point
    ]


def _means(program: Program) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """Yield the losses that are means over labels, with these, and what they skip."""
    for node in program.compute_nodes:
        call = call_of(node, program.module)
        if node.target is F.nll_loss:
            given = dict(zip(_NLL.split(), node.args, strict=False)) | node.kwargs
            call = Call(node, "cross_entropy", given)
        elif type(call.layer) is nn.NLLLoss:
            given = dict(zip(_NLL.split(), node.args, strict=False)) | vars(call.layer)
            call = Call(node, "cross_entropy", given | node.kwargs)
        labels = call.get("target")
        is_mean = call.get("reduction", "mean") == "mean"
        if call.kind == "cross_entropy" and is_mean and isinstance(labels, fx.Node):
            yield node, labels, int(call.get("ignore_index", NOTHING))


def _sources(node: fx.Node) -> set[str]:
    """Return the placeholders that a value is made of."""
    found, left = set(), [node]
    seen = {node}
    while left:
        each = left.pop()
        if each.op == "placeholder":
            found.add(each.name)
        left += [source for source in each.all_input_nodes if source not in seen]
        seen.update(each.all_input_nodes)
    return found
