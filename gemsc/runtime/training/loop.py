"""The loop over epochs and steps; what happens beside the steps is in callbacks."""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemsc.base.rng import seed_of
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.data.tiled import TiledDataset, window_of
from gemsc.runtime.training.bar import Bar
from gemsc.runtime.training.callback import Callback
from gemsc.runtime.training.evaluation import Evaluator
from gemsc.runtime.training.hooks import Hooks
from gemsc.runtime.training.manifest import LATEST, Manifest
from gemsc.runtime.training.run_record import RunRecord
from gemsc.runtime.training.trainer import Trainer
from gemsc.user_model import UserModel

__all__ = ["Training"]


@dataclass
class Training:
    """A run of a program on one rank: its data, its steps, and its callbacks."""

    trainer: Trainer
    user: UserModel
    plan: Plan
    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.transport = self.trainer.transport
        self.talks = self.transport.rank == 0
        self.record = RunRecord(is_kept=self.options.record_run is not None)
        seed = self.options.seed
        self.data = self._data("dataset", seed, shuffle=True)
        # what is drawn for evaluation must not be what was drawn for training
        data = self._data("eval_dataset", seed_of(seed, -1), shuffle=False)
        self.evaluator = (
            Evaluator(self.trainer, self.user, data, self.record) if data else None
        )
        self.trainer.callbacks += self._callbacks()

    def _callbacks(self) -> list[Callback]:
        """Return what the options and the user's file ask for, in order."""
        found: list[Callback] = [Hooks(self.user)]
        if self.talks:
            found.append(Bar(self.total, len(self._batches)))
        return found

    @property
    def _batches(self) -> Batches:
        assert self.data is not None
        return self.data.batches

    @property
    def total(self) -> int:
        """The steps of the whole run, from its first start."""
        steps: int | None = self.options.steps
        return steps or self.options.epochs * len(self._batches)

    def _data(self, name: str, seed: int, *, shuffle: bool) -> SharedData | None:
        if getattr(self.user, name) is None:
            return None
        items = self.user.make_dataset(name, seed=seed)
        worker = self.trainer.worker
        window = None
        if isinstance(items, TiledDataset):
            window = window_of(worker.program.inputs.values(), tuple(items.shape))
        batches = Batches(
            items,
            size := self.plan.batch_size,
            seed=seed,
            shuffle=shuffle,
            workers=self.options.workers,
            part=worker.place.copy,
            num_parts=worker.place.num_copies,
            window=window,
            compare_all=self.record.is_kept,
        )
        shared = SharedData(batches, self.transport, name, self.user.line_of(name))
        if len(batches) == 0:
            raise GemscError(
                f"the dataset has {batches.num_samples} samples, one step takes {size}",
                help="compile with fewer --micro-batches, or give more data",
            )
        return shared

    def run(self) -> None:
        """Make the steps that are left, evaluating and saving after each epoch.

        Raises:
            GemscError: no step is left, or the loss is not finite any more.
        """
        try:
            self._run()
        except BaseException as error:
            self.trainer.tell("on_failure", error)
            raise

    def _run(self) -> None:
        each, total = len(self._batches), self.total
        done = self.trainer.worker.steps.done
        if done >= total:
            raise GemscError(
                f"{self.options.resume} has already done {done} of {total} steps",
                help="give more --epochs or --steps: they count from the first start",
            )
        self.trainer.start()
        while done < total and not self.trainer.is_stopping:
            epoch, first = divmod(done, each)
            self.trainer.epoch = epoch
            self._train_epoch(epoch, first, min(each, first + total - done))
            done = self.trainer.worker.steps.done
            self.trainer.tell("on_epoch", epoch, self._evaluate(epoch))
            self.trainer.agree()
            if self.options.save is not None:
                self._save(self.options.save, epoch)
        if self.trainer.is_stopping:
            self._say_why()
        self.trainer.tell("on_end")
        if self.options.save is not None:
            self._say(f"saved {self.options.save / 'model.safetensors'}")
        if self.talks and self.options.record_run is not None:
            self.record.write(self.options.record_run)

    def _train_epoch(self, epoch: int, first: int, end: int) -> None:
        assert self.data is not None
        window, reads = self._batches.window, bool(self.trainer.worker.program.inputs)
        source = self.trainer.worker.status.while_reading(
            self.data.epoch(epoch, first, reads=reads)
        )
        for batch, seen in itertools.islice(source, end - first):
            input, target = batch.data
            with self.record.draws():
                loss = self.trainer.step(input, target, window=window)
            self.record.add_step(loss, seen)
            if not math.isfinite(loss):
                raise self._diverged(f"the loss is {loss}", epoch)
            if self.trainer.is_stopping:
                return

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Print and return the loss and the user's metrics, means over the samples."""
        if self.evaluator is None:
            return {}
        figures = self.evaluator.run()
        text = "  ".join(f"{name} {mean:.4f}" for name, mean in figures.items())
        self._say(f"held-out after epoch {epoch + 1}: {text}")
        if not math.isfinite(figures.get("loss", 0.0)):
            self._say("warning: the held-out loss is not finite")
        self.trainer.tell("on_evaluation", figures)
        return figures

    def _say_why(self) -> None:
        """Say why the run ends before its time."""
        mine = self.trainer.requests.reason("stop")
        reasons: list[Any] = self.transport.all_gather_object(mine)
        reason = next(filter(None, reasons), "asked to")
        self._say(f"stopped after step {self.trainer.step_number}: {reason}")

    def _save(self, folder: Path, epoch: int) -> None:
        self._check_weights(epoch)
        self.trainer.save(folder)

    def _check_weights(self, epoch: int) -> None:
        """Make sure that a checkpoint is worth to be kept: no loss has seen its update.

        Raises:
            GemscError: a trained parameter of any rank is not finite.
        """
        named = self.trainer.stages.parameters.items()
        wrong = [n for n, p in named if p.requires_grad and not p.isfinite().all()]
        everyone: list[Any] = self.transport.all_gather_object(wrong)
        if names := [name for theirs in everyone for name in theirs]:
            raise self._diverged(f"'{names[0]}' is not finite", epoch)

    def _diverged(self, what: str, epoch: int) -> GemscError:
        """Return what says that training has failed; all ranks raise it."""
        help = "try a smaller learning rate, or --clip-norm 1; look at the data"
        if (folder := self.options.save) is not None and (folder / LATEST).exists():
            step = Manifest.read(folder / LATEST).step
            help += f"; {folder} still holds the checkpoint of step {step}"
        step = self.trainer.worker.steps.done
        return GemscError(f"{what} at step {step}, in epoch {epoch + 1}", help=help)

    def _say(self, text: str) -> None:
        if self.talks:
            print(text, flush=True)  # noqa: T201
