"""The tensors of a stage: under the user's names, and how they get there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.errors import GemscError

__all__ = ["NOT_OF_THE_MODEL", "fill", "model_state", "stage_tensors"]

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
