"""When checkpoints are saved: each epoch, every so many steps or minutes, or never.

At the end of an epoch it is done after the evaluation, so that a checkpoint holds what
that has found; then also if it is the best one so far. The run ends with one. At the
end of the first epoch one is saved before, too: what fails then fails for the first
time.

    --best loss        the smallest loss over held-out data: so it is without the option
    --best dice:max    the largest of a figure that `metrics` returns
    --patience 5       stop once 5 evaluations in turn have brought nothing better
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from gemsc.datasets.stream import ENDLESS
from gemsc.errors import GemscError, SourceLocation, say_note
from gemsc.runtime.checkpoint.folder import go_back
from gemsc.runtime.checkpoint.states import encode
from gemsc.runtime.checkpoint.write import check_savable
from gemsc.runtime.data.stream_batches import StreamBatches
from gemsc.runtime.data.stream_reader import Mark
from gemsc.runtime.training.callbacks import Callback, why_stopped
from gemsc.runtime.training.epochs import Epochs
from gemsc.runtime.training.step_report import StepReport
from gemsc.runtime.training.trainer import Trainer


def plateaus(trainer: Trainer) -> list[ReduceLROnPlateau]:
    """Return the schedulers that evaluations step, of all phases on this rank."""
    every = (updates.scheduler for updates in trainer.worker.variants.updates.values())
    return [plateau for plateau in every if isinstance(plateau, ReduceLROnPlateau)]


class Best(Callback):
    """Follows one figure of the evaluations, and shows it to ReduceLROnPlateau.

    `value` is the best one, of step `step`; `since` counts the evaluations after it.
    A run that ends within an epoch is not the end of this epoch for a scheduler:
    resumed, it goes on as if it had not ended.
    """

    def __init__(
        self,
        epochs: Epochs,
        rule: str | None = None,
        patience: int | None = None,
    ) -> None:
        """Follow `NAME`, `NAME:min` or `NAME:max`; stop after so many evaluations."""
        self.epochs = epochs
        self.name, _, kind = (rule or "loss").partition(":")
        self.is_larger_better = kind == "max"
        self.is_assumed = self.name != "loss" and not kind
        self.is_asked_for = rule is not None or patience is not None
        self.patience = patience
        self.value: float | None = None
        self.step = self.since = 0
        self.is_new = False  # the last evaluation is the best
        self.problem: GemscError | None = None  # the figure is not there
        self._counts: list[int] = []  # of plateaus, once they were shown it

    def check(self, names: Iterable[str], at: SourceLocation | None) -> None:
        """Make sure that the figure is one of those whose names begin so.

        Raises:
            GemscError: it is none of them.
        """
        names = ["loss", *names]
        if not any(f"{self.name}_".startswith(f"{name}_") for name in names):
            raise GemscError(
                f"--best {self.name}: evaluations only have {', '.join(names)}",
                at=at,
                help="name one of them, or return it from metrics()",
            )

    def on_start(self, trainer: Trainer) -> None:
        """Refuse to go on where patience has ended already, or what has no figure."""
        waiting = plateaus(trainer)
        if self.name == "loss" and trainer.phases and (waiting or self.is_asked_for):
            asks = "ReduceLROnPlateau asks"
            asks = "--best and --patience ask" if self.is_asked_for else asks
            text = f"{asks} for a held-out loss, and phases have none"
            raise GemscError(text, help="name a figure of metrics() with --best")
        if self.is_assumed and trainer.transport.rank == 0:
            say_note(
                f"--best {self.name}: the smallest is the best; if it is the largest, "
                f"--best {self.name}:max"
            )
        mode, other = ("max", "min") if self.is_larger_better else ("min", "max")
        if any(scheduler.mode != mode for scheduler in waiting):
            better = "larger" if self.is_larger_better else "smaller"
            raise GemscError(
                f"ReduceLROnPlateau has mode='{other}', and is shown {self.name}, "
                f"which is better if {better}",
                help=f"give it mode='{mode}', or name another figure: --best "
                f"NAME:{other}",
            )
        if self.is_over:
            raise GemscError(
                f"{self.reason}: --patience {self.patience} has ended this run",
                help="resume with a larger --patience, or without",
            )

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Compare the figure with the best one."""
        self.is_new = False
        waiting = plateaus(trainer)
        if self.name not in figures:
            if self.is_asked_for:
                self.problem = GemscError(
                    f"--best {self.name}: evaluations only have {', '.join(figures)}",
                    help="give one of them to --best, or return it from metrics()",
                )
            return
        _, within = self.epochs.place(trainer.step_number)
        for scheduler in waiting if within == 0 else ():
            scheduler.step(figures[self.name])
        self._counts = [scheduler.last_epoch for scheduler in waiting]
        value, best = figures[self.name], self.value
        if self.is_larger_better:
            self.is_new = value == value if best is None else value > best
        else:
            self.is_new = value == value if best is None else value < best
        self.since = 0 if self.is_new else self.since + 1
        if self.is_new:
            self.value, self.step = value, trainer.step_number
        if self.is_over:
            trainer.stop(self.reason)

    def on_epoch(
        self, trainer: Trainer, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Refuse a hook that steps a plateau again, as a loop of one's own does."""
        counts = [scheduler.last_epoch for scheduler in plateaus(trainer)]
        if self.name in figures and counts != self._counts:
            raise GemscError(
                "on_epoch() steps ReduceLROnPlateau, which this evaluation has stepped",
                help=f"leave that out: it is shown {self.name}, or what --best names",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the best figure, and how long ago it was."""
        return {
            "name": self.name,
            "larger": self.is_larger_better,
            "value": self.value,
            "step": self.step,
            "since": self.since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was the best, if it is the same figure."""
        self.epochs.owes_end |= state.get("is_owed", False)  # of older checkpoints
        larger = state.get("larger", self.is_larger_better)
        if (state["name"], larger) == (self.name, self.is_larger_better):
            self.value, self.step = state["value"], state["step"]
            self.since = state["since"]

    @property
    def is_over(self) -> bool:
        """Whether patience has an end."""
        return self.patience is not None and self.since >= self.patience

    @property
    def reason(self) -> str:
        """Why patience has an end."""
        evaluations = "evaluation" if self.since == 1 else f"{self.since} evaluations"
        if self.value is None:
            return f"{self.name} was no number in the last {evaluations}"
        return (
            f"{self.name} was not better than {self.value:.6g}, of step {self.step}, "
            f"in the last {evaluations}"
        )


@dataclass(eq=False)
class Checkpoints(Callback):
    """Saves into a folder, and keeps the newest `keep` checkpoints and the best one.

    `every` is a number of steps, seconds as a float, or "epoch". It comes after the
    callbacks whose state it saves.
    """

    folder: Path
    epochs: Epochs
    every: int | float | str = "epoch"
    keep: int = 3
    best: Best | None = None
    background: bool = False
    source: Path | None = None  # what the run goes on from
    _saved: tuple[int, bool] = field(default=(-1, False), init=False)  # a step, early
    _due: float = field(default=0.0, init=False)  # by the clock of the first rank
    _is_checked: bool = field(default=False, init=False)  # that all can be saved

    def on_start(self, trainer: Trainer) -> None:
        """Start the clock; what comes after an older checkpoint is not the latest."""
        if self.source is not None and trainer.transport.rank == 0:
            go_back(self.folder, self.source)
        self._saved = trainer.step_number, self.epochs.owes_end
        self._start_clock()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Save if it is time; at the end of an epoch, that waits for the evaluation.

        The first update, after which an optimizer has a state, shows if it can be done.
        """
        if not self._is_checked and trainer.worker.variants.num_updates:
            self._is_checked = True
            check_savable(trainer.worker)
        if self._is_time(trainer, report.step) and not self._ends(trainer):
            self.save(trainer)

    def on_epoch(
        self, trainer: Trainer, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Save if it is time, or if the evaluation was the best one."""
        trainer.agree()  # a checkpoint knows of what has stopped the run
        is_best = self.best is not None and self.best.is_new
        is_time = self.every == "epoch" or self._is_time(trainer, trainer.step_number)
        if is_time or is_best:
            self.save(trainer, is_best=is_best)

    def save(self, trainer: Trainer, *, is_best: bool = False) -> None:
        """Save now, unless that is done; early where the epoch's end is owed."""
        step, early = trainer.step_number, self.epochs.owes_end
        if self._saved == (step, early):
            return
        self._saved = step, early
        trainer.requests.done("save")
        trainer.save(
            self.folder,
            keep=self.keep,
            best=is_best,
            early=early,
            background=self.background and not early,
        )
        self._start_clock()

    def _is_time(self, trainer: Trainer, step: int) -> bool:
        if isinstance(self.every, int):
            return step % self.every == 0
        asks = isinstance(self.every, float) and trainer.transport.rank == 0
        if asks and time.monotonic() >= self._due:
            trainer.requests.ask("save")
        return trainer.requests.agreed("save")

    def _ends(self, trainer: Trainer) -> bool:
        step = trainer.step_number
        return self.epochs.ends(step, trainer.requests) or trainer.is_stopping

    def _start_clock(self) -> None:
        if isinstance(self.every, float):
            self._due = time.monotonic() + self.every


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
        per_epoch = self.epochs.epoch_steps
        self.epochs.owes_end = per_epoch is not None and report.step % per_epoch == 0

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
            marks = self.batches.marks(epoch)
            state["marks"] = self._of_all(marks) if first else {}
        return state

    def _of_all(self, mine: Mapping[int, Mark]) -> dict[str, Any]:
        """Return the marks of all parts, of whoever came farthest in each."""
        farthest: dict[int, Mark] = {}
        for marks in self.trainer.transport.all_gather_object(dict(mine)):
            for number, mark in marks.items():
                other = farthest.setdefault(number, mark)
                farthest[number] = max(other, mark, key=lambda mark: mark.first)
        return {str(number): vars(_storable(mark)) for number, mark in farthest.items()}

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
        if epochs.epoch_steps is not None:
            steps.done = state["epoch"] * epochs.epoch_steps + first
            epochs.owes_end |= (
                first == epochs.epoch_steps
            )  # larger batches leave out the rest
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
