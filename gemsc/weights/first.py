"""The weights that a program starts from: each rank reads its own part of them.

They are in the program's files, one for each stage. What a model on the meta device had
not is elsewhere: in the user's files, or made by the model file's `init(module)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from gemsc.base.boxes import Interval
from gemsc.base.dtypes import default_dtype
from gemsc.base.parts import Part, rows_of
from gemsc.errors import GemscError
from gemsc.weights.elsewhere import Elsewhere
from gemsc.weights.initialize import Initialized
from gemsc.weights.read import AGAIN, open_tensors, own_part
from gemsc.weights.source import WeightFiles, matched
from gemsc.weights.tensor_file import TensorFile
from gemsc.weights.write import Entry

Make = Callable[[], tuple[nn.Module, Callable[[nn.Module], object]]]


@dataclass(frozen=True)
class FirstWeights:
    """The tensors that a program starts from, by the names that its stages use.

    `make` returns the user's model on the meta device, and its file's `init(module)`,
    where `dtype` is the default. Nothing but tables is read before a tensor is asked
    for.
    """

    folder: Path
    make: Make | None = None
    dtype: torch.dtype = torch.float32

    def check(self) -> None:
        """Make sure that all tensors are there, in their shapes.

        Raises:
            GemscError: some are not.
        """
        if not self.are_there:
            raise self.nowhere()
        _ = self._names

    @property
    def are_there(self) -> bool:
        """Whether it is known where they are."""
        there = self.elsewhere
        return there is None or not there.absent or bool(there.files or there.is_made)

    def nowhere(self) -> GemscError:
        """Return what to say of a program that has no weights."""
        program = self.folder.parent
        return GemscError(
            f"{program} has no weights: its model was on the meta device",
            help=f"gemsc import {program} WEIGHTS copies those of a file or a folder; "
            'or name them in the model\'s file, weights = "...", or define '
            "init(module) there, and compile again; or --resume a checkpoint",
        )

    def table(self, stage: int) -> dict[str, Entry]:
        """Return the tensors of a stage, as a whole."""
        there, file = self.elsewhere, self._stage(stage)
        names = there.stages[stage] if there is not None else ()
        absent = {name: there.tensors[name].entry for name in names} if there else {}
        return {**file.table, **absent}

    def read(
        self,
        stage: int,
        name: str,
        part: Part | None = None,
        rows: Interval | None = None,
    ) -> Tensor:
        """Return a tensor of a stage, or a part of it, in memory of its own.

        With `rows` it is these of the tensor or of its part. No more of a file is read.

        Raises:
            GemscError: it is not there, or has another shape.
        """
        file = self._stage(stage)
        if name in self._names:
            files, stored = self._files, self._names[name]
            assert files is not None
            assert self.elsewhere is not None
            what = f"{files.path}: '{stored}'"
            tensor = own_part(files.mapped(stored), part, what, rows)
            return tensor.to(self.elsewhere.tensors[name].entry.dtype)
        if name in file.table:
            return own_part(file.mapped(name), part, f"{file.path}: '{name}'", rows)
        if self.elsewhere is None or name not in self.elsewhere.absent:
            raise GemscError(f"{file.path} has no '{name}'", help=AGAIN)
        if self._made is None:
            raise self.nowhere()
        return own_part(self._made.tensor(name), part, f"init() of '{name}'", rows)

    def blank(
        self,
        stage: int,
        name: str,
        part: Part | None = None,
        rows: Interval | None = None,
    ) -> Tensor:
        """Return the same where it is there, else what is not a number."""
        there = self.elsewhere
        if self.are_there or there is None or name not in there.absent:
            return self.read(stage, name, part, rows)
        like = self.like(stage, name, part)
        tensor = torch.zeros(like.shape, dtype=like.dtype)
        tensor = tensor if rows is None else rows_of(tensor, rows).clone()
        return tensor.fill_(torch.nan) if tensor.dtype.is_floating_point else tensor

    def like(self, stage: int, name: str, part: Part | None = None) -> Tensor:
        """Return a tensor on the meta device with the shape and dtype of what is read.

        Raises:
            GemscError: it is not there.
        """
        file, there = self._stage(stage), self.elsewhere
        entry = file.table.get(name)
        if there is not None and name in there.absent:
            entry = there.tensors[name].entry
        if entry is None:
            raise GemscError(f"{file.path} has no '{name}'", help=AGAIN)
        shape = entry.shape
        if part is not None and part.shape == shape:
            shape = part.local_shape
        return torch.empty(shape, dtype=entry.dtype, device="meta")

    @cached_property
    def elsewhere(self) -> Elsewhere | None:
        """What the program's own files lack."""
        return Elsewhere.read(self.folder)

    @cached_property
    def _files(self) -> WeightFiles | None:
        there = self.elsewhere
        return WeightFiles.open(Path(there.files)) if there and there.files else None

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Which of the model's tensors the user's files have, and under which names."""
        there, files = self.elsewhere, self._files
        if there is None or files is None:
            return {}
        return matched(files, [*there.tensors.values()])

    @cached_property
    def _made(self) -> Initialized | None:
        there = self.elsewhere
        if there is None or not there.is_made or self.make is None:
            return None
        with default_dtype(self.dtype):
            model, init = self.make()
        return Initialized(model, init, self.dtype)

    @cached_property
    def _opened(self) -> dict[int, TensorFile]:
        return {}

    def _stage(self, stage: int) -> TensorFile:
        if stage not in self._opened:
            path = self.folder / f"stage{stage}.safetensors"
            self._opened[stage] = open_tensors(path)
        return self._opened[stage]
