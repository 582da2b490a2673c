"""Normalizations, as layers where PyTorch has them, and Dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from gemsc.importers.onnx.names import is_machine_made
from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.operators.text import axis_of, dim_of, number, of_numbers
from gemsc.importers.onnx.static import Static
from gemsc.importers.sheet import Symbol

_INSTANCE: dict[int, type[nn.Module]] = {
    3: nn.InstanceNorm1d,
    4: nn.InstanceNorm2d,
    5: nn.InstanceNorm3d,
}


def _held(node: Node, shape: Sequence[int], *indices: int) -> list[Static] | None:
    """Return the operands if a layer can hold them: all known, and of this shape."""
    found = []
    for index in indices:
        weight = node.weight(index)
        if weight is None or weight.shape != tuple(shape):
            return None
        found.append(weight)
    return found


def _layer_norm(node: Node) -> list[Symbol | None]:
    x = node.value(0)
    rank = len(x.shape)
    axis = axis_of(node, node.attribute("axis", -1), rank)
    shape = x.shape[axis:]
    eps = node.attribute("epsilon", 1e-5)
    bias = node.operand(2) is not None
    held = _held(node, shape, 1, *[2] * bias)
    if held:
        module = nn.LayerNorm(shape, eps=eps, bias=bias)
        names = dict(zip(("weight", "bias"), held, strict=False))
        y = node.gives(f"{node.layer(module, **names)}({x})")
    else:
        text = f"F.layer_norm({x}, {shape}, eps={number(eps)}) * {node.value(1)}"
        y = node.gives(text + (f" + {node.value(2)}" if bias else ""))
    results: list[Symbol | None] = [y, None, None]
    dims = dim_of(axis, rank) if axis == rank - 1 else tuple(range(axis, rank))
    if any(node.outputs[1:2]):
        results[1] = node.gives(f"{x}.mean({dims}, keepdim=True)", 1)
    if any(node.outputs[2:3]):
        variance = f"{x}.var({dims}, correction=0, keepdim=True)"
        results[2] = node.gives(f"({variance} + {number(eps)}).rsqrt()", 2)
    return results[: len(node.outputs)]


def _rms_norm(node: Node) -> Symbol:
    x = node.value(0)
    axis = axis_of(node, node.attribute("axis", -1), len(x.shape))
    shape = x.shape[axis:]
    eps = node.attribute("epsilon", 1e-5)
    held = _held(node, shape, 1)
    if held:
        module = nn.RMSNorm(shape, eps=eps)
        return node.gives(f"{node.layer(module, weight=held[0])}({x})")
    normal = f"F.rms_norm({x}, {shape}, eps={number(eps)})"
    return node.gives(f"{normal} * {node.value(1)}")


def _across(node: Node, index: int, rank: int) -> str:
    """Return a vector of channels as it stands beside values with further axes."""
    return f"{node.value(index)}.reshape(-1{', 1' * (rank - 2)})"


def _is_plain(scale: Static, bias: Static) -> bool:
    """Whether an exporter has made these up: torch.onnx, for a norm without weights."""
    made = all(is_machine_made(each.name) for each in (scale, bias))
    return made and bool((scale.array == 1).all() and (bias.array == 0).all())


def _instance_norm(node: Node) -> Symbol:
    x = node.value(0)
    rank, channels = len(x.shape), x.shape[1]
    eps = node.attribute("epsilon", 1e-5)
    held = _held(node, (channels,), 1, 2)
    if held and _is_plain(*held):
        return node.gives(f"F.instance_norm({x}, eps={number(eps)})")
    if held and rank in _INSTANCE:
        make = _INSTANCE[rank]
        module = make(channels, eps=eps, affine=True)
        text = node.layer(module, weight=held[0], bias=held[1])
        return node.gives(f"{text}({x})")
    scale, bias = (node.value(index) for index in (1, 2))
    settings = f"weight={scale}, bias={bias}, eps={number(eps)}"
    return node.gives(f"F.instance_norm({x}, {settings})")


def _group_norm(node: Node) -> Symbol:
    x = node.value(0)
    groups, channels = node.attribute("num_groups"), x.shape[1]
    eps = node.attribute("epsilon", 1e-5)
    held = _held(node, (channels,), 1, 2)
    if held and (node.opset > 20 or groups == channels):
        module = nn.GroupNorm(groups, channels, eps=eps)
        text = node.layer(module, weight=held[0], bias=held[1])
        return node.gives(f"{text}({x})")
    scale, bias = (_across(node, index, len(x.shape)) for index in (1, 2))
    if node.opset < 21:  # one number for each group
        each = f".repeat_interleave({channels // groups}, 0)"
        scale, bias = scale + each, bias + each
    normal = f"F.group_norm({x}, {groups}, eps={number(eps)})"
    return node.gives(f"{normal} * {scale} + {bias}")


def _local_response(node: Node) -> Symbol:
    x, size = node.value(0), node.attribute("size")
    alpha, beta = node.attribute("alpha", 1e-4), node.attribute("beta", 0.75)
    bias = node.attribute("bias", 1.0)
    if size % 2:
        module = nn.LocalResponseNorm(size, alpha=alpha, beta=beta, k=bias)
        return node.gives(f"{node.layer(module)}({x})")
    # PyTorch takes the odd one before the channel
    pads = (0, 0, (size - 1) // 2, size // 2)
    squares = f"F.pad({x}.square().flatten(2).unsqueeze(1), {pads})"
    mean = f"F.avg_pool2d({squares}, ({size}, 1), stride=1).reshape({x}.shape)"
    share = node.sheet.line("near", mean)
    scale = f"({number(bias)} + {number(alpha)} * {share})"
    return node.gives(f"{x} / {scale} ** {number(beta)}")


def _lp_normalization(node: Node) -> Symbol:
    x = node.value(0)
    rank = len(x.shape)
    axis = dim_of(axis_of(node, node.attribute("axis", -1), rank), rank)
    power = node.attribute("p", 2)
    return node.gives(f"F.normalize({x}, p={power}, dim={axis})")


def _mean_variance(node: Node) -> Symbol:
    x = node.value(0)
    rank = len(x.shape)
    axes = node.attribute("axes", [0, 2, 3])
    dims = tuple(axis_of(node, axis, rank) for axis in axes)
    spread = f"{x}.std({dims}, correction=0, keepdim=True)"
    return node.gives(f"({x} - {x}.mean({dims}, keepdim=True)) / ({spread} + 1e-9)")


def _dropout(node: Node) -> Symbol | list[Symbol | None]:
    x = node.value(0)
    if any(node.outputs[1:]):
        raise node.refuse("gives its mask")
    ratio = (node.setting("ratio", 1) or [0.5])[0]
    if not 0 <= ratio <= 1 or math.isnan(ratio):
        raise node.refuse(f"has the ratio {ratio}")
    layer = node.layer(nn.Dropout(float(number(ratio))))
    return node.gives(f"{layer}({x})")


NORMALIZATIONS: Mapping[str, Operator] = of_numbers(
    {
        "Dropout": _dropout,
        "GroupNormalization": _group_norm,
        "InstanceNormalization": _instance_norm,
        "LRN": _local_response,
        "LayerNormalization": _layer_norm,
        "LpNormalization": _lp_normalization,
        "MeanVarianceNormalization": _mean_variance,
        "RMSNormalization": _rms_norm,
    }
)
