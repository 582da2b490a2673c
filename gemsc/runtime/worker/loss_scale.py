"""Loss scaling: gradients in float16 neither vanish nor overflow.

float16 ends at 65504 and loses what is below 6e-8. So the loss is multiplied by a large
factor before the backward, and the gradients of the weights, which are in float32, are
divided by it. Where one of them is not finite the factor was too large: then no rank
makes its update, and the factor is halved. It doubles after 2000 updates in a row. That
is what torch.amp.GradScaler does, which knows the gradients of one process only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gemsc.runtime.transport.device_transport import DeviceTransport

__all__ = ["LossScale"]

FIRST = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
INTERVAL = 2000  # updates between two growths


class LossScale:
    """The factor of the loss, the same on every rank.

    `good` counts the updates since it last changed, `skipped` all that were left out.
    """

    def __init__(self, transport: DeviceTransport) -> None:
        self.factor = FIRST
        self.good = 0
        self.skipped = 0
        self._transport = transport

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide this rank's gradients; return whether those of all ranks are finite.

        All ranks call this, once for each update: the next factor depends on it.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(1.0 / self.factor)
        overflow = _count_overflows(gradients)
        host = self._transport.host
        everyone = host.group(tuple(range(host.size)), "overflow")
        self._transport.wait(everyone.all_reduce(overflow))
        is_finite = not overflow
        self.good = self.good + 1 if is_finite else 0
        if not is_finite:
            self.factor *= BACKOFF
            self.skipped += 1
        elif self.good == INTERVAL:
            self.factor *= GROWTH
            self.good = 0
        return is_finite

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps, as numbers for JSON."""
        return {"factor": self.factor, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.factor = float(state["factor"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])


def _count_overflows(gradients: list[Tensor]) -> Tensor:
    """Return how many gradients are not finite, on the host."""
    if not gradients:
        return torch.zeros(())
    wrong = [(~gradient.isfinite().all()).float() for gradient in gradients]
    return torch.stack(wrong).sum().cpu()
