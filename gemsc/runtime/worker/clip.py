"""Clip gradients by their norm over all ranks, as `clip_grad_norm_` does on one."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.transport import Group

EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_


def clip_gradients(
    limit: float,
    own: Collection[nn.Parameter],
    everything: Collection[nn.Parameter],
    transport: DeviceTransport,
    group: Group,
) -> float:
    """Scale `everything` so that its norm over the group's ranks is at most `limit`.

    Returns what it was before. `own` are the parameters that this rank counts: each one
    is in `own` of one rank.
    """
    square = torch.zeros((), dtype=torch.float64)
    gradients = _gradients(own)
    if gradients:  # one number goes to the host
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64)
        square = torch.stack(norms).square().sum().cpu()
    transport.wait(group.all_reduce(square))
    norm = float(square.sqrt())
    scale = limit / (norm + EPSILON)
    scaled = _gradients(everything)
    if scale < 1.0 and scaled:
        torch._foreach_mul_(scaled, scale)
    return norm


def _gradients(parameters: Collection[nn.Parameter]) -> list[Tensor]:
    """Return the numbers of all gradients, in their memory."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad._values())
        elif parameter.grad is not None:
            found.append(parameter.grad.detach())
    return [torch.view_as_real(g) if g.is_complex() else g for g in found]
