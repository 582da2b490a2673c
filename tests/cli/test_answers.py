"""`--json`: one document on stdout, whatever else is printed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, Gemsc
from test_compare import run_in

from gemsc.plan import Plan

LOUD = "\nimport os\nprint('a model may print')\nos.write(1, b'without Python, too')\n"


@pytest.fixture
def loud(command: Gemsc, tmp_path: Path) -> Gemsc:
    """The command where a model prints, and its program."""
    (tmp_path / "model.py").write_text(MODEL + LOUD)
    done = command("compile", "model.py", "-o", "program")
    assert done.code == 0, done.err
    return command


def document(command: Gemsc, *words: object, code: int = 0) -> dict[str, Any]:
    done = command(*words, "--json")
    assert done.code == code, done.err
    answer = json.loads(done.out, parse_constant=pytest.fail)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.slow
def test_show_gives_the_plan(loud: Gemsc) -> None:
    answer = document(loud, "show", "program")
    assert set(answer) == {"why", "speed", "plan", "seconds_here", "cores_here"}
    plan = Plan.read(Path("program/plan.toml"))
    assert answer["plan"]["peak_bytes"] == list(plan.peak_bytes)
    assert [stage["blocks"] for stage in answer["plan"]["stages"]] == [
        stage.blocks for stage in plan.stages
    ]
    assert answer["why"] in " ".join(loud("show", "program").out.split())
    assert loud("show", "program", "--html", "--json").out == ""


@pytest.mark.slow
def test_plan_gives_what_was_compared_best_first(loud: Gemsc) -> None:
    done = loud("plan", "model.py", "--json", "-o", "plan.toml")
    assert "a model may print" in done.err
    assert "without Python, too" in done.err
    answer = json.loads(done.out)
    assert set(answer) == {"why", "speed", "candidates", "plan"}
    first = answer["candidates"][0]
    rate = answer["speed"]["samples_per_second"]
    assert rate == pytest.approx(first["samples_per_second"], rel=0.05)
    assert answer["speed"]["dtype"] == "float32"
    assert set(first) == {
        *("name", "command_line", "fits", "problem", "samples_per_second"),
        *("step_seconds", "peak_bytes", "sent_bytes"),
    }
    assert first["fits"]
    assert len(answer["candidates"]) > 1
    words = f"compile model.py {first['command_line']} -o chosen".split()
    assert loud(*words).code == 0
    chosen = Plan.read(Path("chosen/plan.toml"))
    assert (chosen.schedule, chosen.data) == (
        answer["plan"]["schedule"],
        answer["plan"]["data"],
    )


def test_simulate_gives_its_points(loud: Gemsc) -> None:
    words = ("simulate", "model.py", "--ranks", 4, "--data", 4, "--per-device", 2)
    answer = document(loud, *words)
    assert [point["ranks"] for point in answer["points"]] == [1, 2, 4]
    assert answer["points"][0]["efficiency"] == 1
    rates = [point["samples_per_second"] for point in answer["points"]]
    assert rates == sorted(rates)
    assert [share["processes"] for share in answer["sharing"]] == [1, 2]
    assert answer["fits"] is True
    assert max(answer["peak_bytes"]) <= answer["memory_bytes"]


@pytest.mark.slow
@pytest.mark.mpi
def test_verify_gives_the_errors_of_each_dtype(loud: Gemsc) -> None:
    answer = document(loud, "verify", "program", "--steps", 1, "--dtype", "float64")
    (name,) = answer["dtypes"]
    assert name == "float64"
    one = answer["dtypes"][name]
    assert answer["exact"] is True
    assert one["verdict"] == "exact"
    assert one["gradient"]["error"] <= one["allowed"]


@pytest.mark.mpi
@pytest.mark.nightly
def test_verify_gives_what_is_wrong(loud: Gemsc) -> None:
    file = Path("program/rank1.py")
    text = file.read_text()
    file.write_text(text.replace("self.third(", "1.01 * self.third("))
    assert file.read_text() != text
    broken = ("verify", "program", "--steps", 1, "--dtype", "float64")
    wrong = document(loud, *broken, code=1)
    assert wrong["exact"] is False
    assert wrong["dtypes"]["float64"]["verdict"] == "wrong"
    proof = document(loud, "verify", "program", "--all-inputs", code=1)
    assert proof["all_inputs"]["verdict"] == "not equal"


@pytest.mark.mpi
@pytest.mark.nightly
def test_verify_gives_those_of_a_run(loud: Gemsc) -> None:
    words = ("verify", "program", "--run", 2, "--dtype", "float64")
    answer = document(loud, *words)
    assert (answer["exact"], answer["steps"]) == (True, 2)
    assert answer["dtypes"]["float64"]["model"]["error"] < 1e-9


def test_compare_gives_last_figures_and_what_differs(
    command: Gemsc, tmp_path: Path
) -> None:
    one = run_in(tmp_path / "one", [4.0, 2.0, 1.0, 0.5], seed=1, epochs=4)
    two = run_in(tmp_path / "two", [], epochs=4)
    answer = document(command, "compare", one, two, "-o", tmp_path / "both.svg")
    first, second = answer["runs"]
    assert first["run"] == str(one)
    assert (first["steps"], first["loss"], first["least_loss"]) == (4, 0.5, 0.5)
    assert first["held_out"] == {"loss": 0.5, "dice": 1.0}
    assert second["loss"] is None
    assert answer["options"] == {"seed": [1, "default"]}


@pytest.mark.slow
def test_doctor_gives_what_is_there(command: Gemsc) -> None:
    answer = document(command, "doctor", "--no-trial")
    rows = {row["name"]: row for row in answer["machine"]}
    assert {"gemsc", "torch", "CPU"} <= set(rows)
    assert all(set(row) == {"name", "found", "advice"} for row in rows.values())
    assert answer["trial"] is None


@pytest.mark.slow
def test_an_error_leaves_stdout_empty_and_tables_come_back(command: Gemsc) -> None:
    done = command("show", "nowhere", "--json")
    assert (done.code, done.out) == (1, "")
    assert "error: " in done.err
    assert "torch" in command("doctor", "--no-trial").out
