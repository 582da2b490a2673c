"""Loss scaling: gradients in float16 neither vanish nor overflow.

float16 ends at 65504 and loses what is below 6e-8. So the loss is multiplied by a large
factor before the backward, and the gradients of the weights, which are in float32, are
divided by it. Where one of them is not finite the factor was too large: then no rank
makes its update, and the factor is halved. It doubles after 2000 updates in a row. That
is what torch.amp.GradScaler does, which knows the gradients of one process only.
"""

from __future__ import annotations

FIRST = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
SMALLEST = 1.0  # below it, what overflows is not what was scaled
INTERVAL = 2000  # updates between two growths


class LossScale:
    """The factor of the loss, the same on every rank.

    `good` counts the updates since it last changed, `skipped` all that were left out.
    """

    def __init__(self) -> None:
        self.factor = FIRST
        self.good = 0
        self.skipped = 0

    def take(self, *, is_overflow: bool) -> bool:
        """Change the factor after an update, or after one that is left out.

        Returns whether a smaller factor may help: it cannot where none is left.
        """
        if not is_overflow:
            self.good += 1
            if self.good == INTERVAL:
                self.factor *= GROWTH
                self.good = 0
            return True
        self.good = 0
        self.skipped += 1
        self.factor *= BACKOFF
        return self.factor >= SMALLEST

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps, as numbers for JSON."""
        return {"factor": self.factor, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.factor = float(state["factor"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])
