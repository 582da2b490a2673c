"""Attention whose heads stay whole: each rank has its own queries, or samples."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from parity_support import FLOAT64, lowered, options, worst_error

from gemsc.base.rng import same_draws

WHOLE = tuple(f"blocks.{block}.{name}" for block in (0, 1) for name in ("qkv", "out"))


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["gpt", "gpt dropout"])
@pytest.mark.parametrize("trunk", ["batch", "sequence"])
def test_whole_heads_attend_from_the_queries_of_the_rank(
    name: str, trunk: str, tmp_path: Path
) -> None:
    choice = options(ranks=3, shards="3", trunk=trunk, whole=WHOLE, micro_batches=2)
    program = lowered(name, choice)
    assert not program.plan.barriers
    draws = same_draws if "dropout" in name else nullcontext
    error = worst_error(name, choice, tmp_path / "p", draws=draws)
    assert error <= FLOAT64


def test_of_heads_in_parts_each_rank_draws_its_own_of_the_mask(tmp_path: Path) -> None:
    choice = options(ranks=2, shards="2", trunk="whole", micro_batches=1)
    error = worst_error("gpt dropout", choice, tmp_path / "p", draws=same_draws)
    assert error <= FLOAT64
    text = (tmp_path / "p/rank0.py").read_text()
    assert "tiles.scaled_dot_product_attention(" in text
