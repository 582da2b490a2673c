"""The files of a checkpoint, read in slices by whoever needs them, or exported as one.

`gemsc export` writes the model as one plain state_dict, under the user's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.folder import (
    check_checkpoint,
    check_digests,
    damage_named,
)
from gemsc.runtime.checkpoint.holdings import EMA_KEY, MODEL_KEY
from gemsc.runtime.checkpoint.manifest import Manifest, Stored, damaged
from gemsc.runtime.checkpoint.pieces import TensorPiece, make_up
from gemsc.runtime.checkpoint.states import DTYPES, dtype_name
from gemsc.weights.write import DTYPES as STORED_DTYPES
from gemsc.weights.write import Entry, write_stream


class StoredTensors:
    """The tensors in the files of a folder, by their keys in its manifest."""

    def __init__(self, folder: Path, table: Mapping[str, Stored]) -> None:
        """Open nothing yet."""
        self._folder = folder
        self._table = {**table}
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._files.clear()

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._table[key].shape

    @classmethod
    def of_weights(cls, path: Path) -> Self:
        """Return the tensors of a file that somebody wrote, by their names.

        Raises:
            GemscError: it is no safetensors file, or damaged.
        """
        found = cls(path.parent, {})
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    stored = file.get_slice(name)
                    shape = tuple(stored.get_shape())
                    pieces = ((path.name, TensorPiece.whole(shape)),)
                    dtype = dtype_name(STORED_DTYPES[stored.get_dtype()])
                    found._table[name] = Stored(dtype, shape, pieces)
        except (SafetensorError, OSError, KeyError) as error:
            raise GemscError(
                f"{path} cannot be read: {str(error) or 'it is empty'}",
                help="give weights in safetensors format, complete",
            ) from None
        return found

    def check(self, key: str, piece: TensorPiece, *, sums: bool = False) -> None:
        """Make sure that the files have a piece, which need not be one of theirs.

        With `sums` the tensor is the sum of all that is stored of it.

        Raises:
            GemscError: they do not.
        """
        name = key.removeprefix(MODEL_KEY)
        if key not in self._table:
            raise GemscError(
                f"{self._folder} has no '{name}'",
                help="give a checkpoint of this model",
            )
        stored = self._table[key]
        if stored.shape != piece.shape:
            raise GemscError(
                f"{self._folder}: '{name}' has shape {list(stored.shape)}, the program "
                f"needs {list(piece.shape)}",
                help="give a checkpoint of this model",
            )
        if not sums and not make_up(piece, (held for _, held in stored.pieces)):
            raise damaged(self._folder, f"is damaged: it has not all of '{name}'")
        for file, held in stored.pieces:
            if held.count and next(piece.overlap(held), None) is None:
                continue
            found = self._slice(file, key)
            sizes = tuple(found.get_shape()) or (1,)
            dtype = STORED_DTYPES.get(found.get_dtype())
            if sizes != held.sizes or dtype is not DTYPES.get(stored.dtype, ""):
                what = f"is damaged: '{key}' is not what was saved"
                raise damaged(self._folder / file, what)

    def copy(self, key: str, piece: TensorPiece, target: Tensor) -> None:
        """Copy a piece that was checked to where it belongs."""
        for place, values in self._parts(key, piece, target):
            place.copy_(values)

    def add(
        self, key: str, piece: TensorPiece, target: Tensor, only: str | None
    ) -> None:
        """Add what all files, or one only, have of a piece checked with `sums`."""
        for place, values in self._parts(key, piece, target, only):
            place += values

    def read(self, key: str, piece: TensorPiece) -> Tensor:
        """Return a piece as a tensor of its own."""
        self.check(key, piece)
        dtype = DTYPES[self._table[key].dtype]
        found = torch.empty(piece.sizes, dtype=dtype)
        self.copy(key, piece, found)
        return found

    def whole(self, key: str) -> Tensor:
        """Return a whole tensor."""
        shape = self._table[key].shape
        return self.read(key, TensorPiece.whole(shape)).view(shape)

    def _parts(
        self, key: str, piece: TensorPiece, target: Tensor, only: str | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what files have of a piece: its place in the target, and its values."""
        target = target if target.dim() else target.view(1)
        for file, held in self._table[key].pieces:
            for own, theirs in piece.overlap(held) if only in (None, file) else ():
                place, found = target[own], self._slice(file, key)
                try:
                    values = found[theirs if found.get_shape() else ...]
                except (SafetensorError, OSError) as error:
                    raise damaged(self._folder / file, f"is damaged: {error}") from None
                yield place, values.view_as(place).to(place.device)

    def _slice(self, file: str, key: str) -> Any:
        path = self._folder / file
        try:
            if file not in self._files:
                opened = safe_open(path, "pt")
                self._files[file] = self._stack.enter_context(opened)
            return self._files[file].get_slice(key)
        except (SafetensorError, OSError) as error:
            raise damaged(path, f"is damaged: {error}") from None


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint: `read` gives a tensor under the user's own name."""

    step: int
    table: Mapping[str, Entry]
    read: Callable[[str], Tensor]


def export_model(directory: Path, path: Path, *, averages: bool = False) -> int:
    """Write the model of a checkpoint as one safetensors file; return its step.

    `model.load_state_dict(safetensors.torch.load_file(path))` takes it. One tensor at a
    time is in memory. With `averages` it is that of the averages of the weights.

    Raises:
        GemscError: there is no whole checkpoint, or nothing can be written.
    """
    with saved_model(directory, averages=averages) as saved:
        try:
            write_stream(path, saved.table, saved.read)
        except OSError as error:
            raise GemscError(
                f"{path} cannot be written: {error.strerror}",
                help="give another file with -o",
            ) from None
        return saved.step


@contextmanager
def saved_model(directory: Path, *, averages: bool = False) -> Iterator[SavedModel]:
    """Open the model of a checkpoint, or of its averages; damage names another one.

    Raises:
        GemscError: there is no whole checkpoint.
    """
    found = check_checkpoint(directory)
    if (manifest := found.manifest) is None:
        raise GemscError(
            f"{directory} holds weights alone: there is nothing to export",
            help=f"use {found.place} as it is",
        )
    keys = _keys(manifest, directory, averages=averages)
    with (
        damage_named(found.place),
        StoredTensors(found.place, manifest.tensors) as stored,
    ):
        check_digests(found.place, manifest, 0, 1)
        table = {}
        for name, key in keys.items():
            stored.check(key, TensorPiece.whole(stored.shape(key)))
            dtype = DTYPES[manifest.tensors[key].dtype]
            table[name] = Entry(dtype, stored.shape(key))
        yield SavedModel(manifest.step, table, lambda name: stored.whole(keys[name]))


def _keys(manifest: Manifest, directory: Path, *, averages: bool) -> dict[str, str]:
    """Return which tensor of a checkpoint has which name in the user's model."""
    keys = {
        key.removeprefix(MODEL_KEY): key
        for key in manifest.tensors
        if key.startswith(MODEL_KEY)
    }
    if averages:
        own = {name: f"{EMA_KEY}{name}" for name in keys}
        own = {name: key for name, key in own.items() if key in manifest.tensors}
        if not own:
            raise GemscError(
                f"{directory} has no averages of the weights",
                help="train with --ema 0.999, or export the weights without --ema",
            )
        keys |= own
    return keys | {alias: keys[name] for alias, name in manifest.aliases.items()}
