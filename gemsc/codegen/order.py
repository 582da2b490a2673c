"""In which order each rank's messages and sums begin, for the text of its file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemsc.compilation import Compilation
from gemsc.ir import meta
from gemsc.ir.flow import message_tag
from gemsc.ir.program import Program, Transfer
from gemsc.schedules.action import Action, Kind
from gemsc.schedules.loops import Loop, expand, find_loops
from gemsc.schedules.loops import Step as TextStep
from gemsc.schedules.rank_step import (
    AllReduce,
    End,
    Event,
    MessageEnd,
    RankStep,
    StageRun,
    Step,
    order_of,
)

LINE = 70  # columns for names that stand in one line


def orders(compilation: Compilation) -> tuple[list[list[Event]], list[list[Event]]]:
    """Return for each group of ranks the order in training, and that in evaluation.

    Ranks are numbers of groups. See `order_of` for the events.
    """
    groups = _Groups(compilation)
    numbers = range(len(groups.placement.groups))
    training: list[list[Event]] = [[] for _ in numbers]
    if groups.first.program.loss is not None:
        training = order_of([groups.training(n) for n in numbers])
    return training, order_of([groups.evaluation(n) for n in numbers])


def last_backwards(steps: Sequence[TextStep]) -> dict[int, list[int]]:
    """Return after which steps the gradients of which stages are added up.

    What several ranks add up they add up in one order.
    """
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        body = [a for a, _ in step.body] if isinstance(step, Loop) else [step]
        for action in body:
            if action.kind is not Kind.FORWARD:
                last[action.stage] = index
    stages: dict[int, list[int]] = {}
    place = 0
    for stage, index in sorted(last.items(), reverse=True):
        place = max(place, index)
        stages.setdefault(place, []).append(stage)
    return stages


def turns_text(names: Sequence[str]) -> str:
    """Return a tuple of names as Python, with what repeats written once.

    X, X, Y, X, Y, X, Y, Z, X -> (X, (3, X, Y), (Z, X)): what does not repeat is in
    tuples of a line each.
    """
    known = {name: code for code, name in enumerate(dict.fromkeys(names))}
    actions = [Action(Kind.FORWARD, known[n], i) for i, n in enumerate(names)]
    shown, row, by_code = list[str](), list[str](), list(known)

    def end_row() -> None:
        shown.extend([f"({', '.join(row)})"] if len(row) > 1 else row)
        row.clear()

    for step in find_loops(actions):
        if isinstance(step, Loop):
            end_row()
            inside = ", ".join(by_code[action.stage] for action, _ in step.body)
            shown.append(f"({len(expand([step])) // len(step.body)}, {inside})")
            continue
        name = by_code[step.stage]
        if len(", ".join([*row, name])) > LINE:
            end_row()
        row.append(name)
    end_row()
    return f"({', '.join(shown)},)"


class _Groups:
    """What each group of ranks does, in the order of its text."""

    def __init__(self, compilation: Compilation) -> None:
        self.placement = compilation.program.require_placement()
        self.first = compilation.tiles[0]
        self.steps = compilation.steps
        self.count = compilation.plan.micro_batches

    def training(self, group: int) -> RankStep:
        """Return what a group does in a training step."""
        last, steps = last_backwards(self.steps[group]), list[Step]()
        for index, step in enumerate(self.steps[group]):
            steps += expand([step])
            for stage in last.get(index, []):
                steps.append(AllReduce(f"stage{stage}", self._holders(stage)))
        return self._rank(group, [*steps, End.REDUCED], self.first.program)

    def evaluation(self, group: int) -> RankStep:
        """Return what it does in an evaluation step: all in the first replica."""
        row = self.placement.ranks[0]
        stages = [s for s in range(len(row)) if self.placement.group(0, s) == group]
        numbers = range(self.count)
        steps = [Action(Kind.FORWARD, s, m) for m in numbers for s in stages]
        return self._rank(group, steps, self.first.evaluation)

    def _holders(self, stage: int) -> tuple[int, ...]:
        replicas = range(self.placement.num_replicas)
        return tuple(sorted({self.placement.group(r, stage) for r in replicas}))

    def _rank(self, group: int, steps: Sequence[Step], program: Program) -> RankStep:
        runs = {
            (kind, replica, stage): self._run(replica, stage, kind, program)
            for replica, row in enumerate(self.placement.ranks)
            for stage in range(len(row))
            for kind in Kind
            if self.placement.group(replica, stage) == group
        }
        return RankStep(group, runs, tuple(steps), self.placement.groups[group])

    def _run(self, replica: int, stage: int, kind: Kind, program: Program) -> StageRun:
        """Return what a stage receives and sends."""
        if kind is Kind.WEIGHT:
            return StageRun()
        back, both = kind is Kind.BACKWARD, (self.first.program, self.first.evaluation)

        def ends(moves: Sequence[Transfer], *, at_source: bool) -> Iterator[MessageEnd]:
            for transfer in moves:
                peer = self.placement.group(
                    replica, transfer.dest if at_source else transfer.source
                )
                if not back or any(map(meta.needs_gradient, transfer.values)):
                    yield MessageEnd(
                        peer, message_tag(replica, transfer.index, *both) + back
                    )

        transfers = program.transfers or ()
        incoming = [transfer for transfer in transfers if transfer.dest == stage]
        outgoing = [transfer for transfer in transfers if transfer.source == stage]
        if back:
            outgoing.sort(key=lambda transfer: (-transfer.dest, transfer.index))
        above, below = ends(incoming, at_source=False), ends(outgoing, at_source=True)
        taken, given = (below, above) if back else (above, below)
        return StageRun(tuple(taken), tuple(given))
