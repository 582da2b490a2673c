"""Runs of a small program on threads, with the options of `gemsc run`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from program_support import WIDTH, Net, on_ranks, written
from torch import Tensor
from torch.utils.data import TensorDataset

from gemsc.errors import SourceLocation
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.loop import Training
from gemsc.runtime.training.predict import Job
from gemsc.runtime.training.trainer import Trainer
from gemsc.user_model import UserModel

T = TypeVar("T")


def simple(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def pairs(count: int = 12, seed: int = 0) -> TensorDataset:
    """Return samples that are always the same."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2, count, WIDTH, generator=generator)
    return TensorDataset(*numbers.to(torch.get_default_dtype()))


class FromTest(UserModel):
    """What a test's file defines, read once: `ast` is for one thread at a time."""

    lock = threading.Lock()
    known: ClassVar[dict[tuple[Path, str], SourceLocation | None]] = {}

    def line_of(self, name: str) -> SourceLocation | None:
        with self.lock:
            if (self.path, name) not in self.known:
                self.known[self.path, name] = super().line_of(name)
            return self.known[self.path, name]


def user_of(**names: Any) -> UserModel:
    """Return what a file defines that has these names; its lines are the test's."""
    frame = sys._getframe(1)
    path = Path(frame.f_code.co_filename)
    module: Any = sys.modules[__name__]
    given: dict[str, Any] = {"dataset": pairs, **names}
    return FromTest(path, module, "model", None, None, **given)


def program(folder: Path, **options: Any) -> Path:
    """Compile the small network: 2 ranks, 2 micro-batches of 2 samples."""
    given: dict[str, Any] = {"ranks": 2, "micro_batches": 2, **options}
    written(folder, Net(simple), **given)
    return folder


def run(
    directory: Path,
    user: UserModel,
    *words: str,
    ranks: int = 2,
    result: Callable[[Trainer], Any] = lambda trainer: trainer.state_dict(),
    **options: Any,
) -> list[Any]:
    """Return what `result(trainer)` gives on each rank after the run."""
    parsed = parse_arguments([str(word) for word in words])
    if parsed.goes_on:
        parsed.resume = parsed.save

    def work(trainer: Trainer) -> Any:
        training = Training(trainer, user, parsed)
        if parsed.resume is not None:
            trainer.resume(parsed.resume)
        training.run()
        return result(trainer)

    return on_ranks(
        directory,
        ranks,
        work,
        optimizer=user.optimizer,
        scheduler=user.scheduler,
        accumulate=parsed.accumulate,
        clip_norm=parsed.clip_norm,
        **options,
    )


def predict_job(folder: Path, source: Path, output: Path, **options: Any) -> Job:
    """Return what `gemsc predict` is asked for, of one picture."""
    given: dict[str, Any] = {
        "program": str(folder),
        "weights": "",
        "pictures": [(str(source), str(output))],
        "level": 0,
        "orientation": None,
        "spacing": None,
        "overlap": None,
        "kind": "scores",
        "threshold": 0.0,
        "device": "cpu",
        "dtype": "float64",
        "constants": {},
    }
    return Job(**given | options)


def predict_on(
    kind: Callable[..., Any], trainer: Trainer, job: Job, user: UserModel | None = None
) -> None:
    """Let a rank do what `gemsc predict` lets it do with the picture of a job."""
    ((source, output),) = job.pictures
    kind(trainer, job, user, source).run(Path(output))
