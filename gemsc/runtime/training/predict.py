"""The main program of a rank that predicts: `gemsc predict` starts it with a job.

Every rank reads what its stage takes of each window. The ranks that have the model's
output bring it to the first of them, which writes a slide row by row, and a volume once
all its windows are blended. What pixels become for the model, and what its output
becomes in the file, can be said in the model's file: `predict_input(region)`,
`predict_output(output)`.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from gemsc.base.units import show_bytes
from gemsc.errors import GemscError
from gemsc.runtime.data.metrics import sample_of
from gemsc.runtime.data.tiled import window_of
from gemsc.runtime.process.device import peak_bytes
from gemsc.runtime.process.progress import ProgressBar
from gemsc.runtime.process.stop import STOPPING
from gemsc.runtime.training.evaluation import (
    Holders,
    evaluate_case,
    picture_of_all,
    zero_target,
)
from gemsc.runtime.training.train import load
from gemsc.runtime.training.trainer import Trainer
from gemsc.slides.mask import write_rows
from gemsc.slides.slide import Slide
from gemsc.slides.volume import Volume, is_volume
from gemsc.slides.windows import Case, Picture, Place, SlidingWindows, Windows
from gemsc.user_model import UserModel, load_user_model

KINDS = ("mask", "probabilities", "scores")
INPUT_HELP = "define predict_input(region) in the model's file: docs/whole-slides.md"
OUTPUT_HELP = "define predict_output(output) in the model's file, which returns a NumPy"
OUTPUT_HELP += " array of that size"


def as_input(region: NDArray[Any], picture: Picture) -> Tensor:
    """Return pixels from 0 to 1, as the model takes them; floats stay as they are.

    Raises:
        GemscError: the slide has other channels than the model takes.
    """
    if region.shape[-1] != picture.channels:
        raise GemscError(
            f"the picture has {region.shape[-1]} channels, but the model expects "
            f"{picture.channels}",
            help=INPUT_HELP,
        )
    scaled = region.astype(np.float32)
    if region.dtype.kind in "iu":
        scaled /= np.iinfo(region.dtype).max
    if picture.is_channels_first:
        scaled = np.moveaxis(scaled, -1, 0)
    return torch.from_numpy(np.ascontiguousarray(scaled))


def as_picture(
    output: Any, size: tuple[int, ...], kind: str, threshold: float
) -> NDArray[Any]:
    """Return what is written of the output for a window or a volume of this size.

    Its last axis has the channels, if there are any. A mask has the class with the
    highest score; of a single channel, 1 where the score is above the threshold, or
    the classes themselves if it has whole numbers.

    Raises:
        GemscError: the output is no picture of this size, or has no scores.
    """
    if not isinstance(output, Tensor):
        what = "dict" if isinstance(output, dict) else type(output).__name__
        raise GemscError(f"the model returns a {what}: not a picture", help=OUTPUT_HELP)
    scores, dims = output, len(size)
    if scores.dim() == dims:
        scores = scores[None]
    is_last = scores.shape[:dims] == size and scores.shape[1:] != size
    if scores.dim() == dims + 1 and is_last:
        scores = scores.movedim(-1, 0)
    if scores.dim() != dims + 1 or scores.shape[1:] != size:
        raise GemscError(
            f"the model returns {list(output.shape)} for a picture of "
            f"{' x '.join(map(str, size))}: the sizes do not match",
            help=OUTPUT_HELP,
        )
    is_float = scores.is_floating_point()
    if kind == "probabilities" and not is_float:
        raise GemscError(
            f"the model returns {scores.dtype}: classes, which have no probabilities",
            help="--output-kind mask writes classes as they are",
        )
    if kind == "mask":
        if len(scores) == 1 and not (is_float or threshold):
            is_small = scores.dtype.itemsize == 1
            return scores[0].numpy().astype(np.uint8 if is_small else np.int32)
        if len(scores) == 1:
            return (scores[0] > threshold).numpy().astype(np.uint8)
        return scores.argmax(0).numpy().astype(np.min_scalar_type(len(scores) - 1))
    if kind == "probabilities":
        scores = scores.softmax(0) if len(scores) > 1 else scores.sigmoid()
    picture = scores.movedim(0, -1).numpy()
    return picture[..., 0] if len(scores) == 1 else picture


DTYPES = {"float32": None, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of pictures, which are pairs of a file to read and one to write.

    `weights` is a file of them, `constants` what `--set` gave to the run that trained
    them.
    """

    program: str
    weights: str
    pictures: Sequence[tuple[str, str]]
    level: int
    orientation: str | None
    spacing: Sequence[float] | None
    overlap: int | None
    kind: str
    threshold: float
    device: str
    dtype: str
    constants: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write it for the ranks."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(path: Path) -> None:
    """Run this rank under mpirun; what is not whole yet stands beside the job."""
    job = Job(**json.loads(path.read_bytes()))
    wanted = None if job.device == "auto" else torch.device(job.device)
    trainer = load(job.program, phases=None, device=wanted, dtype=DTYPES[job.dtype])
    for number in STOPPING:  # there is nothing to save
        signal.signal(number, signal.SIG_DFL)
    trainer.resume(job.weights)
    plan = trainer.plan
    constants = {**plan.constants, **job.constants}
    user = load_user_model(plan.spec, constants=constants) if plan.spec else None
    transport = trainer.transport
    for source, output in job.pictures:
        start = time.perf_counter()
        whole = Path(output)
        begun = path.parent / f"new-{whole.name}"
        of_source = VolumePrediction if is_volume(Path(source)) else Prediction
        prediction = of_source(trainer, job, user, source)
        prediction.run(begun)
        # all wait for the rank that writes
        peaks = transport.all_gather_object(peak_bytes(trainer.device))
        if transport.rank == 0:
            begun.replace(whole)
            name = f"{whole}: " if len(job.pictures) > 1 else ""
            print(  # noqa: T201
                f"{name}{prediction.what}, in {time.perf_counter() - start:.0f} s; "
                f"a rank took at most {show_bytes(max(peaks))} of memory",
                flush=True,
            )
    transport.close()


class _Prediction:
    """What slides and volumes have in common on their way through one rank."""

    def __init__(self, trainer: Trainer, job: Job, user: UserModel | None) -> None:
        self.trainer, self.job, self.user = trainer, job, user
        picture = picture_of_all(trainer)
        assert picture is not None  # the command has looked
        self.picture = picture
        # a rank that gets no input reads nothing
        inputs = trainer.program.inputs.values()
        self.reads = any(item.path[0] == "input" for item in inputs)
        self.holders = Holders(trainer.transport)

    def bar(self, total: int) -> ProgressBar | None:
        """Return what shows how far it has come, on the first rank."""
        is_first = self.trainer.transport.rank == 0
        return ProgressBar(total, "predict") if is_first else None

    def drawn(
        self, outputs: Any, number: int, count: int, size: tuple[int, ...]
    ) -> NDArray[Any]:
        """Return what is written of one of the outputs, for a picture of this size."""
        job, user = self.job, self.user
        output = sample_of(outputs, number, count, self.trainer.plan.sample_dims)
        if user is None or user.predict_output is None:
            return as_picture(output, size, job.kind, job.threshold)
        picture = np.asarray(user.call("predict_output", output))
        if picture.ndim - len(size) not in (0, 1) or picture.shape[: len(size)] != size:
            raise GemscError(
                f"predict_output returns the shape {list(picture.shape)} for "
                f"{' x '.join(map(str, size))} pixels",
                at=user.line_of("predict_output"),
                help="return an array of that size, or with channels behind",
            )
        if picture.dtype.name in ("int64", "uint64") and abs(picture).max() < 2**31:
            return picture.astype(np.int32)  # few programs read 64 bits
        return picture.astype(np.uint8) if picture.dtype == bool else picture


class VolumePrediction(_Prediction):
    """A volume on its way through one rank."""

    def __init__(
        self, trainer: Trainer, job: Job, user: UserModel | None, source: str
    ) -> None:
        super().__init__(trainer, job, user)
        self.volume = Volume(source, job.orientation, job.level, job.spacing)
        given = user.make_windows() if user is not None else None
        how, size = given or SlidingWindows(), self.picture.size
        steps = how.steps(size)
        if job.overlap is not None:
            steps = tuple(n - 2 * job.overlap for n in size)
        input = self._input() if self.reads else ()
        self.case = Case(self.volume.shape, size, how, input, steps)

    @property
    def what(self) -> str:
        """What is done, in a few words."""
        return f"{self.volume}: {len(self.case.windows)} windows of {self.picture}"

    def run(self, path: Path) -> None:
        """Predict all windows; the rank that has the outputs writes the file."""
        bar = self.bar(-(-len(self.case.windows) // self.trainer.plan.batch_size))
        output = evaluate_case(self.trainer, self.case, self.holders, bar)
        if bar is not None:
            bar.close()
        if output is not None:
            data = self.drawn(output, 0, 1, self.volume.shape)
            self.volume.write(path, data)

    def _input(self) -> Any:
        """Return the whole volume as the model takes it, as a batch of one."""
        voxels = self.volume.read()
        if self.user is None or self.user.predict_input is None:
            return as_input(voxels, self.picture)[None]
        batch = default_collate([self.user.call("predict_input", voxels)])
        shape = self.picture.shape_of(batch)
        if shape != self.volume.shape:
            raise GemscError(
                f"predict_input returns a volume of {shape} for one of "
                f"{self.volume.shape}",
                at=self.user.line_of("predict_input"),
                help=f"return {self.picture.channels} channels and as many voxels; "
                "--spacing gives it voxels of another size",
            )
        return batch


class Prediction(_Prediction):
    """A slide on its way through one rank."""

    def __init__(
        self, trainer: Trainer, job: Job, user: UserModel | None, source: str
    ) -> None:
        super().__init__(trainer, job, user)
        self.slide = Slide(source, job.level)
        size, overlap = self.picture.size, job.overlap
        assert overlap is not None
        steps = tuple(n - 2 * overlap for n in size)
        self.windows = Windows(self.slide.shape[:2], size, steps)
        # what this rank takes of each
        self.part = window_of(trainer.program.inputs.values(), size)

    @property
    def what(self) -> str:
        """What is done, in a few words."""
        count, overlap = len(self.windows), self.job.overlap
        return f"{count} windows of {self.picture}, overlap {overlap}"

    def run(self, path: Path) -> None:
        """Predict all windows; the rank that has the outputs writes the file."""
        pictures = self._pictures()
        first = next(pictures, None)
        if first is None:
            return
        shape = (*self.slide.shape[:2], *first.shape[2:])
        bands = self._bands(itertools.chain([first], pictures), first)
        write_rows(path, bands, shape, first.dtype, self.slide.pixel)

    def _bands(
        self, pictures: Iterator[NDArray[Any]], like: NDArray[Any]
    ) -> Iterator[NDArray[Any]]:
        """Yield what is kept of the windows in each row, side by side."""
        rows, columns = self.windows.axes
        for row in rows:
            height, width = row.kept[1] - row.kept[0], self.slide.shape[1]
            band = np.empty((height, width, *like.shape[2:]), like.dtype)
            for column in columns:
                picture = next(pictures)
                kinds = [f"{p.shape} of {p.dtype}" for p in (picture, like)]
                if kinds[0] != kinds[1]:
                    raise GemscError(
                        f"predict_output returns {kinds[0]}, but for the first window "
                        f"{kinds[1]}",
                        help="return the same shape and dtype for each window, and no "
                        "int64",
                    )
                band[:, slice(*column.kept)] = picture[row.inside, column.inside]
            yield band

    def _pictures(self) -> Iterator[NDArray[Any]]:
        """Yield what is to be written of each window, on the rank that writes."""
        trainer, size = self.trainer, self.trainer.plan.batch_size
        target = zero_target(trainer, self.part)
        batches = list(self.windows.batches(size))
        bar, holders = self.bar(len(batches)), self.holders
        inputs = self._inputs([places for places, _ in batches])
        source = trainer.worker.status.while_reading(inputs)
        for input, (_, count) in zip(source, batches, strict=True):
            shape = trainer.plan.first_shape
            evaluation = trainer.evaluate(input, target, window=self.part, shape=shape)
            holders.find(evaluation.for_loss)
            drawn = holders.join(self._all_drawn(evaluation.output))
            yield from drawn[:count] if drawn is not None else ()
            if bar is not None:
                bar.step(None, size)
        if bar is not None:
            bar.close()

    # ------------------------------------------------ what goes into the model

    def _inputs(self, batches: Sequence[Sequence[Place]]) -> Iterator[Any]:
        """Yield this rank's part of each batch; a thread reads the next one."""
        place = self.trainer.worker.place
        size = len(batches[0]) // place.num_copies
        parts = [batch[place.copy * size :][:size] for batch in batches]
        with ThreadPoolExecutor(1) as thread:
            ahead = thread.submit(self._read, parts[0])
            for following in (*parts[1:], ()):
                input = ahead.result()
                ahead = thread.submit(self._read, following)
                yield input

    def _read(self, places: Sequence[Place]) -> Any:
        if not self.reads or not places:
            return ()
        regions = (self._region(place) for place in places)
        if self.user is None or self.user.predict_input is None:
            samples = [as_input(region, self.picture) for region in regions]
        else:
            samples = [self._given(self.user, region) for region in regions]
        return default_collate(samples)

    def _given(self, user: UserModel, region: NDArray[Any]) -> Any:
        """Return what the user makes of a region: as many pixels, the model's channels.

        Raises:
            GemscError: it is something else.
        """
        pixels = user.call("predict_input", region)
        if self.picture.shape_of(default_collate([pixels])) != region.shape[:2]:
            shape = (
                list(pixels.shape) if isinstance(pixels, torch.Tensor) else "no tensor"
            )
            given = " x ".join(map(str, region.shape))
            raise GemscError(
                f"predict_input returns {shape} for {given} of {self.slide.path}: "
                "rows, columns, channels",
                at=user.line_of("predict_input"),
                help=f"return {self.picture.channels} channels and as many pixels as "
                "it is given",
            )
        return pixels

    def _region(self, place: Place) -> NDArray[Any]:
        """Return what this rank takes of a window: height, width, channels.

        What a small picture lacks is mirrored at its lower and right edge.
        """
        corner, windows = [span.start for span in place], self.windows
        if all(a >= b for a, b in zip(windows.shape, windows.size, strict=True)):
            both = zip(corner, self.part.box, strict=True)
            return self.slide.read(*((n + a, n + b) for n, (a, b) in both))
        sizes = zip(corner, windows.size, windows.shape, strict=True)
        part = self.slide.read(*((n, min(n + a, b)) for n, a, b in sizes))
        missing = [(0, n - m) for n, m in zip(windows.size, part.shape, strict=False)]
        whole = np.pad(part, [*missing, (0, 0)], "symmetric")
        return whole[tuple(slice(*interval) for interval in self.part.box)]

    # ------------------------------------------------ what comes out of it

    def _all_drawn(self, output: Any) -> NDArray[Any] | None:
        """Return what is written of the windows of this copy, None without output."""
        if output is None:
            return None
        count = self.trainer.plan.batch_size // self.trainer.worker.place.num_copies
        size = self.picture.size
        return np.stack([self.drawn(output, i, count, size) for i in range(count)])


if __name__ == "__main__":
    main(Path(sys.argv.pop()))
