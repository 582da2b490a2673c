"""What a rank holds over the time of a step, by what it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemsc.schedules.action import Action, Kind, Task, Timed

__all__ = ["Held", "held_bytes"]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on a rank from a time on, besides those that are there all the time.

    `saved` wait for backwards, `transient` serve one that runs; `messages` are the
    buffers of receives posted ahead. `live` counts the forwards whose backward is not
    yet done.
    """

    time: float
    action: Action
    saved: int
    transient: int
    gradients: int
    messages: int
    live: int

    @property
    def activations(self) -> int:
        """What backwards need."""
        return self.saved + self.transient

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.gradients + self.messages


def held_bytes(task: Task, rank: int, actions: Sequence[Timed]) -> Iterator[Held]:
    """Yield what a rank holds after each change, in order.

    A receive is posted when the one before it of the same stage is taken. A stage's
    gradients come with its first backward and go with the update, at the end.
    """
    last = Kind.WEIGHT if _splits(actions) else Kind.BACKWARD
    if not task.has_backward:
        last = Kind.FORWARD
    posted: dict[tuple[Kind, int, int], int] = {}
    with_gradients: set[int] = set()
    saved = live = messages = gradients = 0
    for timed in actions:
        action = timed.action
        stage = task.stages[action.stage]
        if action.kind is not Kind.WEIGHT:
            is_last = action.micro_batch + 1 == task.micro_batches[action.replica]
            sizes = task.posted[action.replica][action.stage]
            size = 0 if is_last else sizes[action.kind is Kind.BACKWARD]
            key = action.kind, action.replica, action.stage
            messages += size - posted.get(key, 0)
            posted[key] = size
        if action.kind is Kind.FORWARD:
            saved, live = saved + stage.saved_bytes, live + 1
        transient = made = 0
        if action.kind is Kind.BACKWARD:
            transient = stage.transient_bytes
            if action.stage not in with_gradients:
                made = stage.first_transient_bytes - transient
        held = (saved, transient, gradients + made, messages, live)
        yield Held(timed.start, action, *held)
        if action.kind is Kind.BACKWARD and action.stage not in with_gradients:
            with_gradients.add(action.stage)
            gradients += stage.gradient_bytes
        if action.kind is last:
            saved, live = saved - stage.saved_bytes, live - 1
        if action.kind is not Kind.FORWARD or action.kind is last:
            held = (saved, 0, gradients, messages, live)
            yield Held(timed.end, action, *held)


def _splits(actions: Sequence[Timed]) -> bool:
    return any(timed.action.kind is Kind.WEIGHT for timed in actions)
