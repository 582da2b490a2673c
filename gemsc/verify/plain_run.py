"""A training run in plain PyTorch and one process: what `gemsc run` must equal.

It follows docs/models.md; of the runtime it uses what seeds samples, and metrics.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree

from gemsc.base.boxes import Box
from gemsc.base.dtypes import cast, converted, like_examples
from gemsc.base.nests import ONCE, Mean, as_loss, call_model, copied, on_device, unbound
from gemsc.base.rng import same_draws, seed_of
from gemsc.datasets.samples import num_samples
from gemsc.datasets.stream import ENDLESS, Stream, StreamEndError
from gemsc.runtime.data.batches import digest
from gemsc.runtime.data.held_generators import SeededReader
from gemsc.runtime.data.metrics import (
    Metrics,
    along_samples,
    first_samples,
    in_micro_batches,
    is_texts,
)
from gemsc.runtime.data.shapes import ShapeClasses, join_samples, numbers_of
from gemsc.runtime.data.stream_reader import StreamReader
from gemsc.slides.windows import Case, Picture, SlidingWindows
from gemsc.user_model import UserModel
from gemsc.verify.one_process import PlainUpdate, plain_updates
from gemsc.verify.precision import FULL, Precision

HOST = torch.device("cpu")

# the samples of a part of the data, or the terms of its loss, and figures
Scores = list[tuple[float, dict[str, float]]]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is asked for; a step takes a batch for each of `replicas`."""

    steps: int
    dtype: torch.dtype
    micro_batch_size: int
    micro_batches: int
    replicas: int = 1
    seed: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Precision = FULL
    memory_format: str = "as-given"
    trains_rest: bool = False
    near_zero: float = 0.0  # what in a gradient is zero for the optimizer
    device: torch.device = HOST
    shapes: ShapeClasses | None = None
    sample_dims: Sequence[int] = ()  # of what the model returns

    @property
    def micro_batch_sizes(self) -> list[int]:
        """The samples of a micro-batch of each shape."""
        if self.shapes is None:
            return [self.micro_batch_size]
        return [shape.micro_batch_size for shape in self.shapes.classes]

    @property
    def sizes(self) -> list[int]:
        """The samples of a step of each shape."""
        count = self.replicas * self.micro_batches
        return [count * size for size in self.micro_batch_sizes]


@dataclass
class Samples:
    """A dataset whose samples are read under their seed; `seen` are their digests."""

    data: Any
    seed: int
    seen: dict[tuple[int, int, Box | None], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reader = SeededReader(self.data, self.seed)
        self.stream: StreamReader | None = None
        if isinstance(self.data, Stream):
            self.stream = StreamReader(self.data, self.seed)

    def split(self, replicas: int) -> None:
        """Let replicas read parts of a stream, if it can be split."""
        if self.stream is not None and self.data.split and not self.data.is_loader:
            can = (self.stream.can_split(part, replicas) for part in range(replicas))
            self.stream.num_parts = replicas if replicas > 1 and all(can) else 1

    @property
    def is_tiled(self) -> bool:
        """Whether images are read by their box."""
        return hasattr(self.data, "read") and hasattr(self.data, "shape")

    def read(self, epoch: int, index: int, box: Box | None = None) -> Any:
        """Return a sample, or the part of it that lies in a box."""
        if self.stream is not None:
            return self.stream.read(epoch, index)

        def sample() -> Any:
            if not self.is_tiled:
                return self.data[index]
            return self.data.read(index, box or tuple((0, n) for n in self.data.shape))

        return self._reader.read(epoch, index, sample)

    def take(self, epoch: int, indices: Sequence[int]) -> list[Any]:
        """Return several samples, and note what was read; fewer where a stream ends."""
        samples = []
        for index in indices:
            try:
                samples.append(self.read(epoch, index))
            except StreamEndError:
                if num_samples(self.data) < ENDLESS:
                    raise
                break
            self.seen[epoch, index, None] = digest(samples[-1])
        return samples

    def digest_of(self, epoch: int, index: int, box: Box | None) -> str:
        """Return the digest of a sample, or of the part of it in a box."""
        if (epoch, index, box) not in self.seen:
            self.seen[epoch, index, box] = digest(self.read(epoch, index, box))
        return self.seen[epoch, index, box]


@dataclass
class PlainRun:
    """A model on its way through a run.

    `losses`, `rows` (indices of samples) and `epochs` are those of each step;
    `evaluations` hold the figures of each part of the data, with the number of its
    samples.
    """

    user: UserModel
    model: nn.Module
    settings: RunSettings
    losses: list[float] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    evaluations: list[Scores] = field(default_factory=list)
    shape: int = 0  # of the batch at hand
    largest: float = 0.0  # of all gradients, at the optimizer's steps
    smallest: dict[str, float] = field(default_factory=dict)  # that are not 0, of each

    def __post_init__(self) -> None:
        seed, dtype = self.settings.seed, self.settings.dtype
        form = self.settings.memory_format
        self.examples = converted(self.user.make_inputs(), form)
        self.samples = Samples(self.user.make_dataset("dataset", seed=seed), seed)
        if not self.settings.trains_rest:
            self.samples.split(self.settings.replicas)
        seed = seed_of(seed, -1)
        data = self.user.make_dataset("eval_dataset", seed=seed)
        self.eval_samples = Samples(data, seed)
        self.classes = self._classes(self.samples)
        self.eval_classes = self._classes(self.eval_samples)
        self.model, self.loss = copy.deepcopy((self.model, self.user.make_loss()))
        self.updates = plain_updates(
            self.model,
            self.loss,
            self.user.optimizer,
            self.user.make_phases(),
            dtype,
            self.settings.precision,
            self.settings.device,
            self.user.scheduler,
        )

    def _classes(self, samples: Samples) -> list[int]:
        """Return the number of each sample's shape: all are 0 where there is one."""
        if samples.stream is not None or samples.data is None:
            return []
        count, shapes = len(samples.data), self.settings.shapes
        if len(self.settings.sizes) == 1 or shapes is None:
            return [0] * count
        return numbers_of(shapes, samples.data, samples.seed, range(count))

    def _rows(self, epoch: int) -> list[tuple[int, list[int]]]:
        """Return shape and samples of each batch of an epoch."""
        settings, count = self.settings, len(self.samples.data)
        generator = torch.Generator().manual_seed(seed_of(settings.seed, epoch))
        order = torch.randperm(count, generator=generator).tolist()
        rows: list[tuple[int, list[int]]] = []
        for shape, size in enumerate(settings.sizes):
            least = settings.micro_batch_sizes[shape] if settings.trains_rest else size
            for row in self._cut(self.classes, order, shape):
                if whole := len(row) - len(row) % least:
                    rows.append((shape, row[:whole]))
        if len(settings.sizes) > 1:
            places = torch.randperm(len(rows), generator=generator).tolist()
            rows = [rows[place] for place in places]
        return rows

    def _eval_rows(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield shape and samples of each batch of an evaluation."""
        count, sizes = num_samples(self.eval_samples.data), self.settings.sizes
        if self.eval_samples.stream is not None:
            for first in range(0, count, sizes[0]):
                yield 0, range(first, min(first + sizes[0], count))
            return
        for shape in range(len(sizes)):
            for row in self._cut(self.eval_classes, range(count), shape):
                yield shape, row

    def _cut(
        self, classes: Sequence[int], order: Sequence[int], shape: int
    ) -> Iterator[list[int]]:
        """Yield the samples of a shape in parts of a batch."""
        mine, size = [i for i in order if classes[i] == shape], self.settings.sizes
        for first in range(0, len(mine), size[shape]):
            yield mine[first : first + size[shape]]

    def train(self, told: Callable[[float, int], None] | None = None) -> None:
        """Make all steps; evaluate after each epoch and at the end.

        `told` is called after each step, with its loss and the number of its samples.
        """
        settings = self.settings
        epoch, number = 0, 0
        rows, samples = self._read(epoch, number)
        for step in range(settings.steps):
            self.rows.append(rows)
            self.epochs.append(epoch)
            for update in self.updates:
                if update.phase.is_due(step):
                    loss = self._step(update, samples)
                    if (step + 1) % settings.accumulate == 0:
                        update.end_sums()
                        update.clip(settings.clip_norm)
                        self._note_gradients()
                        update.apply(settings.near_zero)
            self.losses.append(loss)
            if told is not None:
                told(self.losses[-1], len(rows))
            is_last, number = step + 1 == settings.steps, number + 1
            rows, samples = ([], []) if is_last else self._read(epoch, number)
            if not samples and self.eval_samples.data is not None:
                self.evaluations.append(self._evaluate())
                self._show(self.evaluations[-1])
            if not samples and not is_last:
                epoch, number = epoch + 1, 0
                rows, samples = self._read(epoch, number)

    def _note_gradients(self) -> None:
        """Note how large those are that the optimizer is about to see."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            sizes = parameter.grad.abs()
            if len(sizes := sizes[sizes > 0]):
                smallest = self.smallest.get(name, math.inf)
                self.smallest[name] = min(float(sizes.min()), smallest)
                self.largest = max(float(sizes.max()), self.largest)

    def _read(self, epoch: int, number: int) -> tuple[list[int], list[Any]]:
        """Return a batch of an epoch, none after its last one, and its samples."""
        if (stream := self.samples.stream) is None:
            if number == 0:
                self._order = self._rows(epoch)
            if number == len(self._order):
                return [], []
            self.shape, rows = self._order[number]
        else:
            self.shape, (size,) = 0, self.settings.sizes
            (least,) = self.settings.micro_batch_sizes
            count = num_samples(self.samples.data)
            rows = list(range(number * size, min((number + 1) * size, count)))
            rows.sort(key=lambda index: (index % stream.num_parts, index))
            rows = rows[: len(rows) - len(rows) % least]
            if len(rows) < size and not self.settings.trains_rest:
                return [], []
        samples = self.samples.take(epoch, rows)
        return (rows, samples) if len(samples) == len(rows) else ([], [])

    def _show(self, scores: Scores) -> None:
        """Let ReduceLROnPlateau see the mean of the held-out loss."""
        parts = [(n, score["loss"]) for n, score in scores if "loss" in score]
        if total := sum(number for number, _ in parts):
            mean = sum(number * loss for number, loss in parts) / total
            for update in self.updates:
                if isinstance(update.scheduler, ReduceLROnPlateau):
                    update.scheduler.step(mean)

    def _step(self, update: PlainUpdate, samples: list[Any]) -> float:
        micro_batches = list(self._micro_batches(samples))
        count = len(micro_batches) * self.settings.accumulate
        with update.training():
            for input, target in micro_batches:
                with same_draws(), self._autocast():
                    given = self._given(input)
                    value = update.phase.call(self.model, given, target)
                update.backward(as_loss(value), count)
        return update.mean.value

    @torch.no_grad()
    def _evaluate(self) -> Scores:
        """Return the loss of each batch of eval_dataset, and the user's metrics."""
        parts = [p for p in (self.model, self.loss) if isinstance(p, nn.Module)]
        modes = [(module, module.training) for p in parts for module in p.modules()]
        for part in parts:
            part.eval()
        metrics = Metrics(self.user.make_metrics())
        windows = self.user.make_windows()
        scores = (
            self._score(metrics)
            if windows is None
            else self._score_cases(metrics, windows)
        )
        for name, (value, number) in metrics.figures().items():
            scores.append((number, {name: value}))
        for module, mode in modes:
            module.training = mode
        return scores

    def _score(self, metrics: Metrics) -> Scores:
        settings, scores = self.settings, Scores()
        for shape, rows in self._eval_rows():
            self.shape, most = shape, settings.micro_batch_sizes[shape]
            if not (samples := self.eval_samples.take(0, rows)):
                break
            size = -(-len(samples) // most) * most  # in whole micro-batches
            parts, mean = [], Mean()
            for input, target in self._micro_batches(samples, size):
                with same_draws(), self._autocast():
                    output = self._forward(input)
                    if self.loss is not None and len(samples) == size:
                        mean.add(as_loss(self.loss(output, copied(target))))
                parts.append((output, target))
            dims = settings.sample_dims
            joined = along_samples(_join, dims, *parts)
            output, target = first_samples(joined, len(samples), size, dims)
            if len(samples) < size and self.loss is not None:  # without what fills it
                of_parts = in_micro_batches(joined, len(samples), size, most, dims)
                for (part, wanted), number in of_parts:
                    with self._autocast():
                        mean.add(as_loss(self.loss(part, copied(wanted))), number)
            output = settings.precision.output(output)  # for metrics
            scored, wanted = on_device((output, target), HOST)
            metrics.add(scored, wanted, len(samples))
            if self.loss is None:
                continue
            weight = mean.count if mean.counted else len(samples)
            if weight:
                scores.append((weight, {"loss": mean.value}))
        return scores

    def _score_cases(self, metrics: Metrics, windows: SlidingWindows) -> Scores:
        """Score whole cases, each in windows of the size of the examples."""
        leaves = pytree.tree_leaves(self.examples)
        shapes = (leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
        picture = next(filter(None, map(Picture.of_shape, shapes)))
        scores: Scores = []
        for index in range(num_samples(self.eval_samples.data)):
            if not (samples := self.eval_samples.take(0, [index])):
                break
            input, target = self._batch(samples, pads=False)
            shape = picture.shape_of(input)
            assert shape is not None
            case = Case(shape, picture.size, windows, input)
            for places, count in case.windows.batches(self.settings.micro_batch_size):
                with same_draws(), self._autocast():
                    output = self._forward(case.take(places))
                case.add(places[:count], output, self.settings.sample_dims)
            output = case.output()
            mean = Mean()
            if self.loss is not None:
                mean.add(as_loss(self.loss(output, copied(target))))
            scored, wanted = on_device((output, target), HOST)
            metrics.add(scored, wanted, 1)
            if mean.divisor:
                scores.append((mean.divisor, {"loss": mean.value}))
        return scores

    def _micro_batches(
        self, samples: list[Any], count: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """Yield those of all samples, filled up with the last one to `count`."""
        size = self.settings.micro_batch_sizes[self.shape]
        for first in range(0, max(len(samples), count), size):
            yield self._batch(samples[first : first + size] or samples[-1:], size)

    def _batch(
        self, samples: list[Any], size: int = 1, *, pads: bool = True
    ) -> tuple[Any, Any]:
        shapes, shape = self.settings.shapes if pads else None, self.shape
        count, samples = len(samples), samples + samples[-1:] * (size - len(samples))
        if shapes is not None:
            samples = [shapes.padded(sample, shape) for sample in samples]
        kind = self.settings.precision.casts_to(self.settings.dtype)
        batch = cast(join_samples(samples, shapes, shape, count), kind)
        input, target = on_device(batch, self.settings.device)
        return input, target

    def _autocast(self) -> AbstractContextManager[Any]:
        return self.settings.precision.autocast(self.settings.device)

    def _forward(self, input: Any) -> Any:
        output = call_model(self.model, self._given(input))
        return unbound(output, self.model.buffers())

    def _given(self, input: Any) -> Any:
        """Return a batch's input as the model takes it."""
        if isinstance(input, Mapping):
            return like_examples(input, self.examples)
        given = input if isinstance(input, Sequence) else (input,)
        return like_examples(given, self.examples)


def _join(dim: int, *leaves: Any) -> Any:
    if is_texts(leaves[0]):
        return [text for texts in leaves for text in texts]
    if not isinstance(leaves[0], Tensor) or dim == ONCE:
        return leaves[0]
    return torch.cat(leaves, max(dim, 0)) if leaves[0].dim() else torch.stack(leaves)
