"""What an ONNX graph is before its nodes are read: functions inlined, or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner

from gemsc.errors import GemscError
from gemsc.importers.onnx.operators import CONTROL, OPERATORS
from gemsc.importers.onnx.standard import DRAWN
from gemsc.importers.onnx.trained import all_nodes, used_names

OLDEST = 6
KNOWN = frozenset(["Constant", *CONTROL, *OPERATORS])
QUANTIZED = frozenset(
    [
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv"),
        *("QLinearMatMul", "ConvInteger", "MatMulInteger"),
    ]
)
NOT_INLINED = (
    "write these nodes as others, or keep them outside of the file: onnx itself cannot "
    "replace them"
)
MOST = 10  # kinds of nodes in one message


def inlined(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return the model without functions, be they its own or the standard's.

    Raises:
        GemscError: its version of the standard is not known here.
    """
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            newest = onnx.defs.onnx_opset_version()
            if not OLDEST <= entry.version <= newest:
                raise GemscError(
                    f"{path} has opset {entry.version}; opsets {OLDEST} to {newest} "
                    "are read",
                    help="pip install -U onnx, or export the model with opset_version="
                    f"{newest}",
                )
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        known = known_names(model.graph)  # computed when the file is read
        kinds = {
            node.op_type
            for node in all_nodes(model.graph)
            if not node.domain and known.isdisjoint(node.output)
        }
        standard = [("", kind) for kind in sorted(kinds - KNOWN) if _is_function(kind)]
        _refuse_gaps(model.graph, path, {kind for _, kind in standard})
        if standard:
            model = onnx.inliner.inline_selected_functions(
                _typed(model), standard, inline_schema_functions=True
            )
    except (RuntimeError, ValueError, TypeError) as why:
        reason = str(why).split("\n")[0]
        raise GemscError(
            f"{path}: its functions cannot be inlined: {reason}", help=NOT_INLINED
        ) from why
    return model


def _refuse_gaps(
    graph: onnx.GraphProto, path: Path, functions: Collection[str]
) -> None:
    """Refuse functions of the standard that leave an input out before another one.

    The inliner of `onnx` ends then in an assertion of its own.
    """
    for node in all_nodes(graph):
        gap = [*node.input, ""].index("")
        if node.op_type in functions and any(node.input[gap:]):
            name = node.name or next(iter(node.output), "")
            raise GemscError(
                f"{path.name}: {node.op_type} '{name}' leaves input {gap} out, and "
                "gives later ones: onnx cannot replace it by other operators then",
                help="export the operators that it is made of, or keep it outside of "
                "the file",
            )


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the types of its values, which some functions depend on."""
    typed = onnx.shape_inference.infer_shapes(model)
    for node in typed.graph.node:  # without inputs at the end that are left out
        while node.input and not node.input[-1]:
            node.input.pop()
    own = {value.name for value in typed.graph.input}
    for tensor in typed.graph.initializer:
        if tensor.name not in own:
            value = onnx.helper.make_tensor_value_info(
                tensor.name, tensor.data_type, tensor.dims
            )
            typed.graph.value_info.append(value)
    return typed


def _is_function(kind: str) -> bool:
    if not onnx.defs.has(kind):
        return False
    schema: Any = onnx.defs.get_schema(kind)
    return bool(schema.has_function or schema.has_context_dependent_function)


def refuse_unknown(graph: onnx.GraphProto, file: str) -> None:
    """Refuse what no program can do, all kinds of nodes in one message.

    Raises:
        GemscError: there are such nodes.
    """
    known = known_names(graph)
    quantized: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    first: dict[str, str] = {}
    for node in graph.node:  # of those within it, only some are run
        kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        if node.op_type in QUANTIZED:
            quantized[kind] += 1
        elif node.domain not in ("", "ai.onnx") or (
            node.op_type not in KNOWN and known.isdisjoint(node.output)
        ):
            unknown[kind] += 1
        first.setdefault(kind, node.name or next(iter(node.output), ""))
    if quantized:
        raise GemscError(
            f"{file} is a quantized file: {_list(quantized, first)}",
            help="export the float model: that one is trained",
        )
    if unknown:
        raise GemscError(
            f"{file} has operators that gemsc does not know: {_list(unknown, first)}",
            help="keep these parts outside of the file, or write them in PyTorch",
        )


def _list(counts: Counter[str], first: dict[str, str]) -> str:
    words = [
        f"{kind} ({count} node{'s' * (count > 1)}, first '{first[kind]}')"
        for kind, count in counts.most_common(MOST)
    ]
    more = len(counts) - len(words)
    return ", ".join(words) + (f", and {more} kinds more" if more else "")


def leave_unused_out(graph: onnx.GraphProto) -> None:
    """Take the names from results that nothing takes, such as Dropout's mask."""
    used = used_names(graph)
    for node in graph.node:
        for index, name in enumerate(node.output):
            if index and name not in used:
                node.output[index] = ""


def known_names(graph: onnx.GraphProto) -> set[str]:
    """Return the first outputs of nodes that are computed when the file is read."""
    known = {tensor.name for tensor in graph.initializer} | {""}
    for node in graph.node:
        is_shape = node.op_type in ("Shape", "Size", "Constant")
        is_fixed = known.issuperset(node.input) and node.op_type not in DRAWN
        is_standard = not node.domain and onnx.defs.has(node.op_type)
        if is_shape or (is_fixed and is_standard):
            known.update(node.output)
    return known - {""}
