"""`--branches` on the command line: what comes out, edited plans, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import Gemsc, compile_here, line_of

from gemsc.plan import Plan, cut_name

MODEL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.a = nn.Linear(64, 16)
        self.b = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 32))
        self.c = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x), self.c(x)], 1)


def model():
    return nn.Sequential(Block(), nn.ReLU(), Block(), nn.Linear(64, 8))


def example_inputs():
    return (torch.randn(256, 64),)


loss = nn.MSELoss()


def example_target():
    return torch.randn(256, 8)
"""
MOVED = ('        "0.a",\n', '        "0.b",\n', '        "0.c",\n')


GIVEN = ("--ranks", "2", "--branches", "2", "--trunk", "whole")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branches")
    (folder / "model.py").write_text(MODEL)
    compile_here(folder / "model.py", *GIVEN, "-o", folder / "first")
    return folder / "first"


@pytest.fixture
def first(program: Path, command: Gemsc) -> str:
    """The text of first/plan.toml, of a program beside model.py."""
    shutil.copytree(program, "first")
    return Path("first/plan.toml").read_text()


def recompiled(command: Gemsc, text: str) -> tuple[str, Plan]:
    """Compile an edited plan; return the error, and the plan that comes out."""
    path = Path("first/plan.toml")
    path.write_text(text)
    outcome = command("compile", "model.py", "--plan", str(path), "-o", "second")
    folder = "second" if outcome.code == 0 else "first"
    said = outcome.err.splitlines(keepends=True)
    error = "".join(line for line in said if not line.startswith("note: no optimizer"))
    return error, Plan.read(Path(folder) / "plan.toml")


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_a_plan_says_which_rank_has_which_branch_and_its_weights(
    command: Gemsc,
) -> None:
    (stage,) = Plan.read(Path("first/plan.toml")).stages
    assert stage.branches == 2
    assert [fork.placed for fork in stage.forks] == [
        [["0.b"], ["0.a", "0.c"]],
        [["2.b"], ["2.a", "2.c"]],
    ]
    assert "0.b.2.bias" in stage.alone[0]
    assert {"0.a.weight", "2.c.0.bias"} < set(stage.alone[1])
    here = "Here: 0.a, 0.c, 2.a, 2.c; what is between is whole."
    assert here in Path("first/rank1.py").read_text()
    shown = command("show", "first").out
    assert "branches (one micro-batch, forward and backward)" in shown
    assert "branches on 2 ranks" in shown
    assert 'rank 1"' in Path("first/graph.dot").read_text()


@pytest.mark.nightly
def test_the_blocks_of_the_inception_example_are_shared_out(command: Gemsc) -> None:
    example = Path(__file__).parents[2] / "examples" / "inception.py"
    outcome = command(
        "compile", example, "--ranks", "2", "--branches", "2", "-o", "out"
    )
    assert outcome.code == 0, outcome.err
    (stage,) = Plan.read(Path("out/plan.toml")).stages
    assert [fork.name for fork in stage.forks if fork.placed] == ["2", "4", "6"]
    assert all(len(fork.branches) == 4 for fork in stage.forks)


@pytest.mark.slow
def test_auto_compares_branches(command: Gemsc) -> None:
    flags = ("--ranks", "2", "--branches", "auto", "--shards", "auto")
    outcome = command("compile", "model.py", *flags)
    for way in ("branches 2, one stage", "shards 2, one stage", "shards 2, branches 2"):
        assert f" {way}" in outcome.out
    assert "why: " in outcome.out


@pytest.mark.nightly
def test_an_unchanged_plan_places_branches_alike(command: Gemsc, first: str) -> None:
    error, second = recompiled(command, first)
    assert not error
    assert second.stages == Plan.read(Path("first/plan.toml")).stages


@pytest.mark.slow
def test_a_branch_moves_with_its_line(command: Gemsc, first: str) -> None:
    a, b, _ = MOVED
    error, plan = recompiled(command, first.replace(a, "").replace(b, a + b))
    assert not error
    (stage,) = plan.stages
    assert [fork.placed for fork in stage.forks] == [
        [["0.a", "0.b"], ["0.c"]],
        [["2.b"], ["2.a", "2.c"]],
    ]
    assert {"0.a.weight", "0.b.0.weight"} < set(stage.alone[0])
    assert "self.0.a" not in Path("second/rank1.py").read_text()


@pytest.mark.slow
def test_weights_of_branches_are_neither_cut_nor_whole(command: Gemsc) -> None:
    words = ("compile", "model.py", *GIVEN, "--shards", "2", "-o", "first")
    assert command(*words).code == 0
    (stage,) = Plan.read(Path("first/plan.toml")).stages
    alone = {name for names in stage.alone for name in names}
    whole = {name for group in stage.whole for name in group.names}
    assert "0.b.0.weight" in alone
    assert "3.bias" in whole
    assert not alone & (whole | {cut_name(text) for text in stage.cut})
    error, plan = recompiled(command, Path("first/plan.toml").read_text())
    assert not error
    assert plan.stages == [stage]
    assert plan.options["whole"] == []


@pytest.mark.slow
def test_a_fork_that_is_taken_out_is_computed_by_all(
    command: Gemsc, first: str
) -> None:
    before, _, second = first.split("[[stages.forks]]")
    error, plan = recompiled(command, f"{before}[[stages.forks]]{second}")
    assert not error
    (stage,) = plan.stages
    forks = {fork.name: (fork.placed, fork.reason) for fork in stage.forks}
    assert forks["0"] == ([], "the plan places none of them")
    assert forks["2"] == ([["2.b"], ["2.a", "2.c"]], "")
    assert not any(name.startswith("0.") for names in stage.alone for name in names)
    shown = command("show", "second").out
    assert "not shared out" in shown
    assert "the plan places" in shown


@pytest.mark.slow
def test_a_stage_without_any_fork_left_is_refused(command: Gemsc, first: str) -> None:
    before, *_ = first.split("[[stages.forks]]")
    _, after = first.split("[traffic]", 1)
    error, _ = recompiled(command, f"{before}[traffic]{after}")
    assert "stage 0 gains nothing: the plan places none of them" in error


def test_a_wrong_name_is_refused_at_its_line(command: Gemsc, first: str) -> None:
    wrong = first.replace(MOVED[1], '        "0.bb",\n')
    error, _ = recompiled(command, wrong)
    where = line_of('"0.bb"', wrong)
    assert f"plan.toml:{where}: error: '0.bb' of 0 is none of its" in error
    assert "place each of 0.a, 0.b, 0.c once" in error


@pytest.mark.slow
def test_a_stage_without_branches_says_so_and_what_would_work(command: Gemsc) -> None:
    Path("model.py").write_text(
        MODEL.replace("[self.a(x), self.b(x), self.c(x)]", "[self.b(x).repeat(1, 2)]")
    )
    refused = command("compile", "model.py", "--ranks", "2", "--branches", "2")
    assert "error: --branches 2: stage 0 has no branches" in refused.err
    one = "give this stage one rank: --ranks 1 without --branches, or split its layers"
    assert one in refused.err
    advice = refused.err.rpartition("layers: ")[2].split()
    assert command("compile", "model.py", *advice).code == 0


@pytest.mark.slow
def test_branches_that_gain_nothing_say_why(command: Gemsc) -> None:
    two = MODEL.replace("self.b(x), self.c(x)]", "self.b(x)]")
    light = two.replace("a = nn.Linear(64, 16)", "a = nn.Linear(64, 1)")
    wide = light.replace("(hidden, 32)", "(hidden, 63)").replace("(256,", "(4096,")
    Path("model.py").write_text(wide)
    refused = command("compile", "model.py", "--ranks", "2", "--branches", "2")
    assert "--branches 2: stage 0 gains nothing: " in refused.err
    assert "b alone takes 95 % of" in refused.err


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--ranks", "5"), "--branches 2 does not divide --ranks 5"),
        (("--ranks", "4", "--schedule", "zb-h1"), "cannot be used with --branches"),
        (
            ("--ranks", "3", "--branches", "3", "--trunk", "batch"),
            "--trunk batch splits 2 samples over 3 ranks",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    command: Gemsc, flags: tuple[str, ...], says: str
) -> None:
    Path("model.py").write_text(MODEL.replace("(256,", "(2,"))
    refused = command("compile", "model.py", "--branches", "2", *flags)
    assert says in refused.err
