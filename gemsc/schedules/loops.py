"""Find the loops in a list of actions, so that it can be written as a person would.

Example, 1F1B on rank 1 of 4 with 8 micro-batches:
    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7    ->
    for m in range(0, 2): F(m)
    for m in range(2, 8): F(m), B(m - 2)
    for m in range(6, 8): B(m)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gemsc.schedules.action import Action, Kind

# The longest loop body that is looked for; and how much shorter than possible a loop
# may be, so that its body can begin with a forward.
_LONGEST_BODY = 128
_SHORTER = 2


@dataclass(frozen=True, slots=True)
class Loop:
    """`for m in range(first, last_exclusive, step)`: actions on micro-batch m + offset.

    The actions of `body` have micro-batch 0; the first forward among them, or the first
    action if there is none, has offset 0.
    """

    first: int
    last_exclusive: int
    body: tuple[tuple[Action, int], ...]
    step: int = 1

    def __iter__(self) -> Iterator[Action]:
        for m in range(self.first, self.last_exclusive, self.step):
            for action, offset in self.body:
                yield replace(action, micro_batch=m + offset)

    def __str__(self) -> str:
        bounds = f"{self.first}, {self.last_exclusive}"
        if self.step != 1:
            bounds += f", {self.step}"
        names = [
            str(action).replace(
                f"{action.kind}0",
                f"{action.kind}(m{f'{offset:+}' if offset else ''})",
                1,
            )
            for action, offset in self.body
        ]
        return f"for m in range({bounds}): {' '.join(names)}"


Step = Action | Loop
Ints = npt.NDArray[np.int64]


def expand(steps: Sequence[Step]) -> tuple[Action, ...]:
    """Return the actions that the steps stand for."""
    actions: list[Action] = []
    for step in steps:
        actions.extend(step if isinstance(step, Loop) else (step,))
    return tuple(actions)


def num_lines(steps: Sequence[Step]) -> int:
    """Return the lines that the steps take: one for each action and each `for`."""
    return sum(1 + len(s.body) if isinstance(s, Loop) else 1 for s in steps)


def find_loops(actions: Sequence[Action]) -> tuple[Step, ...]:
    """Return the shortest steps that stand for the actions, in their order.

    Dynamic programming from the end: the best way to write what begins at a position is
    one action, or a loop, and the best way to write the rest. Among texts with as many
    lines the one with fewer steps is taken, then the one whose loops begin with their
    forwards.
    """
    total = len(actions)
    runs = _runs(actions, min(_LONGEST_BODY, total // 2))
    forward_at = _next_forwards(actions)
    # lines, steps and late loops as one number, of which the first counts most
    step = total + 1
    line = step * step
    best = np.zeros(total + 1, dtype=np.int64)
    choice = [(1, 1)] * total
    for start in reversed(range(total)):
        best[start] = best[start + 1] + line + step
        lengths, counts = _loops_from(runs[:, start])
        if not len(lengths):
            continue
        late = (start < forward_at[start]) & (forward_at[start] < start + lengths)
        costs = best[start + lengths * counts] + line * (1 + lengths) + step + late
        least = int(np.argmin(costs))
        if costs[least] < best[start]:
            best[start] = costs[least]
            choice[start] = int(lengths[least]), int(counts[least])
    steps: list[Step] = []
    start = 0
    while start < total:
        length, repeats = choice[start]
        steps.append(_step(actions, start, length, repeats))
        start += length * repeats
    return tuple(steps)


def _loops_from(runs: Ints) -> tuple[Ints, Ints]:
    """Return the lengths and repeats of the loops that may begin at a position.

    `runs` has, for each length, how long the actions repeat there. Shorter bodies come
    first, and of one length as many repeats as possible.
    """
    lengths = np.arange(1, len(runs) + 1)
    most = 1 + runs // lengths
    repeats = most[:, None] - np.arange(_SHORTER)
    where, which = np.nonzero(repeats > 1)
    return lengths[where], repeats[where, which]


def _runs(actions: Sequence[Action], longest: int) -> Ints:
    """Return, for each length and position, how long the actions repeat that later.

    They repeat while they differ in the micro-batch alone, and always by as much.
    """
    total = len(actions)
    known: dict[tuple[Kind, int, int], int] = {}
    names = [(a.kind, a.stage, a.replica) for a in actions]
    codes = np.array([known.setdefault(name, len(known)) for name in names])
    numbers = np.array([action.micro_batch for action in actions])
    runs = np.zeros((longest, total), dtype=np.int64)
    for length in range(1, longest + 1):
        count = total - length
        steps = numbers[length:] - numbers[:count]
        steps[codes[length:] != codes[:count]] = 0
        # each position belongs to a run of equal steps, which ends somewhere
        ends = np.append(np.nonzero(np.diff(steps))[0], count - 1)
        sizes = np.diff(ends, prepend=-1)
        to_end = np.repeat(ends + 1, sizes) - np.arange(count)
        runs[length - 1, :count] = np.where(steps != 0, to_end, 0)
    return runs


def _next_forwards(actions: Sequence[Action]) -> list[int]:
    """Return, for each position, that of the first forward from there on."""
    following = len(actions)
    positions = [following] * len(actions)
    for position in reversed(range(len(actions))):
        if actions[position].kind is Kind.FORWARD:
            following = position
        positions[position] = following
    return positions


def _step(actions: Sequence[Action], start: int, length: int, repeats: int) -> Step:
    """Return one action or loop of the text."""
    if repeats == 1:
        return actions[start]
    body = actions[start : start + length]
    forwards = [action for action in body if action.kind is Kind.FORWARD]
    first = (forwards or body)[0].micro_batch
    step = actions[start + length].micro_batch - actions[start].micro_batch
    last = first + (repeats - 1) * step
    return Loop(
        first,
        last + (1 if step > 0 else -1),
        tuple((replace(a, micro_batch=0), a.micro_batch - first) for a in body),
        step,
    )
