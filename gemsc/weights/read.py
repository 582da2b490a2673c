"""Read safetensors files: whole tensors, or the parts of them that a rank needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gemsc.base.parts import Part
from gemsc.errors import GemscError

AGAIN = "compile again to rewrite it"


def read_tensors(
    path: Path,
    *,
    names: Collection[str] | None = None,
    parts: Mapping[str, Part] | None = None,
) -> dict[str, Tensor]:
    """Read a file, or what it has of some `names`.

    Of tensors that have `parts` only the part is read: the whole is never in memory.

    Raises:
        GemscError: it is missing or damaged, or a tensor has not the part's shape.
    """
    with _opened(path) as file:
        found = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118
        cut = parts or {}
        return {
            name: _read_part(file.get_slice(name), cut[name], f"{path}: '{name}'")
            if name in cut
            else file.get_tensor(name)
            for name in found
        }


def read_tensor(path: Path, parts: Mapping[str, Part], name: str) -> Tensor:
    """Read one tensor, or the part of it that there is in `parts`, into own memory.

    Raises:
        GemscError: as `read_tensors`, or the file has no such tensor.
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
