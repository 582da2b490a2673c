"""Read safetensors files: whole tensors, or the parts of them that a rank needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gemsc.base.parts import Part
from gemsc.errors import GemscError

__all__ = ["read_tensors"]


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
    try:
        with safe_open(path, "pt") as file:
            found = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118
            cut = parts or {}
            return {
                name: _read_part(file.get_slice(name), cut[name], f"{path}: '{name}'")
                if name in cut
                else file.get_tensor(name)
                for name in found
            }
    except FileNotFoundError:
        raise GemscError(
            f"{path} is missing", help="compile again to rewrite it"
        ) from None
    except (SafetensorError, OSError) as error:
        raise GemscError(
            f"{path} is damaged: {error}", help="compile again to rewrite it"
        ) from None


def _read_part(stored: Any, part: Part, what: str) -> Tensor:
    """Read a part of a tensor, one repetition of its units after the other."""
    if (shape := tuple(stored.get_shape())) != part.shape:
        raise GemscError(
            f"{what} has shape {list(shape)}, the program needs {list(part.shape)}",
            help="use weights of this model, or compile again",
        )
    if not part.shape:
        number: Tensor = stored[...]
        return number
    around = (slice(None),) * part.dim
    rows = [stored[(*around, slice(*interval))] for interval in part.intervals]
    return torch.cat(rows, part.dim).contiguous()
