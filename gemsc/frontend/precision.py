"""Mixed precision: what `torch.autocast` needs of a model."""

from __future__ import annotations

import torch
from torch import nn

from gemsc.base.dtypes import Autocast, is_real
from gemsc.errors import GemscError


def autocast_of(model: nn.Module, precision: str) -> Autocast | None:
    """Return what a model runs within: nothing in "float32".

    Raises:
        GemscError: autocast leaves weights of this dtype as they are.
    """
    if precision == "float32":
        return None
    device = "cpu"
    for name, parameter in model.named_parameters():
        device = parameter.device.type
        if is_real(parameter.dtype) and parameter.dtype is not torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise GemscError(
                f"--precision {precision}: parameter {name} is in {dtype}, and "
                "autocast computes in another precision than float32 only",
                help="leave out --precision"
                + ("" if dtype.startswith("complex") else ", or return model.float()"),
            )
    return "cpu" if device == "meta" else device, getattr(torch, precision)
