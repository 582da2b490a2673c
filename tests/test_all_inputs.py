"""Programs over a finite field: right ones are proved, changed ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity_support import NETWORKS, lowered, options

from gemsc.codegen.package import write_directory
from gemsc.options import CompileOptions
from gemsc.verify.field.check import AllInputs, check_all_inputs

TILES = options(ranks=2, tiles="2x1", micro_batches=2)
PROVED = (
    ("mlp", options(ranks=2, micro_batches=2)),
    ("tiled", TILES),
    ("words smoothed", options(ranks=2, shards=2)),
    ("joins", options(ranks=2, branches=2)),
)


def found(name: str, options: CompileOptions, directory: Path) -> AllInputs:
    plan, case = lowered(name, options).plan, NETWORKS[name]
    batch = case.inputs(plan.data * plan.micro_batches)
    return check_all_inputs(directory, case.build(), case.loss, *batch, draws=1)


@pytest.mark.parametrize(("name", "how"), PROVED, ids=[name for name, _ in PROVED])
def test_a_right_program_is_proved(
    name: str, how: CompileOptions, tmp_path: Path
) -> None:
    write_directory(lowered(name, how).compilation, tmp_path / "program")
    result = found(name, how, tmp_path / "program")
    assert result.verdict == "proved", str(result)
    assert result.num_gradients


# what is changed on both ranks
MUTANTS = {
    "a mean over another number": ("keepdim=True) * 0.5", "keepdim=True) * 0.25"),
    "a sum is missing": ("tiles.all_reduce(self.grid, x.mean", "(x.mean"),
    "an extreme of the tile alone": ("tiles.amax(self.grid, x,", "torch.amax(x,"),
    "a halo of zeros": ("    wraps=True,\n", ""),
    "no scale": ("None, worker.loss_gradient)", "None, 2 * worker.loss_gradient)"),
    "another slice of a weight": (
        "box=((0, 4), (0, 4), (0, 8))",
        "box=((0, 4), (4, 8), (0, 8))",
    ),
    "no sum of gradients": ('    worker.start_reduction("stage0")\n', ""),
}


@pytest.mark.parametrize("kind", MUTANTS)
def test_a_changed_program_is_refused(kind: str, tmp_path: Path) -> None:
    old, new = MUTANTS[kind]
    directory = tmp_path / "program"
    write_directory(lowered("tiled", TILES).compilation, directory)
    is_changed = False
    for path in directory.glob("rank*.py"):
        text = path.read_text()
        is_changed |= old in text
        path.write_text(text.replace(old, new))
    assert is_changed
    assert found("tiled", TILES, directory).verdict == "not equal"
