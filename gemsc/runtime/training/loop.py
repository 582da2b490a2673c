"""The loop over epochs and steps; what happens beside the steps is in callbacks."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from gemsc.base.examples import Examples
from gemsc.base.rng import seed_of
from gemsc.errors import GemscError
from gemsc.plan import Plan, PlannedShape
from gemsc.runtime.checkpoint.files import export_model
from gemsc.runtime.checkpoint.folder import LATEST, MODEL
from gemsc.runtime.checkpoint.manifest import Manifest
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.metrics import figure_names
from gemsc.runtime.data.shapes import ShapeClasses, all_numbers
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.data.tiled import TiledDataset, window_of
from gemsc.runtime.process.failure import is_first
from gemsc.runtime.process.status import REPORTED
from gemsc.runtime.process.stop import StopSignal
from gemsc.runtime.training.callbacks import Callback, Console, Ema, Hooks, Position
from gemsc.runtime.training.checkpoints import Best, Checkpoints, plateaus
from gemsc.runtime.training.evaluation import Evaluator
from gemsc.runtime.training.logs import Log
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

    They are where batches have several shapes, or the file has a `pad_value`.
    """
    shapes = plan.shapes
    if not shapes and user.pad_value is not None:
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
    return ShapeClasses(
        shapes,
        0 if user.pad_value is None else user.pad_value,
        user.bucket,
        user.collate if plan.shapes else None,
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
        self.record = RunRecord(is_kept=self.options.record_run is not None)
        seed = self.trainer.worker.seed
        self.data = self._data("dataset", seed, shuffle=True)
        # what is drawn for evaluation must not be what was drawn for training
        data = self._data("eval_dataset", seed_of(seed, -1), shuffle=False)
        self.evaluator = (
            Evaluator(self.trainer, self.user, data, self.record) if data else None
        )
        self.console = Console(self.trainer, self.total, len(self._batches))
        self.checkpoints: Checkpoints | None = None
        self.trainer.add_callbacks(self._callbacks())

    def _callbacks(self) -> list[Callback]:
        """Return what the options and the user's file ask for, in order."""
        options, best = self.options, None
        each = len(self._batches)
        callbacks: list[Callback] = [Position(self.trainer, self._batches)]
        if options.ema is not None:
            callbacks.append(Ema(options.ema))
        callbacks.append(Hooks(self.user))
        if self.evaluator is not None:
            callbacks.append(best := Best(options.best, options.patience))
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
                each=each,
                total=self.total,
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
    def total(self) -> int:
        """The steps of the whole run, from its first start."""
        steps: int | None = self.options.steps
        return steps or self.options.epochs * len(self._batches)

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ends the run before its last step."""
        return self.trainer.is_leaving and self.trainer.step_number < self.total

    def _data(self, name: str, seed: int, *, shuffle: bool) -> SharedData | None:
        if getattr(self.user, name) is None:
            return None
        items = self.user.make_dataset(name, seed=seed)
        worker = self.trainer.worker
        window = None
        trains_rest = shuffle and self.options.last_batch == "train"
        if isinstance(items, TiledDataset):
            window = window_of(worker.inputs, tuple(items.shape))
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
        batches = Batches(
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
            least=self.plan.micro_batch_sizes if trains_rest else None,
            shapes=shapes,
            numbers=samples,
        )
        shared = SharedData(batches, self.transport, name, self.user.line_of(name))
        if len(batches) == 0:
            wanted = " or ".join(map(str, sizes))
            raise GemscError(
                f"the dataset has {batches.num_samples} samples, one step takes "
                f"{wanted}",
                help="compile with fewer --micro-batches, give more data, or use "
                "--last-batch train",
            )
        if shuffle:
            self._note_shapes(shared)
        return shared

    def _note_shapes(self, shared: SharedData) -> None:
        """Say which shapes have too few samples for a batch."""
        order, place = shared.batches.order, f"{shared.at}: " if shared.at else ""
        for number, each in enumerate(self.plan.shapes):
            count = order.counts[number]
            if count and not order.batches[number] and self.transport.rank == 0:
                text = (
                    f"{place}warning: no batch has shape {each.name}: {count} samples "
                )
                text += f"have it, a batch takes {order.sizes[number]}"
                help = (
                    "--last-batch train, fewer --micro-batches, or bucket() that puts "
                )
                help += "them into a larger shape"
                print(f"{text}\nhelp: {help}", file=sys.stderr, flush=True)  # noqa: T201

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
        each, total = len(self._batches), self.total
        done = self.trainer.worker.steps.done
        if not self._has_steps_left(done, total):
            return
        self.trainer.start()
        while done < total and not self.trainer.is_stopping:
            epoch, first = divmod(done, each)
            self.trainer.epoch = epoch
            self._train_epoch(epoch, first, min(each, first + total - done))
            done = self.trainer.worker.steps.done
            if self.trainer.is_leaving and done % each and done < total:
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

    def _has_steps_left(self, done: int, total: int) -> bool:
        """Whether there is something to do; say what a run goes on from."""
        folder, goes_on = self.options.save, self.options.goes_on
        if goes_on and self.options.resume is None:
            self.console.say(f"{folder} holds no checkpoint yet: from the start")
        if done < total:
            return True
        if not goes_on:
            raise GemscError(
                f"{self.options.resume} has already done {done} of {total} steps",
                help="give more --epochs or --steps: they count from the first start",
            )
        more = "go on from there with more --epochs or --steps"
        self.console.say(f"{folder} has done all of its {total} steps; {more}")
        return False

    def _train_epoch(self, epoch: int, first: int, end: int) -> None:
        assert self.data is not None
        window, reads = self._batches.window, bool(self.trainer.worker.inputs)
        source = self.trainer.worker.status.while_reading(
            self.data.epoch(epoch, first, reads=reads)
        )
        for _, (batch, seen) in zip(range(first, end), source, strict=False):
            input, target = batch.data
            shape = batch.shape
            count = batch.count // self.plan.micro_batch_sizes[shape]
            how: dict[str, Any] = {"micro_batches": count, "shape": shape}
            try:
                with self.record.draws():
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
                return

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
            where = f"checkpoint in {folder}; go on with: gemsc run "
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
        epoch, number = divmod(problem.step - 1, len(batches))
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
