"""Invariants of a Program, checked after every pass; a breach is a fault of gemsc.

Among them: what loss and outputs are computed from (inputs, parameters, constants,
draws) is the same before and after a pass. What only lends its shape or dtype (`other`
in `x.expand_as(other)`) is no source: a graph that took the one for the other has lost
a source, although all its shapes are right.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn

from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.holder import attribute
from gemsc.ir.mutation import SIZED, elements, mutated_inputs
from gemsc.ir.operators.calls import call_of
from gemsc.ir.program import Program
from gemsc.ir.staged import out_of_order
from gemsc.runtime import tiles
from gemsc.runtime.tiles.dropout import strips_along

# What takes of its operands no more than their shape.
_LIKE = frozenset(f"{name}_like" for name in ("zeros", "ones", "empty", "full"))
_LIKE |= {f"{name}_like" for name in ("rand", "randn", "randint")}
_DRAWN = "the random numbers of "
# graphs whose order was found to be right, with what was looked at
_IN_ORDER: WeakKeyDictionary[fx.Graph, int] = WeakKeyDictionary()
_EXCHANGES = frozenset({tiles.redistribute, tiles.all_reduce, tiles.ring_attention})


def verify(program: Program) -> None:
    """Check every invariant that the facts at hand allow.

    Raises:
        InternalError: the first invariant that does not hold.
    """
    program.graph.lint()
    for check in CHECKS:
        check(program)


def every_value_is_computed_before_it_is_used(program: Program) -> None:
    """The order of the nodes is an order of execution."""
    seen = set()
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                raise InternalError(
                    f"{node.name} uses {source.name} before it is there"
                )
        seen.add(node)


def memory_is_used_in_the_order_of_the_trace(program: Program) -> None:
    """Between two uses of one memory, of which one writes, the order stays."""
    nodes = program.compute_nodes
    looked_at = hash((id(program.module), *map(_uses, nodes)))
    if _IN_ORDER.get(program.graph) == looked_at:
        return
    traced = sorted(nodes, key=meta.traced_place)
    if wrong := out_of_order(program, nodes, traced):
        raise InternalError(wrong)
    _IN_ORDER[program.graph] = looked_at


def _uses(node: fx.Node) -> Hashable:
    """Return what the order of a node depends on, as long as its graph is there."""
    inputs = tuple(map(id, node.all_input_nodes))
    known = meta.traced_place(node), id(meta.value(node))
    return id(node), id(node.target), inputs, known


def placeholders_are_the_inputs(program: Program) -> None:
    """Placeholders and inputs have the same names in the same order."""
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    inputs = [item.name for item in program.inputs]
    if names != inputs:
        raise InternalError(f"placeholders {names} are not the inputs {inputs}")


def blocks_hold_every_node_once_in_order(program: Program) -> None:
    """Blocks one after the other are the row of nodes."""
    if program.blocks is None:
        return
    inside = tuple(node for block in program.blocks for node in block.nodes)
    if inside != program.compute_nodes:
        raise InternalError("the blocks are not the graph's nodes in order")


def stages_hold_every_block_once_in_order(program: Program) -> None:
    """Stages one after the other are the row of blocks; none is empty."""
    if program.stages is None:
        return
    inside = tuple(block for stage in program.stages for block in stage.blocks)
    if inside != program.blocks or not all(stage.blocks for stage in program.stages):
        raise InternalError("the stages are not the blocks in order")


def every_stage_is_placed(program: Program) -> None:
    """Each replica places each stage on at least one rank."""
    if program.placement is None:
        return
    for replica in program.placement.ranks:
        if len(replica) != len(program.require_stages()) or not all(replica):
            raise InternalError(f"placement {program.placement} misses a stage")


def transfers_cover_what_stages_use(program: Program) -> None:
    """A stage gets each foreign value it uses in exactly one transfer, and no other."""
    if program.transfers is None:
        return
    stage_of = program.stage_of
    wanted = {
        (source, stage_of[user])
        for source in stage_of
        for user in source.users
        if user in stage_of and stage_of[user] != stage_of[source]
    }
    given = [(value, t.dest) for t in program.transfers for value in t.values]
    outputs = {(node, program.home) for node in program.outputs}
    if len(given) != len(set(given)) or not wanted <= set(given) <= wanted | outputs:
        raise InternalError("the transfers are not the values that stages use")
    indices = [transfer.index for transfer in program.transfers]
    if len(indices) != len(set(indices)):
        raise InternalError(f"transfers have the same index: {indices}")
    for transfer in program.transfers:
        sources = {stage_of[value] for value in transfer.values}
        if sources != {transfer.source} or transfer.source >= transfer.dest:
            raise InternalError(f"transfer {transfer.index} does not lead forward")


def tiles_hold_what_their_layouts_say(program: Program) -> None:
    """A value of a split stage has the shape of its tile's box."""
    for node in program.graph.nodes:
        layout = meta.layout(node)
        if layout is not None:
            tile = program.tile % layout.num_tiles
            actual, wanted = meta.spec(node).shape, layout.local_shape(tile)
            if actual != wanted:
                raise InternalError(
                    f"%{node.name} has shape {actual} on tile {tile}, not {wanted}"
                )


CHECKS: tuple[Callable[[Program], None], ...] = (
    every_value_is_computed_before_it_is_used,
    memory_is_used_in_the_order_of_the_trace,
    placeholders_are_the_inputs,
    blocks_hold_every_node_once_in_order,
    stages_hold_every_block_once_in_order,
    every_stage_is_placed,
    transfers_cover_what_stages_use,
    tiles_hold_what_their_layouts_say,
)


def data_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of which a call takes elements, not only shape or dtype."""
    target: Any = node.target
    name = str(getattr(target, "__name__", target))
    if node.op in ("call_function", "call_method") and name in _LIKE | SIZED.keys():
        return [n for n in node.all_input_nodes if name in SIZED and n is node.args[0]]
    return elements(node)


def sources(*programs: Program) -> dict[str, fx.Node]:
    """Return what loss and outputs are computed from, each with a node that takes it.

    The programs are those of the ranks, each the whole graph. An exchange is one call
    of all that take part: where one rank uses its result, all that is given to it
    counts.
    """
    partners = _partners(programs)
    owners = {program.graph: program for program in programs}
    writes = {graph: _writes(program) for graph, program in owners.items()}
    seen: set[fx.Node] = set()
    waiting = [node for program in programs for node in program.output.all_input_nodes]
    takers: dict[str, fx.Node] = {}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        takers |= dict.fromkeys(_direct_sources(owners[node.graph], node), node)
        waiting += data_operands(node)
        waiting += partners.get(node, ())
        waiting += writes[node.graph].get(meta.glue(node), ())
    return takers


def _partners(programs: Iterable[Program]) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes of all ranks that are one exchange, by each of them.

    Ranks that compute the same node of the model make the same exchanges for it; one
    without its branch makes none.
    """
    exchanges: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
    for program in programs:
        times: Counter[int] = Counter()
        for node in program.graph.nodes:
            if node.target in _EXCHANGES:
                place = meta.traced_place(node)
                exchanges[place, times[place]].append(node)
                times[place] += 1
    return {node: nodes for nodes in exchanges.values() for node in nodes}


def lost_nothing(
    before: Program, after: Iterable[Program], *, draws: bool = True
) -> None:
    """See that what results are computed from is the same in `after` all together.

    Without `draws`, random numbers are left aside: evaluation may share the graph of
    training, where layers draw.

    Raises:
        InternalError: a source has no way to a result any more.
    """
    kept = sources(*after).keys()
    for name, node in sources(before).items():
        if name not in kept and (draws or not name.startswith(_DRAWN)):
            takes = [user for user in node.users if node in data_operands(user)]
            is_held = node.op in ("placeholder", "get_attr")
            at = meta.location(takes[0] if is_held and takes else node)
            where = f"{at}: " if at else ""
            raise InternalError(
                f"{where}wrong program: {name} is part of what the model computes, "
                "but not of what the ranks do"
            )


def drawn_alike(ranks: Sequence[Program]) -> None:
    """See that the ranks of a stage draw the same numbers, from one seed, in one order.

    Each draws the mask of a whole value and takes its part. A rank that draws more or
    fewer before has another mask: no loss shows it, nor does a run in `same_draws`.

    Raises:
        InternalError: one draws another number of them.
    """
    by_stage = zip(*(program.stages or () for program in ranks), strict=True)
    for stages in by_stage:
        drawn = [
            list(_drawn(program, stage.nodes))
            for program, stage in zip(ranks, stages, strict=True)
        ]
        for others in drawn[1:]:
            for mine, other in zip_longest(drawn[0], others):
                if mine is None or other is None or mine[1] != other[1]:
                    node, _ = mine or other
                    raise InternalError(
                        f"{meta.location(node)}: wrong program: from here on, the "
                        "ranks of a stage draw different random numbers"
                    )


def _drawn(
    program: Program, nodes: Iterable[fx.Node]
) -> Iterator[tuple[fx.Node, object]]:
    """Yield nodes that draw by the seed of the stage: how many, and in what strips."""
    for node in nodes:
        kwargs: dict[str, Any] = node.kwargs
        if not meta.facts(node).random:
            continue  # such as a dropout of none
        if meta.region(node).draw is not None or node.target is tiles.ring_attention:
            continue  # each part has a seed of its own
        if "draw" in kwargs:
            count = math.prod(kwargs["shape"])
            along = strips_along(kwargs["shape"], kwargs["box"], kwargs.get("along"))
        else:
            is_of_channels = call_of(node, program.module).kind == "channel_dropout"
            dims = slice(None, 2 if is_of_channels else None)
            count = sum(math.prod(tensor.shape[dims]) for tensor in meta.tensors(node))
            along = None
        yield node, (meta.traced_place(node), count, along)


def _writes(program: Program) -> dict[int | None, list[fx.Node]]:
    """Return the writes of each group of nodes that share a memory: all read them."""
    groups: dict[int | None, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if meta.glue(node) is not None and mutated_inputs(node, program.module):
            groups.setdefault(meta.glue(node), []).append(node)
    return groups


def _direct_sources(program: Program, node: fx.Node) -> Iterator[str]:
    """Yield the sources that a node takes by itself."""
    if node.op == "placeholder":
        item = next(item for item in program.inputs if item.name == node.name)
        yield f"input {'.'.join(map(str, item.path))}"
    elif node.op == "get_attr":
        attr = attribute(program.module, str(node.target))
        if not isinstance(attr, nn.Module):
            yield _tensor(program, str(node.target))
    if node.op in ("get_attr", "call_module"):
        layer = attribute(program.module, str(node.target))
        if isinstance(layer, nn.Module):
            prefix = str(node.target)
            for name, _ in layer.named_parameters(prefix, remove_duplicate=False):
                yield _tensor(program, name)
    if meta.facts(node).random:
        yield f"{_DRAWN}{meta.layer(node) or meta.location(node)}"


def _tensor(program: Program, name: str) -> str:
    return f"'{program.aliases.get(name, name)}'"
