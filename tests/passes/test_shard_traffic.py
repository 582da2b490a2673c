"""What shards send: as many sums and bytes as the papers say, and as are counted.

What is predicted is compared with what is counted in test_traffic.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from gpt import Gpt, cross_entropy, words
from nightly import at_night
from parity_support import lowered, options

from gemsc.compiler import Traced, lower, trace
from gemsc.plan import Plan

BATCH, LENGTH, WIDTH, WORDS = 4, 12, 24, 37
VALUE = BATCH * LENGTH * WIDTH * torch.float32.itemsize  # bytes between the blocks


@cache
def gpt(depth: int) -> Traced:
    (tokens,), target = words(BATCH, LENGTH, WORDS)
    model = Gpt(WIDTH, 4, depth, WORDS, LENGTH)
    return trace(
        model, (tokens,), loss=cross_entropy, example_target=target, check=False
    )


def planned(depth: int, shards: int, trunk: str) -> Plan:
    choice = options(ranks=shards, shards=shards, trunk=trunk, micro_batches=1)
    return lower(gpt(depth), choice).plan


def of_a_block(shards: int, trunk: str) -> dict[str, int]:
    """Return what one block sends for a micro-batch, forward and backward."""
    one, two = (planned(depth, shards, trunk).traffic for depth in (1, 2))
    return {name: two[name] - one[name] for name in one}


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, *at_night(3)])
def test_a_block_needs_two_sums_forward_and_two_backward(shards: int) -> None:
    assert of_a_block(shards, "whole") == {
        "messages": 0,
        "message_bytes": 0,
        "sums": 4 * shards,
        "sum_bytes": 4 * shards * VALUE,
    }


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize(("shards", "trunk"), [(2, "batch"), (3, "sequence")])
def test_a_split_trunk_takes_two_gathers_and_two_reductions_each_way(
    shards: int, trunk: str
) -> None:
    pairs = shards * (shards - 1)
    assert of_a_block(shards, trunk) == {
        "messages": 2 * 4 * pairs,
        "message_bytes": 2 * 4 * (shards - 1) * VALUE,
        "sums": 0,
        "sum_bytes": 0,
    }


@pytest.mark.slow(1)
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_words_over_ranks_take_a_sum_and_two_numbers_a_token(shards: int) -> None:
    choice = options(ranks=shards, shards=shards, trunk="whole", micro_batches=1)
    program = lowered("words", choice)
    tokens, width = 4 * 10, 24  # of shard_models
    item = torch.float32.itemsize
    embedded = tokens * width * item  # forward, and its gradient
    weighted_and_smoothed = 3  # numbers of each token and rank, else 2
    table = shards * tokens * weighted_and_smoothed * item
    assert program.plan.traffic == {
        "messages": 0,
        "message_bytes": 0,
        "sums": 4 * shards,
        "sum_bytes": shards * (2 * embedded + table + item),
    }
