"""Export: one plain state_dict of a checkpoint, under the user's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.files import StoredTensors
from gemsc.runtime.checkpoint.folder import check_checkpoint, check_digests, with_advice
from gemsc.runtime.checkpoint.holdings import EMA_KEY, MODEL_KEY
from gemsc.runtime.checkpoint.manifest import Manifest
from gemsc.runtime.checkpoint.pieces import TensorPiece
from gemsc.runtime.checkpoint.state_json import DTYPES
from gemsc.weights.write import Entry, write_stream


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
    try:
        check_digests(found.place, manifest, 0, 1)
        with StoredTensors(found.place, manifest.tensors) as stored:
            table = {}
            for name, key in keys.items():
                stored.check(key, TensorPiece.whole(stored.shape(key)))
                dtype = DTYPES[manifest.tensors[key].dtype]
                table[name] = Entry(dtype, stored.shape(key))

            def read(name: str) -> Tensor:
                return stored.whole(keys[name])

            yield SavedModel(manifest.step, table, read)
    except GemscError as error:
        if "is damaged" in error.message:
            raise with_advice(error, found.place) from None
        raise


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
