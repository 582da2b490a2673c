"""What the documentation shows is what happens."""

from __future__ import annotations

import ast
import functools
import io
import math
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command_line import gemsc_here
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from typer.main import get_command

from gemsc.cli import make_app
from gemsc.compiler import CompiledProgram, Traced, compile, lower, trace
from gemsc.ir.dump import dump
from gemsc.ir.operators import calls, table
from gemsc.launch.launch import launch
from gemsc.launch.start import read_launch
from gemsc.options import CompileOptions
from gemsc.passes.manager import Observer
from gemsc.passes.shards import operations
from gemsc.schedules import SCHEDULES, policies
from gemsc.user_model import UserModel, load_user_model
from gemsc.viz.terminal import show

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
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
    picked = []
    for node in ast.parse(text).body:
        if lines[node.lineno - 1].startswith(tuple(starts)):
            picked.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    assert len(picked) >= len(starts)
    return "\n\n\n".join(picked) + "\n"


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
    theirs = {"tests/test_count_heavy.py"}  # what the reader is to write
    assert not [file for file in named if not (ROOT / file).exists() | (file in theirs)]
    targets = re.findall(r"`make (\w+)`", text)
    makefile = (ROOT / "Makefile").read_text()
    assert not [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)]
    commands = {command.name for command in make_app().registered_commands}
    assert set(re.findall(r"`gemsc (\w+)[ `]", text)) <= commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_code_and_no_prose(page):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    names = "|".join(str(command.name) for command in make_app().registered_commands)
    assert not re.findall(rf"^gemsc (?:{names}) .*", prose, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_are_python(page):
    for block in blocks(page, "python"):
        ast.parse(block)


def test_every_page_can_be_found_from_the_readme():
    reached = {ROOT / "README.md"}
    queue = list(reached)
    while queue:
        page = queue.pop()
        for target in re.findall(r"\]\(([^)#]+\.md)\)", page.read_text()):
            path = (page.parent / target).resolve()
            if path.exists() and path not in reached:
                reached.add(path)
                queue.append(path)
    assert not set(PAGES) - reached


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
        *("constants", "settings"),
    }
    assert not [name for name in names if not re.search(rf"\n\| `{name}\W", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_are_named_exist(page, capsys):
    known = {"--help", "--update-golden", "--nightly"}  # pytest's
    known |= {"--extra-index-url", "--oversubscribe", "--mpi"}  # pip, mpirun, srun
    known |= {"--gpus-per-node"}  # sbatch
    known |= {"--no-binary", "--recipe"}  # pip, rattler
    known |= {"--nproc-per-node", "--local-addr", "--rdzv-conf"}  # torchrun
    known |= {"--nnodes", "--rdzv-backend", "--rdzv-endpoint"}  # torchrun
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


@functools.cache
def traced_file(path: Path, keep: Observer | None = None) -> tuple[UserModel, Traced]:
    user = load_user_model(str(path))
    inputs = user.make_inputs()
    graph = trace(
        user.make_unfilled(),
        inputs,
        loss=user.make_loss(),
        example_target=user.make_target(inputs),
        optimizer=user.optimizer,
        check=False,  # the commands of the readme compare
        after_each=keep,
    )
    return user, graph


def compile_file(path: Path, *, dumps_passes: bool = False, **options) -> Shown:
    dumps: dict[str, str] = {}

    def keep(step, program, seconds):
        dumps.setdefault(step.name, dump(program))

    after_each = keep if dumps_passes else None
    user, graph = traced_file(path, after_each)
    how = {"source": user.path, "after_each": after_each}
    return Shown(lower(graph, CompileOptions(**options), **how), dumps)


@pytest.fixture(scope="module")
def models(workplace) -> dict[str, Shown]:
    """The models that the documentation shows."""
    shards = {"ranks": 2, "shards": ("2",)}
    experts = workplace / "experts.py"
    block, mixed = workplace / "block.py", workplace / "mixed.py"
    branches = {"ranks": 2, "branches": ("2",)}
    return {
        "block": compile_file(block, trunk="whole", **shards),
        "experts": compile_file(experts, trunk="whole", **shards),
        "split": compile_file(block, trunk="batch", **shards),
        "mixed": compile_file(mixed, trunk="whole", **branches),
        "mixed_batch": compile_file(mixed, trunk="batch", **branches),
        "unet": compile_file(UNET, dumps_passes=True, ranks=4, micro_batches=8),
        "rings": compile_file(workplace / "rings.py", ranks=2),
        "shapes": compile_file(workplace / "model.py", ranks=2),
        "digits": compile_file(workplace / "digits.py", ranks=2, data=2),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_shown_is_what_comes_out(page, models, pytestconfig):
    def write_anew(match: re.Match[str]) -> str:
        starts = [start.lstrip() for start in match["starts"].split(";")]
        text = models[match["model"]].pick(match["place"], starts)
        comment = match[0].split("\n", 1)[0]
        return f"{comment}\n```{match['kind']}\n{text}```"

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


# what contributing.md adds


CONTRIBUTING = ROOT / "docs" / "contributing.md"


def indented(page: Path, start: str) -> str:
    """Return an indented block of a list that begins so."""
    text = page.read_text(encoding="utf-8")
    match = re.search(
        rf"^ {{7}}{re.escape(start)}.*\n(?: {{7}}.*\n)*", text, re.MULTILINE
    )
    assert match is not None
    return textwrap.dedent(match[0])


def test_the_pass_that_is_added_counts_what_its_example_shows(models, monkeypatch):
    (text,) = (b for b in blocks(CONTRIBUTING, "python") if "class CountHeavy" in b)
    module = ModuleType("count_heavy")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(text, vars(module))
    module.replace = lambda program, num_heavy: num_heavy
    counts = module.CountHeavy().apply(models["unet"].program.compilation.program)
    assert f"    {' '.join(map(str, counts))}\n" in module.__doc__


def test_the_schedule_that_is_shown_is_that_of_gemsc():
    (text,) = (b for b in blocks(CONTRIBUTING, "python") if b.startswith("SCHEDULES"))
    names = dict(vars(policies))
    exec(text, names)
    (name,) = names["SCHEDULES"]
    assert names["SCHEDULES"][name] == SCHEDULES[name]


def test_the_operation_that_is_added_is_exact_on_shards(monkeypatch):
    added = ast.literal_eval("{" + indented(CONTRIBUTING, '"addmv": ("addmv"') + "}")
    monkeypatch.setitem(calls.FUNCTIONS, torch.addmv, added["addmv"])
    row = indented(CONTRIBUTING, '"addmv": Operator(')
    monkeypatch.setitem(
        table.OPERATORS, "addmv", eval("{" + row + "}", dict(vars(table)))["addmv"]
    )
    names = dict(vars(operations))
    exec(
        "from __future__ import annotations\n" + indented(CONTRIBUTING, "def _addmv"),
        names,
    )
    monkeypatch.setitem(operations.OPERATIONS, "addmv", names["_addmv"])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 64)
            self.vector, self.added = (nn.Parameter(torch.randn(n)) for n in (64, 8))

        def forward(self, x):
            return torch.addmv(self.added, torch.relu(self.first(x)), self.vector)

    made = compile(Net(), torch.randn(8, 6), loss=torch.mean, ranks=2, shards=("2",))
    assert {cut.name for cut in made.compilation.program.shards[0].cut} >= {"vector"}


# the readme


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the files that pages show as a whole."""
    return write_files(tmp_path_factory.mktemp("readme"))


def write_files(folder: Path) -> Path:
    """Write the files that pages show as a whole."""
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
        if "verify" in words:  # in float32 at night: test_the_first_pages
            words += ["--dtype", "float64"]
        done = gemsc(*words)
        text = done.out + done.err
        assert done.code == 0, text
        if "verify" in command:
            assert text.count(": exact") == 1
        if "gemsc run" in command:
            shown = [line.strip() for line in printed(ROOT / "README.md")[1]]
            for line in (s for s in shown if s.startswith(("epoch", "saved"))):
                near = pytest.approx(numbers_of(line), rel=0.02)
                same = (s for s in text.splitlines() if words_of(s) == words_of(line))
                assert any(numbers_of(s) == near for s in same), line
            first, last = re.findall(r"falls from (\S+) in .* to (\S+) in", README)[0]
            losses = [float(loss) for loss in re.findall(r"  loss (\S+)  ", text)]
            assert losses[0] == pytest.approx(float(first), abs=0.01)
            assert losses[-1] == pytest.approx(float(last), abs=0.01)
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


# the first pages: each command that they print, and what they say it prints

FIRST = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{n}.md" for n in ("index", "install", "first-model")),
]
# what needs a network, root, a cluster or a shell of its own
ELSEWHERE = (
    *(
        "pip ",
        "make demo",
        "docker ",
        "apptainer ",
        "rattler-build ",
        "cp -r ",
        "spack ",
    ),
    *("module ", "python3 -m venv", "srun ", "sbatch ", "gemsc --install-completion"),
)
KERAS = ("unet.keras", "train.py", "build/keras", "trained.keras")  # tests of importers
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def printed(page: Path) -> tuple[list[str], list[str]]:
    """Return the commands that a page prints, and the lines that they print."""
    text = page.read_text(encoding="utf-8")
    shown = "".join(blocks(page, "text"))
    prose = re.sub(r"^ *```(?!sh).*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)
    is_command = re.compile(
        r"(gemsc|python|python3|make|pip|docker|apptainer|srun|sbatch"
        r"|rattler-build|cp|spack|module) "
    )
    commands = [line for line in lines if is_command.match(line)]
    return commands, [*shown.splitlines(), *(set(lines) - set(commands))]


def words_of(line: str) -> str:
    """Return a line without what differs from run to run: speeds, and all numbers."""
    line = re.sub(r"\s+[\d.]+ samples/s.*", "", line).removesuffix("...")
    return " ".join(NUMBER.sub("#", line).split())


def numbers_of(line: str) -> list[float]:
    line = re.sub(r"\s+[\d.]+ samples/s.*", "", line)
    return [float(number) for number in NUMBER.findall(line)]


def is_run(command: str) -> bool:
    return not command.startswith(ELSEWHERE) and not any(k in command for k in KERAS)


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.stem)
def test_the_first_pages_print_what_happens(page, tmp_path):
    (write_files(tmp_path) / "examples").symlink_to(ROOT / "examples")
    commands, shown = printed(page)
    said: list[str] = []
    for command in filter(is_run, commands):
        said += run(tmp_path, shlex.split(command, comments=True)).splitlines()
    by_words: dict[str, list[list[float]]] = {}
    for line in said:
        by_words.setdefault(words_of(line), []).append(numbers_of(line))
    for line in shown:
        if re.match(r"(epoch|saved|held-out|wrote|float|Net)", line):
            assert words_of(line) in by_words, line
        if line.startswith("held-out"):
            near = pytest.approx(numbers_of(line), rel=0.5, abs=0.1)
            assert any(numbers == near for numbers in by_words[words_of(line)])
    if page.stem == "first-model":
        tree = blocks(page, "text")[1]
        names = re.findall(r"(?m)^  (\S+)(?: (\S+\.\w+))?", tree)
        folder = tmp_path / "build" / "shapes"
        assert not [n for pair in names for n in pair if not (folder / n).exists()]
        assert run(tmp_path, [sys.executable, "plain.py"]) in page.read_text()


@pytest.mark.mpi
@pytest.mark.nightly
def test_the_gpt_of_the_page_of_libraries_prints_what_happens(tmp_path):
    transformers = pytest.importorskip("transformers")
    section = (
        (ROOT / "docs" / "libraries.md").read_text().partition("# Hugging Face")[2]
    )
    page = write_files(tmp_path) / "page.md"
    page.write_text(section.partition("### A Llama")[0])
    said: list[str] = []
    commands, shown = printed(page)
    assert sum(command.startswith("gemsc") for command in commands) == 6
    for command in filter(is_run, commands):
        if command.startswith("gemsc import"):
            said += run(tmp_path, [sys.executable, "write.py"]).splitlines()
        said += run(tmp_path, shlex.split(command)).splitlines()
        text = (tmp_path / "text.txt").read_text()
        (tmp_path / "text.txt").write_text(text[:20_000])  # five steps an epoch
    told = {words_of(line) for line in said}
    kinds = r"(GPT2|float|held-out|perplexity|saved|build|epoch 1/1)"
    wanted = [words_of(line) for line in shown if re.match(kinds, line)]
    assert len(set(wanted)) > 6
    assert not [words for words in wanted if words not in told]
    figures = [numbers_of(s) for s in said if re.match("held-out|perplexity", s)]
    for (_, loss), (perplexity,) in zip(figures[::2], figures[1::2], strict=True):
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-3, abs=0.1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    weights = load_file(tmp_path / "trained-gpt" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.mpi
@pytest.mark.nightly
def test_the_page_of_monai_prints_what_happens(tmp_path):
    pytest.importorskip("monai")
    pytest.importorskip("nibabel")
    text = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
    page = write_files(tmp_path) / "monai.md"
    page.write_text(text.split("\n## ")[1], encoding="utf-8")
    commands, shown = printed(page)
    said: dict[str, list[list[float]]] = {}
    for command in filter(is_run, commands):
        for line in run(tmp_path, shlex.split(command)).splitlines():
            said.setdefault(words_of(line), []).append(numbers_of(line))
    for line in shown:
        if re.match(r"(UNet|float|held-out|saved|wrote|dice)", line):
            assert words_of(line) in said, line
        if re.match(r"(held-out|dice)", line):
            near = pytest.approx(numbers_of(line), rel=0.05)
            assert any(numbers == near for numbers in said[words_of(line)]), line


@pytest.mark.mpi
@pytest.mark.nightly
def test_doctor_has_the_lines_of_the_page_of_installing(tmp_path):
    def labels(text: str) -> set[str]:
        return {line[:14].strip() for line in text.splitlines() if line.strip()}

    page = blocks(ROOT / "docs" / "install.md", "text")[0]
    assert labels(page) <= labels(run(tmp_path, ["gemsc", "doctor"]))


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.stem)
def test_what_the_first_pages_install_from_is_there(page):
    commands, _ = printed(page)
    assert commands
    known = (ROOT / "pyproject.toml").read_text()
    for command in commands:
        for extra in re.findall(r"'\.\[([\w,]+)\]'", command):
            assert not [e for e in extra.split(",") if f"\n{e} = [" not in known]
        for path in re.findall(r"packaging/\S+|constraints-\w+\.txt", command):
            assert (ROOT / path).exists()
        assert "<" not in command  # nothing that cannot be typed


def test_the_error_of_the_readme_is_what_compile_says(tmp_path, monkeypatch, capfd):
    text = next(b for b in blocks(ROOT / "README.md", "text") if b.startswith("bad.py"))
    model = (
        (
            "import torch\nfrom torch import nn\n\nclass Net(nn.Module):\n"
            "    def forward(self, x):\n    if x.sum() > 0:\n        x = -x\n"
            "        return x\n\nmodel = Net\n\ndef example_inputs():\n"
            "    return (torch.ones(2, 3),)\n"
        )
        .replace("    if x.sum", "        if x.sum")
        .replace("        x = -x", "            x = -x")
    )
    (tmp_path / "bad.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    done = gemsc_here(monkeypatch, capfd)("compile", "bad.py", "-o", "build")
    assert done.code == 1
    assert " ".join(text.split()) in " ".join(done.err.split())
