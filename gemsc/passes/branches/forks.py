"""Find forks: branches between which nothing flows, up to the node that joins them.

Example, an Inception block:
    x -> 1x1 ---------------+
      -> 1x1 -> 3x3 --------+-> cat        # four branches
      -> 1x1 -> 5x5 --------+
      -> pool -> 1x1 -------+

For each node that may be a join, the stage is scanned backwards from it. A window has
the nodes from some position on that lead to the join only; its connected components
are the branches. It grows node by node; where the next node would connect two of them,
or give one something more than work to do, the window is a fork.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from gemsc.ir import meta
from gemsc.ir.flow import used_tensors
from gemsc.ir.holder import called_layer
from gemsc.ir.opaque import has_own_backward, has_state
from gemsc.ir.program import Program, Stage
from gemsc.passes.shards.choice import kept_whole

ADDITIONS = (operator.add, torch.add, "add")


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """What would be a branch: the places of its nodes among those of the stage.

    `results` are the nodes that the join takes; `stays` says why all ranks must compute
    it, "" if one may.
    """

    of: Sequence[fx.Node]
    places: tuple[int, ...]
    results: tuple[fx.Node, ...]
    seconds: float
    stays: str = ""

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes, in order."""
        return tuple(self.of[place] for place in sorted(self.places))


@dataclass(frozen=True, slots=True)
class ForkWindow:
    """A join with the components before it; `added` are the additions it ends."""

    join: fx.Node
    added: tuple[fx.Node, ...]
    components: tuple[Component, ...]


@dataclass
class _Group:
    """A component as it grows backwards: positions, in descending order.

    `missing` are nodes that must belong to it and do not yet.
    """

    members: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    missing: set[fx.Node] = field(default_factory=set)
    seconds: float = 0.0
    is_heavy: bool = False
    stays: str = ""


class Finder:
    """Knows of each node of a stage what it needs, and scans from joins.

    `keep_whole` are modules and tensors whose nodes all ranks compute. Seconds are
    those of one of `tiles`; if there are several, all ranks compute what tiles have to
    compute alike.
    """

    def __init__(
        self,
        program: Program,
        stage: Stage,
        keep_whole: Mapping[str, str],
        *,
        tiles: int = 1,
    ) -> None:
        self.tiles = tiles
        self.nodes = stage.nodes
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.sources = [
            [self.position[s] for s in node.all_input_nodes if s in self.position]
            for node in self.nodes
        ]
        self.next = [self._users(node) for node in self.nodes]
        self.before: list[list[int]] = [[] for _ in self.nodes]
        for place, users in enumerate(self.next):
            for user in users or ():
                self.before[user].append(place)
        self.stays = [
            _stays(program, node, keep_whole, tiled=tiles > 1) for node in self.nodes
        ]
        self.ties = self._ties(program)

    def _users(self, node: fx.Node) -> list[int] | None:
        """Return the positions of a node's users, None if it leaves the stage.

        Nothing uses a call like `y[0] = x` itself: what it changes has the users.
        """
        users = dict.fromkeys(node.users)
        if not users and meta.glue(node) is not None:
            glued = [n for n in self.nodes if meta.glue(n) == meta.glue(node)]
            users = dict.fromkeys(u for n in glued for u in n.users if u not in glued)
        places = sorted(self.position.get(user, -1) for user in users)
        is_inside = bool(places) and places[0] > self.position[node]
        return places if is_inside else None

    def _ties(self, program: Program) -> list[list[fx.Node]]:
        """Return, for each node, others that one rank must compute with it.

        Those are the calls of a layer with a state, nodes that change a value in
        place, and values that are no tensors.
        """
        groups: dict[object, list[fx.Node]] = {}
        for node in self.nodes:
            if meta.glue(node) is not None:
                groups.setdefault(("glue", meta.glue(node)), []).append(node)
            layer = called_layer(node, program.module)
            if layer is not None and has_state(layer):
                groups.setdefault(("layer", node.target), []).append(node)
            for source in node.all_input_nodes:
                if source.op != "get_attr" and not meta.is_one_tensor(source):
                    groups.setdefault(source, [source]).append(node)
        ties: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.nodes}
        for members in groups.values():
            for node in members:
                if node in ties and len(members) > 1:
                    ties[node] += [other for other in members if other is not node]
        return [ties[node] for node in self.nodes]

    def joins(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the position of each node that may be a join, with its additions."""
        for place, node in enumerate(self.nodes):
            takes_several = len(self.sources[place]) > 1 and meta.is_one_tensor(node)
            if takes_several and not self._is_addend(place):
                yield place, self._sum(place)

    def _is_addend(self, place: int) -> bool:
        """Whether a node is an addition whose result is only used by another one."""
        users = self.next[place]
        if users is None or len(users) > 1 or not _is_addition(self.nodes[place]):
            return False
        return _is_addition(self.nodes[users[0]])

    def _sum(self, join: int) -> tuple[int, ...]:
        """Return the additions of which a node is the last, in order."""
        is_number = meta.value(self.nodes[join]).dim() == 0
        if not _is_addition(self.nodes[join]) or (self.tiles > 1 and is_number):
            return ()
        added, todo = [join], [join]
        while todo:
            inner = [s for s in self.sources[todo.pop()] if self._is_addend(s)]
            added += inner
            todo += inner
        return tuple(sorted(added))

    def windows(
        self, join: int, added: tuple[int, ...], starts: Collection[int]
    ) -> Iterator[ForkWindow]:
        """Yield the windows of a join, small ones first, that may be forks.

        They begin where the next node would do more than lengthen a component, and
        after each of `starts`. If there are none, what would connect two components
        stays outside: weights of all branches that are computed after them.
        """
        windows = list(self._windows(join, added, starts))
        yield from windows or self._windows(join, added, starts, apart=True)

    def _windows(
        self,
        join: int,
        added: tuple[int, ...],
        starts: Collection[int],
        *,
        apart: bool = False,
    ) -> Iterator[ForkWindow]:
        scan = _Scan(self, join, added)
        if len(scan.begins) < 2:
            return
        place = join
        while place > 0 and not scan.is_over():
            place -= 1
            outside = not self._leads(scan, place) or (apart and scan.connects(place))
            if place in scan.skipped or outside:
                if place in starts and scan.is_fork():
                    yield scan.window()
                continue
            if (place in starts or not scan.is_plain(place)) and scan.is_fork():
                yield scan.window()
            scan.add(place)
        if scan.is_fork():
            yield scan.window()

    def _leads(self, scan: _Scan, place: int) -> bool:
        users = self.next[place]
        return users is not None and all(user in scan.inside for user in users)


class _Scan:
    """The components of one join while its window grows."""

    def __init__(self, finder: Finder, join: int, added: tuple[int, ...]) -> None:
        self.finder, self.join, self.added = finder, join, added
        self.skipped = {join, *added}
        before = {s for place in self.skipped for s in finder.before[place]}
        # where components begin: what else uses a value has one already
        self.begins = {
            s for s in before if self.skipped.issuperset(finder.next[s] or ())
        }
        self.begins -= self.skipped
        self.awaited = len(self.begins)
        self.inside = set(self.skipped)  # the window, the join and its additions
        self.group_of: dict[int, _Group] = {}
        self.groups: list[_Group] = []
        self.leaves = {s for place in self.skipped for s in finder.sources[place]}

    def is_over(self) -> bool:
        return not self.awaited and len(self.groups) < 2

    def is_fork(self) -> bool:
        return sum(group.is_heavy for group in self.groups) > 1

    def _users(self, place: int) -> list[_Group]:
        """Return the components that use a value, each once."""
        users = self.finder.next[place] or ()
        groups = [self.group_of[user] for user in users if user not in self.skipped]
        return list({id(group): group for group in groups}.values())

    def connects(self, place: int) -> bool:
        return len(self._users(place)) > 1

    def is_plain(self, place: int) -> bool:
        """Whether a node only makes one component longer, or begins one."""
        groups, finder = self._users(place), self.finder
        if finder.stays[place] or finder.ties[place] or len(groups) > 1:
            return False
        return not groups or place not in self.leaves

    def add(self, place: int) -> None:
        finder, node = self.finder, self.finder.nodes[place]
        self.inside.add(place)
        self.awaited -= place in self.begins
        tied = [finder.position.get(other, -1) for other in finder.ties[place]]
        groups = self._users(place)
        groups += [self.group_of[other] for other in tied if other in self.group_of]
        groups = list({id(group): group for group in groups}.values())
        group = self._merged(groups)
        self.group_of[place] = group
        group.members.append(place)
        if place in self.leaves:
            group.results.append(place)
        group.missing.discard(node)
        members = set(group.members) if tied else set()
        group.missing |= {
            other
            for other, at in zip(finder.ties[place], tied, strict=True)
            if at not in members
        }
        facts = meta.facts(node)
        group.seconds += facts.seconds / finder.tiles
        group.is_heavy |= facts.heavy
        group.stays = group.stays or finder.stays[place]

    def _merged(self, groups: list[_Group]) -> _Group:
        """Return one component of several: the largest takes in the others."""
        if not groups:
            self.groups.append(_Group())
            return self.groups[-1]
        group, *others = sorted(groups, key=lambda group: -len(group.members))
        for other in others:
            group.members += other.members
            group.results += other.results
            group.missing |= other.missing
            group.seconds += other.seconds
            group.is_heavy |= other.is_heavy
            group.stays = group.stays or other.stays
            self.group_of.update(dict.fromkeys(other.members, group))
            self.groups.remove(other)
        if others:
            nodes = self.finder.nodes
            group.missing -= {nodes[place] for place in group.members}
        return group

    def window(self) -> ForkWindow:
        nodes = self.finder.nodes
        components = [
            Component(
                nodes,
                tuple(group.members),
                tuple(nodes[place] for place in sorted(group.results)),
                group.seconds,
                group.stays or (_TIED if group.missing else ""),
            )
            for group in sorted(self.groups, key=lambda group: min(group.members))
        ]
        added = tuple(nodes[place] for place in self.added)
        return ForkWindow(nodes[self.join], added, tuple(components))


def most_branches(program: Program) -> int:
    """Return how many branches with work to do a model has side by side at most."""
    finder = Finder(program, Stage(0, tuple(program.blocks or ())), {})
    return max(
        (
            sum(part.seconds > 0 and not part.stays for part in window.components)
            for join, added in finder.joins()
            for window in finder.windows(join, added, ())
        ),
        default=0,
    )


_TIED = "it cannot be parted from nodes outside of it"


def _is_addition(node: fx.Node) -> bool:
    """Whether a node adds two tensors of the same shape and type, and nothing else."""
    if node.op == "call_module" or node.target not in ADDITIONS or node.kwargs:
        return False
    if len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    values = [meta.value(n) for n in (*node.all_input_nodes, node)]
    if not all(isinstance(value, Tensor) for value in values):
        return False
    return len({(value.shape, value.dtype) for value in values}) == 1


def _stays(
    program: Program, node: fx.Node, keep_whole: Mapping[str, str], *, tiled: bool
) -> str:
    """Return why all ranks must compute a node, "" if one may."""
    if tiled and meta.glue(node) is not None:
        return "it changes what tiles share in place"
    if tiled and has_own_backward(node, program.module):
        return "its backward is not looked into, and tiles add up its gradients"
    if keep_whole:
        for name in used_tensors(program, [node]):
            if reason := kept_whole(name, keep_whole):
                return reason
    return ""
