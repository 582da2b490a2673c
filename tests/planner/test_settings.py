"""Options of a project in gemsc.toml or pyproject.toml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import MODEL, Gemsc

from gemsc.launch.start import compile_for
from gemsc.plan import Plan

COMPILE = """\
[compile]
ranks = 3
micro_batches = 2
blocks = [1, 1, 1]
check = false
set = {WIDTH = 8, DEPTH = 2}
"""


@pytest.fixture(autouse=True)
def model(command: Gemsc, tmp_path: Path) -> None:
    text = "WIDTH = 4\nDEPTH = 1\n" + MODEL.replace(
        "nn.Linear(16, 4)", "nn.Linear(16, WIDTH)"
    )
    (tmp_path / "model.py").write_text(text)


def compiled(command: Gemsc, *words: object) -> tuple[Plan, str]:
    done = command("compile", "model.py", "-o", "program", *words)
    assert done.code == 0, done.err
    return Plan.read(Path("program/plan.toml")), done.err


def test_what_the_file_says_is_as_if_it_was_typed(command: Gemsc) -> None:
    Path("gemsc.toml").write_text(COMPILE.replace("[compile]", "[compile] # ours"))
    plan, said = compiled(command)
    assert (plan.ranks, plan.micro_batches) == (3, 2)
    assert plan.options["check"] is False
    assert plan.constants == {"WIDTH": "8", "DEPTH": "2"}
    assert (
        "settings from gemsc.toml: ranks=3, micro-batches=2, blocks=1,1,1, "
        "check=false, set=WIDTH=8 DEPTH=2\n" in said
    )
    assert "settings" not in command("show", "program").err


@pytest.mark.slow
def test_the_command_line_wins(command: Gemsc) -> None:
    Path("gemsc.toml").write_text(COMPILE)
    words = ("--ranks", 2, "--blocks", "1,2", "--check", "--set", "WIDTH=6")
    plan, _ = compiled(command, *words)
    assert (plan.ranks, plan.micro_batches) == (2, 2)
    assert plan.options["check"] is True
    assert plan.constants == {"WIDTH": "6"}


def test_a_plan_has_the_constants_of_its_model(command: Gemsc) -> None:
    words = ("plan", "model.py", "--ranks", 2, "--set", "WIDTH=8", "-o", "plan.toml")
    assert command(*words).code == 0
    Path("gemsc.toml").write_text("[compile]\nset = {WIDTH = 5, DEPTH = 2}\n")
    plan, _ = compiled(command, "--plan", "plan.toml")
    assert plan.constants == {"WIDTH": "8"}
    plan, _ = compiled(command, "--plan", "plan.toml", "--set", "DEPTH=3")
    assert plan.constants == {"WIDTH": "8", "DEPTH": "3"}


@pytest.mark.slow
def test_an_edited_plan_goes_before_the_file(command: Gemsc) -> None:
    compiled(command)
    Path("gemsc.toml").write_text(COMPILE.replace("set = {WIDTH = 8, DEPTH = 2}", ""))
    done = command("compile", "model.py", "--plan", "program/plan.toml", "-o", "again")
    assert done.code == 0, done.err
    assert Plan.read(Path("again/plan.toml")).ranks == 2


@pytest.mark.slow
def test_settings_may_stand_in_pyproject(command: Gemsc) -> None:
    text = '[project]\nname = "x"\n\n[tool.gemsc.compile]\nranks = 1\n'
    Path("pyproject.toml").write_text(text)
    plan, said = compiled(command)
    assert plan.ranks == 1
    assert "settings from pyproject.toml: ranks=1\n" in said
    Path("gemsc.toml").write_text("[compile]\nranks = 3\n")
    assert compiled(command)[0].ranks == 3
    Path("gemsc.toml").unlink()
    Path("pyproject.toml").write_text(text.replace("[tool.gemsc.c", "[tool.other.c"))
    assert compiled(command)[0].ranks == 2


@pytest.mark.parametrize(
    ("words", "text", "line", "said"),
    [
        ("compile model.py", "[compile]\nrank = 3", 2, "did you mean ranks?"),
        ("compile model.py", "[complie]\nranks = 3", 1, "[compile] or [run]"),
        ("compile model.py", "ranks = 3", 1, "[compile] or [run]"),
        ("compile model.py", "[compile]\nranks = = 3", 2, "is not valid TOML"),
        ("run program", "[run]\nepoch = 3", 2, "did you mean epochs?"),
        ("run program", "[run]\nrecord-into = 'x'", 2, "has no option 'record-into'"),
    ],
)
def test_what_is_unknown_is_refused_at_its_line(
    words: str, text: str, line: int, said: str, command: Gemsc
) -> None:
    Path("gemsc.toml").write_text(text)
    done = command(*words.split())
    assert done.code == 1
    assert done.err.startswith(f"gemsc.toml:{line}: error: ")
    assert said in done.err
    assert command("compile", "--help").code == 0


def test_a_wrong_value_is_said_after_the_file_that_has_it(command: Gemsc) -> None:
    Path("gemsc.toml").write_text('[compile]\nranks = "two"\n')
    done = command("compile", "model.py")
    assert done.code == 2
    assert "settings from gemsc.toml: ranks=two\nerror: --ranks takes" in done.err


@pytest.mark.slow
def test_a_restart_on_fewer_ranks_takes_none(command: Gemsc) -> None:
    """What the program had at its default would have another value then."""
    plan, _ = compiled(command, "--no-check", "--ranks", 3, "--data", 3)
    Path("gemsc.toml").write_text('[compile]\nschedule = "gpipe"\nmicro-batches = 8\n')
    folder = compile_for(Path("program"), plan, 2)
    smaller = Plan.read(folder / "plan.toml")
    assert (smaller.ranks, smaller.data, smaller.micro_batches) == (2, 2, 6)
    assert smaller.schedule == "1f1b"


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_takes_its_own(command: Gemsc) -> None:
    compiled(command, "--no-check", "--ranks", 1)
    text = '[run]\nsteps = 3\nsave = "saved"\nseed = 5\noverwrite = true\nkeep = 2\n'
    Path("gemsc.toml").write_text(text + "deterministic = false\n")
    done = command("run", "program", "--steps", 2)
    assert done.code == 0, done.err
    assert "settings from gemsc.toml: steps=3, save=saved, seed=5, overwrite=true" in (
        done.err
    )
    (start,) = json.loads(Path("saved/run.json").read_text())["starts"]
    given = start["options"]
    assert (given["steps"], given["seed"], given["keep"]) == (2, 5, 2)
