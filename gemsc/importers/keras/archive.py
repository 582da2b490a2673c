"""A Keras 3 archive as a file: its config, and its variables one at a time.

    metadata.json      {"keras_version": "3.15.1", ...}
    config.json        the layers and how they are connected
    model.weights.h5   layers/conv2d/vars/0, layers/lstm/cell/vars/2, ...

Nothing in it is executed, nothing is written beside it, and nothing that it declares is
believed before its size is known.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from gemsc.base.files import replaced
from gemsc.errors import GemscError
from gemsc.importers.weight import Array, FileTensor

_WEIGHTS = "model.weights.h5"
_MAX_TEXT = 256 << 20  # bytes of config.json; those of large models have 10 MB
_FLOOR, _MAX_EXPANSION = 256 << 20, 1000  # bytes declared, and for each that is stored
_MAX_DEPTH = 100  # of groups in groups
# what zipfile, zlib and h5py raise for files that are damaged
_DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError)
_DAMAGED = (*_DAMAGE, zipfile.BadZipFile, NotImplementedError, OverflowError)
_CONVERT = 'save it once with Keras 3: keras.models.load_model(path).save("m.keras")'

_DAMAGED_FILE = "it is truncated, or not a Keras file: copy it or save it again"


class Archive:
    """A file that ends in .keras."""

    files: Sequence[str] = ()  # further ones that belong to it

    def __init__(self, path: Path) -> None:
        """Read all but the variables.

        Raises:
            GemscError: it is not a Keras 3 archive, or damaged.
        """
        self.path = path
        if not zipfile.is_zipfile(path):
            is_older = h5py.is_hdf5(path)  # as TensorFlow has called them, too
            raise GemscError(
                f"{path} is not a Keras 3 archive" + ", but HDF5" * is_older,
                help=_CONVERT if is_older else _DAMAGED_FILE,
            )
        with self._damage(), zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist()]
            twice = sorted(name for name, n in Counter(names).items() if n > 1)
            metadata = self._json(archive, "metadata.json")
            self.config = self._json(archive, "config.json")
        if twice:
            raise GemscError(f"{path} is damaged: it has {twice[0]!r} twice")
        version = str(metadata.get("keras_version"))
        if not version.startswith("3."):
            raise GemscError(
                f"{path} is of Keras {version[:20]}, and gemsc reads those of Keras 3",
                help=_CONVERT,
            )
        if _WEIGHTS not in names:
            raise GemscError(f"{path} has no {_WEIGHTS}", help=_DAMAGED_FILE)

    def _json(self, archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
        if name not in archive.namelist():
            raise GemscError(f"{self.path} has no {name}", help=_DAMAGED_FILE)
        if archive.getinfo(name).file_size > _MAX_TEXT:
            raise GemscError(f"{self.path}: {name} is too large to be true")
        try:
            content = json.loads(
                archive.read(name), parse_float=_finite, parse_constant=_finite
            )
        except (ValueError, RecursionError) as error:
            raise GemscError(f"{self.path}: {name} is damaged: {error}") from error
        if not isinstance(content, dict):
            raise GemscError(f"{self.path}: {name} is damaged")
        return content

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Turn what others raise for damaged files into an error that names this."""
        try:
            yield
        except GemscError:
            raise
        except _DAMAGED as error:
            raise GemscError(f"{self.path} is damaged: {error}") from error

    # ----------------------------------------------------------------- variables

    @cached_property
    def table(self) -> Mapping[str, FileTensor]:
        """All tensors by name, as `layers/conv2d/vars/0`."""
        with self._damage():
            return dict(_tensors(self._file, "", set()))

    def variables(self, path: str) -> dict[str, tuple[str, ...]]:
        """Return the names of a layer's tensors, for it and for each of its parts."""
        inside = f"{path}/"
        parts = {group: names for group, names in self._groups.items() if group == path}
        parts |= {g: names for g, names in self._groups.items() if g.startswith(inside)}
        return {group[len(inside) :]: names for group, names in parts.items()}

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        numbered: dict[str, dict[int, str]] = defaultdict(dict)
        for name in self.table:
            match = re.fullmatch(r"(?:(.*)/)?vars/(\d{1,9})", name)
            if match:
                numbered[match[1] or ""][int(match[2])] = name
        return {
            group: tuple(name for _, name in sorted(names.items()))
            for group, names in numbered.items()
        }

    def read(self, name: str) -> Array:
        """Return a tensor.

        Raises:
            GemscError: the file is damaged.
        """
        with self._damage():
            array: Array = self._file[name][()]
        return array

    @cached_property
    def _copy(self) -> IO[bytes]:
        """The HDF5 file out of the archive, which has no name on the disk."""
        file = tempfile.TemporaryFile()  # noqa: SIM115  as long as the archive
        with self._damage(), zipfile.ZipFile(self.path) as archive:
            info = archive.getinfo(_WEIGHTS)
            _believe(info.file_size, info.compress_size, _WEIGHTS)
            with archive.open(info) as source:
                shutil.copyfileobj(source, file, 1 << 20)
        return file

    @cached_property
    def _file(self) -> h5py.File:
        with self._damage():
            return h5py.File(self._copy, "r")

    # ---------------------------------------------------------------- the way back

    def write_copy(self, path: Path, changed: Callable[[str], Array | None]) -> None:
        """Write the archive once more, with new numbers in some of its tensors.

        All else in it stays as it is: the optimizer's state, too.

        Raises:
            GemscError: the file is damaged.
        """
        with (
            self._damage(),
            tempfile.TemporaryFile() as weights,
            zipfile.ZipFile(self.path) as archive,
            replaced(path) as beside,
            zipfile.ZipFile(beside, "w") as copy,
        ):
            self._change(weights, changed)
            for info in archive.infolist():
                with copy.open(_like(info), "w", force_zip64=True) as target:
                    if info.filename == _WEIGHTS:
                        weights.seek(0)
                        shutil.copyfileobj(weights, target, 1 << 20)
                    else:
                        with archive.open(info) as source:
                            shutil.copyfileobj(source, target, 1 << 20)

    def _change(self, file: IO[bytes], changed: Callable[[str], Array | None]) -> None:
        self._copy.seek(0)
        shutil.copyfileobj(self._copy, file, 1 << 20)
        with h5py.File(file, "r+") as copy:
            for name in self.table:
                array = changed(name)
                if array is not None:
                    copy[name][...] = array


def _like(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    copy = zipfile.ZipInfo(info.filename, info.date_time)
    copy.compress_type, copy.external_attr = info.compress_type, info.external_attr
    return copy


def _believe(declared: int, stored: int, what: str) -> None:
    """Refuse what takes far more memory than bytes of the file."""
    if declared > _FLOOR and declared > _MAX_EXPANSION * max(stored, 1):
        raise ValueError(f"{what} declares {declared} bytes and stores {stored}")


def _tensors(
    group: h5py.Group, path: str, seen: set[int], depth: int = 0
) -> Iterator[tuple[str, FileTensor]]:
    """Yield the datasets below a group, which may not lead out of the file."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{path[:80]} is too deep")
    for name in group:
        inside = f"{path}/{name}" if path else str(name)
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{inside} is a link")
        item = group[name]
        address = h5py.h5o.get_info(item.id).addr
        if address in seen:
            raise ValueError(f"{inside} is there twice")
        seen.add(address)
        if isinstance(item, h5py.Group):
            yield from _tensors(item, inside, seen, depth + 1)
        elif isinstance(item, h5py.Dataset):
            tensor = _tensor(item, inside)
            if tensor is not None:
                yield inside, tensor


def _tensor(item: h5py.Dataset, path: str) -> FileTensor | None:
    """Return what is known of a dataset; None for one that is no tensor of numbers."""
    if item.external or item.is_virtual:
        raise ValueError(f"{path} lies in another file")
    dtype: np.dtype[Any] = item.dtype
    if item.attrs.get("dtype") == "bfloat16":
        raise GemscError(
            f"the file's {path} is bfloat16, which gemsc does not read",
            help="build the model in Keras with float32 or mixed_bfloat16, and give it "
            "the weights: model.set_weights(other.get_weights())",
        )
    if item.shape is None or dtype.kind not in "fiub":
        return None
    size = item.size * dtype.itemsize
    _believe(size, item.id.get_storage_size(), path)
    return FileTensor(tuple(item.shape), dtype)


def _finite(text: str) -> float:
    """Return a number of a setting; 1e999 and Infinity are none that text can have."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} among its numbers")
    return number
