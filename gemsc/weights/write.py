"""Write safetensors files, one tensor at a time.

A file is a table in JSON (dtype, shape and place of each tensor), then their bytes
(https://github.com/huggingface/safetensors#format). So the table can be written first,
and a tensor be read, or put together, when it is its turn: memory for one is enough.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gemsc.base.dtypes import bits_of
from gemsc.base.files import FileFacts, replaced, write_text
from gemsc.errors import GemscError, InternalError

ALIGNMENT = 8  # bytes, of what follows the table of a file
METADATA = {"format": "pt"}  # Hugging Face's loaders look for it
PAIRS = "complex128"  # metadata: which tensors of pairs of F64 are C128, no name there
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """What the table of a file says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Entry:
        """Return the entry of a tensor."""
        return Entry(tensor.dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        """How many bytes it takes."""
        return self.dtype.itemsize * prod(self.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """Write tensors of any device and layout; see `write_stream`."""
    table = {name: Entry.of(tensor) for name, tensor in tensors.items()}
    return write_stream(path, table, tensors.__getitem__)


def write_stream(
    path: Path,
    table: Mapping[str, Entry],
    read: Callable[[str], Tensor],
    *,
    sync: bool = False,
) -> FileFacts:
    """Write the tensors of a table: `read(name)` is called for each, once, in turn.

    The file is written beside and renamed; with `sync` it is on the disk by then. The
    size and the digest are those of the bytes that were written, not read again.

    Raises:
        GemscError: the format has no such dtype.
        OSError: it cannot be written.
    """
    order = sorted(table, key=lambda name: (-table[name].dtype.itemsize, name))
    pairs = [name for name in order if table[name].dtype is torch.complex128]
    metadata = METADATA | ({PAIRS: json.dumps(pairs)} if pairs else {})
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name in order:  # large elements first, so that all are aligned
        entry, start = table[name], end
        end += entry.bytes
        header[name] = {
            "dtype": "F64" if name in pairs else stored_name(name, entry.dtype),
            "shape": (*entry.shape, 2) if name in pairs else entry.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head)
    with replaced(path) as beside, beside.open("wb") as file:
        file.write(head)
        for name in order:
            data = _bytes_of(name, read(name), table[name])
            file.write(data)
            digest.update(data)
            del data  # before the next one is read
        if sync:
            file.flush()
            os.fsync(file.fileno())
    return FileFacts(len(head) + end, digest.hexdigest())


INDEX = "model.safetensors.index.json"


def write_shards(
    folder: Path,
    table: Mapping[str, Entry],
    read: Callable[[str], Tensor],
    most_bytes: int,
) -> int:
    """Write the tensors of a table as Hugging Face ships them; return how many files.

    Each file has some tensors of at most so many bytes together, or a larger one. The
    index, which says what is where, comes last.

    Raises:
        GemscError: the format has no such dtype.
        OSError: a file cannot be written.
    """
    groups: list[dict[str, Entry]] = []
    room = 0
    for name, entry in table.items():
        if not groups or entry.bytes > room:
            groups.append({})
            room = most_bytes
        groups[-1][name] = entry
        room -= entry.bytes
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_stream(folder / file, group, read)
        places |= dict.fromkeys(group, file)
    total = sum(entry.bytes for entry in table.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_text(folder / INDEX, json.dumps(index, indent=2))
    return len(groups)


def stored_name(name: str, dtype: torch.dtype) -> str:
    """Return what a safetensors file calls a dtype, or we for it.

    Raises:
        GemscError: it has no name; the message says that tensor `name` has it.
    """
    if dtype not in _NAMES:
        raise GemscError(
            f"'{name}' is {dtype}, which a safetensors file cannot hold",
            help="use another dtype for it",
        )
    return _NAMES[dtype]


def _bytes_of(name: str, tensor: Tensor, entry: Entry) -> memoryview:
    """Return the bytes of a tensor: its own memory, where it is contiguous there."""
    if Entry.of(tensor) != entry:
        raise InternalError(f"'{name}' is {Entry.of(tensor)}, its table says {entry}")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    data: memoryview = bits_of(plain).numpy().data
    return data
