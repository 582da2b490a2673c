"""The tensors of a stage: under the user's names, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.base.memory_format import is_laid_out, to_format
from gemsc.errors import GemscError

NOT_OF_THE_MODEL = ("_loss.", "_constants.")  # names that only a stage has


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


def fill(stage: nn.Module, read: Callable[[str], Tensor], device: torch.device) -> None:
    """Give a stage that was built without memory its tensors, one after the other.

    Raises:
        GemscError: a tensor is missing or has another shape.
    """
    values = {}
    for name, empty in stage_tensors(stage).items():
        tensor = read(name)
        if tensor.shape != empty.shape:
            raise GemscError(
                f"weights '{name}' have shape {list(tensor.shape)}, the program needs "
                f"{list(empty.shape)}",
                help="use weights of this model, or compile again",
            )
        tensor = tensor.to(device)
        if is_laid_out(empty) and not is_laid_out(tensor):
            tensor = to_format(tensor)
        values[name] = tensor
        del tensor
    put(stage, values)


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
    for each in module.modules():  # a tied tensor has several places
        slots: dict[str, Any]
        for slots in (each._parameters, each._buffers):
            for name, slot in slots.items():
                slots[name] = new.get(id(slot), slot)
