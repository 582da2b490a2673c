"""What a checkpoint holds: the model, and what each rank needs to go on."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from gemsc.base.files import sync
from gemsc.base.parts import Part
from gemsc.errors import GemscError
from gemsc.runtime.training.manifest import (
    MODEL,
    WEIGHTS_ALONE,
    Manifest,
    check_checkpoint,
    check_digests,
    clear_space,
    make_latest,
)
from gemsc.runtime.worker.worker import Worker
from gemsc.weights.facts import FileFacts, facts_of
from gemsc.weights.join import join_files
from gemsc.weights.read import read_tensors
from gemsc.weights.stage import NOT_OF_THE_MODEL, model_state, stage_tensors
from gemsc.weights.write import write_tensors

__all__ = ["resume", "save"]

NEEDED = {"steps", "parameters", "rows", "buffers", "gradients", "kinds", "states"}


# -------------------------------------------------------------------- saving


def save(worker: Worker, directory: Path) -> None:
    """Write a checkpoint of all ranks: see `Trainer.save`."""
    transport, step = worker.transport.host, worker.steps.done
    beside = directory
    with _told(directory, step):
        if transport.rank == 0:
            beside = clear_space(directory, step)
    beside = Path(str(transport.broadcast_object(str(beside))))
    with _told(directory, step):
        name, facts = _write_part(worker, beside)
    mine = _Written(step, name, facts, {**worker.program.parts})
    everyone = cast("list[_Written]", transport.all_gather_object(mine))
    with _told(directory, step):
        if transport.rank == 0:
            _join(directory, beside, everyone)
    transport.barrier()


@contextmanager
def _told(directory: Path, step: int) -> Iterator[None]:
    """Say what could not be written, where to, and what is left."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise GemscError(
            f"the checkpoint of step {step} cannot be written to {directory}: {error}",
            help="free space there, or --save elsewhere; an older checkpoint there "
            "is still complete",
        ) from error


def _write_part(worker: Worker, folder: Path) -> tuple[str, FileFacts]:
    """Write what this rank has; return the name and the facts of the file that stays.

    Its share of the model is joined with the others'; what several ranks hold is in the
    share of the first of them.
    """
    rank = worker.transport.host.rank
    write_tensors(_share(folder, rank), _own_state(worker))
    path = folder / _progress_name(rank)
    torch.save(_progress(worker), path)
    sync(path)
    return path.name, facts_of(path)


def _own_state(worker: Worker) -> dict[str, Tensor]:
    """Return what this rank holds of the model, less what an earlier rank has too."""
    program, place = worker.program, worker.place
    return {
        name: tensor
        for run, stage in worker.stages.items()
        for name, tensor in model_state(stage).items()
        if place.copy == 0 and program.is_first(program.sum_of(run, name), place.rank)
    }


def _share(folder: Path, rank: int) -> Path:
    return folder / f".share{rank}.safetensors"


def _progress_name(rank: int) -> str:
    return f"optimizer-rank{rank}.pt"


def _stateful(worker: Worker) -> dict[str, Any]:
    """Return what there is of an optimizer and a scheduler."""
    parts = {
        "optimizer": worker.updates.optimizer,
        "scheduler": worker.updates.scheduler,
    }
    return {key: part for key, part in parts.items() if part is not None}


def _progress(worker: Worker) -> dict[str, Any]:
    """Return what this rank needs to go on, besides the model."""
    named = worker.stages.parameters
    stateful = _stateful(worker)
    return {
        "steps": worker.steps.done,
        "parameters": _split(worker),
        "rows": worker.updates.own_rows,
        "buffers": {
            name: tensor
            for name, tensor in worker.stages.tensors().items()
            if name not in named or name.startswith(NOT_OF_THE_MODEL)
        },
        "gradients": {n: p.grad for n, p in named.items() if p.grad is not None},
        "kinds": {key: type(part).__name__ for key, part in stateful.items()},
        "states": {key: part.state_dict() for key, part in stateful.items()},
    }


def _split(worker: Worker) -> list[str]:
    """Return which parameters this rank has, and which part of each."""
    parts = worker.program.parts
    return [
        f"{name}: {parts[name]}" if name in parts else name
        for name in worker.stages.parameters
    ]


@dataclass(frozen=True)
class _Written:
    """What a rank has written: after which step, a file that stays, and its parts."""

    step: int
    name: str
    facts: FileFacts
    parts: dict[str, Part]


def _join(directory: Path, folder: Path, everyone: list[_Written]) -> None:
    """Put the ranks' shares together, write down what there is, and switch to it."""
    steps = [each.step for each in everyone]
    if len(set(steps)) > 1:
        raise GemscError(
            f"the ranks save after different steps: {steps}",
            help="call trainer.save() on every rank, after the same step",
        )
    shares = [(_share(folder, rank), each.parts) for rank, each in enumerate(everyone)]
    join_files(folder / MODEL, shares)
    sync(folder / MODEL)
    for rank in range(len(everyone)):
        _share(folder, rank).unlink()
    files = {each.name: each.facts for each in everyone}
    files[MODEL] = facts_of(folder / MODEL)
    Manifest(steps[0], len(everyone), files).write(folder)
    make_latest(directory, folder)


# ------------------------------------------------------------------ resuming


def resume(worker: Worker, directory: Path) -> None:
    """Take what `save` wrote, once it fits on all ranks: see `Trainer.resume`."""
    transport = worker.transport.host
    before = {key: part.state_dict() for key, part in _stateful(worker).items()}
    found, problem = None, None
    try:
        found = _read(worker, directory)
        _load_states(worker, found.progress.get("states", {}))
    except GemscError as error:
        problem = error
    for theirs in transport.all_gather_object(problem):  # perhaps of another rank
        if isinstance(theirs, GemscError):
            _load_states(worker, before)
            raise theirs
    assert found is not None
    with torch.no_grad():
        for tensor, value in found.weights:
            tensor.copy_(value)
    if found.progress:
        _take_progress(worker, found.progress)


@dataclass(frozen=True)
class _Found:
    """What fits this rank: tensors, each with what it shall become, and the rest."""

    weights: list[tuple[Tensor, Tensor]]
    progress: dict[str, Any]


def _read(worker: Worker, directory: Path) -> _Found:
    transport = worker.transport.host
    folder, manifest = check_checkpoint(directory, transport.size)
    if manifest is None:
        return _Found(_read_weights(worker, folder), {})
    check_digests(folder, manifest, transport.rank, transport.size)
    progress = _read_progress(worker, folder, manifest.step)
    return _Found(_read_weights(worker, folder), progress)


def _read_weights(worker: Worker, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's tensors, each with what it shall become."""
    names, parts = worker.stages.tensors().keys(), worker.program.parts
    whole = read_tensors(folder / MODEL, names=names, parts=parts)
    pairs = []
    for stage in worker.stages.values():
        needed = stage.state_dict().keys()
        for name, tensor in stage_tensors(stage).items():
            if name in whole:
                pairs.append((tensor, _fitting(whole[name], tensor, name, folder)))
            elif name in needed and not name.startswith(NOT_OF_THE_MODEL):
                raise GemscError(
                    f"{folder} has no '{name}'", help="give a checkpoint of this model"
                )
    return pairs


def _fitting(value: Tensor, target: Tensor, name: str, folder: Path) -> Tensor:
    if target.shape != value.shape:
        raise GemscError(
            f"{folder}: '{name}' has shape {list(value.shape)}, the program needs "
            f"{list(target.shape)}",
            help="give a checkpoint of this model",
        )
    return value


def _read_progress(worker: Worker, folder: Path, step: int) -> dict[str, Any]:
    """Read what this rank needs besides the model; make sure that it fits."""
    path = folder / _progress_name(worker.transport.host.rank)
    try:
        found = torch.load(path, weights_only=True, map_location=worker.device)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        found = str(error).split("\n")[0]
    if isinstance(found, dict) and (missing := NEEDED - found.keys()):
        found = f"it has no {', '.join(sorted(missing))}"
    if not isinstance(found, dict):
        raise GemscError(f"{path} is damaged: {found}", help="use another checkpoint")
    if found["steps"] != step:
        raise GemscError(
            f"{path} is of step {found['steps']}, the checkpoint of step {step}",
            help="use another checkpoint",
        )
    if found["parameters"] != _split(worker):
        raise GemscError(
            f"{folder} was saved with another split of the model",
            help=f"compile with that split, {WEIGHTS_ALONE}",
        )
    if found["rows"] != worker.updates.own_rows:
        before, now = (
            "with" if rows else "without"
            for rows in (found["rows"], worker.updates.own_rows)
        )
        raise GemscError(
            f"{folder} was saved {before} --shard-optimizer, this program is compiled "
            f"{now} it{', for other ranks' * (before == now)}",
            help=f"compile as for the run that was saved, {WEIGHTS_ALONE}",
        )
    for key, part in _stateful(worker).items():
        before, now = found["kinds"].get(key), type(part).__name__
        if before not in (None, now):
            raise GemscError(
                f"{folder} was saved with the {key} {before}, the program has {now}",
                help=f"use {before} again, {WEIGHTS_ALONE}",
            )
    return found


def _load_states(worker: Worker, states: Mapping[str, Any]) -> None:
    for key, part in _stateful(worker).items():
        if key not in states:
            continue
        try:
            part.load_state_dict(states[key])
        except (ValueError, KeyError, TypeError) as error:
            raise GemscError(
                f"the state of the {key} does not fit {type(part).__name__}: {error}",
                help=f"create it as in the run that was saved, {WEIGHTS_ALONE}",
            ) from error


def _take_progress(worker: Worker, state: Mapping[str, Any]) -> None:
    worker.steps.done = state["steps"]
    tensors, named = worker.stages.tensors(), worker.stages.parameters
    for name, buffer in state["buffers"].items():
        tensors[name].copy_(buffer)
    for name, gradient in state["gradients"].items():
        named[name].grad = gradient
