"""Every network of the tables over a finite field: all are proved."""

from __future__ import annotations

from pathlib import Path

import pytest
from branch_models import BRANCH_MODELS
from parity_support import NETWORKS, lowered, options
from shard_models import SHARD_MODELS
from test_all_inputs import answer_for

from gemsc.codegen.package import write_directory
from gemsc.options import CompileOptions

PICTURES = ("resnet18", "unet", "densecnn", "tiled", "vit", "resnext", "convnext")


def plans(name: str) -> dict[str, CompileOptions]:
    """Return the plans of a network, one of each kind that it has."""
    by_kind = {
        "1f1b": options(ranks=2, micro_batches=3, schedule="1f1b"),
        "recompute": options(ranks=2, micro_batches=2, recompute=("all",)),
        "offload": options(ranks=1, micro_batches=2, offload=("all",)),
        "mast": options(ranks=2, micro_batches=2, schedule="mast"),
        "data": options(ranks=4, micro_batches=2, data=2),
    }
    if name in PICTURES:
        by_kind["tiles"] = options(ranks=3, micro_batches=2, tiles="2x1")
    if name in SHARD_MODELS:
        by_kind["shards"] = options(ranks=2, micro_batches=2, shards=2)
    if name in BRANCH_MODELS:
        by_kind["branches"] = options(ranks=2, micro_batches=2, branches=2)
    return by_kind


REFUSED = (("parallel t5", "recompute"),)  # a block that writes to what it is given
CASES = [
    (name, kind)
    for name in sorted(NETWORKS)
    for kind in plans(name)
    if (name, kind) not in REFUSED
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_right_program_is_proved(name: str, kind: str, tmp_path: Path) -> None:
    how = plans(name)[kind]
    write_directory(lowered(name, how).compilation, tmp_path / "program")
    result = answer_for(name, how, tmp_path / "program")
    assert result.verdict == "proved", str(result)
