"""Read safetensors files: tensors, parts, or whole ones put together of parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from gemsc.base.boxes import Interval
from gemsc.base.parts import Part, make_whole, rows_of
from gemsc.errors import GemscError, InternalError
from gemsc.weights.tensor_file import TensorFile

AGAIN = "compile again to rewrite it"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a whole file.

    Raises:
        GemscError: it is missing or damaged.
    """
    file = open_tensors(path)
    return {name: file.mapped(name) for name in file.table}


def open_tensors(path: Path) -> TensorFile:
    """Open a file of a program.

    Raises:
        GemscError: it is missing or damaged.
    """
    try:
        return TensorFile.open(path)
    except FileNotFoundError:
        raise GemscError(f"{path} is missing", help=AGAIN) from None
    except (SafetensorError, OSError, KeyError) as error:
        raise GemscError(f"{path} is damaged: {error}", help=AGAIN) from None


def own_part(
    mapped: Tensor, part: Part | None, what: str, rows: Interval | None = None
) -> Tensor:
    """Return a tensor, or a part of it, or some `rows` of that, in own memory.

    Raises:
        GemscError: the part is one of a tensor of another shape.
    """
    if part is None:
        return (mapped if rows is None else rows_of(mapped, rows)).clone()
    if (shape := tuple(mapped.shape)) != part.shape:
        raise GemscError(
            f"{what} has shape {list(shape)}, but the program needs {list(part.shape)}",
            help="use weights of this model, or compile again",
        )
    tensor = part.of(mapped)
    return tensor if rows is None else rows_of(tensor, rows).clone()


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
    return {name: _whole(name, parts) for name, parts in pieces.items()}


def _whole(name: str, pieces: Mapping[Part | None, Tensor]) -> Tensor:
    if None in pieces:
        return pieces[None]
    parts = {part: tensor for part, tensor in pieces.items() if part is not None}
    if not make_whole(parts):
        raise InternalError(f"the parts of '{name}' are not all of it: {[*parts]}")
    part, tensor = next(iter(parts.items()))
    if tensor.shape == (*part.local_shape, 2):  # pairs, of a complex one: see as_real
        numbers: dict[Part | None, Tensor] = {}
        numbers |= {part: torch.view_as_complex(pairs) for part, pairs in parts.items()}
        return torch.view_as_real(_whole(name, numbers))
    whole = tensor.new_empty(part.shape)
    for part, tensor in parts.items():
        part.put(tensor, whole)
    return whole
