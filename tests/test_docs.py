"""What the documentation shows is what happens."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from command_line import gemsc_here
from rich.console import Console
from typer.main import get_command

from gemsc.cli import make_app
from gemsc.compiler import CompiledProgram, compile
from gemsc.ir.dump import dump
from gemsc.launch.arguments import read_launch
from gemsc.launch.launch import launch
from gemsc.schedules import SCHEDULES
from gemsc.user_model import UserModel, load_user_model
from gemsc.viz.tables import show

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
UNET = ROOT / "examples" / "unet_histology" / "model.py"
# `<!-- from unet annotate: %a; %b -->` above a block says what the block shows
SHOWN = re.compile(
    r"^<!-- from (?P<model>\w+) (?P<place>[\w.-]+): ?(?P<starts>[^\n]*) -->\n"
    r"```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
WIDTH = 100


def blocks(path: Path, kind: str) -> list[str]:
    """Return the fenced blocks of a kind."""
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def pick_statements(text: str, starts: list[str]) -> str:
    """Return the top-level statements that start so."""
    lines = text.splitlines()
    found = []
    for node in ast.parse(text).body:
        if lines[node.lineno - 1].startswith(tuple(starts)):
            found.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    assert len(found) >= len(starts)
    return "\n\n\n".join(found) + "\n"


def pick_lines(text: str, starts: list[str]) -> str:
    """Return the lines that start so."""
    lines = [t for t in text.splitlines() if t.strip().startswith(tuple(starts))]
    assert lines
    cut = [t if len(t) <= WIDTH else f"{t[: WIDTH - 4]} ..." for t in lines]
    return "\n".join(cut) + "\n"


# links, commands, names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    files = [target for target in targets if "://" not in target]
    assert not [file for file in files if not (page.parent / file).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_commands_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\b((?:gemsc|tests|examples)/[\w/]+\.py)\b", text)
    own = {"tests/test_count_heavy.py"}  # what the reader is to write
    assert not [file for file in named if not (ROOT / file).exists() | (file in own)]
    targets = re.findall(r"`make (\w+)`", text)
    makefile = (ROOT / "Makefile").read_text()
    assert not [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)]
    commands = {command.name for command in make_app().registered_commands}
    assert set(re.findall(r"`gemsc (\w+)[ `]", text)) <= commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_are_python(page):
    for block in blocks(page, "python"):
        ast.parse(block)


def test_every_page_can_be_found_from_the_readme():
    found = {ROOT / "README.md"}
    queue = list(found)
    while queue:
        page = queue.pop()
        for target in re.findall(r"\]\(([^)#]+\.md)\)", page.read_text()):
            path = (page.parent / target).resolve()
            if path.exists() and path not in found:
                found.add(path)
                queue.append(path)
    assert not set(PAGES) - found


def test_all_commands_and_schedules_are_explained():
    text = (ROOT / "README.md").read_text()
    for command in make_app().registered_commands:
        assert re.search(rf"`gemsc {command.name}[ `]", text)
    text = (ROOT / "docs" / "pipeline.md").read_text()
    for schedule in SCHEDULES:
        assert text.count(f"\n| `{schedule}` |") >= 2  # what it is; its figures


def test_all_names_of_a_model_file_are_explained():
    text = (ROOT / "docs" / "models.md").read_text()
    names = {field.name for field in fields(UserModel)} - {
        "path",
        "module",
        "name",
        "spec",
        "constants",
    }
    assert not [name for name in names if not re.search(rf"\n\| `{name}\W", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_are_named_exist(page, capsys):
    known = {"--help", "--update-golden", "--nightly"}  # pytest's
    known |= {"--extra-index-url", "--oversubscribe", "--mpi"}  # pip, mpirun, srun
    known |= {"--gpus-per-node"}  # sbatch
    known |= {"--no-binary", "--recipe", "--nproc-per-node"}  # pip, rattler, torchrun
    known |= {"--rm", "--gpus", "--nv", "--build-arg"}  # docker, apptainer
    app = get_command(make_app())
    for command in (app, *app.commands.values()):
        known |= {name for param in command.params for name in param.opts}
        known |= {name for param in command.params for name in param.secondary_opts}
    for script in (*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*/*.py")):
        known |= set(re.findall(r'"(--[\w-]+)"', script.read_text(encoding="utf-8")))
    with pytest.raises(SystemExit):
        read_launch(["--help"])
    known |= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    named = re.findall(r"(?<![\w|-])--[a-z][\w-]+", page.read_text(encoding="utf-8"))
    assert set(named) <= known


# what is shown of programs


@dataclass
class Shown:
    """A compiled model and the dump after each pass."""

    program: CompiledProgram
    dumps: dict[str, str]

    def pick(self, place: str, starts: list[str]) -> str:
        if place == "order":
            return "\n".join(self.program.plan.order) + "\n"
        if place == "show":
            console = Console(file=io.StringIO(), width=WIDTH)
            show(self.program.plan, console)
            return pick_lines(console.file.getvalue(), starts)
        if place.startswith("lines-"):
            return pick_lines(self.program.rank_modules()[place[6:]], starts)
        if place.endswith(".py"):
            return pick_statements(self.program.rank_modules()[place], starts)
        return pick_lines(self.dumps[place], starts)


def compile_file(path: Path, **options) -> Shown:
    user = load_user_model(str(path))
    dumps: dict[str, str] = {}

    def keep(step, program, seconds):
        dumps.setdefault(step.name, dump(program))

    inputs = user.make_inputs()
    program = compile(
        user.make_model(),
        inputs,
        loss=user.make_loss(),
        example_target=user.make_target(inputs),
        optimizer=user.optimizer,
        source=user.path,
        after_each=keep,
        **options,
    )
    return Shown(program, dumps)


@pytest.fixture(scope="module")
def models(workplace) -> dict[str, Shown]:
    """The models that the documentation shows."""
    shards = {"ranks": 2, "shards": ("2",), "check": False}
    block, mixed = workplace / "block.py", workplace / "mixed.py"
    branches = {"ranks": 2, "branches": ("2",), "check": False}
    return {
        "block": compile_file(block, trunk="whole", **shards),
        "split": compile_file(block, trunk="batch", **shards),
        "mixed": compile_file(mixed, trunk="whole", **branches),
        "mixed_batch": compile_file(mixed, trunk="batch", **branches),
        "unet": compile_file(UNET, ranks=4, micro_batches=8, check=False),
        "rings": compile_file(workplace / "rings.py", ranks=2),
        "shapes": compile_file(workplace / "model.py", ranks=2),
        "digits": compile_file(workplace / "digits.py", ranks=1, data=2),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_shown_is_what_comes_out(page, models, pytestconfig):
    def write_anew(found: re.Match[str]) -> str:
        starts = [start.lstrip() for start in found["starts"].split(";")]
        text = models[found["model"]].pick(found["place"], starts)
        comment = found[0].split("\n", 1)[0]
        return f"{comment}\n```{found['kind']}\n{text}```"

    before = page.read_text(encoding="utf-8")
    now = SHOWN.sub(write_anew, before)
    if pytestconfig.getoption("--update-golden"):
        page.write_text(now, encoding="utf-8")
    else:
        assert now == before, "if it is right, run pytest --update-golden"


def test_the_readme_counts_the_networks_of_the_benchmark():
    table = (ROOT / "docs" / "benchmarks.md").read_text()
    _, table = table.split("## Networks that others wrote", 1)
    table, _ = table.split("\n## ", 1)
    cell = r"same bits|1 fails|\de-\d\d"
    rows = re.findall(rf"^\w+/.+? {{2,}}\d+ +({cell}) ", table, re.MULTILINE)
    failed = rows.count("1 fails")
    exact = [row for row in rows if "s" not in row and float(row) <= 1e-9]
    exact += [row for row in rows if row == "same bits"]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"of {len(rows) + 2} networks of MONAI" in text  # two are not in the table
    assert f"{len(exact)} train one step exactly" in text
    assert f"and {failed} in float32" in text
    assert len(exact) + failed == len(rows)


# the readme


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the files that pages show as a whole."""
    folder = tmp_path_factory.mktemp("readme")
    for page in PAGES:
        for text in blocks(page, "python"):
            if name := re.match(r"# (\w+\.py)\n", text):
                (folder / name[1]).write_text(text)
    return folder


def run(folder: Path, words: list[str]) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.mpi
def test_the_commands_of_the_readme_work(workplace, monkeypatch, capfd):
    (commands,) = blocks(ROOT / "README.md", "sh")
    gemsc = gemsc_here(monkeypatch, capfd)
    monkeypatch.chdir(workplace)
    for command in commands.splitlines():
        first, *words = shlex.split(command)
        assert first == "gemsc"
        done = gemsc(*words)
        text = done.out + done.err
        assert done.code == 0, text
        if "verify" in command:
            assert text.count(": exact") == 2
        if "gemsc run" in command:
            losses = [float(found) for found in re.findall(r"  loss (\S+)  ", text)]
            assert losses[-1] < 0.1 < losses[0]  # it learns
    assert (workplace / "build/rings-trained/model.safetensors").is_file()


@pytest.mark.mpi
@pytest.mark.nightly
def test_the_loop_of_ones_own_works(workplace):
    run(workplace, [sys.executable, "compile_rings.py"])
    with (workplace / "output").open("w+") as output:
        code = launch(
            2,
            [sys.executable, "train_rings.py"],
            cwd=workplace,
            stdout=output,
            stderr=output,
            timeout=120,
        )
        output.seek(0)
        text = output.read()
    assert code == 0, text
    loss = re.search(r"^loss (\S+), evaluated \S+, \(64,\)$", text, re.MULTILINE)
    assert loss, text
    assert float(loss[1]) < 0.2
    assert (workplace / "build/own-trained/latest/manifest.json").is_file()
