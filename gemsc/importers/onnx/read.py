"""Read an ONNX file: its inputs, its nodes in their order, its outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import torch
from torch.utils.flop_counter import FlopCounterMode

from gemsc.errors import GemscError
from gemsc.importers.network import ImportedNetwork
from gemsc.importers.onnx.file import OnnxTensors, load_model
from gemsc.importers.onnx.graph import inlined, leave_unused_out, refuse_unknown
from gemsc.importers.onnx.operators.names import SCOPES
from gemsc.importers.onnx.operators.parameters import (
    Static,
    Value,
    number_type,
    torch_type,
)
from gemsc.importers.onnx.standard import DRAWN, reference
from gemsc.importers.onnx.trained import (
    TrainedTensors,
    fuse_bias,
    trained_names,
    used_names,
)
from gemsc.importers.onnx.walk import Walk
from gemsc.importers.options import ImportOptions
from gemsc.importers.sheet import Sheet, Symbol

MOST_FLOPS = 10**9  # of a network that is run by the reference implementation


def read_onnx(path: Path, options: ImportOptions) -> ImportedNetwork:
    """Return the network of an ONNX file.

    Raises:
        GemscError: it is damaged, or has what PyTorch or gemsc has not; it names the
            node.
    """
    if options.custom is not None:
        raise GemscError(
            f"--custom {options.custom.name} is for layers of Keras",
            help="keep operators of your own outside of the file",
        )
    if options.channels_first:
        raise GemscError(
            "--channels-first is for images of Keras",
            help="leave it out: images of ONNX have their channels first",
        )
    model = load_model(path)
    tensors = OnnxTensors(path, model)
    model = inlined(model, path)
    graph = model.graph
    refuse_unknown(graph, path.name)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opsets[""] = opsets.pop("ai.onnx", opsets.get("", 1))
    leave_unused_out(graph)
    fuse_bias(graph, tensors.table)
    ties = tensors.ties
    trained = trained_names(
        graph, tensors.table, tensors.read, ties.buffers, ties.parameters
    )
    doc = f"{path.name}, opset {opsets['']}."
    sheet = Sheet(_class_name(path.stem), doc, path.name)
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


def _is_quick(sheet: Sheet) -> bool:
    """Return whether the reference implementation takes seconds for it at most."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sheet.root(*(value.tensor for value in sheet.inputs))
    return bool(counter.get_total_flops() <= MOST_FLOPS)


def _input(sheet: Sheet, value: onnx.ValueInfoProto, options: ImportOptions) -> Symbol:
    with sheet.place(f"input '{value.name}'"):
        if not value.type.HasField("tensor_type"):
            raise sheet.refuse("is no tensor", help="keep that part outside")
        kind = number_type(value.type.tensor_type.elem_type)
        if kind is None:
            raise sheet.refuse("has no numbers that PyTorch has")
        shape = _shape(sheet, value, options)
        return sheet.input(value.name, shape, torch_type(kind))


def _shape(
    sheet: Sheet, value: onnx.ValueInfoProto, options: ImportOptions
) -> tuple[int, ...]:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        if value.name in options.shapes:
            return options.shapes[value.name]
        raise sheet.refuse(
            "has a shape that the file leaves open", help=_give_shape(value, "...")
        )
    sizes = [d.dim_value if d.dim_value > 0 else None for d in tensor.shape.dim]
    given = options.shape(value.name, sizes)
    if given is not None:
        return given
    if sizes and sizes[0] is None:
        sizes[0] = options.batch
    if None in sizes:
        said = "x".join("?" if size is None else str(size) for size in sizes)
        raise sheet.refuse(
            f"has the shape {said}: the file leaves sizes open",
            help=_give_shape(value, said),
        )
    return tuple(size for size in sizes if size is not None)


def _give_shape(value: onnx.ValueInfoProto, shape: str) -> str:
    return f"give --shape {value.name}={shape.replace('?', '224')}, for example"


def _returns(
    sheet: Sheet, walk: Walk, graph: onnx.GraphProto, values: Mapping[str, Value]
) -> None:
    texts = []
    for output in graph.output:
        with sheet.place(f"output '{output.name}'"):
            value = values.get(output.name)
            if value is None:
                raise sheet.refuse("is given by no node", help="the file is damaged")
            if isinstance(value, list):
                raise sheet.refuse("is no tensor", help="keep that part outside")
            if isinstance(value, Static):
                value = walk.parameters.value(onnx.NodeProto(), value)
            texts.append(value.text)
    if not texts:
        raise GemscError(f"{sheet.file} has no outputs")
    sheet.returns(texts[0] if len(texts) == 1 else f"({', '.join(texts)})")


def _class_name(stem: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", stem)
    name = "".join(word[:1].upper() + word[1:] for word in words)
    return name if name[:1].isalpha() else f"Network{name}"


def _notes(
    sheet: Sheet, graph: onnx.GraphProto, tensors: OnnxTensors, trained: TrainedTensors
) -> list[str]:
    notes = []
    folded = sum(map(_is_folded, graph.node))
    if folded:
        notes.append(
            f"{folded} BatchNormalization folded into convolutions: trains without "
            "them; export with optimize=False to keep them"
        )
    own = dict(sheet.root.named_parameters())
    frozen = [name for name, p in own.items() if not p.requires_grad]
    if frozen:
        notes.append(f"not trained, as they are computed, or buffers: {_some(frozen)}")
    held = {s for n, w in sheet.weights.items() if n in own for s in w.sources}
    shared = [name for name in trained.shared if name in held]
    if shared:
        notes.append(
            "one tensor in the file for several layers, and trained as one: "
            f"{_some(shared)}; if they only happened to be equal, export with "
            "dynamo=True, optimize=False"
        )
    if tensors.ties.parted:
        parted = [f"{name} (of {n})" for name, n in tensors.ties.parted.items()]
        notes.append(
            "the exporter merged tensors that happened to be equal; each layer has its "
            f"own again: {_some(parted)}"
        )
    if tensors.ties.left_out:
        notes.append(
            "left out by the exporter, as they are zeros, and so not trained: "
            f"{_some(tensors.ties.left_out)}; export with optimize=False to keep them"
        )
    if trained.named:
        count = sum(math.prod(tensors.table[name].shape) for name in trained.named)
        notes.append(
            f"trained though no layer's weight, {count:,} parameters: "
            f"{_some(trained.named)}; if one is a constant, make it "
            "self.register_buffer(name, torch.empty(...)) in model.py"
        )
    buffers = [
        name
        for name, buffer in sheet.root.named_buffers()
        if buffer.numel() > 1 and "running_" not in name
    ]
    if buffers:
        notes.append(f"constants: {_some(buffers)}")
    if sheet.fixes_batch:
        notes.append(
            f"{sheet.fixes_batch} fixes the batch at {sheet.inputs[0].shape[0]}: "
            "export the model with dynamic_shapes to have another one"
        )
    return notes


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _is_folded(node: onnx.NodeProto) -> bool:
    """Return whether a convolution has taken a BatchNormalization in."""
    if node.op_type not in ("Conv", "ConvTranspose"):
        return False
    scopes = [entry.value for entry in node.metadata_props if entry.key == SCOPES]
    is_newer = any("batch_norm" in scope.rsplit(",", 1)[-1] for scope in scopes)
    is_older = len(node.input) > 2 and node.input[1].startswith("onnx::Conv")
    return is_newer or is_older
