"""What a rank starts from: its files, and the first weights of their stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.base.boxes import Interval
from gemsc.base.nests import all_named, saved_named
from gemsc.base.parts import Part
from gemsc.errors import GemscError, choose
from gemsc.plan import Plan
from gemsc.runtime.training.program_directory import load_program
from gemsc.runtime.worker.program import RankProgram
from gemsc.runtime.worker.stages import Stages
from gemsc.user_model import load_user_model
from gemsc.weights.first import FirstWeights
from gemsc.weights.load import NOT_OF_THE_MODEL, stage_tensors
from gemsc.weights.source import Wanted


def check_choices(accumulate: Any, clip_norm: Any, on_nonfinite: str) -> None:
    """Make sure of what a loop of one's own gives, as `gemsc run` does of its options.

    Raises:
        GemscError: it would train nothing, or otherwise than anybody wants.
    """
    choose("on_nonfinite", on_nonfinite, dict.fromkeys(("stop", "skip", "warn")))
    if not isinstance(accumulate, Integral) or accumulate < 1:
        raise GemscError(
            f"accumulate is {accumulate!r}",
            help="give a whole number of steps: 1 updates after each",
        )
    is_number = isinstance(clip_norm, Real) and float(clip_norm) > 0  # NaN is none
    if clip_norm is not None and not is_number:
        raise GemscError(
            f"clip_norm is {clip_norm!r}", help="give a number above 0, or None"
        )


def first_weights(directory: Path, plan: Plan) -> FirstWeights:
    """Return the first weights of a program; the user's file is loaded if need be."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], object]]:
        return load_user_model(plan.spec, constants=plan.constants).initialized()

    dtype = torch.float64 if plan.dtype == "float64" else torch.float32
    return FirstWeights(directory / plan.weights, make, dtype)


def tensors_of_program(
    directory: Path, plan: Plan, first: FirstWeights
) -> list[Wanted]:
    """Return the tensors of a program's model; `required` is what a state_dict has."""
    if (there := first.elsewhere) is not None:
        return [*there.tensors.values()]
    table = {n: e for s in plan.stages for n, e in first.table(s.index).items()}
    names: dict[str, list[str]] = defaultdict(list)
    persistent: set[str] = set()
    for rank in range(plan.copy_ranks):
        program = load_program(directory, rank)
        for alias, first_name in program.aliases.items():
            names[first_name].append(alias)
        for kind in program.stages.values():
            with torch.device("meta"):
                stage = kind()
            firsts: dict[int, str] = {}
            for name, tensor in all_named(stage):
                names[firsts.setdefault(id(tensor), name)].append(name)
            persistent |= saved_named(stage).keys()
    return [
        Wanted(tuple(dict.fromkeys([name, *names[name]])), entry, name in persistent)
        for name, entry in table.items()
        if not name.startswith(NOT_OF_THE_MODEL)
    ]


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank of a program, and the weights that their stages get."""

    directory: Path
    rank: int
    first: FirstWeights
    device: torch.device
    dtype: torch.dtype | None

    def load(
        self, name: str = "", known: Stages | None = None
    ) -> tuple[RankProgram, Stages]:
        """Return what a file says, and its stages; they read what is not `known`.

        Where weights are kept in parts, it is known later which rows they read.
        """
        program, stages = load_program(self.directory, self.rank, name), Stages()
        for run, kind in program.stages.items():
            held = stage_tensors(known[run]) if known is not None else {}
            read = partial(self._read, held, run.stage, program.parts)
            like = None
            if program.whole_stages and known is None:
                like = partial(self._like, run.stage, program.parts)
            stages.add(run, kind, read, self.device, self.dtype, like)
        return program, stages

    def _like(self, stage: int, parts: Mapping[str, Part], name: str) -> Tensor:
        return self.first.like(stage, name, parts.get(name))

    def _read(
        self,
        held: Mapping[str, Tensor],
        stage: int,
        parts: Mapping[str, Part],
        name: str,
        rows: Interval | None = None,
    ) -> Tensor:
        """Return a tensor that is held, or what this rank has of it at first."""
        if name in held:
            return held[name].detach()
        return self.first.blank(stage, name, parts.get(name), rows)
