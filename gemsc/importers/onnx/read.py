"""Read an ONNX file: its inputs, its nodes in their order, its outputs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import torch
from onnx.checker import ValidationError
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from gemsc.base.units import show_some
from gemsc.errors import GemscError
from gemsc.importers.network import ImportedNetwork, ImportOptions
from gemsc.importers.onnx.file import OnnxTensors, load_model
from gemsc.importers.onnx.operators import CONTROL, OPERATORS
from gemsc.importers.onnx.operators.names import SCOPES, node_name, noted
from gemsc.importers.onnx.operators.parameters import (
    Static,
    Value,
    number_type,
    torch_type,
)
from gemsc.importers.onnx.standard import DRAWN, reference
from gemsc.importers.onnx.trained import (
    TrainedTensors,
    all_nodes,
    fuse_bias,
    trained_names,
    used_names,
)
from gemsc.importers.onnx.walk import Walk
from gemsc.importers.sheet import Sheet, Symbol

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
MOST_FLOPS = 10**9  # of a network that is run by the reference implementation


def read_onnx(path: Path, options: ImportOptions) -> ImportedNetwork:
    """Return the network of an ONNX file.

    Raises:
        GemscError: it is damaged, or has what PyTorch or gemsc has not; it names the
            node.
    """
    if options.custom is not None:
        raise GemscError(
            f"--custom {options.custom.name} is only for Keras layers",
            help="leave out --custom, and keep custom operators out of the file",
        )
    if options.channels_first:
        raise GemscError(
            "--channels-first is only for Keras images",
            help="leave out --channels-first: images in ONNX have their channels first",
        )
    model = load_model(path)
    tensors = OnnxTensors(path, model)
    model = _inlined(model, path)
    graph = model.graph
    _refuse_unknown(graph, path.name)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opsets[""] = opsets.pop("ai.onnx", opsets.get("", 1))
    _leave_unused_out(graph)
    fuse_bias(graph, tensors.table)
    ties = tensors.ties
    trained = trained_names(
        graph, tensors.table, tensors.read, ties.buffers, ties.parameters
    )
    doc = f"{path.name}, opset {opsets['']}."
    sheet = Sheet(path.stem, doc, path.name)
    held = {tensor.name for tensor in graph.initializer}  # old files name them, too
    inputs = [value for value in graph.input if value.name not in held]
    options.check_names(path.name, [value.name for value in inputs])
    values = {value.name: _input(sheet, value, options) for value in inputs}
    if not values:
        raise GemscError(f"{path.name} has no inputs, so there is nothing to train")
    names = list(values)
    walk = Walk(sheet, tensors, opsets, trained.all, used_names(graph))
    walk.run(graph, values)
    _returns(sheet, walk, graph, values)
    notes = _notes(sheet, graph, tensors, trained)
    kinds = {node.op_type for node in graph.node}
    # before opset 14 onnx.reference takes the statistics of the batch
    odd = {"BatchNormalization"} if opsets[""] < 14 else set()
    is_checked = _is_quick(sheet) and not kinds & {*DRAWN, *odd}
    other = reference(tensors, names) if is_checked else None
    return ImportedNetwork([sheet], tensors, notes=notes, reference=other)


# --------------------------------------------------- before the nodes are read


def _inlined(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return the model without functions, be they its own or the standard's.

    Raises:
        GemscError: its version of the standard is not known here.
    """
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            newest = onnx.defs.onnx_opset_version()
            if not OLDEST <= entry.version <= newest:
                raise GemscError(
                    f"{path} has opset {entry.version}; gemsc reads opsets {OLDEST} to "
                    f"{newest}",
                    help="pip install -U onnx, or export the model with opset_version="
                    f"{newest}",
                )
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        known = _known_names(model.graph)  # computed when the file is read
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
    except (RuntimeError, ValueError, TypeError, ValidationError) as why:
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
            raise GemscError(
                f"{path.name}: {node.op_type} '{node_name(node)}' leaves input {gap} "
                "out, and gives later ones: onnx cannot replace it by other operators "
                "then",
                help="export the operators that it is made of, or keep it outside of "
                "the file",
            )


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the types of its values, which some functions depend on."""
    typed = onnx.shape_inference.infer_shapes(model)
    for node in typed.graph.node:  # without inputs at the end that are left out
        while node.input and not node.input[-1]:
            node.input.pop()
    inputs = {value.name for value in typed.graph.input}
    for tensor in typed.graph.initializer:
        if tensor.name not in inputs:
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


def _refuse_unknown(graph: onnx.GraphProto, file: str) -> None:
    """Refuse what no program can do, all kinds of nodes in one message.

    Raises:
        GemscError: there are such nodes.
    """
    known = _known_names(graph)
    quantized: dict[str, list[str]] = defaultdict(list)
    unknown: dict[str, list[str]] = defaultdict(list)
    for node in graph.node:  # of those within it, only some are run
        kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        if node.op_type in QUANTIZED:
            quantized[kind].append(node_name(node))
        elif node.domain not in ("", "ai.onnx") or (
            node.op_type not in KNOWN and known.isdisjoint(node.output)
        ):
            unknown[kind].append(node_name(node))
    if quantized:
        raise GemscError(
            f"{file} is a quantized file: {_list(quantized)}",
            help="export the float model, which can be trained",
        )
    if unknown:
        raise GemscError(
            f"{file} has operators that gemsc does not support: {_list(unknown)}",
            help="keep these parts out of the file, or write them in PyTorch",
        )


def _list(by_kind: Mapping[str, Sequence[str]]) -> str:
    most = sorted(by_kind.items(), key=lambda item: -len(item[1]))[:MOST]
    words = [
        f"{kind} ({len(names)} node{'s' * (len(names) > 1)}, first '{names[0]}')"
        for kind, names in most
    ]
    more = len(by_kind) - len(words)
    return ", ".join(words) + (f", and {more} kinds more" if more else "")


def _leave_unused_out(graph: onnx.GraphProto) -> None:
    """Take the names from results that nothing takes, such as Dropout's mask."""
    used = used_names(graph)
    for node in graph.node:
        for index, name in enumerate(node.output):
            if index and name not in used:
                node.output[index] = ""


def _known_names(graph: onnx.GraphProto) -> set[str]:
    """Return the first outputs of nodes that are computed when the file is read."""
    known = {tensor.name for tensor in graph.initializer} | {""}
    for node in graph.node:
        is_shape = node.op_type in ("Shape", "Size", "Constant")
        is_fixed = known.issuperset(node.input) and node.op_type not in DRAWN
        is_standard = not node.domain and onnx.defs.has(node.op_type)
        if is_shape or (is_fixed and is_standard):
            known.update(node.output)
    return known - {""}


# -------------------------------------------------------------- inputs and outputs


def _is_quick(sheet: Sheet) -> bool:
    """Return whether the reference implementation takes seconds for it at most."""
    given = tuple(value.tensor for value in sheet.inputs)
    state = sheet.root.state_dict()  # the counter fails where a module gets a parameter
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(sheet.root, state, given, tie_weights=False)
    return bool(counter.get_total_flops() <= MOST_FLOPS)


def _input(sheet: Sheet, value: onnx.ValueInfoProto, options: ImportOptions) -> Symbol:
    with sheet.place(f"input '{value.name}'"):
        if not value.type.HasField("tensor_type"):
            raise sheet.refuse("is not a tensor", help="keep that part outside")
        kind = number_type(value.type.tensor_type.elem_type)
        if kind is None:
            raise sheet.refuse("has no numbers that PyTorch has")
        shape = options.shapes.get(value.name)
        if value.type.tensor_type.HasField("shape"):
            sizes = [d.dim_value for d in value.type.tensor_type.shape.dim]
            known = [size if size > 0 else None for size in sizes]
            shape = options.shape(sheet, value.name, known)
        if shape is None:
            raise sheet.refuse(
                "has a shape that the file leaves open",
                help=f"give --shape {value.name}=..., for example",
            )
        return sheet.input(value.name, shape, torch_type(kind))


def _returns(
    sheet: Sheet, walk: Walk, graph: onnx.GraphProto, values: Mapping[str, Value]
) -> None:
    texts = []
    for output in graph.output:
        with sheet.place(f"output '{output.name}'"):
            value = values.get(output.name)
            if value is None:
                raise sheet.refuse(
                    "is not computed by any node", help="the file is damaged"
                )
            if isinstance(value, list):
                raise sheet.refuse("is not a tensor", help="keep that part outside")
            if isinstance(value, Static):
                value = walk.parameters.value(onnx.NodeProto(), value)
            texts.append(value.text)
    if not texts:
        raise GemscError(f"{sheet.file} has no outputs")
    sheet.returns(texts[0] if len(texts) == 1 else f"({', '.join(texts)})")


def _notes(
    sheet: Sheet, graph: onnx.GraphProto, tensors: OnnxTensors, trained: TrainedTensors
) -> list[str]:
    notes, some = [], partial(show_some, most=8)
    folded = sum(map(_is_folded, graph.node))
    if folded:
        notes.append(
            f"{folded} BatchNormalization folded into convolutions: trains without "
            "them; export with optimize=False to keep them"
        )
    parameters = dict(sheet.root.named_parameters())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if frozen:
        notes.append(f"not trained, as they are computed, or buffers: {some(frozen)}")
    held = {s for n, w in sheet.weights.items() if n in parameters for s in w.sources}
    shared = [name for name in trained.shared if name in held]
    if shared:
        notes.append(
            "one tensor in the file for several layers, and trained as one: "
            f"{some(shared)}; if they only happened to be equal, export with "
            "dynamo=True, optimize=False"
        )
    if tensors.ties.parted:
        parted = [f"{name} (of {n})" for name, n in tensors.ties.parted.items()]
        notes.append(
            "the exporter merged tensors that happened to be equal; each layer has its "
            f"own again: {some(parted)}"
        )
    if tensors.ties.left_out:
        notes.append(
            "left out by the exporter, as they are zeros, and so not trained: "
            f"{some(tensors.ties.left_out)}; export with optimize=False to keep them"
        )
    if tensors.ties.inside:
        notes.append(
            "the exporter has computed functions of parameters, and their values are "
            f"trained, or nothing: {some(sorted(tensors.ties.inside))}; export with "
            "optimize=False to train the parameters"
        )
    if trained.named:
        count = sum(math.prod(tensors.table[name].shape) for name in trained.named)
        notes.append(
            f"trained though no layer's weight, {count:,} parameters: "
            f"{some(trained.named)}; if one is a constant, make it "
            "self.register_buffer(name, torch.empty(...)) in model.py"
        )
    buffers = [
        name
        for name, buffer in sheet.root.named_buffers()
        if buffer.numel() > 1 and "running_" not in name
    ]
    if buffers:
        notes.append(f"constants: {some(buffers)}")
    if sheet.fixes_batch:
        notes.append(
            f"{sheet.fixes_batch} fixes the batch at {sheet.inputs[0].shape[0]}: "
            "export the model with dynamic_shapes to have another one"
        )
    return notes


def _is_folded(node: onnx.NodeProto) -> bool:
    """Return whether a convolution has taken a BatchNormalization in."""
    if node.op_type not in ("Conv", "ConvTranspose"):
        return False
    is_newer = "batch_norm" in noted(node, SCOPES).rsplit(",", 1)[-1]
    is_older = len(node.input) > 2 and node.input[1].startswith("onnx::Conv")
    return is_newer or is_older
