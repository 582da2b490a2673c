"""The graph as a picture: stages as coloured clusters of blocks, skips drawn apart."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import graphviz
from torch import fx

from gemsc.base.files import replaced
from gemsc.base.units import show_bytes, show_flops
from gemsc.ir import meta
from gemsc.ir.flow import used_tensors
from gemsc.ir.program import Program
from gemsc.plan import Plan, PlannedStage, cut_name
from gemsc.schedules.paths import skipping
from gemsc.viz.boxes import Box, boxes_of
from gemsc.viz.svg import LINES

__all__ = ["draw_graph", "render"]

FILLS = ("#dbe9f6", "#fde5cf", "#dff0d8", "#f6dbe9", "#e9e3f5", "#fdf3c7", "#d7f0ef")
RANKS = ("#a9cbea", "#f5c391", "#b4dba9", "#eab4d0", "#cbbdec", "#efdf8f", "#a3dcd8")
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
    boxes = boxes_of(program)
    for stage in program.require_stages():
        colour = stage.index % len(FILLS)
        with picture.subgraph(name=f"cluster_stage{stage.index}") as cluster:
            cluster.attr(
                style="filled,rounded", fillcolor=FILLS[colour], color=LINES[colour]
            )
            own = [box for box in boxes if box.stage == stage.index]
            for box in own:
                _draw_box(cluster, program, box, plan.stages[stage.index])
            title, first = f"title{stage.index}", own[0].key
            with cluster.subgraph() as row:
                row.attr(rank="same")
                label = graphviz.escape(_stage_label(plan.stages[stage.index]))
                row.node(title, label, shape="plaintext", style="", fontsize="12")
                row.edge(title, first, style="invis")
    _draw_edges(picture, program, boxes)
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


def _draw_box(
    picture: graphviz.Digraph, program: Program, box: Box, stage: PlannedStage
) -> None:
    """Draw nodes that all ranks of a stage compute or cut, or that one of them has."""
    form, names = {}, used_tensors(program, box.nodes)
    cut = [text for text in stage.cut if cut_name(text) in names]
    shared = ""
    if units := replace(stage, cut=cut).units:
        form = {"shape": "box3d", "style": "filled"}
        shared = f"\n{stage.shards} shards: {units}"
    if box.branch is not None:
        colour = box.branch.rank % len(RANKS)
        form = {"fillcolor": RANKS[colour], "color": LINES[colour]}
        shared = f"\n{_rank(box.branch.rank, stage)}"
    last = box.nodes[-1]
    shape = ""
    if meta.tensors(last):
        sizes = list(meta.tensors(last)[0].shape)
        shape = f"\n{sizes or 'scalar'}"
    heavy = sum(meta.facts(node).heavy for node in box.nodes)
    nodes = f"{len(box.nodes)} node{'s' * (len(box.nodes) != 1)}"
    flops = show_flops(sum(meta.facts(node).flops for node in box.nodes))
    label = f"{box.name}\n{nodes}, {heavy} heavy, {flops}{shape}{shared}"
    picture.node(box.key, graphviz.escape(label), **form)


def _rank(place: int, stage: PlannedStage) -> str:
    """Return the rank with a place in a stage's grid; there are several grids, too."""
    if len(stage.ranks) == stage.grid.size:
        return f"rank {stage.ranks[place]}"
    return f"rank {place} of {stage.grid.size}"


def _draw_edges(
    picture: graphviz.Digraph, program: Program, boxes: Sequence[Box]
) -> None:
    """Draw one arrow for each pair of boxes; red and dashed where it skips some."""
    box_of = {node: box for box in boxes for node in box.nodes}
    place = {box.key: index for index, box in enumerate(boxes)}
    uses = (
        (place[box.key], place[box_of[user].key])
        for node, box in box_of.items()
        for user in node.users
        if user in box_of
    )
    skips = skipping(uses)
    values: dict[tuple[str, str], list[fx.Node]] = defaultdict(list)
    kinds: dict[tuple[str, str], str] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            continue
        source = box_of.get(node)
        for user in node.users:
            dest = box_of.get(user)
            if dest is None or dest is source:
                continue
            key = (source.key if source else _id(node.name), dest.key)
            if node not in values[key]:
                values[key].append(node)
            jumps = source is not None and (
                dest.level - source.level > 1
                and (place[source.key], place[dest.key]) in skips
            )
            crosses = source and source.stage != dest.stage
            kinds[key] = "skip" if jumps else "cut" if crosses else "plain"
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


def _id(name: str) -> str:
    return f"input_{name}"
