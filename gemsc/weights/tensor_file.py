"""A safetensors file as a table of tensors, each mapped into memory when asked for.

What safetensors itself maps for PyTorch is the whole file, to be written to: a system
that counts such memory refuses a file that is larger than it has.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gemsc.weights.write import DTYPES, PAIRS, Entry

LENGTH = 8  # bytes, of the number that a file begins with


@dataclass(frozen=True)
class TensorFile:
    """The table of a file that is whole; a tensor's pages are read when it is used."""

    path: Path
    table: Mapping[str, Entry]
    _places: Mapping[str, int] = field(repr=False)

    @staticmethod
    def open(path: Path) -> TensorFile:
        """Read the table.

        Raises:
            SafetensorError: the file is damaged.
            OSError: it cannot be read.
            KeyError: a tensor is of a type that PyTorch has not; the key names it.
        """
        with safe_open(path, "np"):  # compares the table with the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH), "little")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        table = {
            name: Entry(DTYPES[spec["dtype"]], tuple(spec["shape"]))
            for name, spec in header.items()
        }
        for name in json.loads(metadata.get(PAIRS, "[]")):
            table[name] = Entry(torch.complex128, table[name].shape[:-1])
        start = LENGTH + length
        places = {n: start + spec["data_offsets"][0] for n, spec in header.items()}
        return TensorFile(path, table, places)

    def mapped(self, name: str) -> Tensor:
        """Return a tensor on the memory of the file.

        To write to it changes a page of its own, not the file.
        """
        entry, place = self.table[name], self._places[name]
        if not entry.bytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        before = place % mmap.ALLOCATIONGRANULARITY
        size, access = before + entry.bytes, mmap.ACCESS_COPY
        with self.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), size, access=access, offset=place - before)
        raw = torch.frombuffer(pages, dtype=torch.uint8, offset=before)
        if place % entry.dtype.itemsize:  # no tensor can lie there
            raw = raw.clone()
        return raw.view(entry.dtype).view(entry.shape)

    def get_slice(self, name: str) -> StoredSlice:
        """Return a tensor to be read in parts, as safetensors does."""
        return StoredSlice(self.table[name], lambda: self.mapped(name))


@dataclass(frozen=True)
class StoredSlice:
    """A tensor of a file or a checkpoint, read when a part of it is asked for."""

    entry: Entry
    read: Callable[[], Tensor]

    def __getitem__(self, slices: Any) -> Tensor:
        """Return a part of it."""
        return self.read()[slices]
