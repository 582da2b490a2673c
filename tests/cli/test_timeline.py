"""The schedule as a picture, as text and as a trace: predicted and measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from command_line import gemsc_here
from models import MODELS
from schedule_support import equal_task, random_task

from gemsc.base.units import show_bytes
from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, compile, lower, trace
from gemsc.errors import GemscError
from gemsc.launch.measure import measure
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.planner.explain import task_of, timeline_of
from gemsc.runtime.training.recording import CALLS, Recorder
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.schedules import SCHEDULES, Kind, Task, Timeline, run
from gemsc.viz.panel import (
    Panel,
    measured_panel,
    panels_of,
    predicted_panel,
    trace_text,
)
from gemsc.viz.terminal import grid
from gemsc.viz.timeline import MOST_ARROWS, draw_timeline, write_timeline

SVG = "{http://www.w3.org/2000/svg}"
CHOICES = {
    "1f1b": {"ranks": 4, "micro_batches": 8},
    "gpipe": {"ranks": 3},
    "master": {"ranks": 4, "schedule": "master", "times": 2},
    "chimera": {"ranks": 4, "schedule": "chimera", "micro_batches": 8},
    "folded": {"ranks": 2, "placement": "folded"},
    "interleaved": {"ranks": 2, "schedule": "interleaved"},
    "copies": {"ranks": 4, "data": 2},
}


@cache
def compiled(name: str) -> CompiledProgram:
    case = MODELS["mlp"]
    traced = trace(
        case.build(),
        case.example_inputs,
        loss=case.loss,
        example_target=case.example_target,
        check=False,
    )
    return lower(traced, CompileOptions(**CHOICES[name]))


def plan_from_file(name: str, folder: Path) -> Plan:
    path = folder / "plan.toml"
    path.write_text(compiled(name).plan.to_toml(folder), encoding="utf-8")
    return Plan.read(path)


def elements(svg: str, tag: str, kind: str) -> list[ElementTree.Element]:
    """Return the elements of one class."""
    root = ElementTree.fromstring(svg.encode())
    tagged = root.iter(SVG + tag)
    return [e for e in tagged if kind in e.get("class", "").split()]


def scheduled(name: str, seed: int = 0) -> tuple[Task, Timeline]:
    task = random_task(SCHEDULES[name], seed)
    return task, run(task, SCHEDULES[name].policy)


# from the plan alone


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", CHOICES)
def test_the_plan_alone_gives_the_predicted_times(name, tmp_path):
    plan = plan_from_file(name, tmp_path)
    timeline = timeline_of(plan)
    assert timeline.makespan == pytest.approx(plan.step_seconds, rel=1e-12)
    assert timeline.bubble == pytest.approx(plan.bubble)
    assert list(timeline.peak_bytes) == plan.peak_bytes
    assert [" ".join(map(str, row)) for row in timeline.orders] == plan.order
    assert sum(task_of(plan).micro_batches) == plan.micro_batches


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.replace("0F0", "0X0"),
        lambda row: row.replace("0F0", "9F0"),
        lambda row: row.replace("0F0 ", "0F1 0F0 "),
        lambda row: row.replace("0B0", "0F0"),
        lambda row: row + " 1F0",
        lambda row: "",
    ],
)
def test_an_order_that_cannot_be_is_told(change, tmp_path):
    plan = plan_from_file("1f1b", tmp_path)
    broken = replace(plan, order=[change(plan.order[0]), *plan.order[1:]])
    with pytest.raises(GemscError, match=r"plan\.toml is damaged"):
        timeline_of(broken)


# the picture


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_there_is_a_box_for_each_action(name, seed):
    task, timeline = scheduled(name, seed)
    svg = draw_timeline(name, [predicted_panel(task, timeline)])
    rows = elements(svg, "g", "row")
    assert len(rows) == task.num_ranks
    for row, actions in zip(rows, timeline.ranks, strict=True):
        boxes = [e for e in row.iter(SVG + "rect") if "action" in e.get("class", "")]
        titles = [box.findtext(SVG + "title", "").split()[0] for box in boxes]
        assert titles == [str(timed.action) for timed in actions]
        ends = [float(b.attrib["x"]) + float(b.attrib["width"]) for b in boxes]
        starts = [float(b.attrib["x"]) for b in boxes]
        assert all(e <= s + 0.6 for e, s in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("has_backward", [True, False])
def test_the_memory_curve_reaches_the_peak_and_comes_back(name, has_backward):
    task = random_task(SCHEDULES[name], 1, has_backward=has_backward)
    timeline = run(task, SCHEDULES[name].policy)
    panel = predicted_panel(task, timeline)
    for row, peak in zip(panel.rows, timeline.peak_bytes, strict=True):
        assert max(held for _, held in row.memory) == row.peak_bytes == peak
        assert row.memory[0][1] == row.memory[-1][1] == row.resident_bytes
    svg = draw_timeline(name, [panel])
    curves = elements(svg, "path", "memory")
    assert [int(c.attrib["data-peak"]) for c in curves] == list(timeline.peak_bytes)
    notes = [e.text for e in elements(svg, "text", "note")]
    assert {f"peak {show_bytes(peak)}" for peak in timeline.peak_bytes} <= {*notes}


def test_messages_go_from_their_maker_to_their_user():
    task = equal_task(SCHEDULES["gpipe"], 3, 2)
    timeline = run(task, SCHEDULES["gpipe"].policy)
    panel = predicted_panel(task, timeline)
    pairs = [(a.source, a.dest) for a in panel.arrows]
    assert sorted(pairs) == sorted([(0, 1), (1, 2), (2, 1), (1, 0)] * 2)
    assert all(arrow.start <= arrow.end for arrow in panel.arrows)
    assert len(elements(draw_timeline("", [panel]), "path", "arrow")) == len(pairs)


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_large_picture_has_no_arrows_and_no_labels_in_narrow_boxes(name):
    task = equal_task(SCHEDULES[name], 64, 64)
    panel = predicted_panel(task, run(task, SCHEDULES[name].policy))
    assert len(panel.arrows) > MOST_ARROWS
    svg = draw_timeline("large", [panel])
    assert not elements(svg, "path", "arrow")
    assert "messages are not drawn" in svg
    boxes = elements(svg, "rect", "action")
    labels = elements(svg, "text", "dark") + elements(svg, "text", "light")
    assert len(boxes) == sum(len(row.spans) for row in panel.rows)
    assert len(labels) < len(boxes)
    assert len(svg) < 3_000_000


def test_replicas_and_stages_have_colours_of_their_own():
    chimera = compiled("chimera").plan
    names = {
        c.get("class")
        for c in elements(draw_timeline("", panels_of(chimera)), "rect", "action")
    }
    assert len(names) == 6  # three kinds, two replicas
    folded = compiled("folded").plan
    names = {
        c.get("class")
        for c in elements(draw_timeline("", panels_of(folded)), "rect", "action")
    }
    assert len(names) == 6  # three kinds, two stages


def test_sums_are_drawn_in_and_after_the_last_backward():
    plan = compiled("copies").plan
    (panel,) = panels_of(plan)
    lines = elements(draw_timeline("", [panel]), "rect", "sums")
    assert len(lines) == len(plan.sums) == len(panel.rows) == 2
    assert panel.length == max(entry["end"] for entry in plan.sums) > panel.makespan
    ends = [float(line.get("x")) + float(line.get("width")) for line in lines]
    idle = elements(draw_timeline("", [panel]), "rect", "idle")[0]
    right = float(idle.get("x")) + float(idle.get("width"))
    assert max(ends) == pytest.approx(right, abs=0.2)
    assert not panels_of(compiled("1f1b").plan)[0].sums


def test_names_are_escaped(tmp_path):
    plan = replace(compiled("1f1b").plan, model="<b> & 'c'")
    write_timeline(plan, tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert "<b> & 'c'" in root.findtext(SVG + "title", "")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_an_empty_step_can_be_drawn():
    ElementTree.fromstring(
        draw_timeline("nothing", [Panel("measured", (), (), 0.0)]).encode()
    )


def test_the_text_names_every_action():
    plan = compiled("gpipe").plan
    text = grid(plan)
    rows = [line.split()[2:] for line in text.splitlines()]
    shown = [[word for word in row if word[0].isdigit()] for row in rows]
    assert shown == [row.split() for row in plan.order]


def test_compile_writes_the_picture(tmp_path):
    compiled("1f1b").write(tmp_path / "p")
    ElementTree.parse(tmp_path / "p" / "timeline.svg")


# the trace


def check_trace(text: str, names: list[str]) -> dict[str, dict[int, list[dict]]]:
    """Check each event; return the actions by process name and rank."""
    events = json.loads(text)["traceEvents"]
    processes = {
        e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"
    }
    assert list(processes.values()) == names
    ranks = {
        (e["pid"], e["tid"]): int(e["args"]["name"].removeprefix("rank "))
        for e in events
        if e["name"] == "thread_name"
    }
    actions: dict[str, dict[int, list[dict]]] = {name: {} for name in names}
    flows: dict[str, list[str]] = {}
    for event in events:
        assert event["ph"] in "MXCsf"
        assert event["pid"] in processes
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event["ph"])
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            rank = ranks[event["pid"], event["tid"]]
            actions[processes[event["pid"]]].setdefault(rank, []).append(event)
    assert all(marks == ["s", "f"] for marks in flows.values())
    return actions


def actions_of(events: list[dict]) -> str:
    return " ".join(e["name"] for e in events if e["name"][0].isdigit())


def check_no_overlap(events: list[dict]) -> None:
    events = sorted(events, key=lambda event: event["ts"])
    for one, other in pairwise(events):
        assert one["ts"] + one["dur"] <= other["ts"] + 2e-3  # rounded to nanoseconds


@pytest.mark.parametrize("name", CHOICES)
def test_the_trace_has_every_action_of_a_step(name):
    plan = compiled(name).plan
    actions = check_trace(trace_text(panels_of(plan)), ["predicted"])["predicted"]
    assert [actions_of(actions[rank]) for rank in sorted(actions)] == plan.order
    for events in actions.values():
        check_no_overlap(events)


# what ranks write down of themselves


def test_a_worker_that_nobody_watches_has_its_own_methods(tmp_path):
    write_directory(compiled("1f1b").compilation, tmp_path)
    trainers = run_local(4, lambda transport: Trainer(tmp_path, transport))
    assert not set(CALLS) & set(vars(trainers[0].worker))
    Recorder(trainers[0].worker)
    assert set(CALLS) <= set(vars(trainers[0].worker))


@pytest.mark.parametrize("name", ["1f1b", "chimera", "folded", "copies"])
def test_every_action_is_recorded_once_and_in_order(name, tmp_path):
    plan = compiled(name).plan
    write_directory(compiled(name).compilation, tmp_path)
    case = MODELS["mlp"]
    inputs, target = case.inputs(plan.data * plan.micro_batches)

    def main(transport):
        trainer = Trainer(tmp_path, transport)
        recorder = Recorder(trainer.worker)
        for _ in range(2):
            recorder.begin()
            trainer.step(inputs, target)
        return recorder.take()

    records = run_local(plan.ranks, main)
    first = min(record[4] for rank in records for record in rank)
    marks = [[(*r[:4], (r[4] - first) / 1e9, (r[5] - first) / 1e9) for r in rank]
             for rank in records]  # fmt: skip
    panel = measured_panel(task_of(plan), marks)
    predicted = predicted_panel(task_of(plan), timeline_of(plan))
    for rank, row in enumerate(panel.rows):
        order = " ".join(str(s.action) for s in row.spans if s.action is not None)
        assert order == plan.order[rank % plan.copy_ranks]
        assert all(a.end <= b.start for a, b in pairwise(row.spans))
        assert row.spans[-1].kind == "wait"  # for what it has sent
    assert len(panel.arrows) == plan.data * len(predicted.arrows)
    assert all(arrow.start <= arrow.end for arrow in panel.arrows)
    assert all(arrow.start <= arrow.end for arrow in predicted.arrows)
    ElementTree.fromstring(draw_timeline("", panels_of(plan, marks)).encode())


gemsc = pytest.fixture(gemsc_here)
MODEL = """
from collections import OrderedDict

import torch
from torch import nn

def model():
    layers = [("layer" + name, nn.Linear(64, 64)) for name in "abcd"]
    return nn.Sequential(OrderedDict(layers))

def example_inputs():
    return (torch.randn(8, 64),)

def example_target():
    return torch.randn(8, 64)

def loss(output, target):
    return (output - target).square().mean()
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_measured_step_is_drawn_below_the_predicted_one(tmp_path, gemsc):
    (tmp_path / "model.py").write_text(MODEL)
    folder = tmp_path / "program"
    made = gemsc(
        "compile", tmp_path / "model.py", "--ranks", 2, "--schedule", "chimera",
        "-o", folder,
    )  # fmt: skip
    assert made.code == 0, made.err
    drawn = gemsc("timeline", folder, "--measured", "--steps", 3)
    assert drawn.code == 0, drawn.err
    assert "predicted" in drawn.out
    plan = Plan.read(folder / "plan.toml")
    text = (folder / "trace.json").read_text()
    actions = check_trace(text, ["predicted", "measured"])
    order = plan.order
    for events in (actions["predicted"], actions["measured"]):
        assert [actions_of(events[rank]) for rank in sorted(events)] == order
    for events in actions["measured"].values():
        check_no_overlap(events)
        assert {"update", "reduction"} <= {event["cat"] for event in events}
    svg = (folder / "timeline.svg").read_text()
    num_actions = sum(len(row.split()) for row in order)
    assert len(elements(svg, "rect", "action")) == 2 * num_actions


def test_each_panel_has_its_own_time_axis(tmp_path):
    plan = plan_from_file("1f1b", tmp_path)
    (predicted,) = panels_of(plan)
    rows = tuple(
        replace(
            row,
            memory=(),
            spans=tuple(
                replace(span, start=5 * span.start, end=5 * span.end)
                for span in row.spans
            ),
        )
        for row in predicted.rows
    )
    slower = Panel("measured", rows, (), 5 * predicted.makespan)
    text = draw_timeline("two", [predicted, slower])
    rows_drawn = [r for r in elements(text, "rect", "idle") if r.get("width") != "18"]
    assert len(rows_drawn) == 2 * len(predicted.rows)
    assert len({box.get("width") for box in rows_drawn}) == 1  # both fill the picture
    assert "5 times the predicted step (each half has its own time axis)" in text


@pytest.mark.slow
def test_a_program_without_a_loss_is_drawn_but_not_measured(tmp_path, gemsc):
    case = MODELS["mlp"]
    program = compile(case.build(), case.example_inputs, ranks=2)
    program.write(tmp_path)
    kinds = {t.action.kind for row in timeline_of(program.plan).ranks for t in row}
    assert kinds == {Kind.FORWARD}
    refused = gemsc("timeline", tmp_path, "--measured")
    assert refused.code == 1
    assert "compiled without a loss" in refused.err
    assert gemsc("timeline", tmp_path, "--text").out.startswith("rank 0")
    refused = gemsc("timeline", tmp_path, "--device", "cpu")
    assert "--device cpu has no effect without --measured" in refused.err
    refused = gemsc("timeline", tmp_path, "--measured", "--device", "tpu")
    assert "unknown device 'tpu'" in refused.err


def test_a_step_is_measured_on_the_device_that_is_named(tmp_path, monkeypatch):
    """Which is the rank's own word for it, as in `gemsc run`."""
    given = []

    def start(directory, words):
        given.append(words)
        return 3

    monkeypatch.setattr("gemsc.launch.measure.start", start)
    trains = SimpleNamespace(phases=())
    monkeypatch.setattr("gemsc.launch.measure.trainable", lambda directory: trains)
    for words in ((), ("cuda",)):
        with pytest.raises(GemscError, match="exit code 3"):
            measure(tmp_path, 5, *words)
    assert [words[2:] for words in given] == [
        ["--steps", "5", "--device", "auto"],
        ["--steps", "5", "--device", "cuda"],
    ]


def test_a_program_without_a_source_is_not_measured(tmp_path):
    compiled("gpipe").write(tmp_path)
    with pytest.raises(GemscError, match="was compiled from Python"):
        measure(tmp_path, 1)
