"""Give a model, or a stage of it, the weights of files, one tensor at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.base.dtypes import is_laid_out, lying_as, lying_of, to_format
from gemsc.base.nests import saved_named
from gemsc.errors import GemscError
from gemsc.weights.elsewhere import wanted_of
from gemsc.weights.keras_model import KerasModel, is_keras
from gemsc.weights.source import WeightFiles, conversions, matched

FEW = 64  # elements


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
    wanted = list(wanted_of(model))
    stored = matched(files, wanted)
    values = {}
    for want in wanted:
        name = want.names[0]
        if name in stored:
            values[name] = _converted(files.mapped(stored[name]), want.entry.dtype)
        elif model.get_buffer(name).is_meta:
            raise GemscError(
                f"the model's buffer '{name}' has no data: it is on the meta device, "
                f"and not in {files.path} since it is not persistent",
                help="make it with device='cpu', or register it with persistent=True; "
                "accelerate's init_empty_weights() leaves buffers as they are",
            )
    put(model, values)
    return conversions(files, wanted)


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


CONSTANTS = "_constants."  # of the program itself
LOSS = "_loss."  # tensors of the loss
NOT_OF_THE_MODEL = (LOSS, CONSTANTS)  # names that only a stage has


def stage_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers, persistent or not, under the user's names."""
    return dict([*stage.named_parameters(), *stage.named_buffers()])


def model_state(stage: nn.Module) -> dict[str, Tensor]:
    """Return what the user's model has: no tensors of the loss, no constants."""
    return {
        name: tensor.detach()
        for name, tensor in saved_named(stage).items()
        if not name.startswith(NOT_OF_THE_MODEL)
    }


def fill(stage: nn.Module, read: Callable[[str], Tensor], device: torch.device) -> None:
    """Give a stage that was built without memory its tensors, one after the other.

    What is read as a tensor on the meta device stays there.

    Raises:
        GemscError: a tensor is missing or has another shape.
    """
    values = {}
    for name, empty in stage_tensors(stage).items():
        tensor = read(name)
        if tensor.shape != empty.shape:
            raise GemscError(
                f"weights '{name}' have shape {list(tensor.shape)}, but the program "
                f"needs {list(empty.shape)}",
                help="use weights of this model, or compile again",
            )
        tensor = tensor if tensor.is_meta else tensor.to(device)
        if is_laid_out(empty) and not is_laid_out(tensor):
            tensor = to_format(tensor)
        elif isinstance(order := lying_of(empty), tuple):
            tensor = lying_as(tensor, order)
        values[name] = tensor
        del tensor
    put(stage, values)


def blank(model: nn.Module) -> None:
    """Give what a model has on the meta device memory that nobody has written to.

    The system provides it page by page when it is used, which planning never does. A
    few numbers, which forward may ask for, are 0.
    """
    values = {
        name: (torch.zeros if tensor.numel() <= FEW else torch.empty)(
            tensor.shape, dtype=tensor.dtype
        )
        for name, tensor in stage_tensors(model).items()
        if tensor.is_meta
    }
    put(model, values)


def put(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put tensors in the place of a module's own; tied ones stay tied."""
    new: dict[int, Any] = {}
    for name, old in stage_tensors(module).items():
        if name in values:
            value: Any = values[name]
            if isinstance(old, nn.Parameter):
                value = nn.Parameter(value, requires_grad=old.requires_grad)
                value.__dict__.update(old.__dict__)
            new[id(old)] = value
    swap(module, new)


def swap(module: nn.Module, new: Mapping[int, Any]) -> None:
    """Put tensors in the place of those of a module with these ids.

    A tied tensor has several places.
    """
    for owner in module.modules():
        slots: dict[str, Any]
        for slots in (owner._parameters, owner._buffers):
            for name, slot in slots.items():
                slots[name] = new.get(id(slot), slot)
