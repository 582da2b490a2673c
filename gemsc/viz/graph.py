"""The graph as a picture: stages as coloured clusters of blocks, skips drawn apart."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import graphviz
from torch import fx

from gemsc.base.files import replaced
from gemsc.base.units import show_bytes, show_flops, show_seconds
from gemsc.ir import meta
from gemsc.ir.flow import used_tensors
from gemsc.ir.program import Program, Stage
from gemsc.ir.shards import Branch
from gemsc.plan import Plan, cut_name
from gemsc.plan_tables import PlannedStage
from gemsc.schedules.paths import skipping
from gemsc.viz.design import COLOURS, FONT, NUM_SERIES, colour, css, series

STYLE = """
g.graph > polygon { fill: $sheet }
text { fill: $ink }
.block > path, .block > polygon { fill: $sheet; stroke: $axis }
.block > polyline { stroke: $axis }
.block > text:first-of-type, .title > text:first-of-type { font-weight: bold }
.input > ellipse { fill: none; stroke: $axis }
.edge > path { stroke: $soft }
.edge > polygon { fill: $soft; stroke: $soft }
.edge > text { paint-order: stroke; stroke: $sheet; stroke-width: 3px }
.skip > path { stroke: $skip }
.skip > polygon { fill: $skip; stroke: $skip }
.skip > text { fill: $skip }
"""
OF_SERIES = """
.stage{0} > path {{ fill: $tint{0}; stroke: $series{0} }}
.rank{0} > path {{ fill: $fill{0}; stroke: $series{0} }}
"""
DOT_SECONDS = 60
DOT_FONT = FONT.partition(",")[0]


def draw_graph(program: Program, plan: Plan) -> str:
    """Return the DOT text of a program with stages and transfers.

    The title of a stage is a node beside its first block: arrows go around it.
    """
    picture = graphviz.Digraph(program.name)
    picture.attr(rankdir="TB", fontname=DOT_FONT, nodesep="0.25", ranksep="0.3")
    picture.attr("node", shape="box", style="filled,rounded", fontname=DOT_FONT)
    light = {name: both.light for name, both in COLOURS.items()}
    picture.attr("node", fontsize="10", fillcolor=light["sheet"], color=light["axis"])
    picture.attr("edge", fontname=DOT_FONT, fontsize="9", color=light["soft"])
    for item in program.inputs:
        label = graphviz.escape(f"{item.name}\n{item.spec}")
        form = {"shape": "ellipse", "style": "solid", "class": "input"}
        picture.node(_id(item.name), label, **form)
    boxes = boxes_of(program)
    stages = plan.stages
    slowest = max(stages, key=lambda stage: stage.seconds) if stages[1:] else None
    for stage in program.require_stages():
        index = stage.index % NUM_SERIES
        form = {"class": f"stage{index}", "style": "filled,rounded"}
        form |= {"penwidth": "3"} if stages[stage.index] is slowest else {}
        with picture.subgraph(name=f"cluster_stage{stage.index}") as cluster:
            cluster.attr(**form, **_colours("tint", index))
            stage_boxes = [box for box in boxes if box.stage == stage.index]
            for box in stage_boxes:
                _draw_box(cluster, program, box, stages[stage.index])
            title, first = f"title{stage.index}", stage_boxes[0].key
            with cluster.subgraph() as row:
                row.attr(rank="same")
                words = _stage_label(stages[stage.index], slowest)
                form = {"shape": "plaintext", "style": "", "class": "title"}
                row.node(title, graphviz.escape(words), fontsize="12", **form)
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
            beside.write_text(_styled(beside.read_text("utf-8")), "utf-8")
    except (subprocess.SubprocessError, OSError) as error:
        return (
            f"`dot` could not draw {path.name} ({type(error).__name__}): see {source}"
        )
    return None


def _styled(svg: str) -> str:
    """Return what `dot` has drawn with colours for light and dark pages."""
    rules = [STYLE.strip(), *(OF_SERIES.strip().format(i) for i in range(NUM_SERIES))]
    style = f"<style>{css('graph', chr(10).join(rules))}</style>"
    return re.sub(r"<svg ([^>]*)>", rf'<svg class="graph" \1>{style}', svg, count=1)


def _colours(ground: str, index: int) -> dict[str, str]:
    """Return the colours that viewers of the DOT text see."""
    return {
        "fillcolor": colour(f"{ground}{index}").light,
        "color": colour(series(index)).light,
    }


def _stage_label(stage: PlannedStage, slowest: PlannedStage | None) -> str:
    word = "rank" if len(stage.ranks) == 1 else "ranks"
    grid = f": {stage.grid}" if stage.grid else ""
    grid += f" of {stage.units}" if stage.units else ""
    return (
        f"stage {stage.index}: {word} {', '.join(map(str, stage.ranks))}{grid}\n"
        f"{show_seconds(stage.seconds)}{', the slowest' * (stage is slowest)}\n"
        f"{show_flops(stage.flops)}\n{show_bytes(stage.parameter_bytes)} parameters\n"
        f"{show_bytes(stage.cost.saved_bytes)} saved for backward"
    )


def _draw_box(
    picture: graphviz.Digraph, program: Program, box: Box, stage: PlannedStage
) -> None:
    """Draw nodes that all ranks of a stage compute or cut, or that one of them has."""
    form, names = {"class": "block"}, used_tensors(program, box.nodes)
    cut = [text for text in stage.cut if cut_name(text) in names]
    shared = ""
    if units := replace(stage, cut=cut).units:
        form |= {"shape": "box3d", "style": "filled"}
        shared = f"\n{stage.shards} shards: {units}"
    if box.branch is not None:
        index = box.branch.rank % NUM_SERIES
        form = {"class": f"block rank{index}", **_colours("fill", index)}
        shared = f"\n{_rank(box.branch.rank, stage)}"
    last = box.nodes[-1]
    shape = ""
    if meta.tensors(last):
        sizes = list(meta.tensors(last)[0].shape)
        shape = f"\n{sizes or 'scalar'}"
    nodes = f"{len(box.nodes)} node{'s' * (len(box.nodes) != 1)}"
    flops = show_flops(sum(meta.facts(node).flops for node in box.nodes))
    label = f"{box.name}\n{nodes}, {flops}{shape}{shared}"
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
    over = COLOURS["skip"].light  # of stages or blocks
    for (tail, head), nodes in values.items():
        size = show_bytes(sum(meta.facts(node).output_bytes for node in nodes))
        kind = kinds[tail, head]
        if kind == "skip":
            picture.edge(
                tail, head, label=f" {size}", color=over, fontcolor=over,
                style="dashed", constraint="false", **{"class": "skip"},
            )  # fmt: skip
        elif kind == "cut":
            picture.edge(tail, head, label=f" {size}", penwidth="2")
        else:
            picture.edge(tail, head)


def _id(name: str) -> str:
    return f"input_{name}"


@dataclass(eq=False, slots=True)
class Box:
    """Nodes of a stage that are drawn as one: those of a block, or a branch.

    `level` counts boxes in the order of the model. The branches of a fork are side by
    side, half a level below what is before them.
    """

    key: str
    name: str
    stage: int
    level: float
    branch: Branch | None = None
    nodes: list[fx.Node] = field(default_factory=list)


def boxes_of(program: Program) -> list[Box]:
    """Return the boxes of all stages, in the order of the model.

    A branch that one of several ranks computes is a box, whatever blocks its nodes are
    in. What else there is of a block is another, or two where branches end in between.
    """
    boxes: dict[str, Box] = {}
    levels: dict[str, float] = {}
    for stage in program.require_stages():
        for key, name, join, branch, node in _keys(program, stage):
            if key not in boxes:
                level = float(sum(box.branch is None for box in boxes.values()))
                if branch is not None:
                    level = levels.setdefault(join, level - 0.5)
                boxes[key] = Box(key, name, stage.index, level, branch)
            boxes[key].nodes.append(node)
    return list(boxes.values())


def _keys(
    program: Program, stage: Stage
) -> Iterator[tuple[str, str, str, Branch | None, fx.Node]]:
    """Yield for each node the key and name of its box, the join and the branch."""
    shards = program.shards.get(stage.index)
    forks = [fork for fork in shards.forks if not fork.reason] if shards else []
    inside = {n: (f.join, b) for f in forks for b in f.branches for n in b.nodes}
    place = {node.name: index for index, node in enumerate(stage.nodes)}
    joins = {fork.join: place[fork.join] for fork in forks}
    place |= {name: joins[fork.join] for fork in forks for name in fork.added}
    for block in stage.blocks:
        parts: list[int] = []
        for node in block.nodes:
            if node.name in inside:
                join, branch = inside[node.name]
                yield f"branch_{branch.nodes[0]}", branch.name, join, branch, node
                continue
            passed = sum(join <= place[node.name] for join in joins.values())
            parts += [passed] if passed not in parts else []
            part = f"_{number}" if (number := parts.index(passed)) else ""
            yield f"block{block.index}{part}", block.name, "", None, node
