"""What happens beside the steps of training: logs, checkpoints, users' hooks, ...

    on_load                              the program and its weights are loaded
    on_start                             and the checkpoint, if there is one
      on_batch on_step, on_batch ...     before and after each step
      on_evaluation_start, on_evaluation where there is held-out data
      on_evaluation_failure              in place of on_evaluation
      on_epoch                           the end of an epoch, or of the run within one
        on_save                          a checkpoint is complete
    on_end                               or on_failure, on the rank that fails

All ranks call all callbacks, in the same order and after the same step: a callback may
communicate, and what only one rank shall do asks for `trainer.transport.rank`. Logs and
checkpoints have files of their own; the small ones are here.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from numbers import Number
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemsc.base.units import show_bytes, show_seconds
from gemsc.errors import warn
from gemsc.runtime.checkpoint.holdings import EMA_KEY
from gemsc.runtime.data.held_generators import parts_held
from gemsc.runtime.process.device import peak_bytes
from gemsc.runtime.process.progress import ProgressBar
from gemsc.runtime.training.step_report import StepReport
from gemsc.runtime.training.trainer import Trainer
from gemsc.user_model import UserModel

if TYPE_CHECKING:
    from gemsc.runtime.training.epochs import Epochs

FIRST_SECONDS = 60.0  # after which a run says if data is what it waits for
MUCH_READING = 0.25  # of these
_OWN = re.compile(r"model\b.*\.(_parameters|_buffers)\[|.*\.training$").match


class Callback:
    """Something that follows training; override what it needs."""

    def on_load(self, trainer: Trainer) -> None:
        """Called once, before a checkpoint is resumed from: make room for `tensors`."""

    def on_start(self, trainer: Trainer) -> None:
        """Called once before the first step."""

    def on_batch(
        self, trainer: Trainer, what: str, sources: Mapping[str, Any], window: Any
    ) -> None:
        """Called before each "step" or "evaluation", of a batch's input and target."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Called after each step."""

    def on_evaluation_start(self, trainer: Trainer) -> None:
        """Called before the held-out samples are evaluated."""

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Called with the means of loss and metrics over all held-out samples."""

    def on_evaluation_failure(self, trainer: Trainer) -> None:
        """Called instead, if loss or metrics failed: what is trained is saved then."""

    def on_epoch(
        self, trainer: Trainer, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Called once an epoch, counted from 0, has ended and was evaluated.

        `figures` are those of `on_evaluation`, none without held-out data.
        """

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """Called once a checkpoint is complete in its folder."""

    def on_end(self, trainer: Trainer) -> None:
        """Called after the last step."""

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Called on a rank that fails, before it ends the others: do not wait."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint shall hold of it, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return tensors of this rank that a checkpoint shall hold, and gives back.

        By kind, then by the name of the parameter whose shape each has on this rank:
        `{"average": {"conv.weight": tensor, ...}}`. Resuming copies into them.
        """
        return {}


class Hooks(Callback):
    """Calls what the user's file defines, `on_step` and `on_epoch`, on every rank.

    A program has what the model and the loss see as it was when it was compiled: that a
    hook changes it is told, or a dataset's `set_epoch`, or a function of a scheduler.
    It is looked for after each epoch and its first step, and after the 1st, 2nd, 4th,
    8th, ... step. What metrics and the loss change in an evaluation does not count.
    """

    def __init__(self, user: UserModel) -> None:
        self.user = user
        self._before: dict[str, object] = {}
        self._steps, self._epoch = 0, 0
        self._seeing: dict[str, Any] = {}

    def on_load(self, trainer: Trainer) -> None:
        """Remember what the model and the loss see."""
        if trainer.transport.rank:
            return
        losses = {phase.name: phase.loss for phase in trainer.phases}
        seeing = {"model": self.user.model, "loss": self.user.loss, "phases": losses}
        self._seeing = seeing
        self._before = self._seen()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Call the user's `on_step(trainer, report)`."""
        is_asked = not self._steps & (self._steps + 1) or trainer.epoch != self._epoch
        self._steps, self._epoch = self._steps + 1, trainer.epoch
        self._call("on_step", is_asked, trainer, report)

    def on_evaluation_start(self, trainer: Trainer) -> None:
        """Look for changes of the epoch."""
        if trainer.transport.rank == 0:
            self._compare("")

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Forget changes of the evaluation."""
        if trainer.transport.rank == 0:
            now = self._seen()
            self._before = {name: now.get(name) for name in self._before}

    def on_epoch(
        self, trainer: Trainer, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Call the user's `on_epoch(trainer, epoch, figures)`."""
        self._call("on_epoch", True, trainer, epoch, figures)

    def _call(self, hook: str, is_asked: bool, trainer: Trainer, *given: Any) -> None:
        is_asked &= trainer.transport.rank == 0
        if is_asked:
            self._compare("")
        self.user.call(hook, trainer, *given)
        if is_asked and getattr(self.user, hook) is not None:
            self._compare(hook)

    def _compare(self, hook: str) -> None:
        """Warn of what has changed, in a `hook` or before it."""
        now, known = self._seen(), self._before
        if changed := [n for n, v in known.items() if now.get(n, v) != v == v]:
            at = self.user.line_of(hook) if hook else None
            warn(
                f"{hook or 'training'} changes {', '.join(changed[:3])}: the program "
                "keeps what that was when it was compiled",
                at=at.short if at else self.user.path.name,
                help="let forward compute it, of a buffer in which it counts its calls",
            )
            self._before = {n: v for n, v in known.items() if n not in changed}

    def _seen(self) -> dict[str, object]:
        """Return the numbers, texts and tensors that the model and the loss can see.

        The weights of a model do not count: a hook may try in it what was trained.
        """
        parts = chain(*(parts_held(*pair) for pair in self._seeing.items()))
        states = {path: _state(value) for path, value in parts if not _OWN(path)}
        return {path: value for path, value in states.items() if value is not None}


def _state(value: object) -> object:
    """Return what is another one once a number, a text or a tensor is changed."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, Number | str) else None


def why_stopped(trainer: Trainer) -> str:
    """Return why all ranks stop, "" if they do not; all ranks call this."""
    if not trainer.requests.agreed("stop"):
        return ""
    reasons = trainer.transport.all_gather_object(trainer.requests.reason("stop"))
    return next(filter(None, reasons), "asked to")


class Console(Callback):
    """What the first rank prints: a bar for each epoch, figures, how the run ends."""

    def __init__(self, trainer: Trainer, epochs: Epochs, reads_ahead: str) -> None:
        """Advise what `reads_ahead` where ranks wait for data; "" if nothing can."""
        self.talks = trainer.transport.rank == 0
        self.epochs = epochs
        self._reads_ahead, self._begin, self._read = reads_ahead, 0.0, 0.0
        self._bar: ProgressBar | None = None
        self._shapes: dict[int, list[float]] = defaultdict(lambda: [0, 0, 0.0])

    def say(self, text: str) -> None:
        """Print a line."""
        if self.talks:
            print(text, flush=True)  # noqa: T201

    def on_start(self, trainer: Trainer) -> None:
        """Begin to measure."""
        self._begin, self._read = perf_counter(), trainer.worker.status.read_seconds

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Count the step; an epoch's first and last one begin and end a bar."""
        if not self.talks:
            return
        self._note_reading(trainer)
        if trainer.plan.shapes:
            step = 1, report.samples, report.seconds
            both = zip(self._shapes[report.shape], step, strict=True)
            self._shapes[report.shape] = [so_far + new for so_far, new in both]
        if self._bar is None:
            epochs, done = self.epochs, report.step - 1
            epoch, before = epochs.place(done)
            total = (
                None
                if epochs.epoch_steps is None
                else before + (epochs.left(done) or 0)
            )
            self._bar = ProgressBar(
                total, epochs.title(epoch), before=before, started=report.seconds
            )
        self._bar.step(report.losses or report.loss, report.samples)
        if self.epochs.ends(report.step, trainer.requests):
            self._close()

    def _note_reading(self, trainer: Trainer) -> None:
        """Say once, after the first minute, if data is what the ranks wait for."""
        seconds = perf_counter() - self._begin
        if not self._reads_ahead or seconds < FIRST_SECONDS:
            return
        way, self._reads_ahead = self._reads_ahead, ""
        share = (trainer.worker.status.read_seconds - self._read) / seconds
        if share > MUCH_READING:
            text = f"so far, the ranks have waited for data {share:.0%} of the time"
            self.say(f"note: {text}; try {way} to read ahead")

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Print the loss and the user's metrics."""
        text = "  ".join(f"{name} {mean:.4f}" for name, mean in figures.items())
        if not figures:  # the losses of phases are no figures of what the model gives
            text = "nothing to score it by: add metrics(output, target)"
        self.say(f"held-out after epoch {trainer.epoch + 1}: {text}")
        if not math.isfinite(figures.get("loss", 0.0)):
            self.say("warning: the held-out loss is not finite")

    def on_end(self, trainer: Trainer) -> None:
        """Say why the run ends before its time, and what the fullest rank took."""
        self._close()
        for number, (steps, samples, seconds) in sorted(self._shapes.items()):
            shape = trainer.plan.shapes[number]
            mean, rate = show_seconds(seconds / steps), samples / seconds
            self.say(
                f"shape {shape.name}: {steps:.0f} steps of {mean}, {rate:.1f} samples/s"
            )
        transport, device = trainer.transport, trainer.device
        if reason := why_stopped(trainer):
            self.say(f"stopped after step {trainer.step_number}: {reason}")
        used = transport.all_gather_object(peak_bytes(device))
        rank, plan = used.index(max(used)), trainer.plan
        planned = plan.by_rank(plan.peak_bytes)[rank % plan.copy_ranks]
        where = "its process, with Python and PyTorch"
        if device.type == "cuda":
            where = "PyTorch on its GPU"
        self.say(
            f"memory: rank {rank} took most: {show_bytes(used[rank])} in {where}; "
            f"{show_bytes(planned)} of tensors were predicted"
        )

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Leave the last state on the screen, above the report."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Ema(Callback):
    """Averages the weights, older ones less and less; `average` has this rank's.

        average = decay * average + (1 - decay) * weights        after each update

    Of a step with several phases, that is after the last.

    It is torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn, on each rank
    for what it holds. An evaluation sees the averages; buffers are those of the model.
    """

    def __init__(self, decay: float) -> None:
        """Let the weights of an update count `1 - decay`, those before it less."""
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self.count = 0  # of the updates in the average
        self._weights: dict[str, Tensor] = {}
        self._seen = 0  # updates

    def on_load(self, trainer: Trainer) -> None:
        """Make room for the averages."""
        self._updates = trainer.worker.updates
        named = {**trainer.stages.parameters, **self._updates.weights_in_parts}.items()
        self._weights = dict(named)
        self.average = {n: p.detach().clone() for n, p in self._weights.items()}

    def on_start(self, trainer: Trainer) -> None:
        """Begin with the weights, unless a checkpoint had averages."""
        self._seen = trainer.worker.variants.num_updates
        if not self.count:
            self._copy()

    @torch.no_grad()
    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Add the weights if they are new."""
        if self._seen == trainer.worker.variants.num_updates:
            return
        self._seen = trainer.worker.variants.num_updates
        if not self.count:
            self._copy()
        else:
            for name, average in self.average.items():
                average.lerp_(self._weights[name], 1.0 - self.decay)
        self.count += 1

    def on_evaluation_start(self, trainer: Trainer) -> None:
        """Let the evaluation see the averages."""
        self.swap()

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Train on with the weights."""
        self.swap()

    def on_evaluation_failure(self, trainer: Trainer) -> None:
        """Let the checkpoint have the weights, and their averages as such."""
        self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages."""
        for name, average in self.average.items():
            weights = self._weights[name]
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
        self._updates.forget_whole_weights()

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the averages: a checkpoint holds them as it holds the weights."""
        return {EMA_KEY.rstrip("/"): self.average}

    def state_dict(self) -> dict[str, Any]:
        """Return how many updates are in the averages."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the averages of a checkpoint."""
        self.count = state["count"]

    @torch.no_grad()
    def _copy(self) -> None:
        for name, average in self.average.items():
            average.copy_(self._weights[name])
