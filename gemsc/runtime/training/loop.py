"""The loop over epochs and steps; what happens beside the steps is in callbacks."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gemsc.base.rng import seed_of
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.files import export_model
from gemsc.runtime.checkpoint.folder import MODEL, way_on
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.metrics import figure_names
from gemsc.runtime.data.stream_batches import StreamBatches
from gemsc.runtime.process.failure import is_first
from gemsc.runtime.process.status import REPORTED
from gemsc.runtime.process.stop import StopSignal
from gemsc.runtime.training.alike import SameCopies
from gemsc.runtime.training.arguments import to_resume
from gemsc.runtime.training.callbacks import Callback, Console, Ema, Hooks
from gemsc.runtime.training.checkpoints import (
    Best,
    Checkpoints,
    Position,
    plateaus,
)
from gemsc.runtime.training.datasets import Datasets
from gemsc.runtime.training.epochs import Epochs
from gemsc.runtime.training.evaluation import Evaluator, naming_samples
from gemsc.runtime.training.logs import Log
from gemsc.runtime.training.run_checks import (
    LabelsThatCount,
    RoundedNumbers,
    SameNumbers,
    StepsOfScheduler,
    warn_of_length,
)
from gemsc.runtime.training.run_folder import changed_options
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import RunRecord
from gemsc.runtime.worker.finite import (
    MOST_NAMED,
    NotFiniteError,
    Problem,
    rows_not_finite,
)
from gemsc.user_model import UserModel

# what `--on-nonfinite` makes of an update
DONE = {"skip": "this update is left out", "warn": "the update was made"}


@dataclass
class Training:
    """A run of a program on one rank: its data, its steps, and its callbacks."""

    trainer: Trainer
    user: UserModel
    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.plan, self.transport = self.trainer.plan, self.trainer.transport
        self.record = RunRecord.begin(self.trainer.worker, self.options.record_run)
        seed = self.trainer.worker.seed
        worker, is_kept = self.trainer.worker, self.record.is_kept
        self.datasets = Datasets(worker, self.plan, self.user, self.options, is_kept)
        self.data = self.datasets.of("dataset", seed, shuffle=True)
        # what is drawn for evaluation must not be what was drawn for training
        data = self.datasets.of("eval_dataset", seed_of(seed, -1), shuffle=False)
        self.evaluator = (
            Evaluator(self.trainer, self.user, data, self.record) if data else None
        )
        options, is_stream = self.options, isinstance(self._batches, StreamBatches)
        self.epochs = Epochs(self._batches, options.steps, options.epochs)
        more = "" if is_stream else "more --workers"  # a stream has one at most
        ahead = more if options.workers else f"--workers {1 if is_stream else 2}"
        self.console = Console(self.trainer, self.epochs, ahead)
        self.checkpoints: Checkpoints | None = None
        self.best: Best | None = None
        self.trainer.add_callbacks(self._callbacks())

    def _callbacks(self) -> list[Callback]:
        """Return what the options and the user's file ask for, in order."""
        options = self.options
        callbacks: list[Callback] = [Position(self.trainer, self.epochs)]
        callbacks.append(StepsOfScheduler())
        if options.ema is not None:
            callbacks.append(Ema(options.ema))
        if options.record_run is None:  # the plain loop beside it has none
            callbacks.append(Hooks(self.user))
        if self.evaluator is not None:
            self.best = Best(self.epochs, options.best, options.patience)
            callbacks.append(self.best)
            if (names := figure_names(self.user.metrics)) is not None:
                self.best.check(names, self.user.line_of("metrics"))
        elif name := self._needs_evaluations():
            raise GemscError(
                f"{name} needs evaluations, and {self.user.path} has no eval_dataset()",
                help="add eval_dataset(), with samples that are not trained on",
            )
        if options.save is not None:
            callbacks.append(Log(options, self.epochs))
        callbacks += [self.console, SameCopies(), SameNumbers()]
        callbacks += [LabelsThatCount(), RoundedNumbers()]
        if options.save is not None and options.checkpoint_every != "never":
            self.checkpoints = Checkpoints(
                options.save,
                epochs=self.epochs,
                every=options.checkpoint_every,
                keep=options.keep,
                best=self.best,
                background=options.checkpoint_async,
                source=options.resume,
            )
            callbacks.append(self.checkpoints)  # last: it saves the state of the others
        return callbacks

    def _needs_evaluations(self) -> str:
        """Return what cannot do without evaluations, if anything."""
        options, has_hook = self.options, self.user.on_epoch or self.user.on_step
        if options.best is not None or options.patience is not None:
            return "--best" if options.patience is None else "--patience"
        waits = not has_hook and plateaus(self.trainer)  # a hook may step it
        return "ReduceLROnPlateau" if waits else ""

    @property
    def _batches(self) -> Batches:
        assert self.data is not None
        return self.data.batches

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ends the run before its last step, or a request to stop."""
        is_over = self.epochs.is_over(self.trainer.step_number)
        is_over = is_over or self.trainer.requests.agreed("stop")
        return self.trainer.is_leaving and not is_over

    def run(self) -> None:
        """Make the steps that are left, evaluating and saving after each epoch.

        Raises:
            GemscError: no step is left, or a loss or gradient is not finite.
        """
        try:
            self._run()
        except BaseException as error:
            self.trainer.tell("on_failure", error)
            raise
        finally:
            self._batches.close()
            if self.evaluator is not None:
                self.evaluator.data.batches.close()

    def _run(self) -> None:
        if not self._has_steps_left(self.trainer.worker.steps.done):
            self._export()  # a kill may have left that out
            return
        for note in self.datasets.notes:
            self.console.say(note)
        if self.evaluator is not None:
            self.evaluator.check_first()
        warn_of_length(self.trainer, self.epochs.total)
        self.trainer.start()
        try:
            done = self._train()
        except Exception as error:
            if self.options.save is not None and (way := way_on(self.options.save)):
                error.add_note(way)
            raise
        StopSignal.answer()
        if self.checkpoints is not None:
            self.checkpoints.save(self.trainer)
            self.trainer.finish_saving()
        if self.is_interrupted:
            self._leave(done)
        else:
            self._end()

    def _end(self) -> None:
        """Say what was made, and write the weights as one plain file."""
        self.trainer.tell("on_end")
        self._export()
        if left := self.trainer.worker.steps.waiting:
            steps = f"{left} step{'s' * (left > 1)} at the end made no update"
            self.console.say(f"note: {steps} (--accumulate {self.options.accumulate})")
        if self.console.talks and self.options.record_run is not None:
            self.record.write(self.options.record_run)

    def _export(self) -> None:
        """Write the weights of the last checkpoint as one plain file."""
        if self.checkpoints is not None:
            folder = self.checkpoints.folder
            if self.console.talks:
                export_model(folder, folder / MODEL, is_new=True)
            self.console.say(f"saved {folder / MODEL}")
            self._say_what_was_best(folder)

    def _say_what_was_best(self, folder: Path) -> None:
        """Say how to get the weights that evaluations judged, if they are others."""
        best, done = self.best, self.trainer.step_number
        averages = self.options.ema is not None
        what, words = "the averages" if averages else "", str(folder)
        if best and best.is_asked_for and best.step not in (0, done):
            what, words = f"the best, of step {best.step}", f"{folder / 'best'}"
        if what:
            words += " --ema" * averages
            self.console.say(f"{what}: gemsc export {words} -o FILE.safetensors")

    def _train(self) -> int:
        """Make all steps and evaluations that are left; return how many steps are done.

        First the evaluation of an epoch that has ended, if it is owed.
        """
        epochs, done = self.epochs, self.trainer.worker.steps.done
        owes = epochs.owes_end
        while owes or not (epochs.is_over(done) or self.trainer.is_stopping):
            epoch, first = epochs.place(done)
            if owes and not first:
                epoch -= 1
            self.trainer.epoch = epoch
            has_ended = owes or self._train_epoch(epoch, first)
            owes, done = False, self.trainer.worker.steps.done
            if self.is_interrupted and not has_ended:
                self.trainer.agree()  # a hook may have asked to stop
            if self.is_interrupted and not has_ended:
                break
            if epoch == 0 and (self.evaluator or self.user.on_epoch):
                self._save_early()
            figures = self._evaluate()
            self.trainer.agree()
            epochs.owes_end = False
            self.trainer.tell("on_epoch", epoch, figures)
            self.trainer.agree()
        return done

    def _say_end(self, epoch: int, steps: int, *, ends: bool) -> None:
        """Say where an epoch has ended sooner for some replicas than for others."""
        place = self.trainer.worker.place
        mine = (place.copy, ends) if self.datasets.reads else None
        copies = [*filter(None, self.transport.all_gather_object(mine))]
        ended = sorted({copy + 1 for copy, ends in copies if ends})
        if len(ended) < len({copy for copy, _ in copies}):
            count = "1 step" if steps == 1 else f"{steps} steps"
            who = f"replica{'s' * (len(ended) > 1)} {', '.join(map(str, ended))}"
            self.console.say(
                f"epoch {epoch + 1} ends after {count}, with the data of {who}; what "
                "the others had left is not used"
            )

    def _has_steps_left(self, done: int) -> bool:
        """Whether there is something to do; say what a run goes on from."""
        folder, goes_on = self.options.save, self.options.goes_on
        if goes_on and self.options.resume is None:
            self.console.say(f"{folder} holds no checkpoint yet: from the start")
        if "Ema" in self.trainer.dropped:
            text = "warning: the checkpoint has averages of the weights, this run keeps"
            self.console.say(f"{text} none\nhelp: resume with --ema, or they are lost")
        if goes_on and self.best is not None and self.best.is_over:
            self.console.say(f"{folder} has ended: {self.best.reason}")
            return False
        if self.epochs.owes_end or not self.epochs.is_over(done):
            if why := self.epochs.stopped:
                text = f"note: this run was stopped after step {done} ({why})"
                self.console.say(f"{text}, and trains on")
            if done and (changes := changed_options(self.options, done)):
                text = "note: this run continues with other options than it had"
                self.console.say(f"{text}: {', '.join(changes)}")
            return True
        if not goes_on:
            raise GemscError(
                f"{self.options.resume} has already done {done} of {self.epochs}"
                if self.epochs.total is not None
                else f"{self.options.resume} has already done all of {self.epochs}",
                help="give more --epochs or --steps: they count from the first start",
            )
        more = "resume with more --epochs or --steps"
        self.console.say(f"{folder} has done all of its {self.epochs}; {more}")
        return False

    def _train_epoch(self, epoch: int, first: int) -> bool:
        """Make the steps of an epoch; return whether it has come to its end."""
        assert self.data is not None
        window, ends = self._batches.window, False
        requests = self.trainer.requests
        source = self.trainer.worker.status.while_reading(
            self.data.epoch(epoch, first, requests=requests, reads=self.datasets.reads)
        )
        left = self.epochs.left(self.trainer.step_number)
        numbers = count(first) if left is None else range(first, first + left)
        for number, (batch, seen) in zip(numbers, source, strict=False):
            (input, target), ends = batch.data, batch.ends
            shape = batch.shape
            whole = batch.count // self.plan.micro_batch_sizes[shape]
            how: dict[str, Any] = {"micro_batches": whole, "shape": shape}
            naming = naming_samples(self.trainer, self.data, epoch, number)
            try:
                with self.record.draws(), naming:
                    loss = self.trainer.step(input, target, window=window, **how)
            except NotFiniteError as error:
                for note in self._where(error.problem, batch.data):
                    error.add_note(note)
                help = f"{error.help}; --on-nonfinite skip leaves such updates out"
                error.help = help
                raise
            self.record.add_step(loss, seen)
            if (problem := self.trainer.worker.problem) is not None:
                where = "; ".join(self._where(problem, batch.data))
                done = DONE[self.options.on_nonfinite]
                self.console.say(f"warning: {problem}, {where}: {done}")
            if self.trainer.is_stopping:
                break
        step = self.trainer.step_number
        if requests.agreed("end"):
            self._say_end(epoch, step - self.epochs.start, ends=ends)
        return self.epochs.end(step, requests)

    def _evaluate(self) -> dict[str, float]:
        """Return the loss and the user's metrics, means over the held-out samples."""
        if self.evaluator is None:
            return {}
        assert self.best is not None
        self.trainer.tell("on_evaluation_start")
        figures, problem = self.evaluator.run()
        if problem is not None:
            self.trainer.tell("on_evaluation_failure")
        else:
            self.trainer.tell("on_evaluation", figures)
            problem = self.best.problem
        if problem is not None:
            self._save_early()
            raise problem
        return figures

    def _save_early(self) -> None:
        """Save what is trained, without the evaluation, which is made on `--resume`."""
        if self.checkpoints is not None:
            self.epochs.owes_end = True
            self.checkpoints.save(self.trainer)

    def _leave(self, done: int) -> None:
        """Say how to go on."""
        folder = self.options.save
        where = "no checkpoint: none was asked for"
        if self.checkpoints is not None:
            where = f"checkpoint in {folder}; resume with: gemsc run "
            where += shlex.join([str(self.trainer.directory), *to_resume(self.options)])
        text = f"stopped on request at step {done}; {where}"
        if self.console.talks and is_first(REPORTED, text):
            self.console.say(text)

    def _where(self, problem: Problem, data: Any) -> list[str]:
        """Return in which samples of the step's batch a problem is; all ranks call it.

        `data` is what this rank has read of the batch.
        """
        batches, place = self._batches, self.trainer.worker.place
        epoch, number = self.epochs.place(problem.step - 1)
        row = next(batches.rows(epoch, number))
        indices, size = row.indices, self.plan.micro_batch_sizes[row.shape]
        lines = [
            f"micro-batch {m} has samples "
            + ", ".join(map(str, indices[m * size :][:size]))
            for m in list(problem.losses)[:MOST_NAMED]
        ]
        mine = indices[place.copy * batches.size_of(row) // place.num_copies :]
        mine = [mine[row] for row in rows_not_finite(data) if row < len(mine)]
        everyone = self.transport.all_gather_object(mine)
        wrong = sorted({index for theirs in everyone for index in theirs})
        lines += [f"sample {i} holds NaN or infinity" for i in wrong[:MOST_NAMED]]
        return [f"in epoch {epoch + 1}", *lines]
