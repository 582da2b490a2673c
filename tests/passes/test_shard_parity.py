"""Shards against one process: models x shards x schedules x trunks, on threads and MPI.

What runs always is a row of the whole table for each model; `--nightly` runs all of it.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Gemsc, gemsc_here
from parity_support import (
    FLOAT64,
    cells,
    draws_of,
    lowered,
    options,
    reference,
    worst_error,
)
from shard_models import HEADS, SHARD_MODELS

from gemsc.codegen.package import write_directory
from gemsc.launch.launch import launch
from gemsc.options import CompileOptions
from gemsc.verify.compare import compare, read_record

gemsc = pytest.fixture(gemsc_here)

PICTURES = ("vit", "resnet", "resnext", "convnext", "groups", "channels dropout")
TEXTS = tuple(name for name in SHARD_MODELS if name not in (*PICTURES, "features"))


# two heads of keys and values, which more ranks cannot share
TWO_HEADS = {"llama": ("blocks.0.query", "blocks.1.query")}


def plan(kind: str, shards: int, trunk: str, name: str = "") -> CompileOptions:
    """Return the options of a column of the table, for a model of this name."""
    choices: dict[str, Any] = {
        "one stage": {"ranks": shards, "micro_batches": 2},
        "1f1b": {"ranks": 2 * shards, "micro_batches": 3},
        "mast": {"ranks": 2 * shards, "schedule": "mast", "micro_batches": 2},
        "data": {"ranks": 2 * shards, "data": 2, "micro_batches": 2},
        "tiles": {"ranks": 2 + shards, "tiles": "2x1,1", "micro_batches": 2},
        "mesh": {"ranks": 2 * shards, "tiles": "2x1", "micro_batches": 2},
        "mesh 1f1b": {"ranks": 4 * shards, "tiles": "2x1,1x2", "micro_batches": 3},
        "mesh data": {"ranks": 4 * shards, "tiles": "1x2", "data": 2},
    }[kind]
    whole = TWO_HEADS.get(name, ()) if shards > 2 else ()
    count = f"1,{shards}" if kind == "tiles" else str(shards)
    return options(shards=count, trunk=trunk, whole=whole, **choices)


def columns(name: str) -> list[tuple[str, int, str]]:
    """Return all that is asked of a model."""
    kinds = ["one stage", "1f1b", "mast", "data"]
    trunks = ["whole", "batch", *["sequence"] * (name in TEXTS)]
    table = list(itertools.product(kinds, (2, 3, 4), trunks))
    if name in PICTURES:
        table += itertools.product(["tiles"], (2, 3, 4), trunks)
        meshes = ["mesh", "mesh 1f1b", "mesh data"]
        table += itertools.product(meshes, (2, 3), ["whole"])
    return table


def chosen(name: str) -> list[tuple[str, int, str]]:
    """Return a column for every second model: they differ in what they take."""
    table, number = columns(name), list(SHARD_MODELS).index(name)
    return [table[7 * number % len(table)]] if number % 2 == 0 else []


CASES = cells(SHARD_MODELS, columns, chosen)


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize(("name", "column"), CASES)
def test_shards_compute_what_one_process_does(
    name: str, column: tuple[str, int, str], tmp_path: Path
) -> None:
    choice = plan(*column, name)
    parts = lowered(name, choice).compilation.parts
    assert any(parts(rank) for rank in range(choice.ranks))
    error = worst_error(name, choice, tmp_path / "p", draws=draws_of(name))
    assert error <= FLOAT64


def test_what_treats_channels_alike_leaves_them_in_parts() -> None:
    made = lowered("channels dropout", plan("one stage", 2, "whole"))
    shards = made.compilation.program.shards[0]
    assert {"first.0.weight", "second.0.weight"} <= {cut.name for cut in shards.cut}
    assert {tensor.reason for tensor in shards.whole} == {"what it meets saves more"}


JOB = Path(__file__).parents[1] / "support" / "mpi_parity_program.py"
SAMPLE = {
    "two": [
        ("gpt", plan("one stage", 2, "batch")),
        ("transformer dropout", plan("one stage", 2, "sequence")),
        ("words", plan("one stage", 2, "whole")),
        ("gpt", plan("one stage", 2, "whole")),
        ("t5", plan("one stage", 2, "batch")),
        ("resnext", plan("one stage", 2, "whole")),
    ],
    "four": [
        ("llama", plan("mast", 2, "sequence")),
        ("tied encoder", plan("data", 2, "batch")),
        ("convnext", plan("tiles", 2, "whole")),
        ("vit", plan("1f1b", 2, "whole")),
        ("features", plan("one stage", 4, "whole")),
    ],
}


@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
@pytest.mark.nightly  # by day test_mpi.py has one of them
@pytest.mark.parametrize("sample", ["two", "four"])
def test_processes_compute_what_one_process_does(sample: str, tmp_path: Path) -> None:
    words, processes = [], 4 if sample == "four" else 2
    for index, (name, choice) in enumerate(SAMPLE[sample]):
        folder = tmp_path / str(index)
        program = lowered(name, choice)
        write_directory(program.compilation, folder / "program")
        count = program.plan.data * program.plan.micro_batches
        batches = [SHARD_MODELS[name].inputs(count, torch.float64)] * 2
        torch.save(batches, folder / "batches.pt")
        words += [str(folder), "float64"]
    assert launch(processes, [sys.executable, str(JOB), *words], timeout=240) == 0
    wrong = {}
    for index, (name, choice) in enumerate(SAMPLE[sample]):
        planned = lowered(name, choice).plan
        count = planned.data * planned.micro_batches
        expected = reference(name, count, torch.float64, 2, draws_of(name))
        record = read_record(tmp_path / str(index), processes)
        error = compare(record, expected).worst
        if not error <= FLOAT64:
            wrong[f"{name} {choice.command_line()}"] = error
    assert not wrong


FILE = """
import sys

sys.path.insert(0, {tests!r})
import torch
from shard_models import HEADS, SHARD_MODELS

case = SHARD_MODELS[{name!r}]
loss = case.loss

def model():
    return case.build()

def example_inputs():
    return case.example_inputs

def example_target():
    return case.example_target

def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)
"""


@pytest.mark.mpi
@pytest.mark.nightly
def test_the_command_line_compiles_and_verifies(tmp_path: Path, gemsc: Gemsc) -> None:
    tests = str(JOB.parent)
    (tmp_path / "net.py").write_text(FILE.format(tests=tests, name="gpt dropout"))
    words = "--ranks", "3", "--shards", "3", "--trunk", "sequence"
    done = gemsc("compile", tmp_path / "net.py", "-o", tmp_path / "p", *words)
    assert done.code == 0, done.err
    done = gemsc("verify", tmp_path / "p", "--steps", "2", "--dtype", "float64")
    assert done.code == 0, done.out + done.err
    assert "exact" in done.out


@pytest.mark.nightly
def test_all_heads_of_a_t5_are_cut() -> None:
    """Also those of attention whose table of distances is masked, or is zeros."""
    program = lowered("t5", plan("one stage", 2, "whole"))
    parts = program.compilation.parts(0)
    cut = {name: part.units for name, part in parts.items() if "query" in name}
    assert set(cut.values()) == {HEADS}
    assert len(cut) == 6  # of two layers, and of two that look at them


@pytest.mark.nightly
def test_a_head_that_only_training_has_is_cut() -> None:
    program = lowered("googlenet", plan("one stage", 2, "whole"))
    part = program.compilation.parts(0)["heads.0.3.weight"]
    assert part.units < part.shape[part.dim]  # channels, of pixels that are flat


@pytest.mark.slow(1)
@pytest.mark.parametrize("trunk", ["whole", "batch"])
@pytest.mark.parametrize("name", ["flat batch", "flat groups"])
def test_pixels_that_are_normalized_together_stay_together(
    name: str, trunk: str, tmp_path: Path
) -> None:
    """A linear layer's features are pixels of channels; columns would fit as well."""
    assert worst_error(name, plan("one stage", 2, trunk), tmp_path) <= FLOAT64
