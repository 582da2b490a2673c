"""The main program of a rank that predicts: `gemsc predict` starts it with a job.

Every rank reads what its stage takes of each window. The ranks that have the model's
output bring it to the first of them, which writes the file row by row.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from gemsc.base.units import show_bytes
from gemsc.errors import GemscError
from gemsc.runtime.data.tiled import window_of
from gemsc.runtime.prediction.pictures import (
    Picture,
    as_input,
    as_picture,
    picture_among,
)
from gemsc.runtime.process.progress import ProgressBar
from gemsc.runtime.process.stop import STOPPING
from gemsc.runtime.training.load import load
from gemsc.runtime.training.logs import peak_bytes
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.transport import LARGEST_TAG
from gemsc.slides.mask import write_rows
from gemsc.slides.slide import Slide
from gemsc.slides.windows import Windows, WindowSpan
from gemsc.user_model import UserModel, load_user_model

__all__ = ["Job", "main"]

DTYPES = {"float32": None, "float64": torch.float64}
Place = tuple[WindowSpan, WindowSpan]  # of a window: rows, columns
_Holder = tuple[int, tuple[int, ...], str]  # rank, shape and dtype of its pictures


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked for; `weights` is a file of them, `output` a file to write."""

    program: str
    weights: str
    slide: str
    level: int
    output: str
    overlap: int
    kind: str
    threshold: float
    device: str
    dtype: str

    def write(self, path: Path) -> None:
        """Write it for the ranks."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_bytes()))


def main(path: Path) -> None:
    """Run this rank under mpirun."""
    job = Job.read(path)
    wanted = None if job.device == "auto" else torch.device(job.device)
    trainer = load(job.program, device=wanted, dtype=DTYPES[job.dtype])
    for number in STOPPING:  # there is nothing to save
        signal.signal(number, signal.SIG_DFL)
    trainer.resume(job.weights)
    plan = trainer.plan
    user = load_user_model(plan.spec, constants=plan.constants) if plan.spec else None
    start = time.perf_counter()
    prediction = Prediction(trainer, job, user)
    prediction.run()
    transport = trainer.transport
    peaks: list[Any] = transport.all_gather_object(peak_bytes(trainer.device))
    if transport.rank == 0:
        height, width = prediction.windows.size
        print(  # noqa: T201
            f"{len(prediction.windows)} windows of {height} x {width} pixels, overlap "
            f"{job.overlap}, in {time.perf_counter() - start:.0f} s; a rank took at "
            f"most {show_bytes(max(peaks))} of memory",
            flush=True,
        )
    transport.close()


class Prediction:
    """A slide on its way through one rank."""

    def __init__(self, trainer: Trainer, job: Job, user: UserModel | None) -> None:
        self.trainer, self.job, self.user = trainer, job, user
        self.slide = Slide(job.slide, job.level)
        inputs = trainer.program.inputs.values()
        found: list[Any] = trainer.transport.all_gather_object(picture_among(inputs))
        self.picture: Picture = next(each for each in found if each is not None)
        size = self.picture.size
        self.windows = Windows(self.slide.shape[:2], size, job.overlap)
        self.part = window_of(inputs, size)  # what this rank takes of each
        self.reads = any(item.path[0] == "input" for item in inputs)

    def run(self) -> None:
        """Predict all windows; the rank that has the outputs writes the file."""
        pictures = self._pictures()
        first = next(pictures, None)
        if first is None:
            return
        shape = (*self.slide.shape[:2], *first.shape[2:])
        bands = self._bands(itertools.chain([first], pictures), first)
        write_rows(Path(self.job.output), bands, shape, first.dtype)

    def _bands(
        self, pictures: Iterator[NDArray[Any]], like: NDArray[Any]
    ) -> Iterator[NDArray[Any]]:
        """Yield what is kept of the windows in each row, side by side."""
        for row in self.windows.rows:
            height, width = row.kept[1] - row.kept[0], self.slide.shape[1]
            band = np.empty((height, width, *like.shape[2:]), like.dtype)
            for column in self.windows.columns:
                picture = next(pictures)[row.inside, column.inside]
                band[:, slice(*column.kept)] = picture
            yield band

    def _pictures(self) -> Iterator[NDArray[Any]]:
        """Yield what is to be written of each window, on the rank that writes."""
        trainer, places = self.trainer, list(self.windows)
        size, target = trainer.plan.batch_size, self._no_target()
        full = places + places[-1:] * (-len(places) % size)
        batches = [full[i : i + size] for i in range(0, len(full), size)]
        is_first = trainer.transport.rank == 0
        bar = ProgressBar(len(batches), "predict") if is_first else None
        left = len(places)
        holders: list[_Holder] | None = None
        for input in trainer.worker.status.while_reading(self._inputs(batches)):
            found = trainer.evaluate(input, target, window=self.part)
            mine = self._drawn(found.output)
            if holders is None:
                holders = self._holders(mine)
            yield from self._brought(mine, holders)[:left]
            left -= size
            if bar is not None:
                bar.step(None, size)
        if bar is not None:
            bar.close()

    # ------------------------------------------------ what goes into the model

    def _inputs(self, batches: Sequence[Sequence[Place]]) -> Iterator[Any]:
        """Yield this rank's part of each batch; a thread reads the next one."""
        place = self.trainer.worker.place
        size = len(batches[0]) // place.num_copies
        own = [batch[place.copy * size :][:size] for batch in batches]
        with ThreadPoolExecutor(1) as thread:
            ahead = thread.submit(self._read, own[0])
            for following in (*own[1:], ()):
                input = ahead.result()
                ahead = thread.submit(self._read, following)
                yield input

    def _read(self, places: Sequence[Place]) -> Any:
        if not self.reads or not places:
            return ()
        regions = (
            self.windows.read(self.slide, *place, self.part.box) for place in places
        )
        if self.user is None or self.user.predict_input is None:
            samples = [as_input(region, self.picture) for region in regions]
        else:
            samples = [self.user.call("predict_input", region) for region in regions]
        return default_collate(samples)

    def _no_target(self) -> Any:
        """Return zeros for what the loss takes here: a program computes it, too."""
        program = self.trainer.program
        target: Any = {}
        for item in program.inputs.values():
            if item.path[0] != "target":
                continue
            shape = self.part.shape_of(item.shape)
            if item.batched:
                shape = (program.copy_micro_batches * shape[0], *shape[1:])
            zeros = torch.zeros(shape, dtype=item.dtype)
            if len(item.path) == 1:
                return zeros
            nest = target
            for part in item.path[1:-1]:
                nest = nest.setdefault(part, {})
            nest[item.path[-1]] = zeros
        return target

    # ------------------------------------------------ what comes out of it

    def _drawn(self, output: Any) -> NDArray[Any] | None:
        """Return what is written of the windows of this copy, None without output."""
        if output is None:
            return None
        count = self.trainer.plan.batch_size // self.trainer.worker.place.num_copies
        return np.stack([self._picture(output, i) for i in range(count)])

    def _picture(self, output: Any, number: int) -> NDArray[Any]:
        job, size = self.job, self.picture.size
        one = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[number], output)
        if self.user is None or self.user.predict_output is None:
            return as_picture(one, size, job.kind, job.threshold)
        found = np.asarray(self.user.call("predict_output", one))
        if found.ndim not in (2, 3) or found.shape[:2] != size:
            raise GemscError(
                f"predict_output returns the shape {list(found.shape)} for a window of "
                f"{size[0]} x {size[1]} pixels",
                at=self.user.line_of("predict_output"),
                help="return height x width, or height x width x channels",
            )
        return found.astype(np.uint8) if found.dtype == bool else found

    def _holders(self, mine: NDArray[Any] | None) -> list[_Holder]:
        """Return who has outputs, in the order of the windows; the first one writes."""
        facts = None if mine is None else (mine.shape, mine.dtype.str)
        everyone: list[Any] = self.trainer.transport.all_gather_object(facts)
        return [(rank, *each) for rank, each in enumerate(everyone) if each is not None]

    def _brought(
        self, mine: NDArray[Any] | None, holders: Sequence[_Holder]
    ) -> list[NDArray[Any]]:
        """Return the pictures of the batch on the rank that writes, none elsewhere."""
        transport = self.trainer.transport
        writer, rank = holders[0][0], transport.rank
        if mine is None:
            return []
        if rank != writer:
            data = torch.from_numpy(mine.reshape(-1).view(np.uint8))
            transport.wait(transport.send(data, writer, LARGEST_TAG))
            return []
        found = [*mine]
        for other, shape, dtype in holders[1:]:
            theirs = np.empty(shape, dtype)
            data = torch.from_numpy(theirs.reshape(-1).view(np.uint8))
            transport.wait(transport.receive(data, other, LARGEST_TAG))
            found += [*theirs]
        return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
