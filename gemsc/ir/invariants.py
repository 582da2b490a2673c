"""Invariants of a Program, checked after every pass; a breach is a fault of gemsc."""

from __future__ import annotations

from collections.abc import Callable

from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.program import Program

__all__ = ["verify"]


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
    stages = program.require_stages()
    stage_of = {node: stage.index for stage in stages for node in stage.nodes}
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
            found, wanted = meta.spec(node).shape, layout.local_shape(tile)
            if found != wanted:
                raise InternalError(
                    f"%{node.name} has shape {found} on tile {tile}, not {wanted}"
                )


CHECKS: tuple[Callable[[Program], None], ...] = (
    every_value_is_computed_before_it_is_used,
    placeholders_are_the_inputs,
    blocks_hold_every_node_once_in_order,
    stages_hold_every_block_once_in_order,
    every_stage_is_placed,
    transfers_cover_what_stages_use,
    tiles_hold_what_their_layouts_say,
)
