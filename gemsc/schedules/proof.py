"""What is to be proved of a step, and what its ranks say of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gemsc.base.parts import parts_of
from gemsc.errors import InternalError
from gemsc.schedules.action import Action, Task
from gemsc.schedules.rank_step import MessageEnd, RankStep, Way

Posted = tuple[Action, MessageEnd]


@dataclass(frozen=True)
class Proof:
    """All ranks of a step, the task that they share, and questions about them."""

    ranks: tuple[RankStep, ...]
    task: Task
    groups: tuple[tuple[int, ...], ...]
    shared: Mapping[str, Sequence[int]]
    weights: Sequence[Collection[str]]
    copies: int

    @cached_property
    def position(self) -> list[dict[Action, int]]:
        """For each rank where each action stands in it."""
        return [{a: i for i, a in enumerate(rank.actions)} for rank in self.ranks]

    def ranks_of(self, replica: int, stage: int) -> tuple[int, ...]:
        """Return the ranks that run a stage."""
        return self.groups[self.task.placement[replica][stage]]

    def lines(self, stage: int) -> str:
        """Return the user's lines of a stage, as any of its ranks knows them."""
        for rank in self.ranks:
            for (_, _, index), run in rank.runs.items():
                if index == stage and run.lines:
                    return f"stage {stage} ({run.lines})"
        return f"stage {stage}"

    def wrong(self, action: Action, text: str) -> InternalError:
        """Return the error that names the action's stage, code and micro-batch."""
        replica = f" of replica {action.replica}" if action.replica else ""
        return InternalError(
            f"wrong program: {text}: {action}, {self.lines(action.stage)}{replica}, "
            f"micro-batch {action.micro_batch}"
        )

    def wrong_sum(self, group: str, text: str) -> InternalError:
        """Return the error that names the stages whose gradients are added up."""
        stages = ", ".join(self.lines(stage) for stage in self.stages.get(group, ()))
        held = f": {stages}, after micro-batch {self.task.micro_batches[0] - 1}"
        return InternalError(f"wrong program: {text}{held if stages else ''}")

    @cached_property
    def wanted(self) -> dict[Action, tuple[int, ...]]:
        """All actions of a step, each with its ranks."""
        actions = [
            Action(kind, stage, m, replica)
            for replica, row in enumerate(self.task.placement)
            for stage in range(len(row))
            for m in range(self.task.micro_batches[replica])
            for kind in self.task.kinds[:2]
        ]
        actions += [
            action for rank in self.ranks for action in sorted(rank.deferred, key=str)
        ]
        return {a: self.ranks_of(a.replica, a.stage) for a in actions}

    @cached_property
    def sent(self) -> dict[Way, list[Posted]]:
        """What is sent each way, in order; from a stage to another of its rank, too."""
        return self._messages(sends=True)

    @cached_property
    def received(self) -> dict[Way, list[Posted]]:
        """What is received each way, in order."""
        return self._messages(sends=False)

    def _messages(self, *, sends: bool) -> dict[Way, list[Posted]]:
        messages: dict[Way, list[Posted]] = defaultdict(list)
        for rank in self.ranks:
            for action in rank.actions:
                run = rank.run(action)
                for message in run.sends if sends else run.receives:
                    ends = rank.rank, message.peer
                    way = (*(ends if sends else ends[::-1]), message.tag)
                    messages[way].append((action, message))
        return messages

    @cached_property
    def stages(self) -> dict[str, Sequence[int]]:
        """The stages of each group of parameters, and of each group of parts."""
        of_parts = {parts_of(group): stages for group, stages in self.shared.items()}
        return {**self.shared, **of_parts}
