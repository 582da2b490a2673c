"""Weights on disk: safetensors files under the user's own names."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gemsc.base.files import replaced
from gemsc.base.parts import Part, make_whole
from gemsc.errors import GemscError, InternalError

__all__ = [
    "NOT_OF_THE_MODEL",
    "fill",
    "join_files",
    "model_state",
    "pasted",
    "read_tensors",
    "stage_tensors",
    "write_tensors",
]

ALIGNMENT = 8  # bytes, of what follows the table of a file
NOT_OF_THE_MODEL = ("_loss.", "_constants.")  # names that only a stage has


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file."""
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    with replaced(path) as beside:
        save_file(plain, beside)


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


def stage_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers, persistent or not, under the user's names."""
    return dict([*stage.named_parameters(), *stage.named_buffers()])


def model_state(stage: nn.Module) -> dict[str, Tensor]:
    """Return what the user's model has: no tensors of the loss, no constants."""
    return {
        name: tensor.detach()
        for name, tensor in stage.state_dict().items()
        if not name.startswith(NOT_OF_THE_MODEL)
    }


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


def join_files(path: Path, shares: Sequence[tuple[Path, Mapping[str, Part]]]) -> None:
    """Write a file of whole tensors that are in files, or parts of them.

    One tensor at a time is in memory: the format has a table of all of them, then their
    bytes (https://github.com/huggingface/safetensors#format).
    """
    with ExitStack() as opened, replaced(path) as beside:
        pieces: dict[str, dict[Part | None, Any]] = defaultdict(dict)
        for share, parts in shares:
            file = opened.enter_context(safe_open(share, "pt"))
            for name in file.keys():  # noqa: SIM118
                pieces[name].setdefault(parts.get(name), file)
        table = [_entry(name, *next(iter(f.items()))) for name, f in pieces.items()]
        table.sort(key=lambda entry: (-entry.item, entry.name))  # so all are aligned
        header, end = {}, 0
        for entry in table:
            start, end = end, end + entry.item * prod(entry.shape)
            fields = {"dtype": entry.dtype, "shape": entry.shape}
            header[entry.name] = {**fields, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        with beside.open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            for entry in table:
                found = pieces[entry.name].items()
                held = {part: file.get_tensor(entry.name) for part, file in found}
                whole = _whole(entry.name, held).contiguous().reshape(-1)
                target.write(whole.view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class _Entry:
    """What the table of a file says of a tensor; an element has `item` bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    item: int


def _entry(name: str, part: Part | None, file: Any) -> _Entry:
    stored = file.get_slice(name)
    shape = tuple(stored.get_shape()) if part is None else part.shape
    dtype = stored.get_dtype()
    bits = re.search(r"\d+", dtype)  # F32, BF16, F8_E4M3, BOOL
    return _Entry(name, dtype, shape, int(bits[0]) // 8 if bits else 1)


def fill(stage: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Give a stage that was built without memory its tensors.

    Raises:
        GemscError: a tensor is missing or has another shape.
    """
    filled: dict[int, Any] = {}
    for name, empty in stage_tensors(stage).items():
        if name not in tensors:
            raise GemscError(f"the weights have no '{name}'", help="compile again")
        tensor = tensors[name]
        if tensor.shape != empty.shape:
            raise GemscError(
                f"weights '{name}' have shape {list(tensor.shape)}, the program needs "
                f"{list(empty.shape)}",
                help="use weights of this model, or compile again",
            )
        value: Any = tensor.to(device)
        if isinstance(empty, nn.Parameter):
            value = nn.Parameter(value, requires_grad=empty.requires_grad)
        filled[id(empty)] = value
    for module in stage.modules():  # a tied tensor has several places
        slots: dict[str, Any]
        for slots in (module._parameters, module._buffers):
            for name, old in slots.items():
                if old is not None:
                    slots[name] = filled[id(old)]
