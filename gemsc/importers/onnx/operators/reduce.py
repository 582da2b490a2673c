"""Reductions: over axes that are an attribute in old files and an input in newer."""

from __future__ import annotations

from collections.abc import Mapping

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.text import at, axis_of, dim_of, of_numbers
from gemsc.importers.sheet import Symbol


def _reduces(text: str) -> Operator:
    """Return the operator of an expression in {x} and {dims}, the other arguments."""

    def operator(node: Node) -> Symbol:
        x = node.value(0)
        rank = len(x.shape)
        axes = node.setting("axes", 1) or []
        if not axes and node.attribute("noop_with_empty_axes", 0):
            return node.gives(_unreduced(text).format(x=x))
        axes = sorted({axis_of(node, axis, rank) for axis in axes or range(rank)})
        if 0 in [x.shape[axis] for axis in axes]:
            raise node.refuse("reduces an axis of no elements")
        keep = bool(node.attribute("keepdims", 1))
        if not axes:
            return node.gives(_unreduced(text).format(x=x))
        if "prod" in text:
            return node.gives(_product(x, axes, keep))
        names = [dim_of(axis, rank) for axis in axes]
        dims = f"dim={names[0] if len(names) == 1 else tuple(names)}"
        dims += ", keepdim=True" * keep
        if ".sum" in text and not x.tensor.is_floating_point():
            dims += f", dtype={x.tensor.dtype}"
        return node.gives(text.format(x=x, dims=dims))

    return operator


def _unreduced(text: str) -> str:
    """Return what is left of an expression that reduces no axis."""
    if "logsumexp" in text or "norm" in text:
        return "{x}.abs()" if "norm" in text else "{x}.clone()"
    for word in ("sum", "mean", "amax", "amin", "prod"):
        text = text.replace(f".{word}({{dims}})", "")
    return text if text != "{x}" else "{x}.clone()"


def _product(x: Symbol, axes: list[int], keep: bool) -> str:
    text = x.text
    dtype = "" if x.tensor.is_floating_point() else f", dtype={x.tensor.dtype}"
    for axis in reversed(axes):
        text += f".prod({axis}{', keepdim=True' * keep}{dtype})"
    return text


def _place_of(kind: str) -> Operator:
    """Return argmax or argmin."""

    def operator(node: Node) -> Symbol:
        x = node.value(0)
        rank = len(x.shape)
        axis = dim_of(axis_of(node, node.attribute("axis", 0), rank), rank)
        keep = ", keepdim=True" * bool(node.attribute("keepdims", 1))
        if not node.attribute("select_last_index", 0):
            return node.gives(f"{x}.{kind}(dim={axis}{keep})")
        last = x.shape[axis] - 1
        return node.gives(f"{last} - {x}.flip({axis}).{kind}(dim={axis}{keep})")

    return operator


def _top_k(node: Node) -> list[Symbol | None]:
    """Return the largest elements and where they are: of equal ones, the first."""
    x = node.value(0)
    rank = len(x.shape)
    axis = axis_of(node, node.attribute("axis", -1), rank)
    (count,) = node.settings("k", 1)
    largest = bool(node.attribute("largest", 1))
    dim = dim_of(axis, rank)
    names = [name or "_" for name in (*node.outputs, "", "")[:2]]
    if names[1] == "_":
        order = "" if largest else ", largest=False"
        text = f"{x}.topk({count}, dim={dim}{order})"
        return [node.sheet.unpack(names, text)[0], None]
    order = f"dim={dim}, descending={largest}, stable=True"
    values, places = node.sheet.unpack(names, f"{x}.sort({order})")
    found: list[Symbol | None] = []
    for value, name in zip((values, places), names, strict=True):
        used = name != "_"
        text = f"{value}{at(axis, f':{count}')}"
        found.append(node.sheet.line(name, text) if used else None)
    return found


REDUCTIONS: Mapping[str, Operator] = of_numbers(
    {
        "ArgMax": _place_of("argmax"),
        "ArgMin": _place_of("argmin"),
        "ReduceL1": _reduces("{x}.abs().sum({dims})"),
        "ReduceL2": _reduces("torch.linalg.vector_norm({x}, {dims})"),
        "ReduceLogSum": _reduces("{x}.sum({dims}).log()"),
        "ReduceLogSumExp": _reduces("torch.logsumexp({x}, {dims})"),
        "ReduceMax": _reduces("{x}.amax({dims})"),
        "ReduceMean": _reduces("{x}.mean({dims})"),
        "ReduceMin": _reduces("{x}.amin({dims})"),
        "ReduceProd": _reduces("{x}.prod({dims})"),
        "ReduceSum": _reduces("{x}.sum({dims})"),
        "ReduceSumSquare": _reduces("{x}.square().sum({dims})"),
        "TopK": _top_k,
    }
)
