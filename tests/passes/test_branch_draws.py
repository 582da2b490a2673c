"""What branches draw is apart from what all ranks draw; tiles of one draw the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_support import options
from threads import run_on_threads
from torch import Tensor, fx, nn

from gemsc.base.boxes import everything
from gemsc.codegen.package import write_directory
from gemsc.compiler import Traced, lower, trace
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.invariants import drawn_alike
from gemsc.ir.program import Program


def attend(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2).unflatten(2, (2, 3)).transpose(1, 2)
    attended = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.5)
    return attended.transpose(1, 2).flatten(2).transpose(1, 2).view(x.shape)


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": nn.Dropout(0.5),
    "its function": lambda x: F.dropout(x, 0.5),
    "of channels": nn.Dropout2d(0.5),
    "gathered": nn.AlphaDropout(0.5),
    "attention": attend,
    "of nothing": nn.Dropout(0.0),
}


class Noisy(nn.Module):
    """Three branches, of which one rank has two: it would draw more than the other."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.noise(branch(x)) for branch in self.branches], 1)
        return F.dropout(joined, 0.5)


@functools.cache
def traced(kind: type[Noisy], noise: str, *shape: int) -> Traced:
    """Return such a network, traced once for all grids."""
    x = torch.randn(*(shape or (2, 6, 8, 8)))
    given = {"loss": F.mse_loss, "example_target": x.repeat(1, 3, 1, 1)}
    return trace(kind(NOISE[noise]), (x,), **given)


def draws(program: Program) -> list[int | None]:
    """Return the number of each node that draws apart, None for those that do not."""
    nodes = (node for node in program.compute_nodes if meta.facts(node).random)
    return [meta.region(node).draw for node in nodes]


@pytest.mark.slow(2)
@pytest.mark.parametrize("noise", [name for name in NOISE if name != "of nothing"])
@pytest.mark.parametrize("grid", [{"ranks": 2}, {"ranks": 4, "tiles": "2x1"}], ids=str)
def test_branches_draw_apart(noise: str, grid: dict[str, object]) -> None:
    made = options(branches="2", **grid)
    tiles = lower(traced(Noisy, noise), made).compilation.tiles
    rows = [draws(tile.program) for tile in tiles]
    assert [draw.count(None) for draw in rows] == [1] * len(rows)  # after the branches
    assert [len(draw) for draw in rows] == [3, 2] * (len(rows) // 2)
    assert len({draw for drawn in rows[:2] for draw in drawn}) == 4
    assert rows == rows[:2] * (len(rows) // 2)  # all tiles draw the same


class Unlike(Noisy):
    """Its graph in evaluation is another one, which draws as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x.tanh())


@pytest.mark.slow(2)
@pytest.mark.parametrize("noise", ["its function", "attention"])
@pytest.mark.parametrize("kind", [Noisy, Unlike])
@pytest.mark.parametrize("grid", [{"ranks": 2}, {"ranks": 4, "tiles": "2x1"}], ids=str)
def test_branches_draw_apart_in_evaluation(
    noise: str, kind: type[Noisy], grid: dict[str, object]
) -> None:
    made = options(branches="2", **grid)
    tiles = lower(traced(kind, noise), made).compilation.tiles
    rows = [draws(tile.evaluation) for tile in tiles]
    assert [draw.count(None) for draw in rows] == [1] * len(rows)
    assert len({draw for drawn in rows[:2] for draw in drawn}) == 4
    assert rows == rows[:2] * (len(rows) // 2)


@pytest.mark.parametrize("grid", [{"ranks": 2}, {"ranks": 4, "tiles": "2x1"}], ids=str)
def test_a_branch_may_have_a_dropout_of_nothing(grid: dict[str, object]) -> None:
    made = options(branches="2", **grid)
    tiles = lower(traced(Noisy, "of nothing"), made).compilation.tiles
    assert {len(draws(tile.program)) for tile in tiles} == {1}  # after the branches


def draw_whole(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "box": everything(node.kwargs["shape"])}


def draw_more(node: fx.Node) -> None:
    larger = tuple(2 * size for size in node.kwargs["shape"])
    node.kwargs = {**node.kwargs, "shape": larger, "along": 2}


def draw_for_another(node: fx.Node) -> None:
    meta.traced_place.set(node, meta.traced_place(node) + 1)


def draw_nothing(node: fx.Node) -> None:
    meta.facts.set(node, replace(meta.facts(node), random=False))


def draw_other_strips(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "along": 3}


def test_what_draws_apart_and_does_not_say_so_is_a_wrong_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = traced(Noisy, "dropout")
    monkeypatch.setattr(meta, "set_draw", lambda node, draw: None)
    with pytest.raises(InternalError, match=r"_draws.py:\d+: .* draw different random"):
        lower(graph, options(ranks=2, branches="2"))


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "change",
    [draw_whole, draw_other_strips, draw_more, draw_for_another, draw_nothing],
)
def test_ranks_that_draw_otherwise_are_a_wrong_program(
    change: Callable[[fx.Node], None],
) -> None:
    """In `same_draws`, in which programs are compared, each has the same numbers."""
    graph = traced(Noisy, "dropout", 1, 6, 256, 256)
    ranks = lower(graph, options(ranks=2, tiles="2x1")).compilation.tiles
    programs = [rank.program for rank in ranks]
    change([n for n in programs[1].compute_nodes if "draw" in n.kwargs][-1])
    with pytest.raises(InternalError, match=r"_draws.py:\d+: .* draw different random"):
        drawn_alike(programs)
    with pytest.raises(InternalError, match="draw different random"):
        drawn_alike(programs[::-1])
    drawn_alike(programs[:1])


def test_tiles_of_other_sizes_draw_alike_for_channels() -> None:
    graph = traced(Noisy, "of channels", 1, 6, 7, 8)
    tiles = lower(graph, options(ranks=2, tiles="2x1")).compilation.tiles
    drawn_alike([rank.program for rank in tiles])


class Gated(nn.Module):
    """Two branches, of which one gives what lies otherwise in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.channels = (
            nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        channels = self.channels(x.transpose(1, 2)).transpose(1, 2)
        return F.dropout(channels * self.words(x), 0.5)


def test_what_all_ranks_draw_for_lies_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask is drawn in the order of memory, of which an own branch has another."""
    x = torch.randn(2, 8, 8)
    graph = trace(Gated(), (x,), loss=F.mse_loss, example_target=x)
    program = lower(graph, options(ranks=2, branches="2", trunk="whole"))
    write_directory(program.compilation, tmp_path)
    dropout, seen = F.dropout, []

    def spied(x: Tensor, *args: Any, **settings: Any) -> Tensor:
        seen.append(x.stride())
        return dropout(x, *args, **settings)

    monkeypatch.setattr(F, "dropout", spied)
    batch = torch.randn(8, 8, 8, dtype=torch.float64)
    run_on_threads(tmp_path, 2, [(batch, batch)])
    assert seen == [(64, 8, 1)] * 8  # four micro-batches, on each rank
