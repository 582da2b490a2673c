"""Which blocks can be recomputed, and where that frees memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from gemsc.ir import meta
from gemsc.ir.flow import external_inputs
from gemsc.ir.holder import called_layer
from gemsc.ir.mutation import changed_by_layer, mutated_inputs, read_statistics
from gemsc.ir.opaque import opaque_of
from gemsc.ir.program import Block, Program, Stage

TO = ".."  # between the names of the first and the last block


def segment_name(run: Sequence[Block], blocks: Sequence[Block]) -> str:
    """Return what a segment of neighbouring blocks is called: `first..last`.

    One block alone goes by its name, unless others lie in a module of that name.
    """
    first, last = run[0].name, run[-1].name
    return first if blocks_in(blocks, first) == [*run] else f"{first}{TO}{last}"


def blocks_named(blocks: Sequence[Block], name: str) -> Sequence[Block]:
    """Return the block of a name, or those from first to last of `first..last`.

    There are none if the model has no such block.
    """
    first, _, last = name.partition(TO)
    names = [block.name for block in blocks]
    if not {first, last or first} <= {*names}:
        return ()
    return blocks[names.index(first) : 1 + names.index(last or first)]


def blocks_in(blocks: Sequence[Block], name: str) -> list[Block]:
    """Return the blocks that have layers in a module, or bear its name."""
    return [b for b in blocks if any(lies_in(p, name) for p in module_paths(b))]


def module_paths(block: Block) -> list[str]:
    """Return in which modules a block has its heavy layers, then its own name."""
    heavy = [n for n in block.nodes if meta.facts(n).heavy] or list(block.nodes)
    return [
        str(node.target) if node.op == "call_module" else meta.module_path(node)
        for node in heavy
    ] + [block.name]


def lies_in(path: str, module: str) -> bool:
    """Whether a path is that of a module or leads into it."""
    return path == module or path.startswith(f"{module}.")


def frees_anything(block: Block) -> bool:
    """Whether autograd saves anything inside that does not come from outside."""
    taken = {
        key
        for node in external_inputs(block.nodes)
        for key, _ in meta.facts(node).storages
    }
    saved = {key for node in block.nodes for key, _ in meta.facts(node).saved}
    given = {key for node in block.nodes[-1:] for key, _ in meta.facts(node).storages}
    return bool(saved - taken - given)


def recomputed_nodes(program: Program, stage: Stage) -> frozenset[fx.Node]:
    """Return the nodes of a stage that run again in the backward."""
    return frozenset(
        node
        for segment, nodes in program.segments_of(stage.index)
        if segment.kind == "recompute"
        for node in nodes
    )


def may_recompute(program: Program, block: Block) -> bool:
    """Whether each node of a block may run twice."""
    return not any(runs_once(program, node) for node in block.nodes)


def runs_once(program: Program, node: fx.Node) -> bool:
    """Whether a node must not run again in the backward.

    It changes what it does not own, reads what has changed by then, or has a backward
    within its forward, which asks for what is dropped until then.
    """
    module = program.module
    opaque = opaque_of(called_layer(node, module))
    if opaque is not None and (opaque.changes or opaque.differentiates):
        return True
    changed = mutated_inputs(node, module) or changed_by_layer(node, module)
    return bool(changed or read_statistics(node, program))
