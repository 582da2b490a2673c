"""Short skips are joined within a few layers, long ones go to the mirror."""

from __future__ import annotations

from typing import Any

import networks
import pytest
import torch
from networks import PICTURE, TEXT, rows
from program_support import Net, blocks_of
from torch import Tensor

from gemsc.ir.program import Program


def kinds(program: Program) -> dict[str, bool]:
    """Return value -> whether its skip is long."""
    return {skip.value.name: skip.long for skip in program.skips or ()}


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "block",
    [
        networks.Residual(down=True),
        networks.Residual(bottleneck=True),
        networks.PreActivation(),
        networks.Inception(),
        networks.SqueezeExcite(),
    ],
    ids=["basic", "bottleneck", "pre-activation", "inception", "squeeze"],
)
def test_the_skip_of_a_branched_block_is_short(block: torch.nn.Module) -> None:
    program = blocks_of(rows(block, *(networks.Residual() for _ in range(12))), PICTURE)
    skips = kinds(program)
    assert skips
    assert not any(skips.values())


@pytest.mark.slow
def test_the_skips_of_a_unet_are_long_at_every_level() -> None:
    skips = kinds(blocks_of(networks.FlatUNet(), PICTURE))
    assert skips == {"e1": True, "e2": True, "e3": True}


def test_the_skips_of_nested_modules_are_long_at_every_level() -> None:
    model = networks.Level(networks.Level(networks.Level(networks.conv())))
    skips = kinds(blocks_of(model, PICTURE))
    assert len(skips) == 3
    assert all(skips.values())


@pytest.mark.slow
def test_skips_of_dense_connections_are_long_as_they_are_joined_again_and_again() -> (
    None
):
    skips = kinds(blocks_of(networks.Dense(), PICTURE))
    assert sum(skips.values()) >= 7


@pytest.mark.slow
def test_the_sums_of_a_transformer_are_short_skips() -> None:
    skips = kinds(blocks_of(networks.FlatTransformer(), TEXT))
    assert len(skips) >= 7
    assert not any(skips.values())


@pytest.mark.slow
def test_a_tower_that_waits_for_the_other_is_a_long_skip() -> None:
    program = blocks_of(networks.TwoTowers(), TEXT, TEXT)
    (skip,) = program.skips or ()
    assert skip.long
    assert skip.last_use.target is torch.cat


def test_a_value_used_before_the_next_layer_is_no_skip() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * h.sigmoid())

    assert blocks_of(Net(forward), torch.zeros(2, 4)).skips == ()


def test_a_skip_knows_its_bytes_and_its_last_use() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.b(h) + h
        end = self.c(k) * h
        return self.d(end)

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    first = next(skip for skip in program.skips or () if skip.value.name == "h")
    assert first.num_bytes == 4 * 2 * 4
    assert first.last_use.name == "end"


def test_skips_stand_in_the_order_of_their_values() -> None:
    program = blocks_of(networks.FlatUNet(), PICTURE)
    order = [node.name for node in program.compute_nodes]
    places = [order.index(skip.value.name) for skip in program.skips or ()]
    assert places == sorted(places)
