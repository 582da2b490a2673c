"""Where a run is: its epochs and their steps, as far as they are known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.stream_batches import StreamBatches
from gemsc.runtime.process.stop import Requests


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
    def epoch_steps(self) -> int | None:
        """The steps of an epoch; None if only its end will tell."""
        batches = self.batches
        is_open = isinstance(batches, StreamBatches) and batches.is_open
        return None if is_open else len(batches)

    @property
    def total(self) -> int | None:
        """The steps of the whole run, from its first start; None if nobody knows."""
        if self.steps is not None:
            return self.steps
        return None if self.epoch_steps is None else self.epochs * self.epoch_steps

    def place(self, done: int) -> tuple[int, int]:
        """Return the epoch after so many steps, and how many of its own are done."""
        if self.epoch_steps is None:
            return self.now, done - self.start
        return divmod(done, self.epoch_steps)

    def left(self, done: int) -> int | None:
        """Return the steps that are left in the epoch, or in the run within it."""
        remaining = None if self.total is None else self.total - done
        if self.epoch_steps is None or remaining is None:
            return remaining
        return min(self.epoch_steps - done % self.epoch_steps, remaining)

    def ends(self, step: int, requests: Requests) -> bool:
        """Whether an epoch, or the run, ends with a step, now that it is done."""
        is_end = (
            requests.agreed("end")
            if self.epoch_steps is None
            else step % self.epoch_steps == 0
        )
        return is_end or step == self.total

    def end(self, done: int, requests: Requests) -> bool:
        """Go on to the next epoch if this one has ended; whether it has."""
        if self.epoch_steps is not None:
            return done % self.epoch_steps == 0
        has_ended = requests.agreed("end")
        requests.done("end")
        if has_ended:
            self.now, self.start = self.now + 1, done
        return has_ended

    def is_over(self, done: int) -> bool:
        """Whether nothing is left to do after so many steps."""
        if self.total is not None:
            return done >= self.total
        return self.now >= self.epochs

    def title(self, epoch: int) -> str:
        """Return `epoch 2/4`, or without the last number where nobody knows it."""
        count: int | None = self.epochs
        if self.epoch_steps is not None and self.total is not None:
            count = -(-self.total // self.epoch_steps)
        elif self.steps is not None:
            count = None
        return f"epoch {epoch + 1}" + ("" if count is None else f"/{count}")

    def __str__(self) -> str:
        """Return what the run is asked for."""
        if self.total is not None:
            return f"{self.total} steps"
        return "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
