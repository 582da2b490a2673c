"""Mixtures of experts on shards: a rank has some of the experts, and their tokens."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Gemsc, gemsc_here
from expert_models import CAPACITY, EXPERTS, MIXTURES, batch, build, loss
from nightly import at_night
from shard_support import sharded
from tile_support import assert_same, eager, on_ranks
from torch import fx, nn
from torch.nn import functional as F

from gemsc.ir.flow import exchange_of, is_exchange
from gemsc.ir.program import Program

gemsc = pytest.fixture(gemsc_here)
pytestmark = pytest.mark.usefixtures("in_double")


def lowered(name: str, shards: int, trunk: str) -> tuple[Program, list[Program]]:
    inputs, target = batch()
    return sharded(build(name), inputs, loss, target, shards, trunk)


def compare(name: str, whole: Program, ranks: list[Program]) -> None:
    """Compare a step on ranks with one process."""
    inputs, target = batch()
    ours = on_ranks(whole, ranks, inputs, target)
    assert_same(ours, eager(build(name), inputs, loss, target))


@pytest.mark.slow(1)
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("trunk", ["whole", "batch", *at_night("sequence")])
@pytest.mark.parametrize("shards", [2, *at_night(3, 4)])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_on_ranks_compute_what_one_process_does(
    name: str, shards: int, trunk: str
) -> None:
    whole, ranks = lowered(name, shards, trunk)
    cut = {tensor.name: tensor for tensor in whole.shards[0].cut}
    for layer in ("mixtures.0", "mixtures.1"):
        for last in ("up", "down"):
            part = cut[f"{layer}.{last}"].parts[0]
            assert (part.dim, part.outer, part.units) == (0, 1, EXPERTS)
            assert cut[f"{layer}.{last}"].noun == "expert"
    compare(name, whole, ranks)


def shapes(program: Program, name: str) -> list[tuple[int, ...]]:
    """Return the shapes of what a function gives on this rank."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    calls = [n for n in nodes if n.target.__name__ == name]
    return [tuple(node.meta["val"].shape) for node in calls]


@pytest.mark.slow
def test_a_rank_computes_the_places_of_its_own_experts_alone() -> None:
    """Also before and after the experts: a part of the dispatch, not of its result."""
    _, ranks = lowered("switch", 2, "whole")
    inside = [s for s in shapes(ranks[0], "einsum") if len(s) == 3]
    assert inside == [(EXPERTS // 2, CAPACITY, 8)] * 2
    _, ranks = lowered("choice", 2, "whole")
    looked_up = [s for s in shapes(ranks[0], "getitem") if s[1:2] == (CAPACITY,)]
    assert looked_up[-1] == (EXPERTS // 2, CAPACITY, 8)


GIVEN, TOKENS = (4, EXPERTS, 2, 8), (4, 6, 8)


@pytest.mark.slow(1)
@pytest.mark.parametrize("shards", [2, 3])
def test_of_groups_that_are_split_what_experts_are_given_is_exchanged(
    shards: int,
) -> None:
    """And what they find: no tokens are gathered, and no sums scattered."""
    whole, ranks = lowered("groups", shards, "batch")
    sent = [exchange_of(n) for n in filter(is_exchange, ranks[0].graph.nodes)]
    sent = [swap for swap in sent if not swap.is_local]
    assert [swap.shape for swap in sent if len(swap.shape) == 4] == [GIVEN] * 4
    assert not any(swap.shape == TOKENS or swap.adds for swap in sent)
    groups = [swap.held[0][0] != (0, 4) for swap in sent if swap.shape == GIVEN]
    assert groups == [True, False] * 2  # from groups to experts, and back
    compare("groups", whole, ranks)


@pytest.mark.parametrize(("shards", "gathers"), [(2, True), (4, False)])
def test_what_sends_less_is_chosen(shards: int, gathers: bool) -> None:
    """Experts with places for more than three times as many tokens as there are."""
    _, ranks = lowered("roomy groups", shards, "batch")
    sent = [exchange_of(n) for n in filter(is_exchange, ranks[0].graph.nodes)]
    shapes = {swap.shape for swap in sent if not swap.is_local}
    assert (TOKENS in shapes) == gathers


@pytest.mark.slow
def test_with_fewer_experts_than_ranks_features_are_cut() -> None:
    whole, ranks = lowered("switch", EXPERTS + 2, "whole")
    cut = {tensor.name: tensor for tensor in whole.shards[0].cut}
    assert cut["mixtures.0.down"].noun == "feature"
    compare("switch", whole, ranks)


def test_a_layer_with_a_bias_has_no_experts() -> None:
    """Its outputs are in the weight, the bias and the result, but not in a value."""
    inputs, target = (torch.randn(4, 8),), torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    whole, _ = sharded(model, inputs, F.mse_loss, target, 2, "whole")
    assert {tensor.noun for tensor in whole.shards[0].cut} == {"feature"}


def first_experts(program: Program) -> int:
    """Let each rank take the tokens of the first experts instead of its own."""
    made = 0
    for node in program.graph.nodes:
        if getattr(node.target, "__name__", "") != "redistribute":
            continue
        exchange = node.args[2]
        same = (exchange.wanted[0],) * len(exchange.wanted)
        if len(set(exchange.held)) == 1 and exchange.wanted != same:
            node.args = (*node.args[:2], replace(exchange, wanted=same))
            made += 1
    return made


def base_on_every_rank(program: Program) -> int:
    """Add rows to the tokens themselves on every rank, and then the ranks' sums."""
    made = 0
    for node in program.graph.nodes:
        if node.target == "index_add" and node.args[0].target is torch.zeros_like:
            node.args = (node.args[0].args[0], *node.args[1:])
            made += 1
    return made


def sum_over_own_experts(program: Program) -> int:
    """Leave out the sums over the ranks."""
    made = 0
    for node in list(program.graph.nodes):
        if getattr(node.target, "__name__", "") == "all_reduce":
            users: list[fx.Node] = list(node.users)
            if any(
                user.target in (operator.add, "reshape", "view_as") for user in users
            ):
                node.replace_all_uses_with(node.args[1])
                made += 1
    return made


@pytest.mark.slow(1)
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("switch", first_experts),
        ("choice", base_on_every_rank),
        ("every token", sum_over_own_experts),
    ],
)
def test_a_mistake_in_the_program_is_found(name: str, mistake: object) -> None:
    whole, ranks = lowered(name, 2, "whole")
    made = [mistake(program) for program in ranks]  # type: ignore[operator]
    assert all(made)
    with pytest.raises(AssertionError):
        compare(name, whole, ranks)


FILE = """
import sys

sys.path.insert(0, {support!r})
import torch
from expert_models import batch, build, loss

def model():
    return build("switch")

def example_inputs():
    return batch()[0]

def example_target():
    return batch()[1]
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_command_line_compiles_and_verifies(tmp_path: Path, gemsc: Gemsc) -> None:
    support = str(Path(__file__).parents[1] / "support")
    (tmp_path / "net.py").write_text(FILE.format(support=support))
    words = "--ranks", "4", "--shards", "2", "--schedule", "mast", "--trunk", "batch"
    done = gemsc("compile", tmp_path / "net.py", "-o", tmp_path / "p", *words)
    assert done.code == 0, done.err
    assert "experts 0 to 2 of 4" in (tmp_path / "p" / "rank0.py").read_text()
    done = gemsc("verify", tmp_path / "p", "--dtype", "float64")
    assert done.code == 0, done.out + done.err
    assert "exact" in done.out
