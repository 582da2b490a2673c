"""How fast a plan is predicted to be: samples, tokens and operations per second."""

from __future__ import annotations

from dataclasses import dataclass

from gemsc.base.units import show_flops
from gemsc.plan import Plan

TRAINS = 3  # times the forward's operations: one for each of two gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of all replicas together.

    `tokens_per_second` is 0 where samples are no words. `flops_per_second` counts the
    model's own operations: none for what is recomputed. `peak_share` is what that is of
    what the devices could do in `dtype`; 0 where the plan does not know.
    """

    samples_per_second: float
    tokens_per_second: float
    flops_per_second: float
    peak_share: float
    dtype: str

    def __str__(self) -> str:
        tokens = f" ({_rate(self.tokens_per_second)} tokens/s)"
        share = f": {self.peak_share:.0%} of the devices' peak ({self.dtype})"
        return (
            f"{_rate(self.samples_per_second)} samples/s"
            f"{tokens * bool(self.tokens_per_second)}, "
            f"{show_flops(self.flops_per_second)}/s{share * bool(self.peak_share)}"
        )


def speed(plan: Plan) -> Speed:
    """Return the predicted speed, the sums of gradients and the update included."""
    seconds = plan.step_seconds + plan.ending_seconds
    micro_batches = plan.data * plan.micro_batches
    samples = micro_batches * plan.micro_batch_size
    flops = TRAINS * micro_batches * sum(stage.flops for stage in plan.stages)
    rate = flops / seconds if seconds else 0.0
    devices = plan.ranks / (plan.per_device or 1)
    peak = devices * plan.peak_flops
    return Speed(
        samples_per_second=samples / seconds if seconds else 0.0,
        tokens_per_second=plan.tokens * samples / seconds if seconds else 0.0,
        flops_per_second=rate,
        peak_share=rate / peak if peak else 0.0,
        dtype=plan.peak_dtype,
    )


def _rate(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"
