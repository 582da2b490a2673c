"""A program directory: the same each time, whole, movable; and its checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from command_line import MODEL, SECONDS, Gemsc, files, gemsc_here, start
from safetensors.torch import load_file

from gemsc.codegen import package
from gemsc.errors import GemscError
from gemsc.launch.launch import launch
from gemsc.plan import Plan
from gemsc.runtime.training.program_directory import check_program
from gemsc.user_model import load_user_model

SAYS_WHAT_IT_LOADED = """

import atexit, os, sys

NEVER_USED = {"torch._dynamo", "torch._inductor", "sympy", "gemsc.compiler"}
if "OMPI_COMM_WORLD_RANK" in os.environ:
    atexit.register(lambda: print("never used:", [*NEVER_USED & sys.modules.keys()]))
"""


@pytest.fixture
def gemsc(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Gemsc:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path / "project")
    return gemsc_here(monkeypatch, capfd)


@pytest.fixture
def program(gemsc: Gemsc, tmp_path: Path) -> Path:
    words = ("compile", "model.py", "--cuts", "third", "-o", "build/program")
    assert gemsc(*words).code == 0
    return tmp_path / "project" / "build" / "program"


# writing


@pytest.mark.slow
def test_compiling_again_gives_the_same_bytes(program: Path) -> None:
    first = files(program)
    words = ("compile", "model.py", "--cuts", "third", "-o", "build/program")
    assert start(*words, PYTHONHASHSEED="7").code == 0
    assert files(program) == first


@pytest.mark.slow
def test_a_program_of_fewer_ranks_replaces_one_of_more(
    gemsc: Gemsc, program: Path
) -> None:
    (program / "notes.txt").write_text("precious")
    assert gemsc("compile", "model.py", "--ranks", "3", "-o", program).code == 0
    assert (program / "rank2.py").exists()
    assert gemsc("compile", "model.py", "--ranks", "1", "-o", program).code == 0
    ranks = {path.name for path in program.glob("rank*.py")}
    assert ranks == {"rank0.py"}
    assert {p.name for p in (program / "weights").iterdir()} == {"stage0.safetensors"}
    assert (program / "notes.txt").read_text() == "precious"


@pytest.mark.slow
def test_a_program_stays_whole_when_its_successor_cannot_be_written(
    gemsc: Gemsc, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "weights")

    before = files(program)
    monkeypatch.setattr(package, "_write_weights", full)
    outcome = gemsc("compile", "model.py", "--ranks", "3", "-o", "build/program")
    assert outcome.code == 1
    assert outcome.err.startswith("error: weights: no space left on device\nhelp: ")
    assert files(program) == before


# moving


def test_a_program_and_its_model_move_together(program: Path, tmp_path: Path) -> None:
    (tmp_path / "project").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "build" / "program"
    plan = check_program(moved, 2)
    assert plan.spec == str(tmp_path / "moved" / "model.py")
    assert load_user_model(plan.spec).path == tmp_path / "moved" / "model.py"
    with pytest.raises(GemscError, match="not a program directory"):
        Plan.read(program / "plan.toml")


@pytest.mark.slow
def test_a_program_without_its_model_is_refused(program: Path, tmp_path: Path) -> None:
    program.rename(tmp_path / "program")
    with pytest.raises(GemscError, match=r"model\.py no longer exists"):
        check_program(tmp_path / "program", 2)


@pytest.mark.slow
@pytest.mark.mpi
def test_plain_mpirun_starts_a_moved_program_from_anywhere(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    """Nor does a rank load what it never uses: that takes as long as all the rest."""
    drop, words = "self.drop(x)", "self.words((x[:, 0] > 0).long())"
    text = MODEL.replace(drop, f"{drop} + {words}")
    layers = "self.words = nn.Embedding(2, 16)\n        self.drop ="
    text = text.replace("self.drop =", layers)
    Path("model.py").write_text(text + SAYS_WHAT_IT_LOADED)
    assert gemsc("compile", "model.py", "--ranks", "2", "-o", "build/program").code == 0
    (tmp_path / "project").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "build" / "program"
    (tmp_path / "elsewhere").mkdir()
    with (tmp_path / "out").open("w") as out:
        words = [sys.executable, str(moved), "--steps", "1", "--save", "checkpoint"]
        where = tmp_path / "elsewhere"
        code = launch(2, words, cwd=where, stdout=out, timeout=SECONDS)
    assert code == 0
    said = (tmp_path / "out").read_text()
    assert "epoch 1/1 1/1  loss " in said
    assert said.count("never used: []") == 2
    assert (tmp_path / "elsewhere" / "checkpoint" / "model.safetensors").is_file()


# checkpoints


@pytest.mark.mpi
@pytest.mark.nightly
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    gemsc: Gemsc, program: Path
) -> None:
    """Three epochs of three steps: at once, and with a stop after four steps.

    By day on threads: test_checkpoints.py.
    """
    for words in (
        "--epochs 3 --save at_once",
        "--steps 4 --save in_two",
        "--epochs 3 --resume in_two --save in_two",
    ):
        outcome = gemsc("run", program, *words.split())
        assert outcome.code == 0, outcome.err
    names = ("at_once", "in_two")
    at_once, in_two = (load_file(f"{name}/model.safetensors") for name in names)
    assert at_once.keys() == in_two.keys()
    assert all(torch.equal(at_once[name], in_two[name]) for name in at_once)
    for rank in range(2):  # optimizer and generators, too
        stored = [load_file(f"{n}/latest/rank{rank}.safetensors") for n in names]
        assert any(key.startswith("optimizer/exp_avg/") for key in stored[0])
        assert stored[0].keys() == stored[1].keys()
        assert all(torch.equal(stored[0][key], stored[1][key]) for key in stored[0])

    model = load_user_model("model.py").make_unfilled()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(at_once)
    assert not any(torch.equal(before[name], at_once[name]) for name in before)
