"""What a stage, a message and an optimizer's state cost: records of the planner."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Edge", "StageCost", "StateBytes"]


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one stage for one micro-batch.

    `backward` is the whole backward; `weight` is the part of it that can wait, the
    gradients of the weights. `saved_bytes` are kept from the beginning of the forward
    to the end of the backward, `transient_bytes` come on top during the backward (in
    the first one of a step, which makes the gradients, `first_transient_bytes`);
    `resident_bytes` are there all the time, `gradient_bytes` from the end of the first
    backward to the end of the step.

    A backward may be split. Then `split_transient_bytes` come on top during its first
    part (`first_split_transient_bytes` if it is the first one of a step), and
    `waiting_bytes` are kept from the end of that to the end of the second one, which
    makes `waiting_gradient_bytes` of the gradients.
    """

    forward: float
    backward: float
    weight: float = 0.0
    saved_bytes: int = 1
    resident_bytes: int = 0
    transient_bytes: int = 0
    first_transient_bytes: int = 0
    gradient_bytes: int = 0
    waiting_bytes: int = 1
    waiting_gradient_bytes: int = 0
    split_transient_bytes: int = 0
    first_split_transient_bytes: int = 0

    def on_top(self, *, split: bool, is_first: bool) -> int:
        """Return the bytes that a backward needs on top of the saved ones."""
        if split and is_first:
            return self.first_split_transient_bytes
        if split:
            return self.split_transient_bytes
        return self.first_transient_bytes if is_first else self.transient_bytes


@dataclass(frozen=True, slots=True)
class Edge:
    """Stage `dest` uses values of stage `source`; `seconds` if their ranks differ.

    `num_bytes` travel from or to the busiest rank. The peak-memory rank receives
    messages of `value_bytes` and, on the way back, of `gradient_bytes`.
    """

    source: int
    dest: int
    seconds: float = 0.0
    num_bytes: int = 0
    gradient: bool = True
    value_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What an optimizer keeps of a parameter.

    `alike` are the bytes of tensors of the parameter's shape, `fixed` those of others,
    such as the number of steps.
    """

    alike: int
    fixed: int = 0

    def of(self, elements: int, whole: int) -> int:
        """Return the bytes of the state of some of the parameter's elements."""
        return self.alike * elements // whole + self.fixed if elements else 0
