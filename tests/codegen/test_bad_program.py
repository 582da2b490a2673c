"""Every mistake with a compiled program is told once, before or on the ranks."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command_line import (
    MODEL,
    SECONDS,
    Gemsc,
    Outcome,
    compile_here,
    files,
    gemsc_here,
    line_of,
)
from nightly import at_night
from torch import nn

from gemsc.compiler import compile as gemsc_compile
from gemsc.errors import GemscError
from gemsc.launch import launch, mpirun
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.training.program_directory import check_program
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.weights.first import FirstWeights
from gemsc.weights.load import fill
from gemsc.weights.read import read_tensors
from gemsc.weights.write import write_tensors


@pytest.fixture
def gemsc(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Gemsc:
    monkeypatch.chdir(tmp_path)
    return gemsc_here(monkeypatch, capfd)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model.py and its program."""
    folder = tmp_path_factory.mktemp("once")
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        compile_here("model.py", "-o", "program")
    return folder


@pytest.fixture
def program(gemsc: Gemsc, once: Path, tmp_path: Path) -> Path:
    """A program in a folder `program` beside its model.py."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "program"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    later = path.stat().st_mtime + 2  # else Python may take what it had compiled
    os.utime(path, (later, later))


@pytest.mark.slow
def test_an_edited_model_makes_its_program_stale(gemsc: Gemsc, program: Path) -> None:
    edit(program.parent / "model.py", "nn.Dropout(0.1)", "nn.Dropout(0.2)")
    for words in (["run", "program"], ["verify", "program"]):
        outcome = gemsc(*words)
        assert outcome.code == 1
        assert outcome.err == (
            "error: program was compiled from other code: model.py: Net changed\n"
            "help: compile again: gemsc compile model.py --ranks 2 -o program\n"
        )


def test_a_rank_s_file_alone_says_how_it_is_started(once: Path) -> None:
    file = once / "program" / "rank0.py"
    runpy.run_path(str(file), run_name="as_a_module")
    with pytest.raises(SystemExit, match=r"rank0\.py is what one rank runs") as caught:
        runpy.run_path(str(file), run_name="__main__")
    assert str(caught.value).endswith(f"help: gemsc run {file.parent}")


def test_what_compiles_again_can_be_typed_as_it_is_shown(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    model, folder = tmp_path / "my models" / "model.py", "my programs/a"
    model.parent.mkdir()
    model.write_text(MODEL)
    assert gemsc("compile", "my models/model.py", "-o", folder).code == 0
    edit(model, "nn.Dropout(0.1)", "nn.Dropout(0.2)")
    advice = gemsc("run", folder).err.rpartition("help: compile again: ")[2]
    name, *words = shlex.split(advice)
    assert (name, words[-1]) == ("gemsc", folder)
    assert gemsc(*words).code == 0


@pytest.mark.slow
def test_what_is_not_compiled_in_may_change(program: Path) -> None:
    file = program.parent / "model.py"
    edit(file, "class Net", "# a comment\nclass Net")
    edit(file, "torch.randn(8), ", "torch.rand(8), ")  # in a class for the data alone
    edit(file, "lr=0.01", "lr=0.02")
    assert check_program(program, 2).ranks == 2


def test_settings_of_the_model_that_changed_are_named(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    for name in ("top.json", "made.yaml", "data.json"):
        (tmp_path / name).write_text("{}")
    text = MODEL.replace(
        "import torch\n", "import torch\n\nopen('top.json').read()\n", 1
    )
    text = text.replace("return Net()", "open('made.yaml').read()\n    return Net()")
    reads = "def dataset():\n    open('data.json').read()\n"
    assert "def dataset():\n" in text
    (tmp_path / "model.py").write_text(text.replace("def dataset():\n", reads))
    assert gemsc("compile", "model.py", "-o", "program").err == ""
    assert "warning" not in gemsc("run", "program", "--resume", "nowhere").err
    for name in ("top.json", "made.yaml", "data.json"):
        (tmp_path / name).write_text("[]")
    told = gemsc("run", "program", "--resume", "nowhere").err
    named = re.findall(
        r"^warning: .*/(\S+) has changed since program", told, re.MULTILINE
    )
    assert named == ["made.yaml", "top.json"]
    assert gemsc("compile", "model.py", "-o", "program").err == ""
    assert "warning" not in gemsc("run", "program", "--resume", "nowhere").err


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("return Net()", "return Net().eval()"), "model changed"),
        (("def loss(output, target)", "def loss(target, output)"), "loss changed"),
        (("import torch\n", "import torch\nWIDTH = 3\n"), "WIDTH is new"),
    ],
)
def test_what_is_compiled_in_is_named(
    change: tuple[str, str], says: str, program: Path
) -> None:
    edit(program.parent / "model.py", *change)
    with pytest.raises(GemscError, match=f"model.py: {says}"):
        check_program(program, 2)


@pytest.mark.slow
def test_a_program_without_its_model_says_which_file_is_gone(
    gemsc: Gemsc, program: Path
) -> None:
    (program.parent / "model.py").unlink()
    outcome = gemsc("run", "program")
    assert outcome.code == 1
    assert f"{program.parent / 'model.py'} no longer exists" in outcome.err


def test_a_program_of_a_script_says_to_run_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{MODEL}\nprint('the loop')\n")
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(script))
    program = gemsc_compile(names["Net"](), names["example_inputs"](), ranks=2)
    program.write("program")
    edit(script, "print('the loop')", "print('another loop')")
    assert check_program(tmp_path / "program", 2).ranks == 2
    edit(script, "nn.Dropout(0.1)", "nn.Dropout(0.2)")
    with pytest.raises(GemscError, match=r"train\.py: Net changed") as caught:
        check_program(tmp_path / "program", 2)
    assert "run your script again that compiles Net into" in str(caught.value)


@pytest.mark.slow
def test_a_plan_of_brackets_is_refused(gemsc: Gemsc, program: Path) -> None:
    (program / "plan.toml").write_text("x = " + "[" * 3000)
    for command in ("run", "show"):
        outcome = gemsc(command, "program")
        says = (
            "error: plan program/plan.toml is not valid TOML: it is nested too deeply"
        )
        assert (outcome.code, outcome.err.splitlines()[0]) == (1, says)
        assert "help: compile again" in outcome.err


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[[stages]]", "[[stages", "plan plan.toml is not valid TOML: "),
        ("ranks = 2", "", "there is no entry 'ranks'"),
        ("ranks = 2", 'ranks = "two"', "ranks is 'two', which is not a number"),
        ("sum_bytes = ", "sum_byte = ", "unknown entry 'stages[0].sum_byte'"),
    ],
)
def test_a_damaged_plan_is_refused(
    old: str, new: str, says: str, gemsc: Gemsc, program: Path
) -> None:
    edit(program / "plan.toml", old, new)
    for command in ("run", "show", "verify", "graph"):
        outcome = gemsc(command, "program")
        assert outcome.code == 1
        line = line_of(new, (program / "plan.toml").read_text())
        assert outcome.err.startswith(f"program/plan.toml:{line}: error: {says}")
        assert "\nhelp: " in outcome.err


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[[memory]]", "[[gone]]", "memory has 1 entries, of 2 ranks of a replica"),
        ("\ngradients = ", "\ngradient = ", "there is no entry 'memory[0].gradients'"),
    ],
)
def test_a_plan_with_an_incomplete_list_is_refused(
    old: str, new: str, says: str, gemsc: Gemsc, program: Path
) -> None:
    edit(program / "plan.toml", 'gemsc = "', 'gemsc = "0.0.')  # may have other tables
    edit(program / "plan.toml", old, new)
    outcome = gemsc("show", "program")
    assert outcome.code == 1
    line = line_of("[[memory]]", (program / "plan.toml").read_text())
    assert outcome.err.startswith(f"program/plan.toml:{line}: error: {says}")


@pytest.mark.slow(1)
@pytest.mark.parametrize("number", ["inf", "nan"])
def test_a_number_in_a_plan_is_finite(number: str, gemsc: Gemsc, program: Path) -> None:
    text = (program / "plan.toml").read_text()
    line = re.search(r"\nstep_seconds = .*", text)
    assert line is not None
    edit(program / "plan.toml", line[0], f"\nstep_seconds = {number}")
    outcome = gemsc("show", "program")
    assert outcome.code == 1
    assert f"error: step_seconds is {number}\n" in outcome.err
    assert "help: give a finite number" in outcome.err


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["rank1.py", "weights/stage1.safetensors"])
def test_a_missing_file_is_found_before_ranks_start(
    name: str, gemsc: Gemsc, program: Path
) -> None:
    (program / name).unlink()
    outcome = gemsc("run", "program")
    assert outcome.code == 1
    assert outcome.err.startswith(f"error: program has no {name}\nhelp: compile again")


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--epoch 1",
            "unrecognized arguments: --epoch 1\nhelp: did you mean --epochs?",
        ),
        ("--epochs x", "argument --epochs: 'x' is not a whole number above 0"),
        ("--steps 0", "argument --steps: '0' is not a whole number above 0"),
        ("--speed 3", "unrecognized arguments: --speed 3"),
        ("--save model.py", "argument --save: model.py is a file, not a folder"),
        (
            "--save /proc/x",
            "argument --save: nothing can be written in /proc: "
            "No such file or directory",
        ),
        (
            "--resume program",
            "program is not a checkpoint: it has no latest, no step- folder and no "
            "model.safetensors",
        ),
    ],
)
def test_a_wrong_option_of_a_program_starts_no_ranks(
    words: str, says: str, gemsc: Gemsc, program: Path
) -> None:
    outcome = gemsc("run", "program", *words.split())
    assert outcome.code == 1 + words.startswith(("--ep", "--st", "--sp"))
    assert outcome.err.startswith(f"error: {says}")
    assert "\nhelp: " in outcome.err


@pytest.mark.slow
def test_without_mpirun_the_message_says_how_to_get_it(
    gemsc: Gemsc, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpirun.shutil, "which", lambda name, path=None: None)
    outcome = gemsc("run", "program")
    assert outcome.code == 1
    assert outcome.err.startswith("error: no mpirun")
    assert "help: pip install" in outcome.err


def test_without_dot_the_graph_stays_text(
    gemsc: Gemsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = gemsc("compile", "model.py", "-o", "program")
    assert outcome.code == 0
    assert "note: graph.svg needs" in " ".join(outcome.out.split())
    assert (tmp_path / "program" / "graph.dot").read_text().startswith("digraph")
    assert not (tmp_path / "program" / "graph.svg").exists()


def test_a_program_without_loss_cannot_be_verified(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL + "\ndel loss\n")
    assert gemsc("compile", "model.py", "-o", "program").code == 0
    outcome = gemsc("verify", "program")
    assert outcome.code == 1
    assert "has no loss(), so there are no gradients" in outcome.err
    assert "help: add loss(output, target)" in outcome.err


@pytest.mark.slow
def test_a_failed_compilation_leaves_the_program_that_was_there(
    gemsc: Gemsc, program: Path
) -> None:
    before = files(program)
    edit(program.parent / "model.py", "self.third(x)", "self.fourth(x)")
    assert gemsc("compile", "model.py", "-o", "program").code == 1
    assert files(program) == before


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "stage0.safetensors", {"other": torch.zeros(1)})
    first = FirstWeights(tmp_path)
    for asked in (first.read, first.like):
        with pytest.raises(GemscError, match="has no 'weight'"):
            asked(0, "weight")
    with torch.device("meta"):
        layer = nn.Linear(2, 3)
    tensors = {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}
    write_tensors(tmp_path / "a.safetensors", tensors)
    read = read_tensors(tmp_path / "a.safetensors").__getitem__
    with pytest.raises(GemscError, match=r"'weight' have shape \[3, 3\]"):
        fill(layer, read, torch.device("cpu"))


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("input", "target", "says"),
    [
        (torch.zeros(7, 8), torch.zeros(8).long(), r"has shape \[7, 8\]"),
        (torch.zeros(8, 8), torch.zeros(8), "target has dtype torch.float32"),
        ((), torch.zeros(8).long(), "the batch has no "),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    input: object, target: object, says: str, program: Path
) -> None:
    def step(transport: LocalTransport) -> float:
        return Trainer(program, transport).step(input, target)

    with pytest.raises(GemscError, match=says) as caught:
        run_local(2, step)
    assert caught.value.help


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "cannot be collated into a batch"),
        ([torch.zeros(2), torch.zeros(2)], "does not return .input, target. pairs"),
        (iter([]), "does not say how many"),
    ],
)
def test_data_that_makes_no_batches_is_refused(samples: object, says: str) -> None:
    with pytest.raises(GemscError, match=says) as caught:
        next(Batches(samples, 2, seed=0, shuffle=True).epoch(0))
    assert caught.value.help


# under mpirun: the first rank that finds a mistake tells it, and all stop


def run_ranks(program: Path, num_ranks: int, folder: Path) -> Outcome:
    """Start ranks without the checks that `gemsc run` makes first."""
    with (folder / "err").open("w") as err, (folder / "out").open("w") as out:
        words = [sys.executable, str(program)]
        code = launch.launch(num_ranks, words, stdout=out, stderr=err, timeout=SECONDS)
    return Outcome(code, (folder / "out").read_text(), (folder / "err").read_text())


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("started", [1, *at_night(3)])
def test_a_wrong_number_of_ranks_is_told_once(
    started: int, program: Path, tmp_path: Path
) -> None:
    outcome = run_ranks(program, started, tmp_path)
    assert outcome.code == 1
    assert outcome.err.count("error: ") == 1
    message = f"{program} was compiled for 2 ranks, but mpirun started {started}"
    assert message in outcome.err
    assert f"help: use mpirun -n 2, or `gemsc run {program}`" in outcome.err


RUN_MISTAKES = {
    "no dataset": (
        ("def dataset()", "def example_target()", "Data(24)", "torch.zeros(2).long()"),
        "has no dataset()",
    ),
    "small dataset": (
        ("Data(24)", "Data(7)"),
        "dataset() has 7 samples, one step takes 8",
    ),
    "samples of another shape": (
        ("torch.randn(8), ", "torch.randn(9), "),
        "has shape [8, 9], but this program expects [8, 8]: 4 micro-batches of [2, 8]",
    ),
}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "name", ["samples of another shape", *at_night("no dataset", "small dataset")]
)
def test_a_mistake_that_only_a_rank_can_find_is_told_once(
    name: str, gemsc: Gemsc, tmp_path: Path
) -> None:
    changes, says = RUN_MISTAKES[name]
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    if name == "no dataset":
        edit(file, *changes[:2])
        edit(file, *changes[2:])
    assert gemsc("compile", "model.py", "-o", "program").code == 0
    if name != "no dataset":
        edit(file, *changes)
    outcome = gemsc("run", "program")
    assert outcome.code == 1
    assert outcome.err.count("error: ") == 1, outcome.err
    assert says in outcome.err
    assert "\nhelp: " in outcome.err
    assert "\nnote: on rank " in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.slow
@pytest.mark.mpi
def test_damaged_weights_are_told_once(program: Path, gemsc: Gemsc) -> None:
    (program / "weights" / "stage1.safetensors").write_bytes(b"damaged")
    outcome = gemsc("run", program)
    assert outcome.code == 1
    assert outcome.err.count("error: ") == 1, outcome.err
    assert "stage1.safetensors is damaged" in outcome.err
    assert "help: compile again" in outcome.err
    assert "note: on rank 1" in outcome.err
