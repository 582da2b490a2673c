"""The loop over epochs and steps; what happens beside the steps is in callbacks."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from itertools import count
from typing import Any

from gemsc.base.examples import Examples
from gemsc.base.rng import seed_of
from gemsc.datasets.samples import joins_samples, num_samples
from gemsc.datasets.stream import ENDLESS
from gemsc.errors import GemscError, warn
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedShape
from gemsc.runtime.checkpoint.files import export_model
from gemsc.runtime.checkpoint.folder import LATEST, MODEL
from gemsc.runtime.checkpoint.manifest import Manifest
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.metrics import figure_names
from gemsc.runtime.data.shapes import ShapeClasses, all_numbers
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.data.stream_batches import StreamBatches, batches_of
from gemsc.runtime.data.tiled import TiledDataset, window_of
from gemsc.runtime.process.failure import is_first
from gemsc.runtime.process.status import REPORTED
from gemsc.runtime.process.stop import StopSignal
from gemsc.runtime.training.callbacks import Callback, Console, Ema, Hooks, Position
from gemsc.runtime.training.checkpoints import Best, Checkpoints, plateaus
from gemsc.runtime.training.epochs import Epochs
from gemsc.runtime.training.evaluation import Evaluator, naming_samples
from gemsc.runtime.training.logs import Log
from gemsc.runtime.training.run_folder import changed_options
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import RunRecord
from gemsc.runtime.worker.finite import (
    ADVICE,
    MOST_NAMED,
    NotFiniteError,
    Problem,
    rows_not_finite,
)
from gemsc.user_model import UserModel


def shape_classes(plan: Plan, user: UserModel, name: str) -> ShapeClasses | None:
    """Return how samples of `dataset` or `eval_dataset` are padded, if they are.

    They are where batches have several shapes, or the file says how to make one.
    """
    shapes, joins = plan.shapes, joins_samples(user.collate)
    if not shapes and (user.pad_value is not None or joins):
        inputs = user.make_shapes()
        examples = Examples(inputs, user.make_targets(inputs))
        shapes = [
            PlannedShape(
                name="of example_inputs()",
                variant="",
                micro_batch_size=plan.micro_batch_size,
                sizes=examples.sizes(0),
                step_seconds=plan.step_seconds,
                peak_bytes=plan.peak_bytes,
            )
        ]
    if not shapes:
        return None
    at = {each: user.line_of(each) for each in ("pad_value", "bucket", "collate")}
    if user.collate is not None and plan.shapes and not joins:
        raise GemscError(
            "collate takes no number of a shape",
            at=at["collate"],
            help="let it take (samples, number), or give it another name",
        )
    return ShapeClasses(
        shapes,
        0 if user.pad_value is None else user.pad_value,
        user.bucket,
        user.collate if joins else None,
        {**at, "dataset": user.line_of(name)},
    )


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
        self._notes: list[str] = []
        self.data = self._data("dataset", seed, shuffle=True)
        # what is drawn for evaluation must not be what was drawn for training
        data = self._data("eval_dataset", seed_of(seed, -1), shuffle=False)
        self.evaluator = (
            Evaluator(self.trainer, self.user, data, self.record) if data else None
        )
        options, is_stream = self.options, isinstance(self._batches, StreamBatches)
        self.epochs = Epochs(self._batches, options.steps, options.epochs)
        more = "" if is_stream else "more --workers"  # a stream has one at most
        ahead = more if options.workers else f"--workers {1 if is_stream else 2}"
        self.console = Console(self.trainer, self.epochs, ahead)
        self.checkpoints: Checkpoints | None = None
        self.trainer.add_callbacks(self._callbacks())

    def _callbacks(self) -> list[Callback]:
        """Return what the options and the user's file ask for, in order."""
        options, best = self.options, None
        callbacks: list[Callback] = [Position(self.trainer, self.epochs)]
        if options.ema is not None:
            callbacks.append(Ema(options.ema))
        callbacks.append(Hooks(self.user))
        if self.evaluator is not None:
            callbacks.append(best := Best(self.epochs, options.best, options.patience))
            if (names := figure_names(self.user.metrics)) is not None:
                best.check(names, self.user.line_of("metrics"))
        elif name := self._needs_evaluations():
            raise GemscError(
                f"{name} needs evaluations, and {self.user.path} has no eval_dataset()",
                help="add eval_dataset(), with samples that are not trained on",
            )
        if options.save is not None:
            callbacks.append(Log(options))
        callbacks.append(self.console)
        if options.save is not None and options.checkpoint_every != "never":
            self.checkpoints = Checkpoints(
                options.save,
                epochs=self.epochs,
                every=options.checkpoint_every,
                keep=options.keep,
                best=best,
                background=options.checkpoint_async,
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
        """Whether a signal ends the run before its last step."""
        is_over = self.epochs.is_over(self.trainer.step_number)
        return self.trainer.is_leaving and not is_over

    @property
    def _reads(self) -> bool:
        """Whether this rank takes anything of a batch in training."""
        return bool(self.trainer.worker.variants.inputs)

    def _data(self, name: str, seed: int, *, shuffle: bool) -> SharedData | None:
        if getattr(self.user, name) is None:
            return None
        items = self.user.make_dataset(name, seed=seed)
        num_samples(items, self.user.line_of(name))
        worker = self.trainer.worker
        window = None
        trains_rest = shuffle and self.options.last_batch == "train"
        if isinstance(items, TiledDataset):
            window = window_of(worker.variants.inputs, tuple(items.shape))
        whole_targets = "none"
        if not shuffle and worker.program.tile == 0:  # where outputs may be
            whole_targets = "last" if self.user.metrics is None else "all"
        sizes, place = self.plan.batch_sizes, worker.place
        part, num_parts = place.copy, place.num_copies
        shapes = shape_classes(self.plan, self.user, name)
        if not shuffle and self.user.eval_windows is not None:
            sizes, part, num_parts = [1], 0, 1  # whole cases, one at a time
            shapes = None
        samples = all_numbers(shapes, items, seed, self.transport)
        batches = batches_of(
            items,
            sizes,
            seed=seed,
            shuffle=shuffle,
            workers=self.options.workers,
            pinned=self.trainer.device.type == "cuda",
            part=part,
            num_parts=num_parts,
            window=window,
            whole_targets=whole_targets,
            compare_all=self.record.is_kept,
            keeps_marks=shuffle and self.options.save is not None,
            least=self.plan.micro_batch_sizes if trains_rest else None,
            shapes=shapes,
            numbers=samples,
        )
        if trains_rest and batches.num_samples == ENDLESS:
            raise GemscError(
                "--last-batch train needs to know how many samples an epoch has",
                at=self.user.line_of(name),
                help="return gemsc.Stream(..., samples=...) from dataset(), or leave "
                "out the option",
            )
        shared = SharedData(batches, self.transport, name, self.user.line_of(name))
        if len(batches) == 0:
            raise self._too_few(name, batches.num_samples, shuffle, trains_rest)
        if shuffle and not shared.split(reads=self._reads):
            self._notes.append(
                f"note: {name}() is not split: each of the {batches.num_copies} "
                "replicas reads all of it, and drops what is not its own"
            )
        if shuffle:
            self._note_shapes(shared)
        return shared

    def _too_few(
        self, name: str, count: int, is_trained: bool, trains_rest: bool
    ) -> GemscError:
        """Return the error of a dataset that fills no batch."""
        what, least = "one step", self.plan.batch_sizes
        help = "compile with fewer --micro-batches, give more data, or use "
        help += "--last-batch train"
        if trains_rest:
            what, least = "one micro-batch", self.plan.micro_batch_sizes
            help = "give more data, or compile with smaller example_inputs()"
        elif not is_trained:
            what, least, help = "an evaluation", [1], f"give data, or no {name}()"
        wanted = " or ".join(map(str, least))
        return GemscError(
            f"{name}() has {count} samples, {what} takes {wanted}",
            at=self.user.line_of(name),
            help=help,
        )

    def _note_shapes(self, shared: SharedData) -> None:
        """Say which shapes have too few samples for a batch."""
        order = shared.batches.order
        for number, each in enumerate(self.plan.shapes):
            count = order.counts[number]
            if count and not order.batches[number] and self.transport.rank == 0:
                warn(
                    f"no batch has shape {each.name}: {count} samples have it, a batch "
                    f"takes {order.sizes[number]}",
                    at=shared.at,
                    help="--last-batch train, fewer --micro-batches, or bucket() that "
                    "puts them into a larger shape",
                )

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
        epochs = self.epochs
        done = self.trainer.worker.steps.done
        if not self._has_steps_left(done):
            return
        for note in self._notes:
            self.console.say(note)
        self.trainer.start()
        while not epochs.is_over(done) and not self.trainer.is_stopping:
            epoch, first = epochs.place(done)
            self.trainer.epoch = epoch
            has_ended = self._train_epoch(epoch, first)
            done = self.trainer.worker.steps.done
            if self.trainer.is_leaving and not has_ended and not epochs.is_over(done):
                break
            figures = self._evaluate()
            self.trainer.agree()
            self.trainer.tell("on_epoch", epoch, figures)
            self.trainer.agree()
        StopSignal.answer()
        if self.checkpoints is not None:
            self.checkpoints.save(self.trainer)
            self.trainer.finish_saving()
        if self.is_interrupted:
            self._leave(done)
            return
        self.trainer.tell("on_end")
        if self.checkpoints is not None:
            folder = self.checkpoints.folder
            if self.console.talks:  # one plain file, from the last checkpoint
                export_model(folder, folder / MODEL, is_new=True)
            self.console.say(f"saved {folder / MODEL}")
        if self.console.talks and self.options.record_run is not None:
            self.record.write(self.options.record_run)

    def _say_end(self, epoch: int, steps: int, *, ends: bool) -> None:
        """Say where an epoch has ended sooner for some replicas than for others."""
        place = self.trainer.worker.place
        mine = (place.copy, ends) if self._reads else None
        found = [*filter(None, self.transport.all_gather_object(mine))]
        ended = sorted({copy + 1 for copy, ends in found if ends})
        if len(ended) < len({copy for copy, _ in found}):
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
        if not self.epochs.is_over(done):
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
            self.data.epoch(epoch, first, requests=requests, reads=self._reads)
        )
        left = self.epochs.left(self.trainer.step_number)
        numbers = count(first) if left is None else range(first, first + left)
        for number, (batch, seen) in zip(numbers, source, strict=False):
            (input, target), ends = batch.data, batch.ends
            shape = batch.shape
            whole = batch.count // self.plan.micro_batch_sizes[shape]
            how: dict[str, Any] = {"micro_batches": whole, "shape": shape}
            naming = naming_samples(self.trainer, self._batches, epoch, number)
            try:
                with self.record.draws(), naming:
                    loss = self.trainer.step(input, target, window=window, **how)
            except NotFiniteError as error:
                for note in self._where(error.problem, batch.data):
                    error.add_note(note)
                error.help = self._advice()
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
        self.trainer.tell("on_evaluation_start")
        figures = self.evaluator.run()
        self.trainer.tell("on_evaluation", figures)
        return figures

    def _leave(self, done: int) -> None:
        """Say how to go on."""
        folder = self.options.save
        where = "no checkpoint: none was asked for"
        if self.checkpoints is not None:
            where = f"checkpoint in {folder}; resume with: gemsc run "
            where += shlex.join([str(self.trainer.directory), *self._arguments()])
        text = f"stopped on request at step {done}; {where}"
        if self.console.talks and is_first(REPORTED, text):
            self.console.say(text)

    def _arguments(self) -> list[str]:
        """Return the options of this run, with those that let it go on."""
        words = [word for word in self.options.typed if word != "--overwrite"]
        if "--resume" in words:
            at = words.index("--resume")
            has_folder = at + 1 < len(words) and not words[at + 1].startswith("-")
            del words[at : at + 1 + has_folder]
        if not any(word.split("=")[0] == "--save" for word in words):
            words += ["--save", str(self.options.save)]
        return [*words, "--resume"]

    def _where(self, problem: Problem, data: Any) -> list[str]:
        """Return in which samples of the step's batch a problem is; all ranks call it.

        `data` is what this rank has read of the batch.
        """
        batches, place = self._batches, self.trainer.worker.place
        epoch, number = self.epochs.place(problem.step - 1)
        row = next(batches.rows(epoch, number))
        indices, size = row.indices, self.plan.micro_batch_sizes[row.shape]
        found = [
            f"micro-batch {m} has samples "
            + ", ".join(map(str, indices[m * size :][:size]))
            for m in list(problem.losses)[:MOST_NAMED]
        ]
        own = indices[place.copy * batches.size_of(row) // place.num_copies :]
        own = [own[row] for row in rows_not_finite(data) if row < len(own)]
        everyone = self.transport.all_gather_object(own)
        wrong = sorted({index for theirs in everyone for index in theirs})
        found += [f"sample {i} holds NaN or infinity" for i in wrong[:MOST_NAMED]]
        return [f"in epoch {epoch + 1}", *found]

    def _advice(self) -> str:
        help = f"{ADVICE}; --on-nonfinite skip leaves such updates out"
        if (folder := self.options.save) is not None and (folder / LATEST).exists():
            step = Manifest.read(folder / LATEST).step
            help += f"; {folder} still holds the checkpoint of step {step}"
        return help
