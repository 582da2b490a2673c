"""Losses that stand in a graph."""

from __future__ import annotations

from collections.abc import Mapping

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.sheet import Symbol


def _loss(node: Node, function: str, scores: str) -> str:
    arguments = [scores, f"{node.value(1)}.long()"]
    if node.operand(2) is not None:
        arguments.append(f"weight={node.value(2)}")
    ignored = node.attribute("ignore_index")
    if ignored is not None:
        arguments.append(f"ignore_index={ignored}")
    reduction = node.attribute("reduction", "mean")
    if reduction not in ("none", "sum", "mean"):
        raise node.refuse(f"reduces by {reduction!r}")
    if reduction != "mean":
        arguments.append(f'reduction="{reduction}"')
    return f"{function}({', '.join(arguments)})"


def _negative_log_likelihood(node: Node) -> Symbol:
    return node.gives(_loss(node, "F.nll_loss", node.value(0).text))


def _cross_entropy(node: Node) -> list[Symbol | None]:
    x = node.value(0)
    loss = node.gives(_loss(node, "F.cross_entropy", x.text))
    if not any(node.outputs[1:]):
        return [loss]
    return [loss, node.gives(f"F.log_softmax({x}, dim=1)", 1)]


LOSSES: Mapping[str, Operator] = {
    "NegativeLogLikelihoodLoss": _negative_log_likelihood,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
}
