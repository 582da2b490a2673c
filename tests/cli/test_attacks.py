"""Names, plans, checkpoints and logs are data: nothing in them is executed."""

from __future__ import annotations

import json
import pickle
import random
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from networks import mean
from program_support import WIDTH, X, written
from torch import Tensor, nn

from gemsc.codegen.writer import in_docstring
from gemsc.errors import GemscError
from gemsc.launch.hosts import parse_hosts, read_hostfile
from gemsc.plan import Plan
from gemsc.runtime.checkpoint.folder import check_checkpoint
from gemsc.runtime.process.status import read_status
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.program_directory import load_program
from gemsc.runtime.training.run_folder import clear, describe_run
from gemsc.viz.curves import RunLog, curves
from gemsc.viz.report import write_report

LEFT = "was_here"  # what an attack that works would leave
TOUCH = f"__import__('pathlib').Path('{LEFT}').touch()"
NAMES = [
    f'a"]; {TOUCH} #',
    f"a'''\n{TOUCH}\n'''",
    f'"""\n{TOUCH}\n"""',
    f"a\\\n{TOUCH}",
    f"{{{TOUCH}}}",
    f"$(touch {LEFT})",
    f"`touch {LEFT}`",
    f"; touch {LEFT};",
    "<script>document.title='was_here'</script>",
    "]]></style><script>x</script>",
    "../../../tmp/up",
    "[link=file:///etc/passwd]x[/link]",
]


@pytest.fixture(autouse=True)
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing is executed, whatever a test does."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert not list(tmp_path.rglob(LEFT))


class Named(nn.Module):
    """A model whose layers have names of an attacker's."""

    def __init__(self) -> None:
        super().__init__()
        odd = [name.replace(".", "_") for name in NAMES]
        self.kept, self.more = odd[::2], odd[1::2]
        for name in self.kept:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.scales = nn.ParameterDict({name: X[0].clone() for name in self.more})

    def forward(self, x: Tensor) -> Tensor:
        for name, scale in zip(self.kept, self.more, strict=True):
            x = torch.tanh(getattr(self, name)(x)) * self.scales[scale]
        return x


def test_names_of_layers_and_parameters_are_data_in_all_files(tmp_path: Path) -> None:
    target = tmp_path / "program"
    written(target, Named(), (X,), mean, None, ranks=2)
    for rank in range(2):
        load_program(target, rank)
    plan = Plan.read(target / "plan.toml")
    page = write_report(plan, target).read_text()
    assert "<script>document" not in page
    assert not (tmp_path.parent / "up").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_stays_one(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f'"""{in_docstring(name)}"""\n', namespace)
    assert isinstance(namespace["__doc__"], str)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_runs_and_figures_are_text_in_a_picture(name: str) -> None:
    log = RunLog(name, [(1, 1.0), (2, 0.5)], {name: [(2, 0.5)]}, options={name: name})
    root = ElementTree.fromstring(curves([log]))
    kinds = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert kinds <= {"svg", "title", "style", "rect", "text", "path", "line", "circle"}


def test_what_was_typed_is_quoted_in_the_record_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("")
    options = parse_arguments(["--save", NAMES[5], "--resume", NAMES[7]])
    describe_run(tmp_path, tmp_path, options, 0, NAMES)
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert shlex.split(start["command"])[3:] == options.typed
    assert start["hosts"] == NAMES


@pytest.mark.parametrize(
    "host",
    [*NAMES, "-oProxyCommand=touch was_here", "a b", "a;b:2", "a:2 && touch was_here"],
)
def test_hosts_are_names_and_numbers(host: str, tmp_path: Path) -> None:
    with pytest.raises(GemscError):
        parse_hosts(f"{host}:2")
    path = tmp_path / "hosts"
    path.write_text(f"{host} slots=2\n")
    with pytest.raises(GemscError):
        read_hostfile(path)


class Touches:
    """What pickle would call."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path(LEFT).absolute(),)


@pytest.mark.parametrize(
    "file",
    ["manifest.json", "rank0.safetensors", "model.safetensors", "optimizer-rank0.pt"],
)
def test_a_pickle_in_a_checkpoint_is_never_loaded(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step-000001"
    folder.mkdir(parents=True)
    (folder / file).write_bytes(pickle.dumps(Touches()))
    for place in (folder, folder.parent):
        with pytest.raises(GemscError):
            check_checkpoint(place)


@pytest.mark.parametrize(
    "file", ["../../secret", "/etc/passwd", "rank0.safetensors/.."]
)
def test_a_manifest_names_no_file_elsewhere(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step-000001"
    folder.mkdir(parents=True)
    facts = {"bytes": 1, "sha256": "0" * 64}
    content = {"format": 3, "step": 1, "ranks": 1, "files": {file: facts}}
    content |= {"tensors": {}, "aliases": {}, "progress": {}}
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(GemscError):
        check_checkpoint(folder)


def test_nothing_outside_a_runs_folder_is_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").touch()
    (outside / "mine").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("step-000001", "latest", "best", "log.jsonl", "model.safetensors"):
        (folder / name).symlink_to(outside)
    clear(folder)
    assert sorted(path.name for path in outside.iterdir()) == ["manifest.json", "mine"]
    assert [path.name for path in folder.iterdir()] == ["step-000001"]


def test_a_status_is_a_short_text(tmp_path: Path) -> None:
    (tmp_path / "rank0").write_bytes(b"\xff" + NAMES[0].encode() + b"\0rest")
    status = read_status(tmp_path, 0)
    assert status is not None
    assert "rest" not in status


# Plans with anything in them


def changed(text: str, draw: random.Random) -> str:
    """Return a plan's text with something wrong in it."""
    lines = text.splitlines()
    at = draw.randrange(len(lines))
    worth = [
        *(json.dumps(name) for name in NAMES),
        *("-1", "1e400", "nan", "[]", "{}", "true", '""', "[[[[]]]]", "99999999999999"),
    ]
    match draw.randrange(5):
        case 0 if " = " in lines[at]:
            lines[at] = f"{lines[at].split(' = ')[0]} = {draw.choice(worth)}"
        case 1:
            del lines[at]
        case 2:
            lines.insert(at, draw.choice(lines))
        case 3:
            lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
        case _:
            letters = list(lines[at] or " ")
            letters[draw.randrange(len(letters))] = chr(draw.randrange(1, 0x2FF))
            lines[at] = "".join(letters)
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 1000), marks=pytest.mark.nightly)]
)
def test_a_plan_with_anything_in_it_is_read_or_refused(
    seeds: range, tmp_path: Path
) -> None:
    program = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    written(tmp_path / "program", program, ranks=2, micro_batches=2)
    text = (tmp_path / "program" / "plan.toml").read_text()
    path, refused = tmp_path / "plan.toml", 0
    for seed in seeds:
        path.write_text(changed(text, random.Random(seed)), encoding="utf-8")
        try:
            Plan.read(path)
        except GemscError:
            refused += 1
    assert refused > len(seeds) / 4
