"""The commands, as users type them, on a small model."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from command_line import MODEL, Gemsc, files, gemsc_here
from nightly import at_night
from safetensors.torch import load_file
from typer.main import get_command

from gemsc.base.process import MALLOC_SETTING
from gemsc.cli.command import COMMANDS, main, make_app
from gemsc.cli.options import CHOICES, FIELDS, PANELS
from gemsc.options import flag
from gemsc.user_model import load_user_model
from gemsc.verify.steps import nudged


@pytest.fixture
def gemsc(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Gemsc:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return gemsc_here(monkeypatch, capfd)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, gemsc: Gemsc) -> None:
    outcome = gemsc(command, "--help")
    assert outcome.code == 0
    assert f"gemsc {command}" in outcome.out


@pytest.mark.parametrize("words", ["--help", "-h"])
def test_run_lists_the_options_of_ranks_and_launcher_without_a_program(
    words: str, gemsc: Gemsc
) -> None:
    outcome = gemsc("run", *words.split())
    assert outcome.code == 0, outcome.err
    for name in ("--epochs", "--resume", "--hosts", "--restarts", "--detect-anomaly"):
        assert f"  {name} " in outcome.out


@pytest.mark.slow(3)
@pytest.mark.parametrize("words", [(), ("--help",), ("--version",), ("complie",)])
def test_no_command_is_imported_to_list_them(words: tuple[str, ...]) -> None:
    text = (
        "import sys, typer; from gemsc.cli import main; before = {*sys.modules}\n"
        "try: main()\n"
        "finally: print([m for m in sys.modules if m.split('.')[0] in"
        " ('torch', 'numpy') or m.startswith('gemsc.') and m not in before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, *words], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_commands_are_listed_with_the_summaries_that_they_have() -> None:
    listed, loaded = (get_command(make_app(loaded=full)) for full in (False, True))
    assert [*listed.commands] == [*COMMANDS]
    for name, command in loaded.commands.items():
        assert (
            command.help.splitlines()[0] == listed.commands[name].help.splitlines()[0]
        )


def test_help_has_each_option_in_a_group_and_shows_choices() -> None:
    assert sorted(name for held in PANELS.values() for name in held) == sorted(FIELDS)
    command = get_command(make_app(["compile", "plan"])).commands["compile"]
    shown = {name: param for param in command.params for name in param.opts}
    for name, choices in CHOICES.items():
        assert shown[flag(name)].metavar == "|".join(choices)
    assert shown["--precision"].rich_help_panel == "Kernels"
    assert shown["--output"].rich_help_panel == "Files"


def test_two_dashes_before_a_command_change_nothing(gemsc: Gemsc) -> None:
    assert "--micro-batches" in gemsc("--", "compile", "--help").out


def test_the_version_is_that_of_the_package(gemsc: Gemsc) -> None:
    assert gemsc("--version").out == f"gemsc {version('gemsc')}\n"


@pytest.mark.parametrize("closed", [">&- 2>&-", "<&- >&- 2>&-", "2>&-", ">&-"])
def test_streams_that_the_caller_has_closed_lead_nowhere(
    closed: str, tmp_path: Path
) -> None:
    """Without that a file that is opened is the standard output."""
    code = "import os, sys\nfrom gemsc.cli import command\n"
    code += "sys.argv[1:] = ['--version']\ntry:\n    command.main()\nfinally:\n"
    code += "    print('more')\n    print('more', file=sys.stderr)\n"
    code += "    file = open(sys.argv[0] + '.txt', 'w')\n    os.write(1, b'out')\n"
    code += "    os.write(2, b'err')\n    print(file.fileno(), file=file)\n"
    path = tmp_path / "closed.py"
    path.write_text(code)
    line = f"{sys.executable} {path} {closed}"
    done = subprocess.run(line, shell=True, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert int((tmp_path / "closed.py.txt").read_text()) > 2


def test_a_command_that_is_not_there_is_refused(gemsc: Gemsc) -> None:
    outcome = gemsc("complie", "model.py")
    assert outcome.code == 2
    assert outcome.err.startswith("error: no such command 'complie'")


@pytest.mark.parametrize(
    "words", [("compile", "model.py", "--profile"), ("profile", "--calibrate")]
)
def test_what_is_timed_begins_anew_with_the_ranks_setting_of_malloc(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[list[str], str]] = []

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        begun.append((words, environment["GLIBC_TUNABLES"]))
        sys.exit()

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setattr(sys, "argv", ["gemsc", *words])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with pytest.raises(SystemExit):
        main()
    assert begun == [([sys.executable, "gemsc", *words], MALLOC_SETTING)]


@pytest.mark.slow
def test_tiles_can_be_off(gemsc: Gemsc) -> None:
    assert gemsc("compile", "model.py", "--tiles", "off", "-o", "p").code == 0


@pytest.mark.slow
def test_a_program_of_another_model_is_replaced_only_if_asked(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    (tmp_path / "other.py").write_text(MODEL)
    (tmp_path / "two.py").write_text(MODEL + "\n\nclass Two(Net):\n    pass\n")
    words = "--ranks", 1, "--no-check", "-o", "p"
    for model, other in (("model.py", "other.py"), ("two.py", "two.py:Two")):
        assert gemsc("compile", model, *words, "--overwrite").code == 0
        before = files(tmp_path / "p")
        outcome = gemsc("compile", other, *words)
        assert outcome.code == 1
        assert f"p holds the program of another model: {tmp_path / model}" in (
            outcome.err
        )
        assert "replace it with --overwrite" in outcome.err
        assert files(tmp_path / "p") == before
        assert (
            gemsc("compile", tmp_path / model, *words, "--micro-batches", 2).code == 0
        )
    assert gemsc("compile", "two.py:Two", *words, "--overwrite").code == 0
    (tmp_path / "p" / "plan.toml").write_text("damaged")
    assert gemsc("compile", "model.py", *words).code == 0


@pytest.mark.slow
def test_compile_says_what_it_chose_and_writes_a_program(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    outcome = gemsc("compile", "model.py", "--blocks", "1,2", "-o", "out/program")
    assert outcome.code == 0, outcome.err
    said, *note = outcome.out.splitlines()
    assert said == (
        "Net: 2 ranks, stages of 1, 2 blocks, 1f1b, 4 micro-batches -> out/program"
    )
    assert not note or note[0].startswith("note: graph.svg needs")
    names = {path.name for path in (tmp_path / "out" / "program").iterdir()}
    wanted = {"__main__.py", "plan.toml", "rank0.py", "rank1.py", "weights"}
    assert wanted <= names
    assert not [name for name in names if name.startswith(".")]


@pytest.mark.slow
def test_passes_can_be_watched(gemsc: Gemsc) -> None:
    words = ("compile", "model.py", "--print-after", "balance-stages", "--time-passes")
    outcome = gemsc(*words)
    assert outcome.code == 0
    assert outcome.err.startswith("--- after balance-stages\n")
    assert re.search(r"ms  canonicalize\n", outcome.err)


@pytest.mark.slow
def test_show_prints_every_decision(gemsc: Gemsc) -> None:
    gemsc("compile", "model.py", "-o", "program")
    outcome = gemsc("show", "program")
    assert outcome.code == 0
    for part in ("Net: 2 ranks, 1f1b, 4 micro-batches", "stages", "transfers", "F0-"):
        assert part in outcome.out


@pytest.mark.slow
def test_the_report_is_written_by_compile_and_anew_by_show(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    gemsc("compile", "model.py", "--schedule", "auto", "-o", "program")
    path = tmp_path / "program" / "report.html"
    assert "What was compared" in path.read_text()
    path.unlink()
    outcome = gemsc("show", "program", "--html")
    assert outcome.out == "wrote program/report.html\n"
    assert "Why this split" in path.read_text()


@pytest.mark.slow(1)
@pytest.mark.parametrize("target", ["model.py", "program"])
def test_graph_draws_a_model_or_a_program(
    target: str, gemsc: Gemsc, tmp_path: Path
) -> None:
    gemsc("compile", "model.py", "-o", "program")
    outcome = gemsc("graph", target, "-o", "pictures/graph.svg")
    assert outcome.code == 0
    assert (tmp_path / "pictures" / "graph.dot").read_text().startswith("digraph")
    drawn = (tmp_path / "pictures" / "graph.svg").exists()
    assert outcome.out.startswith("wrote " if drawn else "note: graph.svg needs")


# where a model can come from


def test_a_file_in_a_folder_with_spaces_and_its_sibling(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    folder = tmp_path / "drei Blöcke"
    folder.mkdir()
    (folder / "widths_beside.py").write_text("WIDTH = 16\n")
    (folder / "model.py").write_text(
        "from widths_beside import WIDTH\n" + MODEL.replace("8, 16", "8, WIDTH")
    )
    outcome = gemsc("compile", "drei Blöcke/model.py", "-o", "drei Blöcke/Programm 1")
    assert outcome.code == 0, outcome.err
    text = (folder / "Programm 1" / "rank0.py").read_text()
    compile(text, "rank0.py", "exec")
    assert "nn.Linear(8, 16)" in text


@pytest.mark.slow
def test_a_name_in_a_module_of_a_package_with_relative_imports(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    package = tmp_path / "package_of_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "widths.py").write_text("WIDTH = 16\n")
    text = "from .widths import WIDTH\n" + MODEL.replace("8, 16", "8, WIDTH")
    (package / "nets.py").write_text(text.replace("def model()", "def small()"))
    for number, spec in enumerate(
        ["package_of_models.nets:small", "package_of_models/nets.py:small"]
    ):
        outcome = gemsc("compile", spec, "-o", f"program{number}")
        assert outcome.code == 0, outcome.err
        plan = (tmp_path / f"program{number}" / "plan.toml").read_text()
        assert 'spec = "../package_of_models/nets.py:small"' in plan


@pytest.mark.slow
def test_a_model_may_be_an_object(gemsc: Gemsc, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        MODEL.replace("def model():\n    return Net()", "model = Net()")
    )
    assert gemsc("compile", "model.py").code == 0


# with ranks


@pytest.mark.mpi
def test_run_trains_and_prints_loss_and_metrics(gemsc: Gemsc, tmp_path: Path) -> None:
    """Its own parser of arguments, as in many a script, gets none of them."""
    text = MODEL.replace("torch.randn(8),", "torch.linspace(-1, 1, 8) * (index % 5),")
    parser = "import argparse\n\nargparse.ArgumentParser().parse_args()\n"
    (tmp_path / "model.py").write_text(parser + text.replace("Data(16)", "Data(13)"))
    assert gemsc("compile", "model.py:model", "-o", "program").code == 0
    options = "--epochs", "2", "--save", "checkpoint", "--device", "cpu"
    outcome = gemsc("run", "program", *options)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    steps = re.findall(r"epoch (\d)/2 (\d)/3  loss \d\.\d+  \S+ samples/s", outcome.out)
    assert steps[0] == ("1", "1")
    assert steps[-1] == ("2", "3")
    pattern = r"held-out after epoch (\d): loss (\d\.\d+)  accuracy (\d\.\d+)\n"
    (first, *_), (second, *printed) = re.findall(pattern, outcome.out)
    assert (first, second) == ("1", "2")
    assert outcome.out.endswith("saved checkpoint/model.safetensors\n")
    user = load_user_model("model.py")
    net = user.make_unfilled().eval()
    net.load_state_dict(load_file(tmp_path / "checkpoint" / "model.safetensors"))
    data = [user.eval_dataset()[index] for index in range(13)]  # a batch has 8
    output = net(torch.stack([x for x, _ in data]))
    target = torch.stack([label for _, label in data])
    expected = [user.loss(output, target), user.metrics(output, target)["accuracy"]]
    assert printed == [f"{float(value.detach()):.4f}" for value in expected]


def test_a_parser_in_the_file_gets_no_arguments(gemsc: Gemsc, tmp_path: Path) -> None:
    parser = "import argparse\n\nparser = argparse.ArgumentParser()\n{}\n"
    text = parser.format("print(parser.parse_args())") + MODEL
    (tmp_path / "model.py").write_text(text)
    assert gemsc("compile", "model.py", "-o", "program").code == 0
    needed = "parser.add_argument('--width', required=True)\nparser.parse_args()"
    (tmp_path / "model.py").write_text(parser.format(needed) + MODEL)
    outcome = gemsc("compile", "model.py", "-o", "other")
    assert outcome.code == 1
    assert "model.py:5: error: importing model.py fails: SystemExit: 2" in outcome.err
    assert "for `gemsc compile --set WIDTH=32`" in outcome.err


@pytest.mark.mpi
@pytest.mark.nightly
def test_a_program_of_another_name_runs_and_is_exact(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("def model()", "def small()"))
    assert gemsc("compile", "model.py:small", "-o", "program").code == 0
    outcome = gemsc("verify", "program", "--dtype", "float64", "--steps", "2")
    assert outcome.code == 0, outcome.err
    assert re.search(r"float64: worst \S+, allowed 1e-09: exact\n", outcome.out)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float64", *at_night("float32")])
def test_a_program_that_computes_something_else_is_not_exact(
    dtype: str, gemsc: Gemsc, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("def model()", "def small()"))
    assert gemsc("compile", "model.py:small", "--ranks", 1, "-o", "p").code == 0
    path = tmp_path / "p" / "rank0.py"
    text = path.read_text()
    wrong = text.replace("self.third(", "1.001 * self.third(")
    assert wrong != text
    path.write_text(wrong)
    outcome = gemsc("verify", "p", "--dtype", dtype, "--steps", "1")
    assert outcome.code == 1
    assert re.search(rf"{dtype}: worst \S+, allowed \S+: NOT EXACT\n", outcome.out)


def test_other_roundings_change_the_last_bit_of_each_weight() -> None:
    model = torch.nn.Linear(40, 30)
    before = model.weight.detach().clone()
    changed = nudged(model, 0, torch.float32).weight
    assert torch.equal(model.weight, before)
    steps = (changed - before).abs() / torch.finfo(torch.float32).eps / before.abs()
    assert float(steps.max()) <= 2  # the product is rounded as well
    assert float((steps > 0).float().mean()) > 0.9
    assert torch.equal(nudged(model, 0, torch.float32).weight, changed)
    assert not torch.equal(nudged(model, 1, torch.float32).weight, changed)
