"""Branches against one process: models x ranks x trunks x schedules, on threads, MPI.

By day each kind of row runs for one of the models; `--nightly` runs the whole table.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from branch_models import BRANCH_MODELS
from parity_support import (
    FLOAT64,
    Column,
    cells,
    draws_of,
    lowered,
    options,
    reference,
    worst_error,
)
from shard_support import FREE
from test_traffic import counted

from gemsc.codegen.package import write_directory
from gemsc.costs.hardware import read_hardware
from gemsc.launch.launch import launch
from gemsc.options import CompileOptions
from gemsc.verify.compare import compare, read_record

Planned = Callable[[str, Column], CompileOptions]

PICTURES = ("inception", "amoebanet", "googlenet", "branches of resnext")
TEXTS = ("parallel t5",)
# both of two stages have forks; of the others the first or the last has
DEEP = (*PICTURES[:3], *TEXTS, "branches dropout", "joins")
LATE = ("towers", "all shared", "nested", "shared")
MOST_SHARDS = {
    "amoebanet": 2,
    "inception": 3,
    "googlenet": 3,
}  # they have layers of few channels


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """Return the options of a column, on a machine whose messages take no time."""
    machine = read_hardware()
    network = replace(machine.network, intra=FREE, inter=FREE)
    path = tmp_path_factory.mktemp("machine") / "free.toml"
    replace(machine, network=network).write(path)
    return lambda name, column: replace(plan(name, column), hardware=str(path))


def plan(name: str, column: Column) -> CompileOptions:
    """Return the options of a column of the table, for a model of this name."""
    kind, ranks, trunk = column
    both = name in DEEP
    counts = f"{ranks}" if both else f"1,{ranks}" if name in LATE else f"{ranks},1"
    staged = {"ranks": 2 * ranks if both else ranks + 1, "branches": counts}
    choices = {
        "one stage": {"ranks": ranks, "branches": ranks},
        "1f1b": {**staged, "micro_batches": 3},
        "master": {"ranks": 2 * ranks, "branches": ranks, "schedule": "master"},
        "data": {"ranks": 2 * ranks, "branches": ranks, "data": 2},
        "tiles": {"ranks": 2 + ranks, "tiles": "2x1", "branches": f"1,{ranks}"},
        "shards": {"ranks": ranks, "branches": ranks, "shards": ranks},
        **meshes(ranks),
    }[kind]
    return options(**{"micro_batches": 2, "trunk": trunk, **choices})


def meshes(ranks: int) -> dict[str, dict[str, object]]:
    """Return columns in which so many ranks share the branches of each tile."""
    one = {"ranks": 2 * ranks, "tiles": "2x1", "branches": ranks}
    two = {"ranks": 4 * ranks, "tiles": "2x1,1x2", "branches": f"{ranks},{ranks}"}
    return {
        "mesh": one,
        "mesh shards": {**one, "shards": ranks},
        "mesh data": {**one, "ranks": 4 * ranks, "data": 2},
        "mesh recompute": {**one, "recompute": "all"},
        "mesh 1f1b": {**two, "micro_batches": 3},
        "mesh mast": {**two, "schedule": "mast"},
    }


def columns(name: str) -> list[Column]:
    """Return all that is asked of a model."""
    kinds = ["one stage", "data", "shards"]
    kinds += ["1f1b"] * (name != "two branches")  # a cut of it leaves no fork
    kinds += ["master"] * (name in DEEP)
    kinds += ["tiles"] * (name in PICTURES and name in DEEP)
    trunks = ["whole", "batch", *["sequence"] * (name in TEXTS)]
    most = MOST_SHARDS.get(name, 4)
    table = itertools.product(kinds, (2, 3, 4), trunks)
    asked = [column for column in table if column[0] != "shards" or column[1] <= most]
    if name in PICTURES:
        deep = ("mesh 1f1b", "mesh mast") if name in DEEP else ()
        deep += ("mesh recompute",) if name in ("inception", "amoebanet") else ()
        asked += [(kind, 2, "whole") for kind in ("mesh", "mesh data", *deep)]
        asked += [("mesh shards", 2, "whole"), ("mesh", 3, "whole")]
    return asked


# each kind of column and each trunk, where a model has what it is about; two of them
# run by day
BY_DAY: dict[str, Column] = {
    "inception": ("tiles", 2, "whole"),
    "parallel t5": ("data", 2, "sequence"),
    "mixture": ("shards", 2, "whole"),
    "branches dropout": ("1f1b", 3, "batch"),
    "joins": ("master", 2, "batch"),
    "all shared": ("one stage", 3, "whole"),
    "two branches": ("data", 2, "whole"),
    "nested": ("1f1b", 2, "whole"),
    "googlenet": ("mesh", 2, "whole"),
}


def chosen(name: str) -> list[Column]:
    """Return the column of a model that runs by day, if any."""
    return [BY_DAY[name]] if name in BY_DAY else []


CASES = cells(BRANCH_MODELS, columns, chosen)


def num_shared(name: str, choice: CompileOptions) -> int:
    """Return how many forks have their branches on several ranks."""
    stages = lowered(name, choice).compilation.whole.program.shards.values()
    return sum(not fork.reason for stage in stages for fork in stage.forks)


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize(("name", "column"), CASES)
def test_branches_compute_what_one_process_does(
    name: str, column: Column, planned: Planned, tmp_path: Path
) -> None:
    choice = planned(name, column)
    # where layers can be cut as well, it depends on which is faster
    assert num_shared(name, choice) or choice.shards
    error = worst_error(name, choice, tmp_path / "p", draws=draws_of(name))
    assert error <= FLOAT64


COUNTED = [
    ("joins", ("one stage", 3, "batch")),
    ("shared", ("1f1b", 2, "whole")),
    # FX numbers what the experts' sum is called otherwise on a rank with other experts
    ("mixture", ("1f1b", 4, "batch")),
    pytest.param("inception", ("mesh 1f1b", 2, "whole"), marks=pytest.mark.nightly),
    pytest.param(
        "parallel t5", ("one stage", 2, "sequence"), marks=pytest.mark.nightly
    ),
    pytest.param("inception", ("one stage", 2, "batch"), marks=pytest.mark.nightly),
]


@pytest.mark.slow(1)
@pytest.mark.parametrize(("name", "column"), COUNTED)
def test_what_is_sent_is_what_was_predicted(
    name: str, column: Column, planned: Planned, tmp_path: Path
) -> None:
    program = lowered(name, planned(name, column))
    sent, predicted = counted(name, program, tmp_path)
    assert sent == predicted
    assert sent["message_bytes"] > 0


JOB = Path(__file__).parents[1] / "support" / "mpi_parity_program.py"
SAMPLE = {
    2: [
        ("inception", ("one stage", 2, "batch")),
        ("parallel t5", ("one stage", 2, "sequence")),
        ("branches dropout", ("one stage", 2, "whole")),
        ("towers", ("one stage", 2, "batch")),
        ("branches of resnext", ("one stage", 2, "whole")),
    ],
    4: [
        ("googlenet", ("tiles", 2, "whole")),
        ("joins", ("master", 2, "batch")),
        ("shared", ("data", 2, "batch")),
        ("amoebanet", ("1f1b", 2, "whole")),
        ("inception", ("mesh", 2, "whole")),
        ("mixture", ("shards", 4, "whole")),
    ],
}


@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
@pytest.mark.nightly
@pytest.mark.parametrize("processes", SAMPLE)
def test_processes_compute_what_one_process_does(
    processes: int, planned: Planned, tmp_path: Path
) -> None:
    programs, words = {}, []
    for index, (name, column) in enumerate(SAMPLE[processes]):
        folder = tmp_path / str(index)
        programs[name] = program = lowered(name, planned(name, column))
        write_directory(program.compilation, folder / "program")
        count = program.plan.data * program.plan.micro_batches
        batches = [BRANCH_MODELS[name].inputs(count, torch.float64)] * 2
        torch.save(batches, folder / "batches.pt")
        words += [str(folder), "float64"]
    assert launch(processes, [sys.executable, str(JOB), *words], timeout=240) == 0
    errors = {}
    for index, (name, program) in enumerate(programs.items()):
        count = program.plan.data * program.plan.micro_batches
        expected = reference(name, count, torch.float64, 2, draws_of(name))
        record = read_record(tmp_path / str(index), processes)
        errors[name] = compare(record, expected).worst
    assert max(errors.values()) <= FLOAT64, errors
