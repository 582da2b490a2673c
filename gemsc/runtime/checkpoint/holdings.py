"""What a rank holds of the whole model: tensors by key, each a piece of a whole."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gemsc.base.nests import all_named
from gemsc.runtime.checkpoint.pieces import TensorPiece
from gemsc.runtime.worker.updates import Updates
from gemsc.runtime.worker.worker import Worker
from gemsc.weights.load import (
    CONSTANTS,
    LOSS,
    NOT_OF_THE_MODEL,
    model_state,
    stage_tensors,
)
from gemsc.weights.source import Wanted
from gemsc.weights.write import Entry

MODEL_KEY = "model/"  # before the user's names
EMA_KEY = "ema/"  # of the averages of `--ema`
BESIDE_KEY = "beside/"  # what a state_dict leaves out, and tensors of the loss
LOSS_KEY = f"{BESIDE_KEY}{LOSS}"

Extra = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor of this rank; perhaps the first of those who hold the same."""

    key: str
    tensor: Tensor
    piece: TensorPiece
    is_first: bool = True


@dataclass
class Holdings:
    """The tensors of a rank, and which pieces of the user's ones they are."""

    worker: Worker

    def __post_init__(self) -> None:
        stages = self.worker.stages
        self._runs = {n: run for run, s in stages.items() for n in stage_tensors(s)}

    def piece(self, name: str, shape: torch.Size) -> TensorPiece:
        """Return what this rank has of a tensor."""
        part = self.worker.program.parts.get(name)
        return TensorPiece.whole(shape) if part is None else TensorPiece.of_part(part)

    def updated(self, updates: Updates) -> dict[int, HeldTensor]:
        """Return the parameters that this rank's optimizer has, or its rows, by id."""
        held = {}
        for name, parameter in updates.parameters.items():
            whole = self.worker.stages.parameters[name]
            piece, rows = self.piece(name, whole.shape), updates.own_rows.rows.get(name)
            if rows is not None:
                piece = piece.rows(*rows)
            is_first = rows is not None or self.is_first(name)
            held[id(parameter)] = HeldTensor(name, parameter, piece, is_first)
        return held

    def is_first(self, name: str) -> bool:
        """Whether this rank is the first one that holds its piece of a tensor."""
        program, place = self.worker.program, self.worker.place
        key = program.sum_of(self._runs[name], name)
        return place.copy == 0 and program.is_first(key, place.rank)

    def tensors(self, extra: Extra) -> Iterator[HeldTensor]:
        """Yield parameters, buffers, and what belongs to them (averages of weights)."""
        by_key: dict[str, tuple[str, Tensor]] = {}
        for stage in self.worker.stages.values():
            kept = model_state(stage)
            for name, tensor in stage_tensors(stage).items():
                place = MODEL_KEY if name in kept else BESIDE_KEY
                if not name.startswith(CONSTANTS):
                    by_key[f"{place}{name}"] = name, tensor
        for kind, named in extra.items():
            for name, tensor in named.items():
                by_key[f"{kind}/{name}"] = name, tensor
        stages, updates = self.worker.stages, self.worker.updates
        for key, (name, tensor) in by_key.items():
            piece = self.piece(name, tensor.shape)
            if (part := updates.weights_in_parts.get(name)) is not None:
                piece = self.piece(name, stages.parameters[name].shape)
                piece = piece.rows(*updates.own_rows.kept_rows[name])
                tensor = tensor if key.startswith(EMA_KEY) else part
            yield HeldTensor(key, tensor.detach(), piece)

    def wanted(self) -> dict[str, Wanted]:
        """Return what this rank takes of a file of weights, by its key."""
        by_key, names = {}, defaultdict(list)
        for alias, first in self.aliases().items():
            names[first].append(alias)
        for held in self.tensors({}):
            _, _, name = held.key.partition("/")
            if not name.startswith(LOSS):
                entry = Entry(held.tensor.dtype, held.piece.shape)
                is_required = held.key.startswith(MODEL_KEY)
                by_key[held.key] = Wanted((name, *names[name]), entry, is_required)
        return by_key

    def gradients(self) -> Iterator[HeldTensor]:
        """Yield the gradients that wait for an update: what is meant is their sum."""
        rows = self.worker.updates.gradients_in_parts
        for name, parameter in self.worker.stages.parameters.items():
            grad = rows[name][1].grad if name in rows else parameter.grad
            if grad is not None:
                yield HeldTensor(gradient_key(name), grad, self.summed(name))

    def summed(self, name: str) -> TensorPiece:
        """Return of which piece of a parameter this rank has terms of the gradient."""
        updates = self.worker.updates
        piece = self.piece(name, self.worker.stages.parameters[name].shape)
        if name in updates.gradients_in_parts:
            piece = piece.rows(*updates.own_rows.kept_rows[name])
        return piece

    def aliases(self) -> dict[str, str]:
        """Return each further name of a tensor of the model, with its first name."""
        aliases = {}
        known = {n for stage in self.worker.stages.values() for n in model_state(stage)}
        for alias, first in self.worker.program.aliases.items():
            if first in known and not alias.startswith(NOT_OF_THE_MODEL):
                aliases[alias] = first
        for stage in self.worker.stages.values():
            firsts = {id(tensor): name for name, tensor in stage_tensors(stage).items()}
            for name, tensor in all_named(stage):
                first = firsts[id(tensor)]
                if name != first and not name.startswith(NOT_OF_THE_MODEL):
                    aliases[name] = first
        return aliases

    def digest(self) -> str:
        """Return what two ranks have in common that add up gradients of the same."""
        named = self.worker.stages.parameters
        pieces = [(name, self.summed(name).intervals) for name in named]
        return hashlib.sha256(repr(pieces).encode()).hexdigest()


def gradient_key(name: str) -> str:
    """Return the key of a parameter's gradient."""
    return f"gradient/{name}"
