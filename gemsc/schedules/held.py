"""What a rank holds over the time of a step, by what it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from gemsc.schedules.action import Action, Kind, Task, Timed, split_backwards


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on a rank from a time on, besides those that are there all the time.

    `saved` wait for backwards, `transient` serve one that runs, `working` are gradients
    on their way in it; `messages` are the buffers of receives posted ahead. `live`
    counts the forwards whose backward is not yet done. `gathered` are weights that are
    kept in parts, and whole for actions.
    """

    time: float
    action: Action
    saved: int
    transient: int
    gradients: int
    messages: int
    live: int
    working: int = 0
    gathered: int = 0

    @property
    def activations(self) -> int:
        """What backwards need."""
        return self.saved + self.transient

    @property
    def total(self) -> int:
        """All of it."""
        held = self.activations + self.gradients + self.messages
        return held + self.working + self.gathered


def held_bytes(task: Task, rank: int, actions: Sequence[Timed]) -> Iterator[Held]:
    """Yield what a rank holds after each change, in order.

    A receive is posted when the one before it of the same stage is taken. A stage's
    gradients come with its first backward and go with the update, at the end; those
    that wait for weight gradients come with the first of these.
    """
    split = split_backwards([[timed.action for timed in actions]])
    account = _Account(task, split)
    for timed, after in zip_longest(actions, actions[1:]):
        yield from account.begin(timed, after)
        if timed.action.kind is not Kind.FORWARD or not task.has_backward:
            yield account.end(timed)


def whole_with(stage: int, whole: Sequence[int], most: int) -> list[int]:
    """Return whose weights are whole in an action of a stage; it is the last one.

    `whole` are those before it, the one used longest ago first: that one goes where
    there would be more than so many.
    """
    kept = [other for other in whole if other != stage]
    return [*kept, stage][-most:] if most else []


def are_gathered(task: Task, actions: Sequence[Action]) -> list[bool]:
    """Return for each of a rank's actions whether its stage's weights are gathered."""
    gathered, whole = list[bool](), list[int]()
    for action in actions:
        gathered.append(task.whole_stages > 0 and action.stage not in whole)
        whole = whole_with(action.stage, whole, task.whole_stages)
    return gathered


@dataclass
class _Account:
    """What a rank holds now; `ready` are the gradients of each stage."""

    task: Task
    split: set[Action]
    saved: int = 0
    live: int = 0
    messages: int = 0
    gradients: int = 0
    posted: dict[tuple[Kind, int, int], int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    whole: list[int] = field(default_factory=list)  # stages, used longest ago first
    coming: int = 0  # in which weights that are on their way are packed

    def begin(self, timed: Timed, after: Timed | None) -> Iterator[Held]:
        """Yield what is held while an action runs, and while its weights are gathered.

        Where two stages may be whole, those of the action `after` it come meanwhile.
        """
        action, stage = timed.action, self.task.stages[timed.action.stage]
        self._post(action)
        most = self.task.whole_stages
        self.coming = stage.packed_bytes * (action.stage not in self.whole)
        self.whole = whole_with(action.stage, self.whole, most)
        if self.coming:
            yield self._held(timed.start, action)
        self.coming = 0
        if after is not None and most > 1:
            following = after.action.stage
            if following not in self.whole:
                self.coming = self.task.stages[following].packed_bytes
            self.whole = whole_with(following, self.whole, most)
        made = transient = working = 0
        if action.kind is Kind.FORWARD:
            self.saved, self.live = self.saved + stage.saved_bytes, self.live + 1
        elif action.kind is Kind.WEIGHT:
            made = stage.gradient_bytes - self.ready[action.stage]
            working = 0 if made else stage.weight_working_bytes
        else:
            split, is_first = action in self.split, action.stage not in self.ready
            transient = stage.on_top(split=split, is_first=False)
            working = stage.working(split=split, is_first=is_first)
            if is_first:
                made = stage.on_top(split=split, is_first=True) - transient
        yield self._held(timed.start, action, transient, made, working)

    def end(self, timed: Timed) -> Held:
        """Return what is held after a backward, or a forward without one."""
        action, stage = timed.action, self.task.stages[timed.action.stage]
        split, gradients = action in self.split, stage.gradient_bytes
        if action.kind is Kind.WEIGHT:
            self.saved -= stage.waiting_bytes
        else:
            self.saved -= stage.saved_bytes
        if split:
            self.saved += stage.waiting_bytes
            gradients -= stage.waiting_gradient_bytes
        else:
            self.live -= 1
        if action.kind is not Kind.FORWARD:
            self._make(action.stage, gradients)
        return self._held(timed.end, action, stage.scatter_bytes)

    def _post(self, action: Action) -> None:
        if action.kind is Kind.WEIGHT:
            return
        sizes = self.task.posted[action.replica][action.stage]
        size = 0 if self.task.is_last(action) else sizes[action.kind is Kind.BACKWARD]
        key = action.kind, action.replica, action.stage
        self.messages += size - self.posted.get(key, 0)
        self.posted[key] = size

    def _make(self, stage: int, num_bytes: int) -> None:
        """Note that at least so many bytes of a stage's gradients are there."""
        more = max(0, num_bytes - self.ready.get(stage, 0))
        self.ready[stage] = self.ready.get(stage, 0) + more
        self.gradients += more

    def _held(
        self,
        time: float,
        action: Action,
        transient: int = 0,
        made: int = 0,
        working: int = 0,
    ) -> Held:
        return Held(
            time,
            action,
            self.saved,
            transient,
            self.gradients + made,
            self.messages,
            self.live,
            working,
            sum(self.task.stages[s].gathered_bytes for s in self.whole) + self.coming,
        )
