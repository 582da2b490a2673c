"""The main program of every rank: data, steps, evaluation, checkpoints, failures."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemsc.base.dtypes import cast
from gemsc.base.process import num_cores
from gemsc.base.rng import seed_of
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.data.batches import Batches
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.data.tiled import TiledDataset, window_of
from gemsc.runtime.process.device import claim_device
from gemsc.runtime.process.failure import install_hooks, stop_all
from gemsc.runtime.process.progress import ProgressBar, Status
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.manifest import LATEST, Manifest
from gemsc.runtime.training.program_directory import check_program
from gemsc.runtime.training.recording import record_timed_steps
from gemsc.runtime.training.run_record import RunRecord
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import run_recorded_steps
from gemsc.runtime.transport.mpi import MpiTransport
from gemsc.runtime.transport.transport import Transport
from gemsc.user_model import UserModel, load_user_model

__all__ = ["main", "share_cores", "train"]

Sums = dict[str, float]

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def main(directory: Path, arguments: list[str] | None = None) -> int:
    """Run this rank under mpirun; return the exit code."""
    options, wrong = argparse.Namespace(), None
    try:
        options = parse_arguments(arguments)
    except GemscError as error:
        wrong = str(error)
    else:
        claim_device(_device(options))
    transport = MpiTransport()
    install_hooks(transport)
    try:
        if transport.rank == 0:
            wrong = wrong or _refusal(directory, transport)
        refusal = next((r for r in transport.all_gather_object(wrong) if r), None)
        if refusal is not None:
            if transport.rank == 0:
                print(refusal, file=sys.stderr, flush=True)  # noqa: T201
            transport.close()
            return 1
        share_cores(transport)
        if options.verify_into is not None:
            run_recorded_steps(
                directory, transport, options.verify_into, DTYPES[options.dtype]
            )
        elif options.record_into is not None:
            record_timed_steps(
                directory, transport, options.record_into, options.steps or 1
            )
        else:
            train(directory, transport, options)
        transport.close()
    except BaseException as error:
        stop_all(error, transport, Status.current)
    return 0


def _device(options: argparse.Namespace) -> torch.device | None:
    """Return the device asked for; None leaves the choice."""
    return None if options.device == "auto" else torch.device(options.device)


def _refusal(directory: Path, transport: Transport) -> str | None:
    """Return why the program cannot run, before anything was done."""
    try:
        check_program(directory, transport.size)
    except GemscError as error:
        return str(error)
    return None


def share_cores(transport: Transport) -> None:
    """Let each rank use its part of its machine's cores, unless the user chose."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // transport.local_size))


def train(directory: Path, transport: Transport, options: argparse.Namespace) -> None:
    """Train for the epochs or steps asked for, evaluating after each epoch."""
    plan = Plan.read(directory / "plan.toml")
    if not plan.spec:
        raise GemscError(
            f"{directory} was compiled from Python and has no dataset",
            help="call gemsc.load() and trainer.step() in your own loop",
        )
    user = load_user_model(plan.spec)
    if user.dataset is None:
        raise GemscError(
            f"{user.path} has no dataset()",
            help="add dataset() -> map-style Dataset of (input, target)",
        )
    torch.set_default_dtype(DTYPES[options.dtype])  # also of what forward makes
    trainer = Trainer(
        directory,
        transport,
        optimizer=user.optimizer,
        device=_device(options),
        dtype=None if options.dtype == "float32" else DTYPES[options.dtype],
        seed=options.seed,
        scheduler=user.scheduler,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
    )
    if options.resume is not None:
        trainer.resume(options.resume)
    _Training(trainer, user, plan, options).run()


@dataclass
class _Training:
    """The loop over epochs and steps on one rank."""

    trainer: Trainer
    user: UserModel
    plan: Plan
    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.transport = self.trainer.transport
        self.talks = self.transport.rank == 0
        self.record = RunRecord(is_kept=self.options.record_run is not None)
        self.loss = self.user.make_loss()
        if isinstance(self.loss, torch.nn.Module) and self.loss.state_dict():
            self.loss = None  # it is trained: only the ranks that do know its weights
        seed = self.options.seed
        self.data = self._data("dataset", seed, shuffle=True)
        # what is drawn for evaluation must not be what was drawn for training
        self.eval_data = self._data("eval_dataset", seed_of(seed, -1), shuffle=False)

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
        assert self.data is not None
        each = len(self.data.batches)
        total = self.options.steps or self.options.epochs * each
        done = self.trainer.worker.steps.done
        if done >= total:
            raise GemscError(
                f"{self.options.resume} has already done {done} of {total} steps",
                help="give more --epochs or --steps: they count from the first start",
            )
        while done < total:
            epoch, first = divmod(done, each)
            end = min(each, first + total - done)
            self._train_epoch(
                f"epoch {epoch + 1}/{-(-total // each)}", epoch, first, end
            )
            done += end - first
            self._evaluate(epoch)
            if self.options.save is not None:
                self._check_weights(epoch)
                self.trainer.save(self.options.save)
        if self.options.save is not None:
            self._say(f"saved {self.options.save / 'model.safetensors'}")
        if self.talks and self.options.record_run is not None:
            self.record.write(self.options.record_run)

    def _train_epoch(self, title: str, epoch: int, first: int, end: int) -> None:
        assert self.data is not None
        batches, reads = self.data.batches, bool(self.trainer.worker.program.inputs)
        source = self.data.epoch(epoch, first, reads=reads)
        with closing(ProgressBar(end - first, title, silent=not self.talks)) as bar:
            for batch, seen in itertools.islice(source, end - first):
                input, target = batch.data
                with self.record.draws():
                    loss = self.trainer.step(input, target, window=batches.window)
                self.record.add_step(loss, seen)
                if not math.isfinite(loss):
                    raise self._diverged(f"the loss is {loss}", epoch)
                bar.step(loss, batches.size)

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

    def _evaluate(self, epoch: int) -> None:
        """Print the loss and the user's metrics, means over the samples."""
        if self.eval_data is None:
            return
        total: Sums = defaultdict(float)
        count: Sums = defaultdict(float)
        everyone: list[Any] = self.transport.all_gather_object(
            self._sums(self.eval_data)
        )
        for theirs in everyone:
            for name, value in theirs[0].items():
                total[name] += value
                count[name] += theirs[1][name]
        means = {name: value / count[name] for name, value in total.items()}
        self.record.add_figures({n: (m, int(count[n])) for n, m in means.items()})
        text = "  ".join(f"{name} {mean:.4f}" for name, mean in means.items())
        self._say(f"held-out after epoch {epoch + 1}: {text}")
        if not math.isfinite(means.get("loss", 0.0)):
            self._say("warning: the held-out loss is not finite")

    def _sums(self, data: SharedData) -> tuple[Sums, Sums]:
        """Return sums over samples of loss and metrics on this rank, and their number.

        The ranks compute the loss of full batches. What is left at the end is filled
        up; its loss is that of the whole outputs, without the samples that fill it.
        """
        window, size = data.batches.window, data.batches.size
        sums: Sums = defaultdict(float)
        counts: Sums = defaultdict(float)
        for batch, seen in data.epoch(0):
            self.record.add_evaluated(seen)
            input, target = batch.data
            with self.record.draws():
                result = self.trainer.evaluate(input, target, window=window)
            if result.loss is not None and batch.is_full and self.talks:
                sums["loss"] += result.loss * size
                counts["loss"] += size
            if result.output is None or not batch.real:
                continue
            if window is not None and not window.is_whole:
                continue  # the target is not here as a whole
            if (dtype := self.trainer.worker.float_dtype) is not None:
                target = cast(target, dtype)  # as in training
            cut = [_first(value, batch.real) for value in (result.output, target)]
            found = dict(self.user.metrics(*cut)) if self.user.metrics else {}
            if not batch.is_full and self.loss is not None:
                with torch.no_grad():
                    found["loss"] = self.loss(*cut)
            for name, value in found.items():
                sums[name] += float(value) * batch.real
                counts[name] += batch.real
        return dict(sums), dict(counts)

    def _say(self, text: str) -> None:
        if self.talks:
            print(text, flush=True)  # noqa: T201


def _first(value: Any, count: int) -> Any:
    """Return the first `count` samples of every tensor in a structure."""
    return torch.utils._pytree.tree_map(
        lambda leaf: (
            leaf[:count] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
        ),
        value,
    )
