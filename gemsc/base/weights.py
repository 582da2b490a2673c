"""Weights on disk: safetensors files under the user's own names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gemsc.base.files import replaced
from gemsc.errors import GemscError

__all__ = [
    "NOT_OF_THE_MODEL",
    "fill",
    "read_tensors",
    "stage_tensors",
    "write_tensors",
]

NOT_OF_THE_MODEL = ("_loss.", "_constants.")  # names that only a stage has


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file."""
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    with replaced(path) as beside:
        save_file(plain, beside)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file.

    Raises:
        GemscError: it is missing or damaged.
    """
    try:
        return load_file(path)
    except FileNotFoundError:
        raise GemscError(
            f"{path} is missing", help="compile again to rewrite it"
        ) from None
    except (SafetensorError, OSError) as error:
        raise GemscError(
            f"{path} is damaged: {error}", help="compile again to rewrite it"
        ) from None


def stage_tensors(stage: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers, persistent or not, under the user's names."""
    return dict([*stage.named_parameters(), *stage.named_buffers()])


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
