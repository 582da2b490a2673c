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
from gemsc.base.weights import (
    NOT_OF_THE_MODEL,
    read_tensors,
    stage_tensors,
    write_tensors,
)
from gemsc.errors import GemscError
from gemsc.runtime.training.manifest import (
    MODEL,
    WEIGHTS_ALONE,
    FileFacts,
    Manifest,
    check_checkpoint,
    check_digests,
    clear_space,
    facts_of,
    make_latest,
)
from gemsc.runtime.worker.worker import Worker

__all__ = ["resume", "save"]

NEEDED = {"steps", "parameters", "buffers", "gradients", "kinds", "states"}


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
    parts = transport.all_gather_object((step, name, facts))
    with _told(directory, step):
        if transport.rank == 0:
            _join_parts(
                directory, beside, cast("list[tuple[int, str, FileFacts]]", parts)
            )
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

    The rank's part of the model is joined with the others'.
    """
    rank = worker.transport.host.rank
    first = worker.program.tile == 0  # the other tiles of a grid have the same
    write_tensors(_part(folder, rank), worker.stages.state_dict() if first else {})
    path = folder / _progress_name(rank)
    torch.save(_progress(worker), path)
    sync(path)
    return path.name, facts_of(path)


def _part(folder: Path, rank: int) -> Path:
    return folder / f".part{rank}.safetensors"


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
        "parameters": list(named),
        "buffers": {
            name: tensor
            for name, tensor in worker.stages.tensors().items()
            if name not in named or name.startswith(NOT_OF_THE_MODEL)
        },
        "gradients": {n: p.grad for n, p in named.items() if p.grad is not None},
        "kinds": {key: type(part).__name__ for key, part in stateful.items()},
        "states": {key: part.state_dict() for key, part in stateful.items()},
    }


def _join_parts(
    directory: Path, folder: Path, parts: list[tuple[int, str, FileFacts]]
) -> None:
    """Put the ranks' parts together, write down what there is, and switch to it."""
    steps = [step for step, _, _ in parts]
    if len(set(steps)) > 1:
        raise GemscError(
            f"the ranks save after different steps: {steps}",
            help="call trainer.save() on every rank, after the same step",
        )
    whole: dict[str, Tensor] = {}
    for rank in reversed(range(len(parts))):  # the first copy of the model stays
        whole.update(read_tensors(_part(folder, rank)))
    write_tensors(folder / MODEL, whole)
    sync(folder / MODEL)
    for rank in range(len(parts)):
        _part(folder, rank).unlink()
    files = {name: facts for _, name, facts in parts}
    files[MODEL] = facts_of(folder / MODEL)
    Manifest(steps[0], len(parts), files).write(folder)
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
    whole = read_tensors(folder / MODEL)
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
    if not isinstance(found, dict) or found.keys() != NEEDED:
        raise GemscError(f"{path} is damaged: {found}", help="use another checkpoint")
    if found["steps"] != step:
        raise GemscError(
            f"{path} is of step {found['steps']}, the checkpoint of step {step}",
            help="use another checkpoint",
        )
    if found["parameters"] != list(worker.stages.parameters):
        raise GemscError(
            f"{folder} was saved with another split of the model",
            help=f"compile with that split, {WEIGHTS_ALONE}",
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
