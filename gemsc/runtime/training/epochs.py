"""Where a run is: its epochs and their steps, as far as they are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemsc.datasets.stream import ENDLESS
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.states import encode
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.stream_batches import StreamBatches
from gemsc.runtime.data.stream_reader import Mark
from gemsc.runtime.process.stop import Requests
from gemsc.runtime.training.callbacks import Callback, why_stopped
from gemsc.runtime.training.step_report import StepReport
from gemsc.runtime.training.trainer import Trainer


@dataclass
class Epochs:
    """The steps that are asked for, and those of an epoch.

    An epoch of a stream may end at any step: whoever reads asks for "end" before its
    last one, so that all ranks know after it. Then `now` is the epoch that goes on,
    and `start` how many steps were done before it. Where the last one `owes_end`, its
    evaluation and what follows are to be made first, perhaps again.
    """

    batches: Batches
    steps: int | None
    epochs: int
    now: int = 0
    start: int = 0
    owes_end: bool = False
    stopped: str = ""  # why the run was, before it was resumed

    @property
    def each(self) -> int | None:
        """The steps of an epoch; None if only its end will tell."""
        batches = self.batches
        is_open = isinstance(batches, StreamBatches) and batches.is_open
        return None if is_open else len(batches)

    @property
    def total(self) -> int | None:
        """The steps of the whole run, from its first start; None if nobody knows."""
        if self.steps is not None:
            return self.steps
        return None if self.each is None else self.epochs * self.each

    def place(self, done: int) -> tuple[int, int]:
        """Return the epoch after so many steps, and how many of its own are done."""
        if self.each is None:
            return self.now, done - self.start
        return divmod(done, self.each)

    def left(self, done: int) -> int | None:
        """Return the steps that are left in the epoch, or in the run within it."""
        rest = None if self.total is None else self.total - done
        if self.each is None or rest is None:
            return rest
        return min(self.each - done % self.each, rest)

    def ends(self, step: int, requests: Requests) -> bool:
        """Whether an epoch, or the run, ends with a step, now that it is done."""
        is_end = requests.agreed("end") if self.each is None else step % self.each == 0
        return is_end or step == self.total

    def end(self, done: int, requests: Requests) -> bool:
        """Go on to the next epoch if this one has ended; whether it has."""
        if self.each is not None:
            return done % self.each == 0
        found = requests.agreed("end")
        requests.done("end")
        if found:
            self.now, self.start = self.now + 1, done
        return found

    def is_over(self, done: int) -> bool:
        """Whether nothing is left to do after so many steps."""
        if self.total is not None:
            return done >= self.total
        return self.now >= self.epochs

    def title(self, epoch: int) -> str:
        """Return `epoch 2/4`, or without the last number where nobody knows it."""
        count: int | None = self.epochs
        if self.each is not None and self.total is not None:
            count = -(-self.total // self.each)
        elif self.steps is not None:
            count = None
        return f"epoch {epoch + 1}" + ("" if count is None else f"/{count}")

    def __str__(self) -> str:
        """Return what the run is asked for."""
        if self.total is not None:
            return f"{self.total} steps"
        return "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"


class Position(Callback):
    """Lets a run that goes on with batches of another size go on at the same sample.

    Its steps are then counted as if all batches had had the size that they have now.
    Batches of several shapes are the same ones, or the run goes on where an epoch ends.
    """

    def __init__(self, trainer: Trainer, epochs: Epochs) -> None:
        self.trainer = trainer
        self.epochs = epochs
        self.batches = epochs.batches

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """From its last step on, an epoch owes its end: a hook may save there."""
        each = self.epochs.each
        self.epochs.owes_end = each is not None and report.step % each == 0

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and sample, of how many; of a stream, marks of its parts."""
        epoch, first = self.epochs.place(self.trainer.step_number)
        order = self.batches.order
        state: dict[str, Any] = {"num_samples": order.num_samples, "epoch": epoch}
        state["owes_end"] = self.epochs.owes_end
        state["stopped"] = why_stopped(self.trainer)
        if len(order.sizes) > 1:
            return state | {"batch": first, "of": self._of_shapes}
        size = order.sizes[0]
        state |= {"batch_size": size, "sample": first * size}
        if isinstance(self.batches, StreamBatches):
            state["parts"] = self.batches.num_parts
            own = self.batches.marks(epoch)
            state["marks"] = self._of_all(own) if first else {}
        return state

    def _of_all(self, own: Mapping[int, Mark]) -> dict[str, Any]:
        """Return the marks of all parts, of whoever came farthest in each."""
        found: dict[int, Mark] = {}
        for marks in self.trainer.transport.all_gather_object(dict(own)):
            for number, mark in marks.items():
                other = found.setdefault(number, mark)
                found[number] = max(other, mark, key=lambda each: each.first)
        return {str(number): vars(_storable(mark)) for number, mark in found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the sample that comes next.

        Raises:
            GemscError: the dataset has another length, or the checkpoint is of the
                middle of an epoch of other batches.
        """
        batches, steps, epochs = self.batches, self.trainer.worker.steps, self.epochs
        steps.saved = steps.done
        epochs.owes_end = state.get("owes_end", False)
        epochs.stopped = state.get("stopped", "")
        if state["num_samples"] != batches.num_samples:
            one, other = map(_samples, (state["num_samples"], batches.num_samples))
            raise GemscError(
                f"the checkpoint is of a run with {one}, but dataset() now has {other}",
                help="resume with the same data; or `gemsc export` the checkpoint and "
                "--resume from that file, which starts a new run from its weights",
            )
        sizes = batches.order.sizes
        if "sample" in state and len(sizes) == 1:
            first = state["sample"] // sizes[0]
        else:
            first = state.get("batch", state.get("sample"))
            if first and state.get("of") != self._of_shapes:
                raise GemscError(
                    "the checkpoint is from the middle of an epoch whose batches had "
                    "other samples than those of this program",
                    help="resume with a program of the same shapes, --micro-batches "
                    "and --data, and the same --last-batch, or from a checkpoint at "
                    "the end of an epoch",
                )
        if epochs.each is not None:
            steps.done = state["epoch"] * epochs.each + first
            epochs.owes_end |= first == epochs.each  # larger batches leave out the rest
        else:
            size = state["batch_size"]
            before = steps.done - state["sample"] // size
            epochs.now, epochs.start = state["epoch"], before * size // sizes[0]
            steps.done = epochs.start + first
        if isinstance(batches, StreamBatches):
            marks = state.get("marks", {}).items()
            batches.split(state.get("parts", 1))
            batches.resume(state["epoch"], {int(n): Mark(**m) for n, m in marks})

    @property
    def _of_shapes(self) -> list[list[int]]:
        """How many batches of how many samples an epoch has of each shape."""
        order = self.batches.order
        return [[*pair] for pair in zip(order.batches, order.sizes, strict=True)]


def _samples(count: int) -> str:
    return "a stream without a known end" if count == ENDLESS else f"{count} samples"


def _storable(mark: Mark) -> Mark:
    """Return a mark without its state if no checkpoint can hold that."""
    try:
        encode(mark.state, lambda _: "", "the stream")
    except GemscError:
        return replace(mark, state=None)
    return mark
