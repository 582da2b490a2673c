"""What a stage, a message and an optimizer's state cost: records of the planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one stage for one micro-batch."""

    forward: float
    """Seconds."""
    backward: float
    """Seconds, of the whole backward."""
    weight: float = 0.0
    """The part of `backward` that can wait: gradients of the weights."""
    saved_bytes: int = 1
    """Kept from the beginning of the forward to the end of the backward."""
    resident_bytes: int = 0
    """There all the time."""
    transient_bytes: int = 0
    """On top, during a backward."""
    first_transient_bytes: int = 0
    """On top, during the first of a step: it makes the gradients."""
    gradient_bytes: int = 0
    """From the end of the first backward to the end of the step."""
    summed_bytes: int = 0
    """Gradients of all of its weights: what ranks that hold the same add up."""
    gathered_bytes: int = 0
    """Weights of which the rank keeps rows only, whole while an action uses them."""
    frozen_bytes: int = 0
    """Of these, what has no gradient."""
    packed_bytes: int = 0
    """On top, while they are gathered: small ones travel together."""
    scatter_bytes: int = 0
    """At the end of a backward whose gradients are added up at once, in parts."""
    waiting_bytes: int = 1
    """Kept between the two parts of a backward that is split."""
    waiting_gradient_bytes: int = 0
    """The gradients that its second part makes."""
    split_transient_bytes: int = 0
    """On top, during its first part."""
    first_split_transient_bytes: int = 0
    """On top, if that is the first of a step."""
    working_bytes: int = 0
    """Gradients on their way from layer to layer, on top of all that, in a backward."""
    first_working_bytes: int = 0
    """Those in the first backward of a step."""
    split_working_bytes: int = 0
    """Those in the first part of a backward that is split."""
    first_split_working_bytes: int = 0
    """Those, if that is the first of a step."""
    weight_working_bytes: int = 0
    """The gradients of one layer, before the second part adds them to others."""

    def on_top(self, *, split: bool, is_first: bool) -> int:
        """Return the bytes that a backward needs on top of the saved ones."""
        if split and is_first:
            return self.first_split_transient_bytes
        if split:
            return self.split_transient_bytes
        return self.first_transient_bytes if is_first else self.transient_bytes

    def working(self, *, split: bool, is_first: bool) -> int:
        """Return the bytes of gradients on their way that a backward adds to these."""
        if split and is_first:
            return self.first_split_working_bytes
        if split:
            return self.split_working_bytes
        return self.first_working_bytes if is_first else self.working_bytes


@dataclass(frozen=True, slots=True)
class Edge:
    """Stage `dest` uses values of stage `source`."""

    source: int
    """The stage that computes them."""
    dest: int
    """The stage that uses them."""
    seconds: float = 0.0
    """One way, if their ranks differ."""
    num_bytes: int = 0
    """From or to the busiest rank."""
    gradient: bool = True
    """Whether gradients travel back."""
    value_bytes: int = 0
    """Messages that the peak-memory rank receives, forward."""
    gradient_bytes: int = 0
    """Those that it receives on the way back."""


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
