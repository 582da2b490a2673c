"""Which uses of a tensor are one parameter: not all that an exporter has made one.

torch.onnx keeps one of equal initializers: that of all norms with fresh weights, of two
running means, of layers that were deep-copied. Trained as one, they would be another
model. The newer exporter notes for each node which parameters of the model it takes: so
they are parted again, whatever their numbers are; and what is one parameter, as a table
of words and the head that is its transpose, becomes one. Without these notes, it is
modules that part what is all one number: that such tensors are equal says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import onnx

from gemsc.importers.onnx.operators.names import (
    is_machine_made,
    module_of,
    noted,
    scope,
)
from gemsc.importers.onnx.operators.node import MOVES
from gemsc.importers.onnx.trained import SLOTS, all_nodes, weight_slots
from gemsc.importers.weight import Array

FX_NODE = "pkg.torch.onnx.fx_node"  # %a = call_function[target=...](args = (%p_w, ...
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"  # its parameters
FOLDED = "pkg.onnxscript.optimizer.folded_from"  # of which values a constant was made
MOVED = re.compile(  # calls that make no other numbers of a parameter
    r"val_\d+|(permute|reshape|squeeze|t|transpose|unsqueeze|view|zeros)(_\d+)?"
)
WITH_BIAS = re.compile(r"target=torch\.ops\.aten\.(linear|addmm|conv)")
Key = tuple[str | int, ...]  # equal for the same parameter
UNKNOWN: Key = ()
CONSTANT: Key = ("",)  # of the exporter's own
FLOATS = frozenset(
    onnx.TensorProto.DataType.Value(name)
    for name in ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16")
)


@dataclass(frozen=True)
class Ties:
    """What was changed: of how many parameters each of the `parted` tensors was.

    `left_out` are parameters of the model that the file has not: biases of zeros.
    `buffers` are tensors that the model holds or computes and does not train,
    `parameters` those that it trains, as the exporter says. `inside` are parameters of
    which the file has the value of a function instead.
    """

    parted: Mapping[str, int]
    left_out: Sequence[str]
    buffers: Collection[str]
    parameters: Collection[str]
    inside: Collection[str]


@dataclass(frozen=True)
class _Call:
    """The nodes that one call of torch has become, and the parameters that it takes."""

    text: str
    nodes: list[onnx.NodeProto]
    names: Sequence[str]  # p_layer_weight, b_norm_running_mean, c_lifted_tensor_0

    def slots(self, tensors: Collection[str]) -> list[tuple[onnx.NodeProto, int]]:
        """Return where these tensors are weights of its nodes."""
        return [
            (node, index)
            for node in self.nodes
            for index in weight_slots(node)
            if node.input[index] in tensors
            # a norm of groups is made of one of samples, with a scale of ones
            and not ("Instance" in node.op_type and "group_norm" in self.text)
        ]

    def mentioned(self, name: str) -> Key:
        """Return the parameter that a tensor is named after, where it takes that."""
        return next((k for k in _keys_of(name) if k[0] in self.names), CONSTANT)


@dataclass(frozen=True)
class _Use:
    node: onnx.NodeProto
    index: int
    key: Key


def part(
    graph: onnx.GraphProto, weights: Collection[str], read: Callable[[str], Array]
) -> Ties:
    """Give each parameter of the model an initializer of its own, in the graph.

    `weights` are the tensors that seem to be parameters or statistics, and `read`
    gives the numbers of one. The same file is always changed in the same way.
    """
    calls = _calls(graph)
    held = {tensor.name: tensor for tensor in graph.initializer}
    taken = {*held, *(n for node in all_nodes(graph) for n in node.output)}
    taken |= {value.name for value in graph.input}
    floats = {
        name
        for name, tensor in held.items()
        if tensor.data_type in FLOATS and (tensor.dims or not is_machine_made(name))
    }
    uses = _uses(graph, calls, floats)
    left_out = [*_left_out(calls, floats)]
    parted: dict[str, int] = {}
    buffers: set[str] = set()
    noted: set[str] = set()
    for name, tensor_uses in uses.items():
        is_weight = name in weights
        groups = _groups(name, tensor_uses)
        is_noted = all(len(use.key) == 1 for use in tensor_uses)
        if not is_noted and not (is_weight and _is_one_number(read(name))):
            continue
        parameters = len(groups) - (CONSTANT in groups)
        if parameters > 1:
            parted[name] = parameters
        for number, (key, group) in enumerate(groups.items()):
            # a weight of a layer is known by its place, another one by its name
            is_plain = is_weight or not str(key[0]).startswith("p_")
            new, wish = name, _name(key, group[0].node, name)
            if is_machine_made(name) and is_plain:
                wish = "val_0"
            if number or (is_machine_made(name) and not is_plain):
                new = _move(graph, held[name], group, wish, taken)
            if str(key[0]).startswith("p_"):
                noted.add(new)
            elif str(key[0]).startswith(("b_", "c_")):
                buffers.add(new)
    _join(graph, uses, read)
    computed, inside = _computed(graph)
    return Ties(parted, left_out, buffers | (computed - noted), noted, inside)


def _computed(graph: onnx.GraphProto) -> tuple[set[str], set[str]]:
    """Return what the exporter has computed of no parameter, and of which it has."""
    signature = next((p.value for p in graph.metadata_props if p.key == SIGNATURE), "")
    trained = set(re.findall(r": PARAMETER target='(.+)'", signature))
    others = trained | {value.name for value in graph.input}
    computed, inside = set(), set()
    for value in graph.value_info if trained else ():
        for known in value.metadata_props:
            names = {value.name, *re.findall(r"'([^']+)'", known.value)}
            if known.key == FOLDED and trained.isdisjoint(names):
                computed.add(value.name)
            elif known.key == FOLDED and not all(map(MOVED.fullmatch, names - others)):
                inside |= trained & names
    return computed, inside


def _groups(name: str, uses: Sequence[_Use]) -> Mapping[Key, list[_Use]]:
    """Return the uses of each parameter, that of the tensor's own name first."""
    groups: dict[Key, list[_Use]] = {}
    for use in uses:
        if use.key != UNKNOWN:
            groups.setdefault(use.key, []).append(use)
    place = name.rpartition(".")[0]
    return dict(
        sorted(
            groups.items(),
            key=lambda item: item[0] not in _keys_of(name) and item[0][0] != place,
        )
    )


def _move(
    graph: onnx.GraphProto,
    tensor: onnx.TensorProto,
    uses: Sequence[_Use],
    wish: str,
    taken: set[str],
) -> str:
    """Let some uses of a tensor be those of a copy; return its name."""
    if uses[0].node.op_type == "Identity":  # which gives it this name
        graph.node.remove(uses[0].node)
        taken.discard(wish)
    new = graph.initializer.add()
    new.CopyFrom(tensor)
    new.name = _free(wish, taken)
    taken.add(new.name)
    for use in uses:
        use.node.input[use.index] = new.name
    return str(new.name)


def _is_one_number(array: Array) -> bool:
    return bool(array.size and (array == array.flat[0]).all())


def _calls(graph: onnx.GraphProto) -> Mapping[str, _Call]:
    inputs = {value.name for value in graph.input}
    calls: dict[str, _Call] = {}
    for node in graph.node:
        text = noted(node, FX_NODE)
        if text:
            mentions = re.findall(r"%([pbc]_\w+)", text)
            names = [name for name in dict.fromkeys(mentions) if name not in inputs]
            calls.setdefault(text, _Call(text, [], names)).nodes.append(node)
    return calls


def _uses(
    graph: onnx.GraphProto, calls: Mapping[str, _Call], tensors: Collection[str]
) -> Mapping[str, list[_Use]]:
    """Return who takes a tensor, and as which parameter."""
    keys: dict[tuple[str, int], Key] = {}
    for call in calls.values():
        for place, name in _named(call, tensors).items():
            keys[place] = UNKNOWN if name is None else (name,)
    uses: dict[str, list[_Use]] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in tensors and node.op_type not in ("Shape", "Size"):
                place, text = (_output(node), index), noted(node, FX_NODE)
                if not text:
                    key = _key_of_module(node, index)
                elif place in keys or index in weight_slots(node):
                    key = keys.get(place, CONSTANT)
                else:  # of a function of a weight, such as its norm
                    key = calls[text].mentioned(name)
                uses.setdefault(name, []).append(_Use(node, index, key))
    return uses


def _named(
    call: _Call, tensors: Collection[str]
) -> Mapping[tuple[str, int], str | None]:
    """Return which parameter each operand is: "" for none, None if that is not clear.

    The operands are in the order of the call's own; a tensor may be cut into several.
    """
    roles: dict[tuple[str, int], list[tuple[str, int]]] = {}
    held: dict[tuple[str, int], str] = {}
    for node, index in call.slots(tensors):
        name = node.input[index]
        role = (name, -1) if node.op_type in MOVES else (_output(node), index)
        roles.setdefault(role, []).append((_output(node), index))
        held[role] = name
    parameters: dict[tuple[str, int], str | None] = {}
    names = list(call.names)
    for role, name in held.items() if len(roles) != len(names) else ():
        key = next((key for (key,) in _keys_of(name) if key in names), None)
        if key is not None:
            names.remove(key)
            parameters[role] = key
    unnamed = [role for role in roles if role not in parameters]
    for number, role in enumerate(unnamed):
        if not call.names:
            parameters[role] = ""
        elif len(unnamed) <= len(names):
            parameters[role] = names[number]
    return {place: parameters.get(role) for role in roles for place in roles[role]}


def _output(node: onnx.NodeProto) -> str:
    return next(iter(node.output), "")


def _key_of_module(node: onnx.NodeProto, index: int) -> Key:
    """Return what names and paths say: the older exporter notes nothing else."""
    if index not in weight_slots(node):
        return UNKNOWN
    if node.op_type == "Identity" and not is_machine_made(node.output[0]):
        return (node.output[0], "")  # which has a parameter's name
    module, owner = module_of(node), node.input[index].rpartition(".")[0]
    if module is None:
        return UNKNOWN
    if re.fullmatch(rf"{re.escape(owner)}_\d+", module):
        module = owner  # called once more
    return (module, index if node.op_type in SLOTS else -1)


def _keys_of(name: str) -> list[Key]:
    """Return the keys of the parameter that a tensor is named after."""
    word = re.sub(r"\W", "_", name)
    return [(f"p_{word}",), (f"b_{word}",)]


def _name(key: Key, node: onnx.NodeProto, name: str) -> str:
    """Return what a parameter that was under another one's name is called."""
    if node.op_type == "Identity":
        return str(key[0])
    if len(key) > 1:
        return f"{scope(node)}.{name.rpartition('.')[2]}"
    return _dotted(str(key[0]), scope(node)) if key[0] else "val_0"


def _dotted(name: str, place: str) -> str:
    """Return layers.0.weight of p_layers_0_weight, in the module layers.0."""
    name, folder = name[2:], re.sub(r"\W", "_", place)
    if place and name.startswith(f"{folder}_"):
        return f"{place}.{name[len(folder) + 1 :]}"
    return name


def _free(name: str, taken: Collection[str]) -> str:
    stem = name.removesuffix("_0") if is_machine_made(name) else name
    names = (f"{stem}_{number}" for number in count(2))
    return name if name not in taken else next(n for n in names if n not in taken)


def _join(
    graph: onnx.GraphProto,
    uses: Mapping[str, list[_Use]],
    read: Callable[[str], Array],
) -> None:
    """Let a parameter that is there as it is and transposed be one tensor."""
    tensors: dict[Key, list[str]] = {}
    for name, tensor_uses in uses.items():
        keys = {use.key for use in tensor_uses}
        if len(keys) == 1 and not keys & {UNKNOWN, CONSTANT}:
            tensors.setdefault(keys.pop(), []).append(name)
    for key, names in tensors.items():
        first = next((name for name in names if key in _keys_of(name)), names[0])
        for name in names:
            array = read(name)
            if name != first and array.ndim == 2 and _is_same(array.T, read(first)):
                node = onnx.helper.make_node("Transpose", [first], [name])
                graph.node.insert(0, node)
                gone = [tensor.name for tensor in graph.initializer].index(name)
                del graph.initializer[gone]


def _is_same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _left_out(calls: Mapping[str, _Call], tensors: Collection[str]) -> Iterator[str]:
    """Give the biases that the exporter has left out, for they were zeros."""
    for call in calls.values():
        if WITH_BIAS.search(call.text):
            for name in call.names[len(call.slots(tensors)) :]:
                yield _dotted(name, scope(call.nodes[0]))
