"""Forks are found in any graph, and their branches shared out as well as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branch_models import BRANCH_MODELS, ConvNorm, InceptionE, ParallelLayer
from models import Cell
from networks import mean
from nightly import at_night
from program_support import Net, node, run_passes
from random_branches import random_branches
from tile_support import one_stage
from torch import Tensor, fx, nn

from gemsc.costs.hardware import LinkSpeed
from gemsc.frontend.record import record
from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.ir.shards import Fork, StageShards
from gemsc.passes.annotate import Annotate
from gemsc.passes.branches.choice import choose_forks, placed_tensors
from gemsc.passes.canonicalize import Canonicalize

LINK = LinkSpeed(latency=1e-6, bandwidth=3e9)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
PICTURE = torch.zeros(2, 8, 16, 16)


def traced(model: nn.Module, *inputs: Tensor, loss: Any = mean) -> Program:
    program = record(model, inputs or (X,), loss=loss)
    return run_passes(one_stage(run_passes(program, (Canonicalize(),))), (Annotate(),))


def forks_of(program: Program, ranks: int = 2, **options: Any) -> tuple[Fork, ...]:
    (stage,) = program.require_stages()
    return choose_forks(program, stage, ranks, LINK, **options)


def shared(program: Program, ranks: int = 2, **options: Any) -> list[Fork]:
    return [fork for fork in forks_of(program, ranks, **options) if not fork.reason]


def names(fork: Fork) -> list[str]:
    return [branch.name for branch in fork.branches]


def net(forward: Callable[..., Tensor], *inputs: Tensor, **layers: Any) -> Program:
    return traced(Net(forward, **layers), *inputs)


# ------------------------------------------------------------ which forks are found


@pytest.fixture(scope="module")
def inception() -> Program:
    case = BRANCH_MODELS["inception"]
    (image,), _ = case.sample(2)
    return traced(case.make(), image)


@pytest.mark.slow
def test_inception_blocks_have_their_branches(inception: Program) -> None:
    forks = shared(inception)
    branches = {fork.name: set(names(fork)) for fork in forks}
    assert branches["blocks.0"] == {
        f"blocks.0.{name}" for name in ("one", "five", "three", "pooled")
    }
    assert branches["blocks.1"] == {
        f"blocks.1.{name}" for name in ("three", "twice", "pooled")
    }
    assert list(branches) == [f"blocks.{index}" for index in range(5)]
    assert all(node(inception, fork.join).target is torch.cat for fork in forks)


@pytest.mark.slow
def test_of_a_fork_in_branches_of_a_fork_the_better_ones_are_taken() -> None:
    outer = traced(InceptionE(8), PICTURE)
    (fork,) = shared(outer)
    assert len(fork.branches) == 4  # the ranks are full: the inner forks gain nothing
    inner = shared(traced(BRANCH_MODELS["nested"].make(), torch.randn(4, 12)))
    assert [fork.name for fork in inner] == ["inner", "after and light"]
    assert "after" in names(inner[1])  # a branch, without the fork before it


class Cells(nn.Module):
    """Three cells of AmoebaNet-D, each of which begins with two values."""

    def __init__(self) -> None:
        super().__init__()
        first = Cell(8, 8, 4, reduces=False, halved=False)
        second = Cell(8, first.outputs, 4, reduces=False, halved=False)
        inputs = first.outputs, second.outputs
        third = Cell(*inputs, 4, reduces=False, halved=False)
        self.cells = nn.ModuleList([first, second, third])

    def forward(self, x: Tensor) -> Tensor:
        before = last = x.sin()
        for cell in self.cells:
            before, last = last, cell(before, last)
        return last


@pytest.mark.slow
def test_cells_with_two_values_to_begin_with_are_forks() -> None:
    program = traced(Cells(), PICTURE)
    forks = shared(program)
    cats = [n.name for n in program.compute_nodes if n.target is torch.cat]
    assert {fork.join for fork in forks} >= set(cats)
    for fork in forks:  # what a cell begins with is used by the next one, too
        inside = {name for branch in fork.branches for name in branch.nodes}
        users = {user.name for name in inside for user in node_users(program, name)}
        assert users <= {*inside, fork.join, *fork.added}


def node_users(program: Program, name: str) -> Sequence[fx.Node]:
    return tuple(node(program, name).users)


@pytest.mark.slow
def test_attention_beside_the_mlp_is_a_fork_by_a_sum() -> None:
    layer = ParallelLayer(first=True, decodes=False)
    seen = torch.ones(1, 1, 1, 5, dtype=torch.bool)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.layer(x, self.layer.bias(5, seen), None, seen)

    program = net(forward, torch.randn(2, 5, 24), layer=layer)
    (fork,) = shared(program)
    assert {"layer.up", "layer.out"} == set(names(fork))
    assert [node(program, name).op for name in fork.added] == ["call_function"] * 2
    assert fork.added[-1] == fork.join


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "add",
    [
        lambda parts: sum(parts[1:], parts[0]),
        lambda parts: sum(parts),
        lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7])),
        lambda parts: torch.stack(parts).sum(0),
    ],
)
def test_eight_branches_that_are_added_are_one_fork(add: Any) -> None:
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
    program = net(
        lambda self, x: add([layer(x) for layer in self.experts]), experts=experts
    )
    (fork,) = shared(program)
    assert len(fork.branches) == 8
    ranks = [branch.rank for branch in fork.branches]
    assert ranks.count(0) == ranks.count(1) == 4
    is_sum = node(program, fork.join).target is not torch.stack
    assert len(fork.added) == (7 if is_sum else 0)


def test_a_sum_ends_where_its_value_is_used_twice_or_has_another_shape() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.a(x) + self.b(x)
        z = self.c(x) + y
        return z + y.sum(1, keepdim=True)  # of another shape

    (fork,) = shared(net(forward))
    assert names(fork) == ["a", "b"]
    assert len(fork.added) == 1


@pytest.mark.slow
def test_towers_are_branches_from_the_inputs_on() -> None:
    case = BRANCH_MODELS["towers"]
    inputs, _ = case.sample(4)
    (fork,) = shared(traced(case.make(), *inputs))
    assert fork.name == "image and text"
    assert [branch.rank for branch in fork.branches] == [0, 1]


@pytest.mark.slow
def test_a_head_whose_output_the_user_gets_is_no_branch() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = ConvNorm(8, 8, 3, padding=1)
            self.rest = nn.Sequential(ConvNorm(8, 8, 3), nn.Flatten(), nn.LazyLinear(4))
            self.aux = nn.Sequential(ConvNorm(8, 8, 3), nn.Flatten(), nn.LazyLinear(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            return self.rest(x), self.aux(x)

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0].square().mean() + 0.3 * outputs[1].square().mean()

    model = Heads()
    model(PICTURE)
    assert not forks_of(traced(model, PICTURE, loss=loss))


def test_a_chain_has_no_fork() -> None:
    assert not forks_of(net(lambda s, x: s.d(s.c(s.b(s.a(x)).relu()) + x)))


def test_short_skips_are_no_branches() -> None:
    assert not forks_of(net(lambda s, x: F.relu(x + s.b(s.a(x).relu()))))


# --------------------------------------------------------- what one rank must compute


def test_a_layer_with_statistics_in_two_branches_makes_them_one() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        one, two = self.norm(self.a(x)), self.norm(self.b(x))
        return torch.cat([one, two, self.c(x), self.d(x)], 1)

    (fork,) = shared(net(forward, norm=nn.BatchNorm1d(4)))
    assert sorted(len(branch.nodes) for branch in fork.branches) == [1, 1, 4]


def test_a_layer_with_statistics_that_the_trunk_uses_too_stays_there() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.cat([self.norm(self.a(x)), self.b(x), self.c(x)], 1)

    (fork,) = shared(net(forward, norm=nn.BatchNorm1d(4)))
    assert names(fork) == ["b", "c"]


def rank_of(*forks: Fork) -> dict[str, int]:
    return StageShards(2, "whole", (), forks=forks).rank_of


def test_a_linear_layer_of_two_branches_stays_whole() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cat([self.b(self.a(x)), self.c(self.a(x.sin())), self.d(x)], 1)

    program = net(forward)
    (stage,) = program.require_stages()
    (fork,) = shared(program)
    assert len(fork.branches) == 3
    ranks = {branch.name: branch.rank for branch in fork.branches}
    assert (ranks["a"], ranks["c"]) == (0, 1)
    placed = dict(placed_tensors(program, stage, rank_of(fork), ()))
    assert placed == {
        f"{layer}.{name}": int(layer != "b")
        for layer in "bcd"
        for name in ("weight", "bias")
    }
    without = placed_tensors(program, stage, rank_of(fork), ("d.bias",))
    assert "d.bias" not in dict(without)


def test_tied_weights_are_placed_by_their_first_name() -> None:
    tied = nn.Linear(4, 4)
    other = nn.Linear(4, 4, bias=False)
    other.weight = tied.weight

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cat([self.tied(self.other(x)), self.a(self.b(x))], 1)

    program = net(forward, other=other, tied=tied)
    (stage,) = program.require_stages()
    placed = dict(placed_tensors(program, stage, rank_of(*shared(program)), ()))
    assert len([name for name in placed if name.endswith("weight")]) == 3


def test_dropout_may_be_in_a_branch() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cat([F.dropout(self.a(x)), torch.rand_like(x) * self.b(x)], 1)

    (fork,) = shared(net(forward))
    assert [len(branch.nodes) for branch in fork.branches] == [2, 3]


def test_what_changes_in_place_stays_with_what_it_changes() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, 0] = self.b(x)[:, 1]
        return torch.cat([y, self.c(x), self.d(x)], 1)

    (fork,) = shared(net(forward))
    assert sorted(len(branch.nodes) for branch in fork.branches)[:2] == [1, 1]
    assert len(fork.branches) == 3


def test_parts_of_a_value_stay_on_its_side() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        one, two = self.a(x).chunk(2, 1)
        three, four = self.b(x).chunk(2, 1)
        return torch.cat([one, two, three, four, self.c(x)], 1)

    program = net(forward)
    for ranks in (2, 3):
        (fork,) = shared(program, ranks)
        for branch in fork.branches:
            inside = set(branch.nodes)
            for name in branch.nodes:
                if not isinstance(meta.value(node(program, name)), Tensor):
                    assert {u.name for u in node_users(program, name)} <= inside


def test_what_is_kept_whole_is_computed_by_all() -> None:
    program = net(lambda s, x: torch.cat([s.a(x), s.b(x), s.c(s.d(x))], 1))
    assert len(shared(program)[0].branches) == 3
    (fork,) = shared(program, keep_whole={"d": "--whole"})
    assert names(fork) == ["a", "b"]
    (left,) = forks_of(program, keep_whole={"d": "--whole", "b.bias": "--whole"})
    assert "--whole" in left.reason


# ------------------------------------------------------------------- who computes what


def test_the_slowest_branch_is_alone_and_small_ones_share_a_rank() -> None:
    wide = [nn.Linear(256, width) for width in (600, 200, 200, 190)]

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], 1)

    program = net(forward, torch.randn(64, 256), layers=nn.ModuleList(wide))
    (fork,) = shared(program)
    assert [branch.rank for branch in fork.branches] == [0, 1, 1, 1]
    slowest = fork.branches[0].seconds
    assert 0 < fork.saved < fork.seconds - slowest
    (more,) = shared(program, 4)
    loads = [sum(b.seconds for b in more.branches if b.rank == r) for r in range(4)]
    assert max(loads) == slowest


@pytest.mark.slow
def test_where_nothing_is_gained_it_says_why() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cat([self.large(x), self.small(x)], 1)

    layers = nn.Linear(256, 4096), nn.Linear(256, 700)
    program = net(forward, torch.randn(8, 256), large=layers[0], small=layers[1])
    (stage,) = program.require_stages()
    slow = LinkSpeed(latency=1e-3, bandwidth=1e6)
    (fork,) = choose_forks(program, stage, 2, slow)
    assert fork.reason.startswith("large alone takes ")
    assert fork.reason.endswith(" % of large and small")
    assert fork.saved < 0
    even = net(lambda s, x: torch.cat([s.a(x), s.b(x), s.c(x)], 1))
    (fork,) = choose_forks(even, even.require_stages()[0], 2, slow)
    assert fork.reason == "its messages take longer than what is saved"


@pytest.mark.slow
def test_the_choice_is_the_same_each_time(inception: Program) -> None:
    assert forks_of(inception, 3) == forks_of(inception, 3)


# ----------------------------------------------------- against all possible choices


class Every:
    """All windows of a stage, found and weighed without any shortcut."""

    def __init__(self, program: Program, ranks: int) -> None:
        (stage,) = program.require_stages()
        self.program, self.ranks, self.nodes = program, ranks, stage.nodes
        self.inside = set(stage.nodes)
        self.tied = {node: set(self.tied_to(node)) for node in stage.nodes}

    def best(self) -> float:
        """Return what the best forks save together of which no two overlap."""
        spans: dict[tuple[int, int], float] = {}
        for last, join in enumerate(self.nodes):
            if not isinstance(meta.value(join), Tensor):
                continue
            added = self.sum_of(join)
            for first in range(last):
                window = self.window(first, last, added)
                if self.nodes[first] not in window:
                    continue  # it is as the one after it
                parts = self.components(window)
                saved = self.saved(parts, join, added)
                if saved > 0:
                    spans[first, last] = max(saved, spans.get((first, last), 0.0))
        best = [0.0] * (len(self.nodes) + 1)  # of the nodes before each position
        for end in range(len(self.nodes)):
            ending = [best[a] + saved for (a, b), saved in spans.items() if b == end]
            best[end + 1] = max(best[end], *ending, 0.0)
        return best[-1]

    def sum_of(self, join: fx.Node) -> set[fx.Node]:
        """Return the additions of which a node is the last."""
        added: set[fx.Node] = set()
        todo = [join]
        while todo:
            node = todo.pop()
            if self.adds(node) and (node is join or len(node.users) == 1):
                added.add(node)
                todo += [s for s in node.all_input_nodes if s in self.inside]
        return added

    def adds(self, node: fx.Node) -> bool:
        if "add" not in str(node.target) or len(node.args) != 2:
            return False
        sides = [a for a in node.args if isinstance(a, fx.Node)]
        shapes = {meta.spec(side).shape for side in [*sides, node]}
        return len(sides) == 2 and len(shapes) == 1

    def window(self, first: int, last: int, added: set[fx.Node]) -> list[fx.Node]:
        """Return the nodes from `first` on whose paths all go through the join."""
        leads = {self.nodes[last]}
        for earlier in reversed(self.nodes[first:last]):
            if (users := self.readers(earlier)) and users <= leads:
                leads.add(earlier)
        return [n for n in self.nodes[first:last] if n in leads and n not in added]

    def readers(self, node: fx.Node) -> set[fx.Node]:
        """Return its users; of a change in place, who reads that memory after it."""
        if node.users or meta.glue(node) is None:
            return set(node.users)
        users = {user for mate in self.tied[node] for user in mate.users}
        return {user for user in users if user > node}

    def components(self, window: list[fx.Node]) -> list[list[fx.Node]]:
        edges: dict[fx.Node, set[fx.Node]] = {member: set() for member in window}
        for member in window:
            for other in (*member.users, *self.tied[member]):
                if other in edges:
                    edges[member].add(other)
                    edges[other].add(member)
        parts, left = [], list(window)
        while left:
            part, todo = [], [left[0]]
            while todo:
                member = todo.pop()
                if member in left:
                    left.remove(member)
                    part.append(member)
                    todo += edges[member]
            parts.append(part)
        return parts

    def tied_to(self, node: fx.Node) -> Iterator[fx.Node]:
        if not isinstance(meta.value(node), Tensor):
            yield from node.users
        for other in self.nodes:
            if other is node:
                continue
            if meta.glue(node) is not None and meta.glue(node) == meta.glue(other):
                yield other
            if node in other.users and not isinstance(meta.value(other), Tensor):
                yield other
            if node.op == other.op == "call_module" and node.target == other.target:
                layer = self.program.module.get_submodule(str(node.target))
                if any(True for _ in layer.buffers()):
                    yield other

    def saved(
        self, parts: list[list[fx.Node]], join: fx.Node, added: set[fx.Node]
    ) -> float:
        if sum(any(meta.facts(n).heavy for n in part) for part in parts) < 2:
            return 0.0
        free = [p for p in parts if all(self.tied[n] <= set(p) for n in p)]
        every = product(range(-1, self.ranks), repeat=len(free))
        return max(self.weighed(free, ranks, join, added) for ranks in every)

    def weighed(
        self,
        parts: list[list[fx.Node]],
        ranks: Sequence[int],
        join: fx.Node,
        added: set[fx.Node],
    ) -> float:
        """Return what is saved where `ranks` compute parts; -1 stands for all."""
        if len(set(ranks) - {-1}) < 2:
            return 0.0
        ends = {join, *added}
        seconds = [sum(meta.facts(n).seconds for n in part) for part in parts]
        loads = [
            sum(s for s, r in zip(seconds, ranks, strict=True) if r in (-1, rank))
            for rank in range(self.ranks)
        ]
        sent, learnt = [], []
        for rank in range(self.ranks):
            mine = [p for p, r in zip(parts, ranks, strict=True) if r == rank]
            gives = [n for p in mine for n in p if ends & n.users.keys()]
            if added and mine:
                gives = [join]
            needed = [n for n in gives if meta.needs_gradient(n)]
            sent.append(sum(meta.facts(n).output_bytes for n in gives))
            learnt.append(sum(meta.facts(n).output_bytes for n in needed))
        forward = max(
            sum(LINK.seconds(b) for s, b in enumerate(sent) if b and s != rank)
            for rank in range(self.ranks)
        )
        backward = max((self.ranks - 1) * LINK.seconds(b) if b else 0 for b in learnt)
        return sum(seconds) - max(loads) - forward - backward


SMALL, LARGE = (0, 2, 3, 6, 10), (1, 4, 5, 7, 8, 9, 11, 12, 13)
GATED = (11, 13)  # a gate stays outside of a fork, which `Every` does not try


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize("seed", [*SMALL, *at_night(*LARGE)])
def test_no_other_choice_of_forks_saves_more(seed: int) -> None:
    case = random_branches(seed)
    program = traced(case.model, *case.inputs)
    best = Every(program, 2).best()
    saved = sum(fork.saved for fork in shared(program))
    if seed in GATED:
        assert 1 < saved / best < 1.2
    else:
        assert saved == pytest.approx(best, rel=0.01)
