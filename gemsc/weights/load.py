"""Give a model the weights of files, without ever reading them as a whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.weights.keras_model import KerasModel, is_keras
from gemsc.weights.match import Wanted, conversions, matched
from gemsc.weights.source import WeightFiles
from gemsc.weights.stage import put
from gemsc.weights.write import Entry


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Give a model the weights of a file or folder, under its own names.

    A model of Keras gets those of a run that trained it as it is.
    The model may be on the meta device. Its parameters and buffers are then on the
    memory of the files, which the system reads and drops page by page; what has another
    dtype there is converted into a temporary file. Returns notes about conversions.

    Raises:
        GemscError: the files are damaged, or not those of this model.
    """
    if is_keras(model):
        module = KerasModel(model)
        notes = load_weights(module, path)
        module.give_back()
        return notes
    files = WeightFiles.open(Path(path))
    wanted = list(_wanted(model))
    found = matched(files, wanted)
    values = {}
    for each in wanted:
        name = each.names[0]
        if name in found:
            values[name] = _converted(files.mapped(found[name]), each.entry.dtype)
        elif model.get_buffer(name).is_meta:
            raise GemscError(
                f"the model's buffer '{name}' has no data: it is on the meta device, "
                f"and not in {files.path} since it is not persistent",
                help="make it with device='cpu', or register it with persistent=True; "
                "accelerate's init_empty_weights() leaves buffers as they are",
            )
    put(model, values)
    return conversions(files, wanted)


def _wanted(model: nn.Module) -> Iterator[Wanted]:
    """Yield what a model's state_dict has, and buffers that are not in it."""
    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in _all_names(model):
        names.setdefault(id(tensor), []).append(name)
    for name, tensor in dict(_all_names(model)).items():
        if (own := names[id(tensor)])[0] == name:
            required = any(each in state for each in own)
            yield Wanted(tuple(own), Entry.of(tensor), required)


def _all_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype, on the memory of an unnamed file."""
    if tensor.dtype == dtype or not tensor.numel():
        return tensor.to(dtype)
    with tempfile.NamedTemporaryFile(prefix="gemsc-weights-") as file:
        new: Any = torch.from_file(
            file.name, shared=True, size=tensor.numel(), dtype=dtype
        )
    new = new.view(tensor.shape)
    return new.copy_(tensor)  # type: ignore[no-any-return]
