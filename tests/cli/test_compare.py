"""Curves of runs, and `gemsc compare`."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command_line import Gemsc

from gemsc.cli.run import draw_run
from gemsc.errors import GemscError
from gemsc.viz.curves import RunLog, curves

SVG = "{http://www.w3.org/2000/svg}"


def run_in(folder: Path, losses: list[Any], **options: Any) -> Path:
    """Write the log of a run: an evaluation at every other step."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0}]
    for step, loss in enumerate(losses, 1):
        figures = {"loss": loss, "dice": step / len(losses)}
        rate = {"samples_per_second": 100.0 * step}
        lines.append({"event": "step", "step": step, "loss": loss, **rate})
        if step % 2 == 0:
            lines.append({"event": "evaluation", "step": step, "figures": figures})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "log.jsonl").write_text(text + '{"event": "step", "st')
    about = {"starts": [{"options": options}]}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def texts(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def paths(picture: str, kind: str) -> list[list[list[float]]]:
    """Return the points of each curve of a kind, without those of the legend."""
    root = ElementTree.fromstring(picture)
    texts = [
        e.get("d", "")
        for e in root.iter(f"{SVG}path")
        if kind in e.get("class", "").split()
    ]
    drawn = [path[1:].split("L") for path in texts if "h" not in path]
    return [[[float(number) for number in p.split()] for p in path] for path in drawn]


def test_runs_are_compared(tmp_path: Path, command: Gemsc) -> None:
    one = run_in(tmp_path / "one", [4.0, 2.0, 1.0, 0.5], seed=1, epochs=4)
    two = run_in(tmp_path / "two", [4.0, 3.0], epochs=4)
    done = command("compare", one, two, "-o", tmp_path / "both.svg")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[1] == [str(one), "4", "0.5", "0.5", "0.5", "1", "250.0"]
    assert rows[2] == [str(two), "2", "3", "3", "3", "1", "150.0"]
    assert "--seed: 1, default" in done.out
    assert "--epochs" not in done.out
    picture = (tmp_path / "both.svg").read_text()
    assert [len(path) for path in paths(picture, "train")] == [4, 2]
    assert [len(path) for path in paths(picture, "eval")] == [2, 1, 2, 1]
    ys = [y for _, y in paths(picture, "train")[0]]
    assert ys == sorted(ys)  # the loss falls: further down


def test_a_large_range_is_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    log = RunLog.read(run_in(tmp_path / "a", [100.0, 10.0, 1.0, 0.1]))
    (path,) = paths(curves([log]), "train")
    steps = [after[1] - before[1] for before, after in itertools.pairwise(path)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.02)
    assert {"0.1", "1", "10", "100"} <= {*texts(curves([log]))}


def test_a_long_run_is_a_short_picture(tmp_path: Path) -> None:
    losses = [2 + math.sin(step) for step in range(20_000)]
    log = RunLog.read(run_in(tmp_path / "a", losses))
    picture = curves([log])
    assert len(picture) < 200_000
    assert all(len(path) < 500 for path in paths(picture, "train"))


@pytest.mark.parametrize(
    "losses", [[], [None], [1.0], [1.0, 1.0], [0.0, -1.0], [1e-300, 1e300], [None, 2.0]]
)
def test_any_figures_are_drawn_within_the_picture(
    tmp_path: Path, losses: list[Any]
) -> None:
    picture = curves([RunLog.read(run_in(tmp_path / "a", losses))])
    root = ElementTree.fromstring(picture)
    height = float(root.get("height", ""))
    for path in [*paths(picture, "train"), *paths(picture, "eval")]:
        assert all(0 <= x <= 860 and 0 <= y <= height for x, y in path)


def test_what_is_no_run_is_refused(tmp_path: Path, command: Gemsc) -> None:
    done = command("compare", tmp_path)
    assert done.code == 1
    assert "log.jsonl: no such file or directory" in done.err
    run = run_in(tmp_path / "a", [1.0])
    assert command("compare", run, "-o", "a.png").code == 1
    (run / "log.jsonl").write_bytes(b"\xff\x00 no log\n[]\n{}\n3\n")
    assert RunLog.read(run).steps == 0
    with pytest.raises(GemscError):
        RunLog.read(tmp_path / "nowhere")


def test_curves_are_drawn_where_a_step_was_logged(tmp_path: Path) -> None:
    draw_run(tmp_path)
    draw_run(run_in(tmp_path / "none", []))
    draw_run(run_in(tmp_path / "some", [1.0, 0.5]))
    drawn = [path.parent.name for path in tmp_path.rglob("*.svg")]
    assert drawn == ["some"]


def test_a_run_whose_curves_cannot_be_written_ends_as_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "some", [1.0, 0.5])
    (run / "curves.svg").mkdir()
    draw_run(run)
    assert f"warning: no curves.svg in {run}: " in capsys.readouterr().err
