"""Group blocks: nodes that stay together; cuts fall only between blocks.

Example, a residual network (one line a block):
    stem      conv1 bn1 relu maxpool
    layer1.0  conv1 bn1 relu conv2 bn2 add relu        # its short skip is inside
    layer1.1  ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise

from torch import fx

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.flow import layer_path, shared_path, unique_names
from gemsc.ir.holder import called_layer
from gemsc.ir.mutation import read_statistics
from gemsc.ir.program import Block, Program, Skip
from gemsc.passes.base import Pass


@dataclass(frozen=True)
class GroupBlocks(Pass):
    """Cut the row of nodes into blocks.

    1. A cut may not fall inside a short skip, inside nodes glued by canonicalize,
       between two calls of a layer with running statistics, or what reads these, or
       where something that is no tensor would cross. Overlapping short skips share a
       block only while the block stays short itself, so that densely connected
       networks can be cut.
    2. A block begins with each tower, and behind it: no block lies across two towers,
       and what joins them is a block of its own even if nothing in it is heavy.
    3. Between two heavy nodes one cut is enough: where the fewest bytes are sent, the
       later one of equals, so that normalisation and activation follow their layer; but
       before a norm of what a later sum needs, too: behind it, both would be sent.
    """

    requires = ("facts", "towers", "skips")
    provides = ("blocks",)

    short_layers: int = 4
    short_share: float = 1 / 8

    def apply(self, program: Program) -> Program:
        """Return the program with its blocks."""
        nodes = program.compute_nodes
        order = {node: i for i, node in enumerate(nodes)}
        allowed = [True] * (len(nodes) + 1)
        for first, last in _indivisible(program, order):
            _forbid(allowed, first, last)
        bounds = [p for p in tower_bounds(program, order) if allowed[p]]
        self._keep_short_skips(program, order, allowed, bounds)
        cuts = _choose_cuts(program, order, allowed, bounds)
        edges = [0, *cuts, len(nodes)]
        groups = [nodes[a:b] for a, b in pairwise(edges) if a < b]
        names = unique_names(_block_name(group) for group in groups)
        blocks = tuple(
            Block(index, name, group)
            for index, (name, group) in enumerate(zip(names, groups, strict=True))
        )
        return replace(program, blocks=blocks)

    def _keep_short_skips(
        self,
        program: Program,
        order: dict[fx.Node, int],
        allowed: list[bool],
        bounds: Sequence[int],
    ) -> None:
        nodes = tuple(order)
        seconds = [meta.facts(node).seconds for node in nodes]
        limit = self.short_share * sum(seconds)
        spans = []
        for skip in program.skips or ():
            if not skip.long:
                first, last = _start_of_span(skip.value, order), order[skip.last_use]
                if not any(first < bound <= last for bound in bounds):
                    spans.append((first, last))
        for first, last in sorted(spans, key=lambda span: (span[1] - span[0], span)):
            low, high = _joined(allowed, first, last)
            heavy = sum(meta.facts(node).heavy for node in nodes[low : high + 1])
            cost = sum(seconds[low : high + 1])
            if heavy <= self.short_layers or cost <= limit:
                _forbid(allowed, first, last)


def _forbid(allowed: list[bool], first: int, last: int) -> None:
    """Keep nodes first..last together: no cut before any of first+1..last."""
    for position in range(first + 1, last + 1):
        allowed[position] = False


def _joined(allowed: list[bool], first: int, last: int) -> tuple[int, int]:
    """Return the run of nodes that first..last would belong to."""
    while first > 0 and not allowed[first]:
        first -= 1
    while last + 1 < len(allowed) and not allowed[last + 1]:
        last += 1
    return first, last


def _start_of_span(value: fx.Node, order: dict[fx.Node, int]) -> int:
    """Return the node from which on a cut would carry the value and something else.

    The block that uses the value begins at its first use; if other layers run before
    that (a branch that waits for the others), the value's own node is the start.
    """
    nodes = tuple(order)
    start = order[value]
    first_use = min(order[user] for user in value.users if user in order)
    if any(meta.facts(node).heavy for node in nodes[start + 1 : first_use]):
        return start
    return first_use


def _indivisible(
    program: Program, order: dict[fx.Node, int]
) -> Iterable[tuple[int, int]]:
    """Yield the runs of nodes that no cut may ever divide."""
    glued: dict[object, list[int]] = {}
    for node, index in order.items():
        group = meta.glue(node)
        if group is not None:
            glued.setdefault(("glue", group), []).append(index)
        layer = called_layer(node, program.module)
        if layer is not None and any(True for _ in layer.buffers()):
            glued.setdefault(("layer", node.target), []).append(index)
        for path in read_statistics(node, program):
            glued.setdefault(("layer", path), []).append(index)
        if not meta.is_one_tensor(node):
            uses = [order[user] for user in node.users if user in order]
            yield index, max(uses, default=index)
    for members in glued.values():
        yield min(members), max(members)


def tower_bounds(program: Program, order: dict[fx.Node, int]) -> list[int]:
    """Return where towers begin and what is behind them, but for the graph's ends."""
    towers = program.towers or ()
    places = {order[tower[0]] for tower in towers}
    places |= {order[tower[-1]] + 1 for tower in towers}
    return sorted(places - {0, len(order)})


def _choose_cuts(
    program: Program,
    order: dict[fx.Node, int],
    allowed: list[bool],
    bounds: Sequence[int],
) -> list[int]:
    nodes = tuple(order)
    crossing = crossing_bytes(nodes)
    heavy = [i for i, node in enumerate(nodes) if meta.facts(node).heavy]
    long = [skip for skip in program.skips or () if skip.long]
    cuts = list(bounds)
    for before, after in pairwise(heavy):
        if any(before < bound <= after for bound in bounds):
            continue
        options = [p for p in range(before + 1, after + 1) if allowed[p]]
        far = [s for s in long if order[s.value] < after < order[s.last_use]]
        cost = {p: crossing[p] - _sent_apart(far, order, p, after) for p in options}
        if options:
            cuts.append(min(options, key=lambda p: (cost[p], crossing[p], -p)))
    return sorted(cuts)


def _sent_apart(
    far: list[Skip], order: dict[fx.Node, int], start: int, end: int
) -> int:
    """Return the bytes that a cut at `start` carries to mirrors only.

    They go there wherever the cut falls. So a level of a U-Net is cut after its pool:
    before it, the level would go to the next stage as well.
    """
    return sum(
        skip.num_bytes
        for skip in far
        if order[skip.value] < start
        and not any(start <= order.get(user, -1) <= end for user in skip.value.users)
    )


def crossing_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Return, for each position, the bytes of the values that a cut there carries."""
    order = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for node in nodes:
        uses = [order[user] for user in node.users if user in order]
        if uses:
            change[order[node] + 1] += meta.facts(node).output_bytes
            change[max(uses) + 1] -= meta.facts(node).output_bytes
    total, crossing = 0, []
    for step in change:
        total += step
        crossing.append(total)
    return crossing


def _block_name(nodes: tuple[fx.Node, ...]) -> str:
    """Return the module path that the block's layers share, else its first layer's."""
    heavy = [node for node in nodes if meta.facts(node).heavy] or list(nodes[:1])
    paths = [layer_path(node) for node in heavy]
    return shared_path(paths) or paths[0]


# Blocks of modules, as users name them


def not_found(option: str, module: str, blocks: Sequence[Block]) -> GemscError:
    """Return the error of an option that names a module in which no block lies."""
    names = [block.name for block in blocks]
    close = get_close_matches(module, names, n=3, cutoff=0.4)
    return GemscError(
        f"--{option} {module}: no block lies in a module '{module}'",
        help="blocks: " + ", ".join(close or names),
    )
