"""What flows into and out of each stage, and which tensors each stage owns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

import torch
from torch import fx

from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.holder import attribute, attributes_of
from gemsc.ir.program import Program, Segment, Transfer
from gemsc.messages.exchange import Exchange
from gemsc.runtime.tiles import convolution, redistribute, ring_attention
from gemsc.runtime.tiles.collectives import TileGrid


@dataclass(frozen=True, slots=True)
class StageFlow:
    """One stage as a function.

    It takes what the `incoming` transfers bring and the batch `inputs` it uses, and
    gives `gives`: the values of its `outgoing` transfers, the loss and the outputs
    that it computes, in the order in which it computes them.

    Where the stage before has another grid, `joined` maps a value of that stage to the
    node that stands for what this stage gets of it: the transfer does its work.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    incoming: tuple[Transfer, ...]
    inputs: tuple[fx.Node, ...]
    outgoing: tuple[Transfer, ...]
    gives: tuple[fx.Node, ...]
    joined: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def takes(self) -> tuple[fx.Node, ...]:
        """What the stage takes, in the order of its arguments, without repeats."""
        values = [value for transfer in self.incoming for value in transfer.values]
        arrived = [self.joined.get(value, value) for value in values]
        used = {source for node in self.nodes for source in node.all_input_nodes}
        return tuple(value for value in (*arrived, *self.inputs) if value in used)


def flow(program: Program, index: int, *, with_outputs: bool) -> StageFlow:
    """Return stage `index` as a function; with the model's outputs for evaluation.

    Inputs that the model returns as they are come in where the outputs are joined.
    """
    stage = program.require_stages()[index]
    transfers = program.transfers or ()
    incoming = tuple(t for t in transfers if t.dest == index)
    outgoing = tuple(t for t in transfers if t.source == index)
    joined = {v: n for t in incoming for v in t.values for n in joins(program, t, v)}
    arrivals = set(joined.values())
    nodes = tuple(node for node in stage.nodes if node not in arrivals)
    used = {source for node in nodes for source in node.all_input_nodes}
    wanted = {value for transfer in outgoing for value in transfer.values}
    wanted.add(program.loss or program.output)
    if with_outputs:
        wanted.update(program.outputs)
        used.update(program.outputs if index == program.home else ())
    inputs = tuple(n for n in program.graph.find_nodes(op="placeholder") if n in used)
    gives = tuple(node for node in nodes if node in wanted)
    return StageFlow(index, nodes, incoming, inputs, outgoing, gives, joined)


def joins(program: Program, transfer: Transfer, value: fx.Node) -> list[fx.Node]:
    """Return the node with which a stage of another grid begins to use a value.

    It redistributes the value from the one grid to the other; the list is empty where
    the grids are the same, since then each tile gets its like.
    """
    placement = program.placement
    if placement is None or (
        placement.grid(transfer.source) == placement.grid(transfer.dest)
    ):
        return []
    stage = program.require_stages()[transfer.dest]
    inside = set(stage.nodes)
    exchanges = [user for user in value.users if user in inside and is_exchange(user)]
    if len(exchanges) > 1:
        raise InternalError(f"{value.name} enters stage {stage.index} twice")
    return exchanges


def is_exchange(node: fx.Node) -> bool:
    """Whether a node changes the layout of a value, or fetches parts of it."""
    return node.target in (redistribute, convolution, ring_attention)


def is_ring(node: fx.Node) -> bool:
    """Whether a node attends to keys and values that come in rounds."""
    return node.target is ring_attention


def is_overlapped(node: fx.Node) -> bool:
    """Whether a node is a convolution whose halo is on its way meanwhile."""
    return node.target is convolution


def exchange_of(node: fx.Node) -> Exchange:
    """Return what the tiles exchange in a node that changes a layout."""
    return cast("Exchange", node.args[2])


def grid_of(node: fx.Node) -> TileGrid:
    """Return the grid, and the tile, for which a node changes a layout."""
    return cast("TileGrid", node.args[0])


def source_of(node: fx.Node) -> fx.Node:
    """Return the value whose layout a node changes."""
    return cast("fx.Node", node.args[1])


def exchanged(node: fx.Node) -> fx.Node:
    """Return a value with the dtype and the gradient of what a node's tiles send."""
    return source_of(node) if is_overlapped(node) else node


def external_inputs(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the values that nodes use and none of them computes, in order of use.

    Parameters and buffers are not among them.
    """
    inside = set(nodes)
    used = dict.fromkeys(
        source
        for node in nodes
        for source in node.all_input_nodes
        if source not in inside and source.op != "get_attr"
    )
    return tuple(used)


def makers(value: fx.Node) -> set[fx.Node]:
    """Return a value with all nodes that it is computed from, but no weights."""
    nodes: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node.op != "get_attr" and node not in nodes:
            nodes.add(node)
            waiting += node.all_input_nodes
    return nodes


def inner_flow(stage: StageFlow, nodes: tuple[fx.Node, ...]) -> StageFlow:
    """Return some consecutive nodes of a stage as a function of their own."""
    elsewhere = set(stage.nodes) - set(nodes)
    gives = tuple(
        node
        for node in nodes
        if node in stage.gives or any(user in elsewhere for user in node.users)
    )
    return StageFlow(stage.index, nodes, (), external_inputs(nodes), (), gives)


def made_once(stage: StageFlow) -> tuple[fx.Node, ...]:
    """Return the nodes of a stage that compute the same for each micro-batch.

    Those are marked; what they take is among them, or parameters and buffers. Where no
    other node takes what they give, there is nothing to keep.
    """
    kept: dict[fx.Node, None] = {}
    for node in stage.nodes:
        inputs = (n for n in node.all_input_nodes if n.op != "get_attr")
        if meta.is_made_once(node) and all(n in kept for n in inputs):
            kept[node] = None
    return tuple(kept) if inner_flow(stage, tuple(kept)).gives else ()


def segments_of(
    program: Program, stage: StageFlow
) -> tuple[tuple[Segment, tuple[fx.Node, ...]], ...]:
    """Return a stage's segments, each with what the stage runs of its nodes."""
    runs = set(stage.nodes)
    segments = (
        (segment, tuple(node for node in nodes if node in runs))
        for segment, nodes in program.segments_of(stage.index)
    )
    return tuple((segment, nodes) for segment, nodes in segments if nodes)


def value_names(
    transfers: Sequence[Transfer], first: Sequence[Transfer]
) -> dict[fx.Node, str]:
    """Return a name for each value that travels, the same on every rank.

    It is the user's variable where only one value has it; else as much of the path of
    the module that computed it as tells it from the others. `first` are the transfers
    of the first rank of a grid: its names are those of all, since what FX numbers
    differs between ranks that do not compute the same.
    """
    names = _names(list(dict.fromkeys(v for t in first for v in t.values)))
    named: dict[fx.Node, str] = {}
    for transfer, other in zip(transfers, first, strict=True):
        for value, like in zip(transfer.values, other.values, strict=True):
            if (base_name(value), _parts(value)) != (base_name(like), _parts(like)):
                text = f"ranks send {value.name} and {like.name} in the same place"
                raise InternalError(f"transfer {transfer.index}: {text}")
            named[value] = names[like]
    return named


def _names(values: Sequence[fx.Node]) -> dict[fx.Node, str]:
    count = Counter(base_name(value) for value in values)
    heads = Counter(head for value in values for head in _heads(value))
    names: dict[fx.Node, str] = {}
    for value in values:
        name = base_name(value)
        if _is_path(value) or count[name] > 1:
            paths = [head for head in _heads(value) if heads[head] == 1]
            name = paths[0] if paths else value.name
        if name.strip("_")[:1].isdigit():
            name = f"layer_{name.strip('_')}"
        while name in names.values():
            name += "_"
        names[value] = name
    return names


def base_name(node: fx.Node) -> str:
    """Return what a person would call the node's value.

    That is the user's variable, without the number that FX may have added, or the last
    word of the layer's path.
    """
    if _is_path(node):
        words = [word for word in _parts(node) if not word.isdigit()]
        return words[-1] if words else "x"
    return re.sub(r"_\d+$", "", node.name) or node.name


def _parts(node: fx.Node) -> list[str]:
    path = meta.layer(node) or meta.module_path(node)
    return path.split(".") if path else []


def _is_path(node: fx.Node) -> bool:
    """Whether the node is named after its layer and not after a variable."""
    name = re.sub(r"_\d+$", "", node.name)
    path = "_".join(_parts(node))
    path = f"_{path}" if path[:1].isdigit() else path  # as FX makes a name of it
    return bool(meta.layer(node)) and path.startswith(name)


def _heads(node: fx.Node) -> list[str]:
    """Return the first words of the node's path, short ones first."""
    parts = _parts(node)
    return ["_".join(parts[: i + 1]) for i in range(len(parts))]


def shared_path(paths: Iterable[str]) -> str:
    """Return the words that all paths of modules begin with, "" if there are none."""
    return ".".join(shared_start(path.split(".") for path in paths))


def shared_start(rows: Iterable[Iterable[str]]) -> list[str]:
    """Return what all rows begin with, the letters of texts for example."""
    columns = zip(*rows, strict=False)
    return [col[0] for col in takewhile(lambda col: len(set(col)) == 1, columns)]


def layer_path(node: fx.Node) -> str:
    """Return the path of the layer, or of the weight, that a node uses."""
    if node.op == "call_module":
        return str(node.target)
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            return str(source.target)
    return meta.module_path(node) or node.name


def unique_names(names: Iterable[str]) -> list[str]:
    """Number the second and further ones of equal names."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result


def message_tag(replica: int, index: int, *programs: Program) -> int:
    """Return the MPI tag of a transfer's values; its gradients have the next one.

    `programs` are training and evaluation, whose transfers share the tags.
    """
    count = 1 + max((t.index for p in programs for t in p.transfers or ()), default=0)
    return 2 * (replica * count + index)


def owned_tensors(program: Program, *others: Program) -> tuple[tuple[str, ...], ...]:
    """Return, for each stage, the names of the parameters and buffers it needs.

    `others` are further programs with the same stages (evaluation). Tensors that no
    node uses stay with the first stage, so that checkpoints are whole. A parameter
    that several stages use is named by each. What is in branches on other ranks than
    the program's is not in its graph: it knows what it has.
    """
    if program.owned is not None:
        return program.owned
    programs = program, *others
    known = dict.fromkeys(n for p in programs for n in _tensor_names(p.module))
    order = {name: position for position, name in enumerate(known)}
    names = [
        {n for p in programs for n in used_tensors(p, p.require_stages()[index].nodes)}
        for index in range(len(program.require_stages()))
    ]
    names[0] |= order.keys() - set().union(*names)
    return tuple(tuple(sorted(needed, key=order.__getitem__)) for needed in names)


def used_tensors(program: Program, nodes: Iterable[fx.Node]) -> list[str]:
    """Return the parameters and buffers that nodes use, each once, in their order."""
    names = (name for node in nodes for name in _uses(program, node))
    return list(dict.fromkeys(program.aliases.get(name, name) for name in names))


def shared_parameters(
    program: Program, owned: tuple[tuple[str, ...], ...]
) -> dict[str, tuple[int, ...]]:
    """Return the trained parameters that several stages hold, and those stages."""
    parameters = dict(program.module.named_parameters())
    holders: dict[str, list[int]] = {}
    for index, names in enumerate(owned):
        for name in names:
            if name in parameters and parameters[name].requires_grad:
                holders.setdefault(name, []).append(index)
    return {name: tuple(held) for name, held in holders.items() if len(held) > 1}


def reductions(
    program: Program, owned: tuple[tuple[str, ...], ...]
) -> dict[str, tuple[int, ...]]:
    """Return the sums of gradients: those of each stage, and of each tied parameter.

    Maps `stage2`, or a parameter's name, to the stages whose ranks take part. Of what
    ranks hold in part, those take part that hold the same part: see `parts_of`.
    """
    stages = {
        f"stage{stage.index}": (stage.index,) for stage in program.require_stages()
    }
    return stages | shared_parameters(program, owned)


def _tensor_names(module: torch.nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def _uses(program: Program, node: fx.Node) -> list[str]:
    names = []
    for path in attributes_of(node):
        attr = attribute(program.module, path)
        if isinstance(attr, torch.nn.Module):
            names += [f"{path}.{name}" for name in _tensor_names(attr)]
        else:
            names.append(path)
    return names


def has_random(nodes: Iterable[fx.Node]) -> bool:
    """Whether any node draws random numbers."""
    return any(meta.facts(node).random for node in nodes)
