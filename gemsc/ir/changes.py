"""What forward changes of the model itself, and what of that needs no data.

Example: a replica of the model sees some of the micro-batches. It can count the others,
too, or turn the vectors of a spectral norm as often as they would; a mean of what they
look like it cannot know.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from gemsc.ir import meta
from gemsc.ir.flow import used_tensors
from gemsc.ir.holder import attribute, called_layer
from gemsc.ir.layers import NORM_STATISTICS
from gemsc.ir.mutation import (
    functional_call,
    memory,
    mutated_inputs,
    mutated_state,
    written_operands,
)
from gemsc.ir.opaque import changed_inside
from gemsc.ir.program import Program
from gemsc.ir.shape_grid import ShapeGrid

# A second call right after the first one changes nothing.
_SETTLING = frozenset(
    {"clamp_", "clip_", "clamp_min_", "clamp_max_", "relu_", "abs_", "fill_", "zero_"}
)


@dataclass(frozen=True, slots=True)
class Change:
    """A node that changes the parameter or buffer `name` of the model.

    `again` are the nodes that make the change where there is no data: this one and what
    it needs. It is empty if data or random numbers are among that, and where it is the
    node's backward that makes the change.
    """

    node: fx.Node
    name: str
    again: frozenset[fx.Node] = frozenset()
    by: str = "forward"


def unjoined_changes(program: Program, *, settled: bool = False) -> Iterator[Change]:
    """Yield the changes that each replica of the model would make for itself alone.

    Left out are statistics of BatchNorm, which replicas join, and changes of which a
    second one right after the first changes nothing, if nothing has seen what was there
    before: the first micro-batch of a replica would. With `settled` these are there,
    too: a replica may run no micro-batch.
    """
    module = program.module
    states = {n: mutated_state(n, module) for n in program.compute_nodes}
    counts = Counter(name for names in states.values() for name in names)
    joined = {name for node in states for name in _as_layers_do(node, states, program)}
    writers = _writers(program)
    attributes = program.graph.find_nodes(op="get_attr")
    held = {key: str(n.target) for n in attributes for key in memory(n)}
    seen = set[str]()
    for node, names in states.items():
        repeats = is_settled(node) and seen.isdisjoint(names)
        if node.op == "call_module":
            seen.update(used_tensors(program, [node]))
        for source in node.all_input_nodes:
            seen |= {held[key] for key in memory(source) - memory(node) if key in held}
        for name in meta.facts(node).backward_writes:
            yield Change(node, name, by="backward")
        if names and joined.issuperset(names):
            continue
        moves = any(counts[name] > 1 or not repeats for name in names)
        if moves or (settled and names and _again(node, writers)):
            yield Change(node, names[0], _again(node, writers))
            continue
        layer = called_layer(node, module)
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
            if layer.track_running_stats:
                yield Change(node, f"{node.target}.running_mean")
        elif inside := changed_inside(node, module):
            yield Change(node, inside[0])


def changes_weights(change: Change, module: nn.Module) -> bool:
    """Whether a change is one of parameters, not only of buffers."""
    names = mutated_state(change.node, module)
    return any(isinstance(attribute(module, name), nn.Parameter) for name in names)


def is_settled(node: fx.Node) -> bool:
    """Whether a change gives the same again, as w.clamp_(0, 1) and w[0] = 0 do.

    So does a copy of what is the same at each call, as torch.tensor(True) is.
    """
    alone = node.op == "call_method" and node.target in {*_SETTLING, "copy_"}
    alone |= node.target is operator.setitem
    return alone and all(map(_is_fixed, node.all_input_nodes[1:]))


def _is_fixed(node: fx.Node) -> bool:
    """Whether a call takes no tensor and draws nothing, and nothing changes it."""
    if node.op != "call_function" or node.all_input_nodes or not _needs_no_data(node):
        return False
    written = (n for other in node.graph.nodes for n in written_operands(other))
    return not any(memory(n) & memory(node) for n in written)


def _writers(program: Program) -> dict[int, set[fx.Node]]:
    """Return the nodes that write to each place in memory."""
    writers = defaultdict[int, set[fx.Node]](set)
    for node in program.compute_nodes:
        for source in mutated_inputs(node, program.module):
            for key in memory(source):
                writers[key].add(node)
    return writers


def _again(node: fx.Node, writers: Mapping[int, set[fx.Node]]) -> frozenset[fx.Node]:
    """Return what makes a change without data: its inputs, all that writes there."""
    needed, way = {node}, [node]
    while way:
        current = way.pop()
        if not _needs_no_data(current):
            return frozenset()
        written = {n for key in memory(current) for n in writers.get(key, ())}
        new = {*current.all_input_nodes, *written} - needed
        needed |= new
        way += new
    return frozenset(n for n in needed if n.op != "get_attr")


def _needs_no_data(node: fx.Node) -> bool:
    """Whether a node takes nothing but its inputs, and no other rank has a part in it.

    Layers take part in what follows from their mode; they are not looked into.
    """
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    given = pytree.tree_leaves((node.args, node.kwargs))
    grids = (isinstance(leaf, ShapeGrid) for leaf in given)
    return not meta.facts(node).random and not any(grids)


def _as_layers_do(
    node: fx.Node, states: Mapping[fx.Node, tuple[str, ...]], program: Program
) -> tuple[str, ...]:
    """Return the statistics that a node updates as the layer that has them would.

    Their count of batches, which must be 1 more, is among them.
    """
    call = functional_call(node, program.module)
    if call.kind != "batch_norm" or not states[node]:
        return ()
    path = states[node][0].rpartition(".")[0]
    layer = program.module.get_submodule(path)
    names = tuple(f"{path}.{n}" for n in NORM_STATISTICS)
    if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return ()
    counting = [n for n, changed in states.items() if names[-1] in changed]
    users = {
        user
        for source in program.graph.nodes
        if source.op == "get_attr" and source.target in names
        for user in source.users
    }
    is_alike = (
        layer.momentum is not None
        and call.arguments.get("momentum", 0.1) == layer.momentum
        and len(counting) == 1
        and users == {node, *counting}
        and not counting[0].users
        and counting[0].target in ("add_", operator.iadd, torch.ops.aten.add_.Tensor)
        and counting[0].args[1:] == (1,)
    )
    return names if is_alike else ()
