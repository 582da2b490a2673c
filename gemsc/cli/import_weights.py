"""Let a program start from other weights: `gemsc import build/program weights`."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gemsc.base.files import sync, write_text
from gemsc.plan import Plan
from gemsc.runtime.training.program_directory import load_program
from gemsc.weights.match import Wanted, conversions, matched
from gemsc.weights.source import WeightFiles
from gemsc.weights.stage import NOT_OF_THE_MODEL
from gemsc.weights.write import Entry, write_stream


def import_weights(directory: Path, path: Path) -> list[str]:
    """Replace a program's initial weights; return notes about what was converted.

    They are written into a new folder, one tensor at a time, and plan.toml then names
    it: a program starts from all of the old weights, or from all of the new ones.

    Raises:
        GemscError: the files are damaged, or not those of the program's model.
    """
    plan = Plan.read(directory / "plan.toml")
    names = (f"stage{stage.index}.safetensors" for stage in plan.stages)
    stages = [WeightFiles.open(directory / plan.weights / name) for name in names]
    table = {name: entry for stage in stages for name, entry in stage.table.items()}
    wanted = _wanted(directory, plan, table)
    files = WeightFiles.open(path)
    found = matched(files, wanted)
    number = int(plan.weights.partition("-")[2] or 1) + 1
    new = directory / f"weights-{number}"
    shutil.rmtree(new, ignore_errors=True)
    try:
        for stage in stages:

            def read(name: str, stage: WeightFiles = stage) -> Tensor:
                if name not in found:
                    return stage.mapped(name)
                return files.mapped(found[name]).to(stage.table[name].dtype)

            write_stream(new / stage.path.name, stage.table, read, sync=True)
        sync(new)
        plan = replace(plan, weights=new.name)
        write_text(directory / "plan.toml", plan.to_toml(directory))
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    for other in directory.glob("weights*"):  # those before, and what kills have left
        if other != new:
            shutil.rmtree(other)
    return conversions(files, wanted)


def _wanted(directory: Path, plan: Plan, table: Mapping[str, Entry]) -> list[Wanted]:
    """Return the model's tensors: under which names, and which a state_dict has."""
    names: dict[str, list[str]] = defaultdict(list)
    persistent: set[str] = set()
    for rank in range(plan.copy_ranks):
        for kind in load_program(directory, rank).stages.values():
            with torch.device("meta"):
                stage = kind()
            first: dict[int, str] = {}
            for tensors in (stage.named_parameters, stage.named_buffers):
                for name, tensor in tensors(remove_duplicate=False):
                    names[first.setdefault(id(tensor), name)].append(name)
            persistent |= stage.state_dict().keys()
    return [
        Wanted(tuple(dict.fromkeys([name, *names[name]])), entry, name in persistent)
        for name, entry in table.items()
        if not name.startswith(NOT_OF_THE_MODEL)
    ]
