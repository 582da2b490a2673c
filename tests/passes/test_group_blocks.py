"""Cuts fall between blocks only, and blocks are what a person would call so."""

from __future__ import annotations

import re
from typing import Any

import networks
import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from networks import PICTURE, TEXT, rows
from nightly import at_night
from program_support import Net, blocks_of, node
from torch import Tensor, nn

from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.program import Block, Program


def block_of(program: Program) -> dict[Any, Block]:
    return {node: block for block in program.blocks or () for node in block.nodes}


def paths(block: Block) -> set[str]:
    return {
        str(n.target) if n.op == "call_module" else meta.module_path(n)
        for n in block.nodes
    }


def blocks_with(program: Program, path: str) -> set[int]:
    """Return the blocks in which nodes of a module lie."""
    return {
        block.index
        for block in program.blocks or ()
        if any(p == path or p.startswith(f"{path}.") for p in paths(block))
    }


def crossing(program: Program) -> list[int]:
    """Return how many values cross each gap between two blocks."""
    block = block_of(program)
    last = {
        n: max((block[u].index for u in n.users if u in block), default=b.index)
        for n, b in block.items()
    }
    gaps = range(len(program.blocks or ()) - 1)
    return [sum(b.index <= g < last[n] for n, b in block.items()) for g in gaps]


RESIDUAL = {
    "basic": lambda: networks.Residual(),
    "basic, downsample": lambda: networks.Residual(down=True),
    "bottleneck": lambda: networks.Residual(bottleneck=True),
    "bottleneck, downsample": lambda: networks.Residual(bottleneck=True, down=True),
    "pre-activation": networks.PreActivation,
    "inception": networks.Inception,
    "squeeze and excitation": networks.SqueezeExcite,
}


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize("kind", RESIDUAL)
def test_a_cut_never_falls_inside_a_branched_block(kind: str) -> None:
    count = 8 if kind == "inception" else 4
    program = blocks_of(rows(*(RESIDUAL[kind]() for _ in range(count))), PICTURE)
    by_path = [blocks_with(program, str(path + 1)) for path in range(count)]
    assert all(len(blocks) == 1 for blocks in by_path)
    assert len(set.union(*by_path)) == count
    assert crossing(program) == [1] * (len(program.blocks or ()) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", *at_night("resnet110v2")])
def test_the_blocks_of_a_residual_network_are_its_residual_blocks(name: str) -> None:
    case = MODELS[name]
    loss = lambda output: case.loss(output, case.example_target)  # noqa: E731
    program = blocks_of(case.build(), *case.example_inputs, loss=loss)
    assert set(crossing(program)) == {1}
    residual = {
        path
        for path, module in program.module.named_modules()
        if path.startswith("layer") and len(path.split(".")) == 2
    } or {
        path
        for path, module in program.module.named_modules()
        if "Block" in type(module).__name__ or "Unit" in type(module).__name__
    }
    assert len(residual) > 5
    assert all(len(blocks_with(program, path)) == 1 for path in residual)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "model",
    [
        networks.FlatUNet(),
        networks.Level(networks.Level(networks.Level(networks.conv()))),
    ],
    ids=["flat", "nested"],
)
def test_a_level_of_a_unet_is_not_glued_to_its_mirror(model: nn.Module) -> None:
    program = blocks_of(model, PICTURE)
    heavy = [n for n in program.compute_nodes if meta.facts(n).heavy]
    block = block_of(program)
    assert len(heavy) == 7
    assert len({block[n].index for n in heavy}) == 7
    # each level's skip and the value on its way down or up
    assert crossing(program) == [2, 3, 4, 3, 2, 1] or max(crossing(program)) == 4


@pytest.mark.slow
def test_the_unet_of_the_examples_has_a_block_for_each_convolution() -> None:
    case = MODELS["unet"]
    loss = lambda output: case.loss(output, case.example_target)  # noqa: E731
    program = blocks_of(case.build(), *case.example_inputs, loss=loss)
    block = block_of(program)
    heavy = [n for n in program.compute_nodes if meta.facts(n).heavy]
    assert len({block[n].index for n in heavy}) == len(heavy)


@pytest.mark.slow
def test_densely_connected_layers_can_be_cut() -> None:
    program = blocks_of(networks.Dense(), PICTURE)
    assert len(program.blocks or ()) >= 8


@pytest.mark.slow
def test_a_transformer_without_modules_is_cut_between_its_sums() -> None:
    program = blocks_of(networks.FlatTransformer(), TEXT)
    assert set(crossing(program)) == {1}
    assert len(program.blocks or ()) == 9  # enter, attention and mlp of each layer


@pytest.mark.slow
def test_a_transformer_of_modules_is_cut_between_its_sums() -> None:
    case = MODELS["encoder"]
    loss = lambda output: case.loss(output, case.example_target)  # noqa: E731
    program = blocks_of(case.build(), *case.example_inputs, loss=loss)
    assert set(crossing(program)) <= {1, 2}  # the mask is an input of all
    assert len(program.blocks or ()) >= 8


class Projected(nn.Module):
    """A layer as Llama has it: four products between a norm and its residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o, self.ffn = (
            nn.Linear(width, width) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = (p(h).unflatten(-1, (2, -1)).mT for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(*heads).mT.flatten(-2))
        return x + F.silu(self.ffn(self.ffn_norm(x)))


@pytest.mark.slow
def test_a_norm_is_behind_the_cut_where_the_sum_before_it_is_added_up_later() -> None:
    """Else both would be sent: the sum, and what the norm makes of it."""
    layers = [Projected(16) for _ in range(4)]
    program = blocks_of(nn.Sequential(nn.Linear(16, 16), *layers), torch.ones(2, 8, 16))
    assert [skip.long for skip in program.skips or ()].count(True) == 4
    assert crossing(program) == [1, 2, 1] * 4  # before, in and after each attention


@pytest.mark.slow
def test_towers_can_be_cut_anywhere() -> None:
    program = blocks_of(networks.TwoTowers(), TEXT, TEXT)
    assert len(program.blocks or ()) == 13
    assert max(crossing(program)) == 2


def test_calls_of_a_layer_with_running_statistics_stay_together() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        x = self.c(self.b(x))
        return self.d(self.norm(x))

    program = blocks_of(Net(forward, norm=nn.BatchNorm1d(4)), torch.zeros(2, 4))
    assert len(blocks_with(program, "norm")) == 1
    (index,) = blocks_with(program, "norm")
    assert blocks_with(program, "b") == blocks_with(program, "c") == {index}
    assert len(program.blocks or ()) > 1


def test_a_layer_without_buffers_may_be_called_in_several_blocks() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(self.b(self.c(self.a(x))))

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    assert len(blocks_with(program, "a")) == 2


@pytest.mark.slow
def test_what_is_no_tensor_is_never_cut() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        parts = self.a(x).chunk(2, 1)
        h = self.b(parts[0].repeat(1, 2))
        left, right = torch.split(self.c(h), 2, 1)
        return self.d(torch.cat([left, right, parts[1]], 1)[:, :4])

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    block = block_of(program)
    tuples = [n for n in block if not isinstance(meta.value(n), Tensor)]
    assert len(tuples) == 2
    for split in tuples:
        assert {block[user].index for user in split.users} == {block[split].index}


def test_what_canonicalize_glued_is_never_cut() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        row = h[0]
        k = self.b(h.detach())
        row += 1  # seen through h: stays in place
        return self.c(h) + k

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    block = block_of(program)
    glued = [n for n in block if meta.glue(n) is not None]
    assert len(glued) > 1
    assert len({block[n].index for n in glued}) == 1


def test_a_cut_falls_where_the_fewest_bytes_cross() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        wide = self.a(x)
        grown = wide.repeat(1, 4)
        small = grown[:, :1]
        again = small.repeat(1, 4)
        return self.b(again)

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    block = block_of(program)
    assert block[node(program, "small")] != block[node(program, "again")]


def test_activations_follow_their_layer() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)
    )
    program = blocks_of(model, torch.zeros(2, 4))
    assert len((program.blocks or ())[0].nodes) == 3
    assert [block.name for block in program.blocks or ()] == ["0", "3"]


def test_names_of_blocks_are_unique_and_say_where_they_are() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = F.linear(x, self.a.weight)
        return self.a(self.a(x))

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    names = [block.name for block in program.blocks or ()]
    assert names == ["a.weight", "a", "a (2)"]


class Scaled(nn.Module):
    """Layers to which something is added that is computed once or for each."""

    def __init__(self, once: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.once = once

    def forward(self, x: Tensor, rates: Tensor) -> Tensor:
        scale = rates.exp()
        for layer in self.layers:
            scale = scale if self.once else rates.exp()
            x = torch.relu(layer(x) + scale.tanh())
        return x


@pytest.mark.slow
def test_what_ties_blocks_is_named_and_the_advice_works() -> None:
    given = torch.randn(8, 6), torch.randn(8, 6)
    with pytest.raises(GemscError, match="4 stages need at least 4 blocks") as caught:
        compile(Scaled(once=True), given, ranks=4)
    (note,) = caught.value.__notes__
    assert re.match(
        r"'scale' of .*test_group_blocks.py:\d+ is used until .*together", note
    )
    assert str(caught.value.help).endswith(
        "compute 'scale' again for each layer that uses it"
    )
    assert compile(Scaled(once=False), given, ranks=4).plan.ranks == 4


class Drawn(Scaled):
    """Layers to which something drawn is added."""

    def forward(self, x: Tensor, rates: Tensor) -> Tensor:
        return super().forward(x, torch.randn_like(rates))


@pytest.mark.slow
def test_what_is_drawn_is_not_to_be_drawn_again() -> None:
    given = torch.randn(8, 6), torch.randn(8, 6)
    with pytest.raises(GemscError, match="4 stages need at least 4 blocks") as caught:
        compile(Drawn(once=True), given, ranks=4)
    assert str(caught.value.help).endswith(
        "draw 'scale' in the dataset, and pass it as an input"
    )


class Picks(nn.Module):
    """Picks by data, within a module of its own or of all layers."""

    def forward(self, h: Tensor) -> Tensor:
        return h[h > 0].sum()


class Deep(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.picks = Picks()
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        out: Tensor = self.picks(x) if self.apart else x[x > 0].sum()
        return out


@pytest.mark.slow
def test_the_line_that_keeps_a_model_whole_is_named_and_the_advice_works() -> None:
    def model(apart: bool) -> Net:
        return Net(lambda self, x: self.net(x) * 2, net=Deep(apart))

    given = (torch.randn(8, 6),)
    with pytest.raises(GemscError, match="2 stages need at least 2 blocks") as caught:
        compile(model(apart=False), given, ranks=2)
    (note,) = caught.value.__notes__
    assert re.match(
        r"'net' stays whole, for .*test_group_blocks.py:\d+: the size of this", note
    )
    assert "outside of 'net'" in str(caught.value.help)
    assert compile(model(apart=True), given, ranks=2).plan.ranks == 2
