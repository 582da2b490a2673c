"""The files of a checkpoint, read in slices by whoever needs them, or exported as one.

`gemsc export` writes the model as one plain state_dict, under the user's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from gemsc.base.dtypes import dtype_name
from gemsc.base.units import show_some
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.folder import (
    check_checkpoint,
    check_digests,
    damage_named,
)
from gemsc.runtime.checkpoint.holdings import (
    BESIDE_KEY,
    EMA_KEY,
    LOSS_KEY,
    MODEL_KEY,
)
from gemsc.runtime.checkpoint.manifest import Manifest, Stored, damaged
from gemsc.runtime.checkpoint.optimizer_state import (
    SavedOptimizer,
    states_of,
    tensor_key,
)
from gemsc.runtime.checkpoint.pieces import TensorPiece, make_up
from gemsc.runtime.checkpoint.states import DTYPES, decode
from gemsc.weights.load import LOSS
from gemsc.weights.source import Wanted, WeightFiles, matched
from gemsc.weights.tensor_file import StoredSlice, TensorFile
from gemsc.weights.write import Entry, stored_name, write_stream

if TYPE_CHECKING:
    from gemsc.weights.distributed import DistributedCheckpoint

_OF_ANOTHER = (
    "give a checkpoint of this model, or compile a model() that loads what fits of "
    "another one"
)


class StoredTensors:
    """The tensors in the files of a folder, by their keys in its manifest."""

    def __init__(self, folder: Path, table: Mapping[str, Stored]) -> None:
        """Open nothing yet."""
        self._folder = self._named = folder
        self._table = {**table}
        self._files: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # in the files, where it is another one

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def entry(self, key: str) -> Entry:
        """Return dtype and shape of a whole tensor."""
        return Entry(DTYPES[self._table[key].dtype], self._table[key].shape)

    @classmethod
    def of_weights(cls, path: Path, wanted: Mapping[str, Wanted]) -> Self:
        """Return what is wanted of a file that somebody wrote, by its keys.

        Raises:
            GemscError: it is no safetensors file, or damaged; it has not all that is
                wanted, or something else.
        """
        files, tensors = WeightFiles.open(path), cls(path.parent, {})
        there, tensors._named = matched(files, [*wanted.values()]), path
        for key, want in wanted.items():
            if (name := there.get(want.names[0])) is not None:
                entry = files.table[name]
                pieces = ((path.name, TensorPiece.whole(entry.shape)),)
                stored = Stored(dtype_name(entry.dtype), entry.shape, pieces)
                tensors._table[key], tensors._names[key] = stored, name
        return tensors

    @classmethod
    def of_distributed(cls, saved: DistributedCheckpoint) -> Self:
        """Return the model and the optimizer's tensors of torch's checkpoint.

        They are called as in a weights file, and as in a checkpoint of ours.
        """
        stored = cls(saved.path, {})
        names = {name: name for name in saved.table}
        for state, name in saved.states:
            if saved.is_like_its_parameter(state, name):
                names[tensor_key(state, name)] = name
        for key in names:
            entry = saved.get_slice(key).entry
            stored_name(key, entry.dtype)  # refuses what no checkpoint has
            pieces = (("", TensorPiece.whole(entry.shape)),)
            stored._table[key] = Stored(dtype_name(entry.dtype), entry.shape, pieces)
        stored._files[""] = saved
        return stored

    def check_taken(self, wanted: Iterable[Wanted]) -> None:
        """Make sure that the model has all weights and buffers that are stored of one.

        Raises:
            GemscError: it does not.
        """
        known = {f"{MODEL_KEY}{name}" for want in wanted for name in want.names}
        of_model = (key for key in self._table if key.startswith(MODEL_KEY))
        if extra := [key for key in of_model if key not in known]:
            names = show_some([f"'{key.removeprefix(MODEL_KEY)}'" for key in extra])
            raise GemscError(
                f"{self._named} has {names}, which the model does not have",
                help=_OF_ANOTHER,
            )

    def check(self, key: str, piece: TensorPiece, *, sums: bool = False) -> None:
        """Make sure that the files have a piece, which need not be one of theirs.

        With `sums` the tensor is the sum of all that is stored of it.

        Raises:
            GemscError: they do not.
        """
        name = key.removeprefix(MODEL_KEY)
        if key not in self._table:
            raise GemscError(
                f"{self._named} has no '{name}'",
                help=_OF_ANOTHER,
            )
        stored = self._table[key]
        if stored.shape != piece.shape:
            raise GemscError(
                f"{self._named}: '{name}' has shape {list(stored.shape)}, but the "
                f"program needs {list(piece.shape)}",
                help=_OF_ANOTHER,
            )
        if not sums and not make_up(piece, (held for _, held in stored.pieces)):
            raise damaged(self._folder, f"is damaged: it has not all of '{name}'")
        for file, held in stored.pieces:
            if held.count and next(piece.overlap(held), None) is None:
                continue
            entry = self._slice(file, key).entry
            is_kind = entry.dtype is DTYPES.get(stored.dtype)
            if (entry.shape or (1,)) != held.sizes or not is_kind:
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
        tensor = torch.empty(piece.sizes, dtype=dtype)
        self.copy(key, piece, tensor)
        return tensor

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
            for ours, theirs in piece.overlap(held) if only in (None, file) else ():
                place, stored = target[ours], self._slice(file, key)
                try:
                    values = stored[theirs if stored.entry.shape else ...]
                except (SafetensorError, OSError) as error:
                    raise damaged(self._folder / file, f"is damaged: {error}") from None
                yield place, values.view_as(place).to(place.device)

    def _slice(self, file: str, key: str) -> StoredSlice:
        path = self._folder / file
        try:
            if file not in self._files:
                self._files[file] = TensorFile.open(path)
            name = self._names.get(key, key)
            stored: StoredSlice = self._files[file].get_slice(name)
            return stored
        except KeyError:
            raise damaged(path, f"is damaged: it has no '{key}'") from None
        except (SafetensorError, OSError) as error:
            raise damaged(path, f"is damaged: {error}") from None


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint: `read` gives a tensor under the user's own name.

    `loss` has the tensors of the loss, under their names there with LOSS before them.
    `optimizer` gives the state of the optimizer, if that goes with the model.
    """

    step: int
    table: Mapping[str, Entry]
    loss: Mapping[str, Entry]
    read: Callable[[str], Tensor]
    optimizer: Callable[[], OptimizerState | None]


def export_model(
    directory: Path, path: Path, *, averages: bool = False, is_new: bool = False
) -> int:
    """Write the model of a checkpoint as one safetensors file; return its step.

    `model.load_state_dict(safetensors.torch.load_file(path))` takes it. One tensor at a
    time is in memory. With `averages` it is that of the averages of the weights. Of one
    that `is_new`, just written, the digests are not compared.

    Raises:
        GemscError: there is no whole checkpoint, or nothing can be written.
    """
    with saved_model(directory, averages=averages, is_new=is_new) as saved:
        try:
            write_stream(path, saved.table, saved.read)
        except OSError as error:
            raise GemscError(
                f"{path} cannot be written: {error.strerror}",
                help=f"free space there, or gemsc export {directory} -o another file",
            ) from None
        return saved.step


@contextmanager
def saved_model(
    directory: Path, *, averages: bool = False, is_new: bool = False
) -> Iterator[SavedModel]:
    """Open the model of a checkpoint, or of its averages; damage names another one.

    Raises:
        GemscError: there is no whole checkpoint.
    """
    saved = check_checkpoint(directory)
    if (manifest := saved.manifest) is None:
        raise GemscError(
            f"{directory} holds only weights: there is nothing to export",
            help=f"use {saved.place} as it is",
        )
    keys = _keys(manifest, directory, averages=averages)
    stored = StoredTensors(saved.place, manifest.tensors)
    with damage_named(saved.place):
        if not is_new:
            check_digests(saved.place, manifest, 0, 1)
        table, loss = dict[str, Entry](), dict[str, Entry]()
        for name, key in keys.items():
            stored.check(key, TensorPiece.whole(stored.entry(key).shape))
            entries = loss if name.startswith(LOSS) else table
            entries[name] = stored.entry(key)
        yield SavedModel(
            manifest.step,
            table,
            loss,
            lambda name: stored.whole(keys[name]),
            lambda: None if averages else _optimizer(stored, manifest),
        )


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer by the names of the model's parameters.

    tensors: the key of each tensor shaped like its parameter, by parameter and state.
    values: what else there is of each parameter.
    groups: the names of their parameters, and learning rates and the like.
    """

    tensors: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Mapping[str, Any]]
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]]
    entry: Callable[[str], Entry]
    read: Callable[[str], Tensor]


def _optimizer(stored: StoredTensors, manifest: Manifest) -> OptimizerState | None:
    """Return what all ranks have saved of the optimizer, whatever their layout.

    Raises:
        GemscError: some of it belongs to the layout of the ranks.
    """
    ranks = manifest.progress["ranks"]
    saved = SavedOptimizer(
        ranks, states_of(manifest), partial(decode, get=stored.whole)
    )
    groups = [
        ([name for name in names if not name.startswith(LOSS)], values)
        for names, values in saved.merged_groups()
    ]
    names = [name for names, _ in groups for name in names]
    if not names or "phases" in ranks[0]:  # with an optimizer for each
        return None
    shapes = {name: stored.entry(f"{MODEL_KEY}{name}").shape for name in names}
    tensors = {n: {s: tensor_key(s, n) for s in saved.states.get(n, ())} for n in names}
    for key in (key for keys in tensors.values() for key in keys.values()):
        stored.check(key, TensorPiece.whole(stored.entry(key).shape))
    return OptimizerState(
        tensors,
        {name: saved.rest_of(name, TensorPiece.whole(shapes[name])) for name in names},
        groups,
        stored.entry,
        stored.whole,
    )


def _keys(manifest: Manifest, directory: Path, *, averages: bool) -> dict[str, str]:
    """Return which tensor of a checkpoint has which name in the user's model, or loss.

    Those of the loss have LOSS before their names.
    """
    keys = {
        key.removeprefix(MODEL_KEY).removeprefix(BESIDE_KEY): key
        for key in manifest.tensors
        if key.startswith((MODEL_KEY, LOSS_KEY))
    }
    if averages:
        ema = {name: f"{EMA_KEY}{name}" for name in keys}
        ema = {name: key for name, key in ema.items() if key in manifest.tensors}
        if not ema:
            raise GemscError(
                f"{directory} has no averages of the weights",
                help="train with --ema 0.999, or export the weights without --ema",
            )
        keys |= ema
    return keys | {alias: keys[name] for alias, name in manifest.aliases.items()}
