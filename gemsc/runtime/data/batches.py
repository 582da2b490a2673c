"""Batches for a rank: the same samples, and the same augmentation, on every rank."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from gemsc.base.dtypes import bits_of, lying_as, lying_of
from gemsc.base.examples import num_rows
from gemsc.base.process import outlast_signals
from gemsc.datasets.samples import num_samples, pair_error
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.data.held_generators import SeededReader, unreadable
from gemsc.runtime.data.order import BatchOrder, BatchRow
from gemsc.runtime.data.shapes import ShapeClasses, join_samples
from gemsc.runtime.data.tiled import TiledDataset, Window, whole_window
from gemsc.runtime.process.status import Status, note_worker

NUM_REPEATED = 8  # samples of a run's first batch that are read twice


class _Key(NamedTuple):
    """A sample to read in an epoch.

    num_digests: how many digests to give, each of another reading of the sample.
    is_whole: whether to give its whole target.
    shape: its class, where there are several.
    """

    epoch: int
    sample_index: int
    num_digests: int = 0
    is_whole: bool = False
    shape: int = 0


class _Read(NamedTuple):
    """A sample that was read, its digests, and its whole target if that was wanted.

    The sample is padded to the shape of its class; the digests are of all before that.
    """

    sample_index: int
    sample: Any
    digests: tuple[str, ...]
    target: Any = None
    shape: int = 0
    facts: Any = None  # of the batch that it is the first of


class _Collated(NamedTuple):
    """The samples of a batch: inputs and targets, and of each sample its digests."""

    data: tuple[Any, Any]
    digests: list[tuple[str, ...]]
    whole_targets: Any
    facts: Any


class _Reproducible(Dataset[Any]):
    """A dataset whose samples depend on nothing but seed, epoch and index.

    Every rank that needs a sample reads it itself, so random crops and flips must come
    out alike: see `SeededReader`. An error is returned, not raised: of one that another
    process raises, DataLoader keeps the text alone.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        window: Window | None,
        shapes: ShapeClasses | None,
    ) -> None:
        self.dataset = dataset
        self.window = window
        self.shapes = shapes
        self._reader = SeededReader(dataset, seed)

    def __getitem__(self, key: _Key) -> _Read | GemscError:
        epoch, index, num_digests, is_whole, shape = key
        try:
            sample = self._read(epoch, index, self.window)
            texts = [digest(sample)] if num_digests else []
            for _ in range(1, num_digests):
                texts.append(digest(self._read(epoch, index, self.window)))
            target = None
            if is_whole and self.window is not None and not self.window.is_whole:
                target = self._read(epoch, index, whole_window(self.window.shape))[1]
        except Exception as error:
            box = self.window and self.window.box
            call = f".read({index}, {box})" if box else f"[{index}]"
            return unreadable(error, call, index)
        try:
            if wrong := pair_error(sample):
                raise wrong
            if self.shapes is not None:
                sample = self.shapes.padded(sample, shape)
        except GemscError as error:
            error.message = f"sample {index}: {error.message}"
            return error
        return _Read(index, sample, (*texts,), target, shape)

    def _read(self, epoch: int, index: int, window: Window | None) -> Any:
        def sample() -> Any:
            Status.go_on()
            if window is not None:
                return self.dataset.read(index, window.box)
            return self.dataset[index]

        return self._reader.read(epoch, index, sample)


class _Sampler:
    """The keys of an epoch's batches: each is made when it is asked for."""

    def __init__(self) -> None:
        self.keys: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.keys


@dataclass(frozen=True)
class Batch:
    """One copy's part of a batch: `data` is collated.

    `count` samples of all parts count, `is_full` says whether these are all. `shape` is
    the class of all, where there are several. `targets` are those of `data`, or whole
    ones (see `Batches`). `digests` are those of the samples by index, where ranks are
    to compare them (see `SharedData`), one for each time that it was read.
    `ends`: a stream gives no batch after this one. `notes` say what it took to go on.
    """

    data: Any
    count: int
    is_full: bool
    shape: int = 0
    targets: Any = None
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    ends: bool = False
    notes: tuple[str, ...] = ()


class Batches:
    """Batches of `size` samples, shuffled anew each epoch or in order.

    Copies of the model share a batch: each reads its own `part` of `num_parts`.
    A last batch that is not full has as many times `least` samples as there are, by
    default none in training (`shuffle`) and all in evaluation. It is filled up with its
    last sample. Of a `TiledDataset` the `window` of each image is read, and besides the
    whole target in `whole_targets`: "all" batches, a "last" one that is not full, or
    "none". The first batch of an epoch has digests; with `compare_all`, every batch.
    The first samples of the first epoch are read twice: is a sample always the same?
    `workers` are processes that read ahead, and stay from epoch to epoch; `pinned` is
    for copies to a GPU. Those of a stream are `StreamBatches`.
    Where there are several `shapes`, `numbers` has the class of each sample, and `size`
    and `least` are those of each class.
    """

    def __init__(
        self,
        dataset: Any,
        size: int | Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        workers: int = 0,
        part: int = 0,
        num_parts: int = 1,
        window: Window | None = None,
        whole_targets: str = "none",
        compare_all: bool = False,
        least: int | Sequence[int] | None = None,
        pinned: bool = False,
        shapes: ShapeClasses | None = None,
        numbers: Tensor | None = None,
    ) -> None:
        if window is None and isinstance(dataset, TiledDataset):
            window = whole_window(tuple(dataset.shape))
        self.window = window
        self.whole_targets = whole_targets
        self.seed = seed
        self.shuffle = shuffle
        self.workers = workers
        self.pinned = pinned
        self.compare_all = compare_all
        self.num_samples = num_samples(dataset)
        sizes = (size,) if isinstance(size, int) else (*size,)
        few = least or (sizes if shuffle else 1)
        self.order = BatchOrder(
            self.num_samples,
            sizes,
            (few,) * len(sizes) if isinstance(few, int) else (*few,),
            seed=seed,
            shuffle=shuffle,
            shapes=numbers,
        )
        self._part, self.num_copies, self.shapes = part, num_parts, shapes
        self._dataset: Dataset[Any] = _Reproducible(dataset, seed, window, shapes)
        self._sampler = _Sampler()  # what `_loader` goes through
        self._loader: DataLoader[Any] | None = None
        self._is_new = True  # nothing has been read

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self.order)

    def size_of(self, row: BatchRow) -> int:
        """Return the samples of a batch, with those that fill it up."""
        return self.order.sizes[row.shape]

    def _samples(self, row: BatchRow) -> list[int]:
        """Return this part of a batch that is filled up."""
        size = self.size_of(row)
        part = size // self.num_copies
        filled = row.indices + row.indices[-1:] * size
        return filled[self._part * part :][:part]

    def rows(self, number: int, first: int = 0) -> Iterator[BatchRow]:
        """Yield the samples of each batch of an epoch, those of all parts."""
        epoch = self.order.epoch(number)
        return (epoch.row(batch) for batch in range(first, len(self)))

    def empty(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch as they are where none of them is read."""
        for row in self.rows(number, first):
            yield self._batch(row, (None, None))

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Yield this part of each batch, from the `first` one on."""
        order, numbers = self.order.epoch(number), range(first, len(self))
        twice = NUM_REPEATED if self._is_new else 0
        self._is_new = False

        def num_digests(i: int, place: int) -> int:
            if i == first:
                return 2 if place < twice else 1
            return int(self.compare_all)

        keys = (
            [
                _Key(number, index, num_digests(i, place), self._whole(row), row.shape)
                for place, index in enumerate(self._samples(row))
            ]
            for i, row in zip(numbers, map(order.row, numbers), strict=True)
        )
        # part 0 reads this one anyway: so those of all copies can be compared
        common: list[_Key] = []
        if self._part and numbers:
            row = order.row(first)
            common = [_Key(number, row.indices[0], num_digests=1, shape=row.shape)]
        read = self._load(chain(([key] for key in common), keys))
        digests = {key.sample_index: next(read).digests[0] for key in common}
        for row, collated in zip(map(order.row, numbers), read, strict=True):
            texts = zip(self._samples(row), collated.digests, strict=True)
            digests |= {index: text for index, text in texts if text}
            yield self._batch(row, collated.data, collated.whole_targets, digests)
            digests = {}

    def _batch(
        self,
        row: BatchRow,
        data: tuple[Any, Any],
        targets: Any = None,
        digests: dict[int, tuple[str, ...]] | None = None,
    ) -> Batch:
        count = len(row.indices)
        return Batch(
            data,
            count,
            count == self.size_of(row),
            row.shape,
            data[1] if targets is None else targets,
            digests or {},
        )

    def joined(self, batch: Batch) -> dict[int, str]:
        """Return a digest of what the user's `collate` gave, by this part's number."""
        if self.shapes is None or self.shapes.collate is None or not batch.digests:
            return {}
        return {self._part: digest(batch.data)}

    def _whole(self, row: BatchRow) -> bool:
        """Whether the whole targets of a batch are read."""
        is_full = len(row.indices) == self.size_of(row)
        return self.whole_targets == "all" or (
            self.whole_targets == "last" and not is_full
        )

    def close(self) -> None:
        """End the processes that read ahead, in the middle of a sample as they are.

        When Python ends it asks them to, and waits until they have outlasted that.
        """
        read = getattr(self._loader, "_iterator", None)
        self._loader = None
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:  # torch would raise an error of a process that was killed
            before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in getattr(read, "_workers", ()):
            process.kill()
            process.join()
        if is_main:
            signal.signal(signal.SIGCHLD, before)

    def _load(self, keys: Iterator[list[Any]]) -> Iterator[_Collated]:
        """Yield what the samples of each list of keys are, as `_collate` joins them."""
        self._sampler.keys = keys
        if self._loader is None:
            if self.workers:  # which make sockets there, and cannot tidy up when killed
                get_temp_dir()
            self._loader = DataLoader(
                self._dataset,
                batch_sampler=self._sampler,
                num_workers=self.workers,
                collate_fn=partial(_collate, self.shapes),
                pin_memory=self.pinned,
                worker_init_fn=_begin_worker,
                persistent_workers=self.workers > 0,
            )
        read = iter(self._loader)
        while True:
            try:
                collated = next(read, None)
            # one that ends while its tensors are fetched closes their socket first
            except (RuntimeError, OSError, EOFError) as error:
                if type(error) is RuntimeError and "DataLoader worker" not in str(
                    error
                ):
                    raise
                raise GemscError(
                    f"a process that reads the dataset has died: {error}",
                    help="it may have taken too much memory, or called sys.exit; "
                    "--workers 0 reads without such processes",
                ) from None
            if collated is None:
                return
            if isinstance(collated, GemscError):
                raise collated
            yield collated


def _begin_worker(number: int) -> None:
    outlast_signals()
    note_worker()


def _collate(
    shapes: ShapeClasses | None, read: list[_Read | GemscError]
) -> _Collated | GemscError:
    """Join samples to a batch of inputs and one of targets."""
    good: list[_Read] = []
    for entry in read:
        if isinstance(entry, GemscError):
            return entry
        good.append(entry)
    samples = [entry.sample for entry in good]
    targets = [entry.target for entry in good if entry.target is not None]
    try:
        count = len({entry.sample_index for entry in good})  # the last one fills it up
        batch = join_samples(samples, shapes, good[0].shape, count)
        whole_targets = default_collate(targets) if targets else None
    except GemscError as error:
        return error
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        return GemscError(
            f"samples of the dataset cannot be collated into a batch: "
            f"{_odd_one(good) or error}",
            help="return samples of the same structure, shapes and dtypes, or let the "
            "model's file pad them: pad_value, collate(samples, number)",
        )
    digests = [entry.digests for entry in good]
    return _Collated((batch[0], batch[1]), digests, whole_targets, good[0].facts)


def _odd_one(read: list[_Read]) -> str:
    """Return which sample has not the shapes of the first one, "" if all have."""
    first = read[0]
    for other in read[1:]:
        leaves = (pytree.tree_leaves(entry.sample) for entry in (first, other))
        for pair in zip(*leaves, strict=False):
            one, two = (list(getattr(leaf, "shape", ())) for leaf in pair)
            if one != two:
                return (
                    f"sample {other.sample_index} has shape {two}, "
                    f"sample {first.sample_index} {one}"
                )
    return ""


def repeated(examples: Any, plan: Plan) -> Any:
    """Return a batch for all micro-batches of a step from (inputs, target) of one."""
    size, count = num_rows(examples[0]), plan.data * plan.micro_batches

    def repeat(leaf: Any) -> Any:
        many = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size
        return lying_as(torch.cat([leaf] * count), lying_of(leaf)) if many else leaf

    return pytree.tree_map(repeat, examples)


def digest(sample: Any) -> str:
    """Return a digest of dtype, shape and content of a sample, for comparisons."""
    hasher = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(sample):
        if isinstance(leaf, torch.Tensor):
            value = bits_of(leaf.detach().cpu().resolve_conj())
            hasher.update(f"{leaf.dtype} {tuple(leaf.shape)};".encode())
            hasher.update(value.numpy().data)
        elif isinstance(leaf, np.ndarray | np.generic):
            hasher.update(f"{leaf.dtype} {leaf.shape};".encode() + leaf.tobytes())
        elif isinstance(leaf, bool | int | float | complex | str | bytes):
            hasher.update(f"{type(leaf).__name__} {leaf!r};".encode())
        else:  # the text of other objects may hold their address
            hasher.update(f"{type(leaf).__name__};".encode())
    return hasher.hexdigest()
