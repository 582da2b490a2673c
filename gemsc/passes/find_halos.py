"""Find halos: what tiles are given, or compute, beyond their own parts.

Example, two tiles one above the other and a convolution of 3 x 3:
    input x of 64 x 64: the upper tile is given rows 0 to 33, the lower one 31 to 64

One wide exchange may serve several layers, which compute the halo again. Example, two
convolutions of 3 x 3 one after the other:

    off:  x -> exchange 1 row -> conv1 -> relu -> exchange 1 row -> conv2
    2:    x -> exchange 2 rows -> conv1 -> relu (1 row more) -> conv2

Each value whose halo travels is an exchange. It is saved if each tile computes that
value itself, with the halo: what it is made of must be wide as well, back to values
that travel anyway. What lies outside the image is padding again at every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from operator import getitem

from torch import Tensor, fx

from gemsc.base.boxes import Box, everything, hull, intersection
from gemsc.base.grid_shape import GridShape
from gemsc.ir import meta
from gemsc.ir.halos import Halos
from gemsc.ir.operators.calls import call_of
from gemsc.ir.operators.table import operator_of
from gemsc.ir.program import Placement, Program, Stage
from gemsc.passes.base import Pass
from gemsc.passes.branches.lowering import lower_node
from gemsc.passes.spatial.classify import probe_of
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.rules.lower_call import RULES
from gemsc.passes.spatial.values import covers
from gemsc.planner.traffic import exchanges

Boxes = tuple[Box, ...]
Wishes = dict[fx.Node, tuple[Boxes, ...]]  # by user: what it wants, with a halo


@dataclass(frozen=True)
class FindHalos(Pass):
    """Lower the first tile to learn what all tiles want of inputs and of each other.

    Inputs come with the halo that their users want; shards have none. Of other
    exchanges one serves up to so many `layers`; 0: each layer has its own. `grids` are
    as for `SplitTiles`.
    """

    requires = ("stages",)
    provides = ("halos",)

    grids: tuple[GridShape, ...]
    layers: int = 0

    def apply(self, program: Program) -> Program:
        """Return the program with its halos."""
        if not any(grid.tiles for grid in self.grids):
            return replace(program, halos=Halos())
        halos = Halos()
        low = self._lowering(program, halos)
        lowered = low.run()
        if self.layers:
            placed = replace(lowered, placement=Placement("", (), self.grids))
            chosen = _choose_fused(low, program.require_stages(), self.layers)
            halos = replace(chosen, unfused=_traffic(placed))
            low = self._lowering(program, halos)
            low.run()
        halos = replace(halos, inputs=low.inputs.wide_inputs())
        return replace(program, halos=halos)

    def _lowering(self, program: Program, halos: Halos) -> Lowering:
        return Lowering(program, self.grids, 0, probe_of(program), halos, lower_node)


def _traffic(program: Program) -> dict[int, tuple[int, int]]:
    """Return the exchanges of each stage and their bytes; inputs come with any halo."""
    traffic = {}
    for stage in program.require_stages():
        sizes = [t.num_bytes for t in exchanges(program, stage, with_inputs=False)]
        traffic[stage.index] = len(sizes), sum(sizes)
    return traffic


def _choose_fused(low: Lowering, stages: Iterable[Stage], layers: int) -> Halos:
    """Return what to compute beyond the own part; `low` has lowered the whole program.

    One exchange serves so many layers at most; whatever saves an exchange is done.
    Values are tried in the order in which they are computed; each choice stays. Where a
    residual leads ever further back, as in bottlenecks, the exchanges of two layers
    become one of the last value before them through which everything goes.
    """
    wide: dict[str, Boxes] = {}
    fetched: dict[tuple[str, int], Boxes] = {}
    for stage in stages:
        if low.grids[stage.index]:
            chains = _Chains(low, stage, layers)
            chains.fuse()
            wide |= {node.name: chains.boxes[node] for node in chains.layers}
            fetched |= {(n.name, stage.index): b for n, b in chains.fetched().items()}
    return Halos(wide, fetched)


@dataclass
class _Trial:
    """What changes if a value becomes wide."""

    chain: set[fx.Node]  # that become wide
    begin: set[fx.Node]  # that are wide, or travel, or come with any halo: inputs
    boxes: dict[fx.Node, Boxes]
    wishes: dict[fx.Node, Wishes]


class _Chains:
    """The values of one stage, what tiles compute of them, and who wants a halo.

    `layers` are the values that are wide, and how many layers the exchange serves that
    they come from. A value that is not and of which somebody wants a halo travels.
    """

    def __init__(self, low: Lowering, stage: Stage, layers: int) -> None:
        low.enter(stage)
        self._low = low
        self._wrapped: set[fx.Node] = set()  # an exchange of these is not saved
        self._known: dict[tuple[fx.Node, Boxes], dict[fx.Node, tuple[Boxes, ...]]] = {}
        self._stage = stage
        self._most = layers
        self._place = {node: place for place, node in enumerate(stage.nodes)}
        self.layers: dict[fx.Node, int] = {}
        self.boxes: dict[fx.Node, Boxes] = {}
        self._wishes: dict[fx.Node, Wishes] = {}
        for node in stage.nodes:
            if low.is_in_fork(node):  # as it is, and what it wants is its own
                continue
            is_cut = low.axes(node) is not None and low.flattened(node) is None
            if is_cut and meta.is_one_tensor(node):
                self.boxes[node] = low.held(node)
                for source, wanted in self._wanted(node, self.boxes[node]).items():
                    self._wishes.setdefault(source, {})[node] = wanted

    def fuse(self) -> None:
        """Choose the wide values."""
        for node in self._stage.nodes:
            if self._travels(node):
                self._accept([node], self._try([node]))
        cuts = _cuts(self._stage)
        before: fx.Node | None = None  # the last value through which all goes
        for node in self._stage.nodes:
            if before is not None and self._travels(node):
                self._accept([node], self._try([node]))
            if before is not None and self._travels(node):
                behind = self._stage.nodes[self._place[node] + 1 :]
                pair = [node, *filter(self._travels, behind)][:2]
                if len(pair) == 2 and not self._travels(before):
                    self._accept(pair, self._try(pair, before))
            before = node if node in cuts else before

    def _travels(self, node: fx.Node) -> bool:
        return node in self._wishes and node not in self.layers

    def _accept(self, nodes: list[fx.Node], trial: _Trial | None) -> None:
        """Let values be wide if that is within the limit."""
        if trial is None:
            return
        served = (self.layers.get(n, int(n in self._wishes)) for n in trial.begin)
        layers = len(nodes) + max(served, default=0)
        if layers <= self._most:
            self.boxes |= trial.boxes
            self._wishes |= trial.wishes
            self.layers |= dict.fromkeys(trial.chain, layers)

    def fetched(self) -> dict[fx.Node, Boxes]:
        """Return the values of which several parts are wanted: one exchange for all."""
        return {
            node: self._joined(node, wishes)
            for node, wishes in self._wishes.items()
            if node.op != "placeholder"
            and node not in self.layers
            and len({boxes for wished in wishes.values() for boxes in wished}) > 1
        }

    def _try(self, nodes: list[fx.Node], begin: fx.Node | None = None) -> _Trial | None:
        """Return what must change so that values are wide; None if they cannot be.

        `begin` shall travel in their place. Values are visited from the last to the
        first: when one is, all its users are.
        """
        trial = _Trial(set(nodes), set(), {}, {})
        first = -1 if begin is None else self._place[begin]
        queue = [-self._place[node] for node in reversed(nodes)]
        while queue:
            value = self._stage.nodes[-heappop(queue)]
            if value in trial.boxes:
                continue
            if value not in self.layers and not self._can_be_wide(value):
                return None
            wishes = trial.wishes.get(value, self._wishes.get(value, {}))
            trial.boxes[value] = self._joined(value, wishes)
            wanted = self._wanted(value, trial.boxes[value])
            for source, boxes in wanted.items():
                known = trial.wishes.get(source, self._wishes.get(source, {}))
                trial.wishes[source] = {**known, value: boxes}
                if source in self.layers or source in trial.chain:
                    heappush(queue, -self._place[source])
                elif not (
                    source.op == "placeholder"
                    or source is begin
                    or source in self._wishes
                ):
                    if self._place.get(source, -1) <= first:
                        return None
                    trial.chain.add(source)
                    heappush(queue, -self._place[source])
                if source not in trial.chain:
                    trial.begin.add(source)
        return trial

    def _can_be_wide(self, node: fx.Node) -> bool:
        """Whether a rule computes more of a value than the tile's own part."""
        value = meta.value(node)
        if node not in self.boxes or meta.glue(node) is not None:
            return False
        if self._low.has_own_backward(node):  # a row's gradient must be on one tile
            return False
        if node in self._wrapped:
            return False
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        if not all(user in self._place for user in node.users):
            return False
        call = call_of(node, self._low.program.module)
        if call.kind in RULES:
            return operator_of(call).wide
        return node.target is not getitem and self._low.probe.is_pointwise(node)

    def _wanted(self, node: fx.Node, boxes: Boxes) -> dict[fx.Node, tuple[Boxes, ...]]:
        """Return what a node wants of its inputs beyond the tiles' own parts."""
        if (node, boxes) in self._known:
            return self._known[node, boxes]
        result: dict[fx.Node, tuple[Boxes, ...]] = {}
        for need in self._low.needs(node, boxes):
            shape, axes = self._low.shape(need.source), self._low.axes(need.source)
            owned = self._low.owned(shape, axes)
            if need.wraps:
                self._wrapped.add(need.source)
            if axes is not None and not covers(owned, need.wanted, shape):
                result[need.source] = (*result.get(need.source, ()), need.wanted)
        self._known[node, boxes] = result
        return result

    def _joined(self, node: fx.Node, wishes: Wishes) -> Boxes:
        """Return the smallest boxes that hold the own part and all that is wished."""
        shape = self._low.shape(node)
        image = everything(shape)
        wanted = [boxes for wished in wishes.values() for boxes in wished]
        return tuple(
            hull(mine, *(intersection(boxes[tile], image) for boxes in wanted))
            for tile, mine in enumerate(self._low.owned(shape, self._low.axes(node)))
        )


def _cuts(stage: Stage) -> set[fx.Node]:
    """Return the values alone of which all that follows in the stage is made."""
    places = {node: place for place, node in enumerate(stage.nodes)}
    reach = 0  # of the values so far
    cuts = set()
    for place, node in enumerate(stage.nodes):
        if reach <= place:
            cuts.add(node)
        reach = max(reach, *(places.get(user, 0) for user in node.users), 0)
    return cuts
