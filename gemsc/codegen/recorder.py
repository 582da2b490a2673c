"""StepRecorder: stands for a rank's worker, and takes down what its file does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gemsc.base.parts import parts_of, sums_in_order
from gemsc.errors import InternalError
from gemsc.runtime import (
    Exchange,
    GridMessage,
    Message,
    Run,
)
from gemsc.schedules.action import Action, Kind
from gemsc.schedules.rank_step import (
    AllReduce,
    End,
    GridCall,
    MessageEnd,
    StageRun,
    Step,
)

UNKNOWN = "does something that the proof does not know"


@dataclass(frozen=True)
class Recorded:
    """Stands for a tensor: the user's line, if known, and if its gradient goes back."""

    line: str = ""
    gradient: bool = False

    def __add__(self, other: Recorded) -> Recorded:
        return self


@dataclass(frozen=True)
class StageMethod:
    """A method of a stage: how much it takes, what it gives, what tiles do in it.

    `back` is what they do in its backward. Autograd runs what is ready in the opposite
    order in which it was made, so these are the calls of forward from the last to the
    first: all of them, as not all may have gradients; none overtakes another. A block
    that is recomputed makes its own calls again before.
    """

    num_taken: int
    gives: tuple[Recorded, ...]
    calls: tuple[GridCall, ...]
    back: tuple[GridCall, ...]
    lines: str


@dataclass
class _Work:
    """What a rank does with a micro-batch: receive, one action, send."""

    micro_batch: int | None = None
    action: Action | None = None
    receives: list[MessageEnd] = field(default_factory=list)
    sends: list[MessageEnd] = field(default_factory=list)
    calls: list[GridCall] = field(default_factory=list)
    lines: str = ""


class StepRecorder:
    """Stands for the worker of a rank: takes down what it is told, computes nothing.

    `file` is the `RankFile` that is run.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.steps: list[Step] = []
        self.runs: dict[tuple[Kind, int, int], StageRun] = {}
        self.work = _Work()
        self.num_gradients: dict[Run, int] = {}  # that a backward gives
        self.whole: Run | None = None  # whose weights have been gathered for an action
        self.gathered: list[Run] = []

    def __getattr__(self, name: str) -> NoReturn:
        raise self.file.wrong(UNKNOWN) from AttributeError(name)

    # ---------------------------------------- what a rank's file calls

    @property
    def loss_gradient(self) -> Recorded:
        """What flows back into a loss."""
        return Recorded()

    def input(self, name: str, m: int) -> Recorded:
        """Return a part of the batch."""
        return Recorded()

    def receive(self, message: Message | GridMessage, m: int) -> Any:
        """Take down a message that comes in."""
        if self.work.action is not None:
            self.finish()
        self._is_current(m)
        self.work.receives += self.file.ends(message, "", sends=False)
        return _one_or_all(self.file.tensors(message))

    def send(self, message: Message | GridMessage, m: int, *tensors: Recorded) -> None:
        """Take down a message that goes out."""
        self._is_current(m)
        self._are_so_many(tensors, len(self.file.tensors(message)))
        lines = dict.fromkeys(tensor.line for tensor in tensors if tensor.line)
        self.work.sends += self.file.ends(message, ", ".join(lines), sends=True)

    def run(self, run: Run, m: int, *inputs: Recorded, method: str = "forward") -> Any:
        """Take down a forward."""
        read = self.file.method(run, method)
        self._begin(Kind.FORWARD, run, m)
        self._are_so_many(inputs, read.num_taken)
        self.work.calls += read.calls
        self.num_gradients[run] = sum(tensor.gradient for tensor in inputs)
        return _one_or_all(read.gives)

    evaluate = run

    def evaluate_apart(self, run: Run, m: int, *inputs: Recorded) -> Any:
        """Take down an evaluation that is not the forward."""
        return self.run(run, m, *inputs, method="forward_eval")

    def backward(
        self, run: Run, m: int, *gradients: Recorded | None
    ) -> tuple[Recorded, ...]:
        """Take down a backward; return what it sends on."""
        self._begin(Kind.BACKWARD, run, m)
        all_there = [gradient or Recorded() for gradient in gradients]
        self._are_so_many(all_there, len(self.file.method(run).gives))
        self.work.calls += self.file.method(run).back
        if run not in self.num_gradients:
            action = self.work.action
            forward = Action(Kind.FORWARD, run.stage, m, run.replica)
            lines = f"stage {run.stage} ({self.work.lines}), micro-batch {m}"
            text = f"rank {self.file.rank} does an action before its {forward}"
            raise InternalError(f"wrong program: {text}: {action}, {lines}")
        return (Recorded(),) * self.num_gradients[run]

    def gather_weights(self, run: Run) -> None:
        """Take down that the weights of a stage become whole for its next action."""
        if self.work.action is not None:
            self.finish()
        self.whole = run
        self.gathered.append(run)

    def weights(self, run: Run, m: int) -> None:
        """Take down the sums of weight gradients."""
        self._begin(Kind.WEIGHT, run, m)

    def gather(self, tensor: Recorded, exchange: Exchange) -> Recorded:
        """Take down an exchange of all tiles."""
        self.work.calls.append(self.file.exchanges("gather", exchange, ""))
        return tensor

    def add_loss(self, *values: object) -> None:
        """Say nothing of it."""

    add_result = add_loss

    def start_reduction(self, group: str) -> None:
        """Take down a sum of gradients."""
        self.finish()
        sums = self.file.program.reductions
        if group not in sums:
            raise self.file.wrong(f"has no '{group}' in its reductions")
        self.steps.append(AllReduce(group, sums[group]))

    def finish_reductions(self) -> None:
        """Take down the sums of tied parameters, and the wait for all."""
        self.finish()
        sums = self.file.program.reductions
        stages = {run.stage_name for run in self.file.program.stages}
        tied = sums.keys() - stages - {*map(parts_of, stages)}  # it starts those
        self.steps += [AllReduce(group, sums[group]) for group in sorted(tied)]
        self.steps.append(End.REDUCED)

    def update(self) -> None:
        """Take down the optimizer's step."""
        self.finish()
        ahead = self.file.program.gather_turns
        if ahead and [*ahead] != self.gathered:
            raise self.file.wrong("gathers weights in another order than it says")
        self.steps.append(End.UPDATED)

    # -------------------------------------------------- what is a unit

    def finish(self) -> None:
        """Take down what has been done with a micro-batch; the next thing is apart."""
        work, self.work = self.work, _Work()
        action = work.action
        if action is None:
            if work.micro_batch is not None:
                raise self.file.wrong("runs no stage with what it received")
            return
        messages = tuple(work.receives), tuple(work.sends)
        done = StageRun(*messages, tuple(work.calls), work.lines)
        key = action.kind, action.replica, action.stage
        if self.runs.setdefault(key, done) != done:
            raise self.file.wrong(f"does in {action} other things than before")
        self.steps.append(action)

    def _begin(self, kind: Kind, run: Run, m: int) -> None:
        if self.work.action is not None:
            self.finish()
        self._is_current(m)
        whole, self.whole = self.whole, None
        sums = self.file.program.reductions.keys() & {*sums_in_order([run.stage])}
        if sums and self.file.program.whole_stages and whole != run:
            raise self.file.wrong(f"uses weights of {run} that it has not gathered")
        self.work.action = Action(kind, run.stage, m, run.replica)
        self.work.lines = self.file.method(run).lines

    def _is_current(self, m: int) -> None:
        if self.work.micro_batch not in (None, m):
            raise self.file.wrong("works on another micro-batch")
        self.work.micro_batch = m

    def _are_so_many(self, tensors: Sequence[Recorded], wanted: int) -> None:
        if len(tensors) != wanted or not all(isinstance(t, Recorded) for t in tensors):
            raise self.file.wrong(f"passes {len(tensors)} of {wanted} values")


def arriving(message: Message | GridMessage) -> tuple[Recorded, ...]:
    """Return what arrives with a message."""
    return tuple(Recorded(gradient=gradient) for gradient in message.gradients)


def _one_or_all(tensors: tuple[Recorded, ...]) -> Any:
    """Return what a worker does: a tensor alone as it is, several in a tuple."""
    return tensors[0] if len(tensors) == 1 else tensors
