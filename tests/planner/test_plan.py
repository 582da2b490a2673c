"""plan.toml holds every decision and is read back as it was."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program_support import Net, X, mse, trunk, written
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.plan import Plan


def forward(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.trunk(h) + h


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "program"
    written(folder, Net(forward, trunk=trunk()), ranks=3, micro_batches=5)
    return folder


@pytest.mark.slow
def test_a_plan_is_read_back_as_it_was(directory: Path, tmp_path: Path) -> None:
    plan = Plan.read(directory / "plan.toml")
    assert plan.to_toml(directory) == (directory / "plan.toml").read_text()
    again = tmp_path / "again" / "plan.toml"
    again.parent.mkdir()
    again.write_text(plan.to_toml(again.parent))
    assert Plan.read(again) == plan


@pytest.mark.slow
def test_the_plan_says_what_was_decided(directory: Path) -> None:
    plan = Plan.read(directory / "plan.toml")
    assert (plan.ranks, plan.schedule, plan.micro_batches) == (3, "1f1b", 5)
    assert (plan.batch_size, plan.micro_batch_size) == (5 * len(X), len(X))
    assert [stage.ranks for stage in plan.stages] == [[0], [1], [2]]
    assert sum(stage.parameter_bytes for stage in plan.stages) == 4 * 20 * 7
    (skip,) = plan.skips
    assert (skip["value"], skip["kind"]) == ("h", "sent once")
    ends = [(t.edge.source, t.edge.dest) for t in plan.transfers if "h" in t.values]
    assert ends == [(0, 2)] or len(plan.transfers) == 2
    assert plan.order[0].split()[0] == "0F0"
    assert str(Path(__file__).resolve()) in plan.sources
    assert len(plan.peak_bytes) == 3


@pytest.mark.slow
def test_the_same_compilation_gives_the_same_plan(
    directory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    written(other, Net(forward, trunk=trunk()), ranks=3, micro_batches=5)
    assert (other / "plan.toml").read_text() == (directory / "plan.toml").read_text()


def test_a_folder_without_a_plan_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="is not a program directory") as caught:
        Plan.read(tmp_path / "plan.toml")
    assert "gemsc compile -o" in str(caught.value)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks = 3\n", "", "there is no entry 'ranks'"),
        ("ranks = 3\n", 'ranks = "3"\n', "ranks is '3', which is not a number"),
        ("ranks = 3\n", "ranks = = 3\n", "plan plan.toml is not valid TOML"),
    ],
)
def test_a_damaged_plan_is_refused(
    directory: Path, old: str, new: str, message: str
) -> None:
    path = directory / "plan.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(GemscError, match=message) as caught:
        Plan.read(path)
    assert "compile again" in str(caught.value)


def test_entries_of_a_later_version_are_left_out(directory: Path) -> None:
    path = directory / "plan.toml"
    before = Plan.read(path)
    text = "colour = 'red'\n" + path.read_text()
    path.write_text(text)
    with pytest.raises(GemscError, match="unknown entry 'colour'"):
        Plan.read(path)
    path.write_text(re.sub('gemsc = ".*"', 'gemsc = "9.9"', text))
    assert Plan.read(path) == replace(before, gemsc="9.9")


@pytest.mark.slow
def test_program_and_model_can_move_together(directory: Path, tmp_path: Path) -> None:
    data = tomllib.loads((directory / "plan.toml").read_text())
    assert not any(Path(file).is_absolute() for file in data["sources"])


@pytest.mark.slow
def test_mse_is_in_the_sources_too(directory: Path) -> None:
    """The loss is compiled in, wherever it is defined."""
    files = {Path(file).name for file in Plan.read(directory / "plan.toml").sources}
    assert Path(str(mse.__code__.co_filename)).name in files
