"""The picture: stages as clusters, skips dashed, with their bytes."""

from __future__ import annotations

import html
import re
import shutil
from dataclasses import replace
from pathlib import Path

import networks
import pytest
import torch
from networks import PICTURE
from plan_support import made_up_plan
from program_support import blocks_of, cut
from torch import nn

import gemsc
from gemsc.base.units import show_bytes
from gemsc.ir.program import Program
from gemsc.viz.graph import draw_graph, render


@pytest.fixture(scope="module")
def program() -> Program:
    return cut(blocks_of(networks.FlatUNet(), PICTURE), 3)


def drawn(program: Program) -> str:
    return draw_graph(program, made_up_plan(len(program.require_stages())))


def test_each_stage_is_a_cluster_of_its_blocks(program: Program) -> None:
    dot = drawn(program)
    assert dot.count("subgraph cluster_stage") == 3
    for block in program.blocks or ():
        assert f"\tblock{block.index} [label=" in dot
        assert block.name in dot
    assert "rank 2" in dot


def test_a_title_is_a_node_so_that_no_arrow_crosses_it(program: Program) -> None:
    dot, plan = drawn(program), made_up_plan(3)
    clusters = dot.split("subgraph cluster_stage")[1:]
    for stage, text in zip(plan.stages, clusters, strict=True):
        head = text.partition("title")[0]
        assert "label=" not in head.partition("block")[0]  # a label is drawn over
        assert f'title{stage.index} [label="stage {stage.index}' in text
        assert f"{show_bytes(stage.cost.saved_bytes)} saved for backward" in text


def test_the_slowest_of_several_stages_is_marked(program: Program) -> None:
    assert drawn(program).count("the slowest") == 1
    one = cut(blocks_of(networks.FlatUNet(), PICTURE), 1)
    assert "the slowest" not in drawn(one)


def test_a_loss_is_a_scalar_and_one_node_is_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    example = {"loss": nn.MSELoss(), "example_target": torch.ones(2, 4)}
    dot = gemsc.compile(model, (torch.ones(2, 4),), ranks=2, **example).graph()
    first, last = re.findall(r'block\d \[label="(\d\s.*?)"', dot, re.DOTALL)
    assert first.split("\n")[1:] == ["1 node, 64 FLOP", "[2, 4]"]
    assert last.split("\n")[1].startswith("2 nodes, ")
    assert last.split("\n")[2] == "scalar"


def test_skips_are_dashed_and_say_their_bytes(program: Program) -> None:
    dashed = [line for line in drawn(program).splitlines() if "dashed" in line]
    assert len(dashed) == 3
    sizes = [line.split('label="')[1].split('"')[0].strip() for line in dashed]
    assert sorted(sizes) == ["1.0 KiB", "16.0 KiB", "4.0 KiB"]


def test_values_between_stages_say_their_bytes_and_others_do_not(
    program: Program,
) -> None:
    lines = drawn(program).splitlines()
    edges = [line for line in lines if "->" in line and "invis" not in line]
    cuts = [line for line in edges if "penwidth" in line]
    assert len(cuts) == 2
    assert all("iB" in line or " B" in line for line in cuts)
    plain = [line for line in edges if "[" not in line]
    assert len(plain) == len(edges) - len(cuts) - 3


def test_inputs_are_drawn_with_their_shapes(program: Program) -> None:
    assert "float32[2, 8, 16, 16]" in drawn(program)


def test_the_picture_is_the_same_each_time(program: Program) -> None:
    assert drawn(program) == drawn(program)
    assert "0x" not in drawn(program)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_the_picture_is_drawn(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "graph.svg"
    assert render(drawn(program), path) is None
    assert "<svg" in path.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph.dot", "graph.svg"]


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_names_of_every_kind_are_shown_as_they_are(
    program: Program, tmp_path: Path
) -> None:
    shown = ["<b>", 'a"b', "a\\nb\\", "{x|y}", "a:b", "\\N", "<b>\\"]
    names = iter(shown)
    stages = tuple(
        replace(s, blocks=tuple(replace(b, name=next(names)) for b in s.blocks))
        for s in program.require_stages()
    )
    blocks = tuple(block for stage in stages for block in stage.blocks)
    path = tmp_path / "graph.svg"
    assert render(drawn(replace(program, stages=stages, blocks=blocks)), path) is None
    text = html.unescape(path.read_text())
    assert all(f">{name}</text>" in text for name in shown)


def test_without_dot_the_text_stays_and_the_reason_is_said(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = render(drawn(program), tmp_path / "graph.svg")
    assert reason is not None
    assert "which is not installed" in reason
    assert "apt-get install graphviz" in reason
    assert (tmp_path / "graph.dot").read_text() == drawn(program)
    assert not (tmp_path / "graph.svg").exists()


def test_a_dot_that_fails_leaves_the_old_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "dot"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "graph.svg"
    path.write_text("old")
    reason = render("digraph {}", path)
    assert reason is not None
    assert "could not draw graph.svg" in reason
    assert path.read_text() == "old"
