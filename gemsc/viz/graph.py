"""The graph as a picture: stages as coloured clusters of blocks, skips drawn apart."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import graphviz
from torch import fx

from gemsc.base.files import replaced
from gemsc.base.units import show_bytes, show_flops
from gemsc.ir import meta
from gemsc.ir.flow import used_tensors
from gemsc.ir.program import Block, Program
from gemsc.ir.shards import StageShards
from gemsc.plan import Plan, PlannedStage, cut_name

__all__ = ["draw_graph", "render"]

FILLS = ("#dbe9f6", "#fde5cf", "#dff0d8", "#f6dbe9", "#e9e3f5", "#fdf3c7", "#d7f0ef")
LINES = ("#2f6ea8", "#c26a12", "#3d8b37", "#a8326e", "#6a4fa3", "#a08a00", "#1d8a86")
SKIP = "#c0392b"
DOT_SECONDS = 60


def draw_graph(program: Program, plan: Plan) -> str:
    """Return the DOT text of a program with stages and transfers.

    The title of a stage is a node beside its first block: arrows go around it.
    """
    picture = graphviz.Digraph(program.name)
    picture.attr(rankdir="TB", fontname="Helvetica", nodesep="0.25", ranksep="0.3")
    picture.attr("node", shape="box", style="filled,rounded", fontname="Helvetica")
    picture.attr("node", fontsize="10", fillcolor="white", color="#888888")
    picture.attr("edge", fontname="Helvetica", fontsize="9", color="#555555")
    for item in program.inputs:
        label = graphviz.escape(f"{item.name}\n{item.spec}")
        picture.node(_id(item.name), label, shape="ellipse", style="solid")
    for stage in program.require_stages():
        colour = stage.index % len(FILLS)
        with picture.subgraph(name=f"cluster_stage{stage.index}") as cluster:
            cluster.attr(
                style="filled,rounded", fillcolor=FILLS[colour], color=LINES[colour]
            )
            for block in stage.blocks:
                shared = _shared(program, block, plan.stages[stage.index])
                form = {"shape": "box3d", "style": "filled"} if shared else {}
                cluster.node(_id(block.index), _block_label(block, shared), **form)
            title, first = f"title{stage.index}", _id(stage.blocks[0].index)
            with cluster.subgraph() as row:
                row.attr(rank="same")
                label = graphviz.escape(_stage_label(plan.stages[stage.index]))
                row.node(title, label, shape="plaintext", style="", fontsize="12")
                row.edge(title, first, style="invis")
    _draw_edges(picture, program)
    return str(picture.source)


def render(dot: str, path: Path) -> str | None:
    """Write `path` (.svg) from DOT text; return why not, if it cannot be drawn.

    The DOT text is left beside it in any case.
    """
    source = path.with_suffix(".dot")
    source.write_text(dot, encoding="utf-8")
    program = shutil.which("dot")
    if program is None:
        return (
            f"{path.name} needs Graphviz' program `dot`, which is not installed "
            f"(apt-get install graphviz); {source} is there: dot -Tsvg -O {source}"
        )
    try:
        with replaced(path) as beside:
            command = [program, "-Tsvg", "-o", str(beside), str(source)]
            subprocess.run(
                command, check=True, capture_output=True, timeout=DOT_SECONDS
            )
    except (subprocess.SubprocessError, OSError) as error:
        return (
            f"`dot` could not draw {path.name} ({type(error).__name__}): see {source}"
        )
    return None


def _stage_label(stage: PlannedStage) -> str:
    word = "rank" if len(stage.ranks) == 1 else "ranks"
    grid = f": {stage.grid}" if stage.grid else ""
    grid += f" of {stage.units}" if stage.units else ""
    return (
        f"stage {stage.index}  -  {word} {', '.join(map(str, stage.ranks))}{grid}\n"
        f"{show_flops(stage.flops)}\n{show_bytes(stage.parameter_bytes)} parameters\n"
        f"{show_bytes(stage.cost.saved_bytes)} saved for backward"
    )


def _shared(program: Program, block: Block, stage: PlannedStage) -> list[str]:
    """Return what the ranks of a stage share in a block: what is cut, and branches.

    Examples: `2 shards: heads`, and `2 ranks: one.b | one.a, one.c`.
    """
    names = used_tensors(program, block.nodes)
    cut = [text for text in stage.cut if cut_name(text) in names]
    units = replace(stage, cut=cut).units
    return [
        *([f"{stage.shards} shards: {units}"] if units else []),
        *_branches(program.shards.get(stage.index), block),
    ]


def _branches(shards: StageShards | None, block: Block) -> Iterator[str]:
    """Yield which rank has which branches of a block, for each of its forks."""
    if shards is None:
        return
    nodes = {node.name for node in block.nodes}
    for fork in shards.forks:
        here = [b for b in fork.branches if not nodes.isdisjoint(b.nodes)]
        if here and not fork.reason:
            ranks = [[b.name for b in here if b.rank == r] for r in range(shards.count)]
            told = " | ".join(", ".join(names) or "-" for names in ranks)
            yield f"{shards.count} ranks: {told}"


def _block_label(block: Block, shared: Sequence[str]) -> str:
    last = block.nodes[-1]
    shape = ""
    if meta.tensors(last):
        sizes = list(meta.tensors(last)[0].shape)
        shape = f"\n{sizes or 'scalar'}"
    heavy = sum(meta.facts(node).heavy for node in block.nodes)
    nodes = f"{len(block.nodes)} node{'s' * (len(block.nodes) != 1)}"
    work = f"{nodes}, {heavy} heavy, {show_flops(block.total('flops'))}"
    lines = "".join(f"\n{line}" for line in shared)
    return str(graphviz.escape(f"{block.name}\n{work}{shape}{lines}"))


def _draw_edges(picture: graphviz.Digraph, program: Program) -> None:
    """Draw one arrow for each pair of blocks; red and dashed where it jumps a block."""
    block_of: dict[fx.Node, Block] = {
        node: block for block in program.blocks or () for node in block.nodes
    }
    stage_of = {
        block.index: stage.index
        for stage in program.require_stages()
        for block in stage.blocks
    }
    values: dict[tuple[str, str], list[fx.Node]] = defaultdict(list)
    kinds: dict[tuple[str, str], str] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            continue
        source = block_of.get(node)
        for user in node.users:
            dest = block_of.get(user)
            if dest is None or dest is source:
                continue
            tail = _id(source.index if source else node.name)
            key = (tail, _id(dest.index))
            if node not in values[key]:
                values[key].append(node)
            jump = dest.index - source.index if source else 1
            crosses = source and stage_of[source.index] != stage_of[dest.index]
            kinds[key] = "skip" if jump > 1 else "cut" if crosses else "plain"
    for (tail, head), nodes in values.items():
        size = show_bytes(sum(meta.facts(node).output_bytes for node in nodes))
        kind = kinds[tail, head]
        if kind == "skip":
            picture.edge(
                tail, head, label=f" {size}", color=SKIP, fontcolor=SKIP,
                style="dashed", constraint="false",
            )  # fmt: skip
        elif kind == "cut":
            picture.edge(tail, head, label=f" {size}", penwidth="2")
        else:
            picture.edge(tail, head)


def _id(key: str | int) -> str:
    return f"block{key}" if isinstance(key, int) else f"input_{key}"
