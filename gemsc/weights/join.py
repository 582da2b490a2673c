"""Whole tensors, put together from the parts that ranks hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from gemsc.base.parts import Part, make_whole
from gemsc.errors import InternalError
from gemsc.weights.facts import FileFacts
from gemsc.weights.write import DTYPES, Entry, write_stream


def pasted(
    held: Iterable[tuple[Mapping[str, Tensor], Mapping[str, Part]]],
) -> dict[str, Tensor]:
    """Return whole tensors, put together from what each rank holds.

    `held` has the tensors of each rank and the parts that some of them are. Of what
    several ranks hold the first one's counts.
    """
    pieces: dict[str, dict[Part | None, Tensor]] = defaultdict(dict)
    for tensors, parts in held:
        for name, tensor in tensors.items():
            pieces[name].setdefault(parts.get(name), tensor)
    return {name: _whole(name, found) for name, found in pieces.items()}


def _whole(name: str, pieces: Mapping[Part | None, Tensor]) -> Tensor:
    if None in pieces:
        return pieces[None]
    parts = {part: tensor for part, tensor in pieces.items() if part is not None}
    if not make_whole(parts):
        raise InternalError(f"the parts of '{name}' are not all of it: {[*parts]}")
    part, tensor = next(iter(parts.items()))
    whole = tensor.new_empty(part.shape)
    for part, tensor in parts.items():
        part.put(tensor, whole)
    return whole


def join_files(
    path: Path, shares: Sequence[tuple[Path, Mapping[str, Part]]]
) -> FileFacts:
    """Write a file of whole tensors that are in files, or parts of them.

    One tensor at a time is in memory.
    """
    with ExitStack() as opened:
        pieces: dict[str, dict[Part | None, Any]] = defaultdict(dict)
        for share, parts in shares:
            file = opened.enter_context(safe_open(share, "pt"))
            for name in file.keys():  # noqa: SIM118
                pieces[name].setdefault(parts.get(name), file)

        def read(name: str) -> Tensor:
            found = pieces[name].items()
            return _whole(name, {part: file.get_tensor(name) for part, file in found})

        firsts = {name: next(iter(found.items())) for name, found in pieces.items()}
        table = {name: _entry(name, *first) for name, first in firsts.items()}
        return write_stream(path, table, read)


def _entry(name: str, part: Part | None, file: Any) -> Entry:
    stored = file.get_slice(name)
    shape = tuple(stored.get_shape()) if part is None else part.shape
    return Entry(DTYPES[stored.get_dtype()], shape)
