"""Read safetensors files: tensors, parts, or whole ones put together of parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gemsc.base.parts import Part, make_whole
from gemsc.errors import GemscError, InternalError

AGAIN = "compile again to rewrite it"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a whole file.

    Raises:
        GemscError: it is missing or damaged.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_tensor(path: Path, parts: Mapping[str, Part], name: str) -> Tensor:
    """Read one tensor, or the part of it that there is in `parts`, into own memory.

    Of a part the whole is never in memory.

    Raises:
        GemscError: the file is missing or damaged, or has no such tensor, or one of
            another shape.
    """
    with _opened(path) as file:
        if name not in file.keys():  # noqa: SIM118
            raise GemscError(f"{path} has no '{name}'", help=AGAIN)
        if name in parts:
            return _read_part(file.get_slice(name), parts[name], f"{path}: '{name}'")
        mapped: Tensor = file.get_tensor(name)
        return mapped.clone()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except FileNotFoundError:
        raise GemscError(f"{path} is missing", help=AGAIN) from None
    except (SafetensorError, OSError) as error:
        raise GemscError(f"{path} is damaged: {error}", help=AGAIN) from None


def _read_part(stored: Any, part: Part, what: str) -> Tensor:
    """Read a part of a tensor, one repetition of its units after the other."""
    if (shape := tuple(stored.get_shape())) != part.shape:
        raise GemscError(
            f"{what} has shape {list(shape)}, the program needs {list(part.shape)}",
            help="use weights of this model, or compile again",
        )
    if not part.shape:
        number: Tensor = stored[...]
        return number.clone()
    around = (slice(None),) * part.dim
    rows = [stored[(*around, slice(*interval))] for interval in part.intervals]
    return torch.cat(rows, part.dim).contiguous()


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
