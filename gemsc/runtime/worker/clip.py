"""Clip gradients by their norm over all ranks, as `clip_grad_norm_` does on one."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.transport import Group

__all__ = ["clip_gradients"]

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
    gradients = [p.grad for p in own if p.grad is not None]
    if gradients:  # one number goes to the host
        squares = [each.abs().double().square().sum() for each in gradients]
        square = torch.stack(squares).sum().cpu()
    transport.wait(group.all_reduce(square))
    norm = float(square.sqrt())
    scale = limit / (norm + EPSILON)
    if scale < 1.0:
        for parameter in everything:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return norm
