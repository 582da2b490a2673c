"""Names for layers and values, out of those that exporters write into files.

layer1.0.conv1.weight         the initializer's own, which torch keeps
/layer1/layer1.0/conv1/Conv   a node of torch's older exporter: layer1.0.conv1
onnx::Conv_123, val_12        machine-made: the node's place is taken
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import onnx
import torch
import torch.nn.functional as F

SCOPES = "pkg.torch.onnx.name_scopes"
MACHINE_MADE = re.compile(
    r"onnx::.*|\d+|_?val_\d+|_to_copy(_\d+)?|expr_.*|.*Constant(_\d+)?(_output_\d+)?|"
    r"(const|tmp|getitem|arange|clone|sym_size|lifted_tensor|c_lifted)(_\w+|\d+)?|"
    r"constant(_\d+)?|t(_?\d+)?|new_(empty|full|ones|zeros)(_\d+)?|"  # and not tokens
    r"const_\w*__\d+|.*_(const|axes|starts|ends|steps)(__?\d+)?"
)
# parts of names that say nothing of the layer
EMPTY = frozenset(
    [
        *("StatefulPartitionedCall", "PartitionedCall", "ReadVariableOp", "Conv2D"),
        *("MatMul", "BiasAdd", "FusedBatchNormV3", "Relu", "Identity"),
    ]
)


def is_machine_made(name: str) -> bool:
    """Return whether an exporter has made a name up, as `val_12`."""
    if not name or MACHINE_MADE.fullmatch(name):
        return True
    # a function that torch's exporter has computed: linear_1, embedding
    function = re.sub(r"_\d+$", "", name)
    return any(hasattr(where, function) for where in (torch, F, torch.Tensor))


def node_name(node: onnx.NodeProto) -> str:
    """Return the name of a node, or that of its first output."""
    return node.name or next(iter(node.output), "")


def noted(node: onnx.NodeProto, key: str) -> str:
    """Return what torch's newer exporter notes of a node, "" if nothing."""
    return next((e.value for e in node.metadata_props if e.key == key), "")


def scope(node: onnx.NodeProto) -> str:
    """Return the path of the module that a node is of, or its own name."""
    if scopes := noted(node, SCOPES):
        return _of_scopes(scopes)
    parts = [part for part in node.name.split("/") if part]
    if len(parts) > 1 and re.fullmatch(rf"(?i){node.op_type}(_\d+)?", parts[-1]):
        parts.pop()
    path: list[str] = []
    for part in parts:
        if part in EMPTY:
            continue
        if path and part.startswith(f"{path[-1]}."):  # a list's item has its name too
            path.pop()
        path.append(part)
    return ".".join(path)


def module_of(node: onnx.NodeProto) -> str | None:
    """Return the module whose forward has a node; None if the file does not say."""
    if noted(node, SCOPES):
        return scope(node)
    if not node.name.startswith("/"):
        return None
    return scope(node) if node.name.count("/") > 1 else ""


def _of_scopes(text: str) -> str:
    """Return the innermost module of what torch's newer exporter notes."""
    try:
        noted = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    scopes = [s for s in noted if isinstance(s, str)] if isinstance(noted, list) else []
    return scopes[-2] if len(scopes) > 1 else ""


def place_of_layer(node: onnx.NodeProto, sources: Mapping[str, str]) -> str:
    """Return where a layer stands.

    `sources` are the names in the file of what becomes its parameters.
    """
    for key, source in sources.items():
        for end in (f".{key}", f"_{key}"):  # in_proj_weight
            if source.endswith(end) and len(source) > len(end):
                return source.removesuffix(end)
    for source in sources.values():
        if is_machine_made(source):
            continue
        parts = [part for part in re.split(r"[./]", source) if part not in EMPTY]
        if len(parts) > 1:
            return ".".join(parts[:-1])
    return scope(node) or node.op_type.lower()


def wish(node: onnx.NodeProto, output: str) -> str:
    """Return what a value is called in forward."""
    if not is_machine_made(output) and re.fullmatch(r"[A-Za-z_]\w*", output):
        return output
    place = scope(node)
    if not place or is_machine_made(place):
        return node.op_type.lower()
    name = re.sub(r"\W+", "_", place, flags=re.ASCII).strip("_")
    return name[-40:].lstrip("_") or node.op_type.lower()
