"""`examples/papers`: published figures beside simulated ones."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from command_line import DEEP, gemsc_here
from models import AmoebaNet
from nightly import at_night
from rich.console import Console

from gemsc.costs.hardware import read_hardware
from gemsc.passes.share_device import share
from gemsc.simulate.simulation import Unfilled

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "examples" / "papers"
NAMES = ("accdp", "gems", "hyfi", "super")
GAINS = """\
title = "deep"
source = "nobody"
model = "deep.py"
hardware = "v100-lassen.toml"
assumptions = ["none"]

[[run]]
name = "one"
environment = { SAMPLES = "16" }
ranks = 8
data = 8

[[run]]
name = "two"
environment = { SAMPLES = "32" }
ranks = 8
data = 8
published_speedup = 3.5
over = "one"
reason = "because"

[[run]]
name = "three"
ranks = 8
data = 8
"""
SMALL = {
    **{"VOCABULARY": 11, "WIDTH": 12, "FEATURES": 8, "HEADS": 4, "HEAD": 3},
    **{"DEPTH": 2, "TOKENS": 6, "BUCKETS": 8, "FARTHEST": 6},
}


def script(name: str) -> ModuleType:
    """Return a file of the papers as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, PAPERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compare() -> Iterator[ModuleType]:
    """Return compare.py, which sets variables for the models."""
    before = dict(os.environ)
    yield script("compare")
    os.environ.clear()
    os.environ.update(before)


def paper(folder: Path, text: str, model: str = DEEP) -> Path:
    """Write a paper whose model is a small one."""
    text = re.sub('model = "[a-z]+.py"', 'model = "deep.py"', text)
    text = text.replace("v100-lassen.toml", str(PAPERS / "v100-lassen.toml"))
    (folder / "deep.toml").write_text(text)
    (folder / "deep.py").write_text(model)
    return folder / "deep.toml"


@pytest.mark.slow
def test_published_figures_are_printed_beside_simulated_ones(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = paper(tmp_path, (PAPERS / "gems.toml").read_text())
    compare.show(path, Console(width=140))
    said = capsys.readouterr().out
    for figure in ("97.32%", "7.25 h", "6.28 h", "4.21 h", "0.45 h", "SC20", "X bus"):
        assert figure in said


@pytest.mark.slow
def test_a_gain_is_over_another_run(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.show(paper(tmp_path, GAINS), Console(width=120))
    said = capsys.readouterr().out
    rows = re.findall(r"(one|two) +│ +(\S+) │ +(\S+)x │.*│ +([\d.,]+) │", said)
    (*first, slow), (*second, fast) = rows
    assert first == ["one", "-", "1.00"]
    gain = float(fast.replace(",", "")) / float(slow.replace(",", ""))
    assert second == ["two", "3.5x", f"{gain:.2f}"]
    assert gain > 1.5  # half of the sums for each sample


def test_the_table_of_all_has_the_runs_that_say_why_they_differ(
    compare: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = []
    simulate = compare.simulate

    def noted(traced, options, copies, **others):
        simulated.append((options.copy_ranks, options.data, copies))
        return simulate(traced, options, copies, **others)

    monkeypatch.setattr(compare, "simulate", noted)
    compare.show_headlines([paper(tmp_path, GAINS)], Console(width=120))
    said = capsys.readouterr().out
    assert re.search(r"deep +│ two +│ +3.5x │ +[\d.]+x │ because", said)
    assert "one " not in said
    assert simulated == [(1, 8, (1,)), (1, 8, (1,))]  # "one" and "two", not "three"


@pytest.mark.slow
def test_curves_are_drawn_of_runs_with_several_points(
    compare: ModuleType, tmp_path: Path
) -> None:
    compare.show(paper(tmp_path, GAINS), Console(quiet=True), str(tmp_path / "curves"))
    files = sorted((tmp_path / "curves").iterdir())
    assert [file.name for file in files] == ["deep-1.svg", "deep-2.svg", "deep-3.svg"]
    ElementTree.parse(files[0])


@pytest.mark.slow
def test_what_sharing_a_device_gains_is_printed_over_the_batch(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = (PAPERS / "accdp.toml").read_text().split("[[run]]")[:4]
    path = paper(tmp_path, "[[run]]".join(runs), DEEP.replace("256", "1024"))
    compare.show(path, Console(width=160))
    said = capsys.readouterr().out
    rows = re.findall(r"│ (\d) sample.*up to \+62% │ +\+(\d+)% │.*│ +(\d+)% │", said)
    assert [int(row[0]) for row in rows] == [1, 2, 3]
    gains, used = ([int(row[i]) for row in rows] for i in (1, 2))
    assert gains == sorted(gains, reverse=True)
    assert used == sorted(used)
    assert "HiPC 2022" in said
    assert "core of its own" in said


def rows_in_docs(name: str) -> set[tuple[str, ...]]:
    text = (ROOT / "docs" / "simulation.md").read_text()
    rows = re.findall(r"^\| `?(\w+)`? \| (.+?) \| (.+?) \| (.+?) \|", text, re.M)
    return {row[1:] for row in rows if row[0] == name}


@pytest.mark.parametrize("samples", ["14", *at_night("238")])
@pytest.mark.nightly
def test_the_documentation_has_what_sharing_a_device_gains(
    samples: str, compare: ModuleType
) -> None:
    file = compare.read_paper(PAPERS / "accdp.toml")
    runs = [run for run in file.run if run["name"].split()[0] in samples]
    lines = compare.sharing_lines(file, runs)
    assert len(lines) == len(samples)
    rows = {(line.name, line.published, line.simulated) for line in lines}
    assert rows >= rows_in_docs("accdp") or samples != "14"
    text = (ROOT / "docs" / "data.md").read_text().replace(" %", "%")
    for line in lines:
        others = line.details
        cells = (
            *(line.name.split()[0], others["device used"], line.published),
            *(line.simulated, others["with sums"], others["one process, larger batch"]),
        )
        assert f"| {' | '.join(cells)} |\n" in text
    if lines[0].name == "2 samples a process":
        device = file.machine.device
        seldom = share(compare.trace_run(file, runs[0]).program, device, 16)
        gain = f"{seldom.gain(4, sums=True):+.0%}"
        left = f"once in 16: {gain}\n  of the {lines[0].simulated} are left"
        assert left in text


@pytest.mark.parametrize("name", at_night("gems", "hyfi", "super"))
def test_the_documentation_has_the_figures(compare: ModuleType, name: str) -> None:
    file = compare.read_paper(PAPERS / f"{name}.toml")
    lines = compare.headlines(file)
    rows = {(line.name, line.published, line.simulated) for line in lines}
    assert rows
    assert rows == rows_in_docs(name)


@pytest.mark.nightly
def test_the_documentation_has_what_data_parallelism_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "simulation.md").read_text()
    (model,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "imagenet.py").write_text(model)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    (words,) = re.findall(r"gemsc (simulate imagenet.py .*)\\\n(.*)\n", text)
    done = gemsc_here(monkeypatch, capfd)(*" ".join(words).split())
    assert done.code == 0, done.err
    rows = [line.split("│") for line in done.out.splitlines() if " ms │" in line]
    one, all_ = (float(row[6].replace(",", "")) for row in rows)
    assert f"| one GPU | 334.0 | {one:,.1f} |" in text
    assert f"| 1,536 GPUs | about 420,000 | {all_:,.0f} |" in text
    assert f"Efficiency {all_ / one / 1536:.1%}".replace("%", " %") in text


@pytest.mark.parametrize("name", NAMES)
def test_papers_say_what_they_assume(compare: ModuleType, name: str) -> None:
    assert PAPERS / f"{name}.toml" in compare.papers()
    assert "main(__file__)" in (PAPERS / f"{name}.py").read_text()
    file = compare.read_paper(PAPERS / f"{name}.toml")
    assert file.source
    assert file.assumptions
    names = [run["name"] for run in file.run]
    assert len(set(names)) == len(names)
    assert {run.get("over", names[0]) for run in file.run} <= set(names)
    for run in file.run:
        if "reason" in run:
            assert any(entry.startswith("published_") for entry in run)


def test_a_machine_says_what_it_leaves_out() -> None:
    lassen = read_hardware(str(PAPERS / "v100-lassen.toml"))
    assert lassen.network.ranks_per_node == 4
    assert len(lassen.notes) > 3


@pytest.mark.parametrize(
    ("cells", "width", "millions"), [(18, 208, 82), (18, 416, 318), (18, 544, 542)]
)
def test_amoebanet_has_the_published_number_of_parameters(
    cells: int, width: int, millions: int
) -> None:
    with Unfilled():
        model = AmoebaNet(cells, width, 1000, stem_cells=1)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.01)  # GPipe, Table 1


def test_t5_is_the_same_function_with_any_number_of_branches(
    monkeypatch: pytest.MonkeyPatch, in_double: None
) -> None:
    models = []
    for branches in (1, 2):
        monkeypatch.setenv("BRANCHES", str(branches))
        module = script("super")
        for name, size in SMALL.items():
            monkeypatch.setattr(module, name, size)
        models.append(module.model().eval())
        words = module.example_inputs()
    one, two = models
    parts = one.state_dict()
    for name, tensor in two.state_dict().items():
        if match := re.fullmatch(r"(.*(?:own|crossed|mlps))\.(\d)\.(.*)", name):
            stem, branch, layer = match.groups()
            dim = 1 if layer in ("out.weight", "3.weight") else 0
            whole = parts[f"{stem}.0.{layer}"]
            tensor.copy_(whole.chunk(2, dim)[int(branch)])
        else:
            tensor.copy_(parts[name])
    torch.testing.assert_close(two(*words), one(*words))
    assert len(parts) < len(two.state_dict())
