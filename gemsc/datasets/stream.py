"""Stream: a dataset that is read from its beginning, with no sample by its number.

In a model's file, with a dataset of Hugging Face:

    def dataset():
        texts = load_dataset("text", data_files="*.txt", streaming=True)["train"]
        return gemsc.Stream(texts, samples=10_000, pair=tokens)
"""

from __future__ import annotations

import copy
import importlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker

from gemsc.errors import GemscError

ENDLESS = sys.maxsize  # the samples of a stream whose end is not known beforehand
_LOCK = threading.RLock()  # torch's worker info is one for all threads


class StreamEndError(GemscError):
    """No sample comes any more."""


class Stream(IterableDataset[Any]):
    """An iterable as a dataset: an epoch is its first `samples` samples, or all.

    Each epoch begins anew, after a call of `set_epoch(epoch)` where the iterable has
    one (those of Hugging Face shuffle by it). The generators of random numbers are
    seeded before each sample, as those of any dataset are. Batches of a DataLoader are
    taken apart.

    Replicas read a `StreamPart` each where the iterable can be split: a dataset of
    Hugging Face by `split_dataset_by_node`, another if it heeds `get_worker_info()`, as
    readers of tar shards do. Otherwise each reads all, and drops what is not its own.
    """

    def __init__(
        self,
        source: Iterable[Any],
        samples: int | None = None,
        pair: Callable[[Any], Any] | None = None,
        *,
        split: bool = True,
    ) -> None:
        """Take an `IterableDataset`, or anything with `__iter__`.

        `pair` makes (input, target) of what it gives, where that is something else.
        Without `samples` an epoch ends where the iterable does. `split=False` lets each
        replica read all of it.

        Raises:
            GemscError: it cannot be begun anew, or there are no samples.
        """
        kind = type(source).__name__
        if not hasattr(type(source), "__iter__") or hasattr(source, "__next__"):
            raise GemscError(
                f"a Stream of type {kind} cannot be read from its beginning again",
                help="give an object whose __iter__ starts from the beginning, such as "
                "an IterableDataset, not a generator",
            )
        if samples is not None and samples < 1:
            raise GemscError(
                f"a Stream of {samples} samples", help="give samples= 1 or more"
            )
        self.source = source
        self.samples = samples
        self.pair = pair
        self.split = split
        self._initial: list[Any] = []  # the state of the source that nobody has read

    @property
    def is_loader(self) -> bool:
        """Whether a DataLoader reads, perhaps ahead and in processes of its own."""
        return isinstance(self.source, DataLoader)

    @property
    def is_hugging_face(self) -> bool:
        """Whether it is a streaming dataset of Hugging Face."""
        datasets = sys.modules.get("datasets")
        return datasets is not None and isinstance(
            self.source, datasets.IterableDataset
        )

    @property
    def has_state(self) -> bool:
        """Whether the iterable can say where it is, and go there."""
        return _has_state(self.source)

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of the first epoch."""
        part = StreamPart(self)
        for _ in range(ENDLESS if self.samples is None else self.samples):
            try:
                yield part.take()
            except StreamEndError:
                return

    def to_read(self, number: int, count: int) -> Any:
        """Return what to iterate over for a part, as if nobody had begun to."""
        if self.is_hugging_face:
            split = importlib.import_module("datasets.distributed")
            return split.split_dataset_by_node(self.source, number, count)
        if not self._initial:
            is_plain = self.has_state and not self.is_loader
            self._initial.append(copy.deepcopy(_state(self.source, is_plain)))
        source: Any = self.source if count == 1 else copy.copy(self.source)
        if (state := self._initial[0]) is not None:
            source.load_state_dict(copy.deepcopy(state))
        return source


class StreamPart:
    """One part of a stream, `number` of `count`, read forward.

    `epoch` and `position` are those of the sample that comes next. It `keeps_state`
    where someone may ask for the `state`.
    """

    def __init__(self, stream: Stream, number: int = 0, count: int = 1) -> None:
        self.stream = stream
        self.number, self.count = number, count
        self.keeps_state = False
        self.heeds_worker = False  # it has asked how many workers there are
        self.begin(0)

    def begin(self, epoch: int, position: int = 0, state: Any = None) -> None:
        """Go to the first sample of an epoch, or to a `position` by its `state`."""
        self.epoch, self.position = epoch, position
        self._begin = position, state
        self._read: Iterator[Any] | None = None
        self._holder: Any = None  # of the state
        self._batch: deque[Any] = deque()  # what is left of a batch of a DataLoader
        self._before_batch: tuple[int, Any] = 0, None

    @property
    def is_new(self) -> bool:
        """Whether nobody has begun to read."""
        return self._read is None

    def open(self) -> None:
        """Begin to read, where that is not done."""
        if self._read is None:
            with self._as_worker():
                self._read = self._open()

    def again(self) -> None:
        """Go to where it began."""
        self.begin(self.epoch, *self._begin)

    def take(self) -> Any:
        """Return the sample that comes next.

        Raises:
            StreamEndError: there is none.
        """
        self.open()
        with self._as_worker():
            try:
                sample = self._next()
            except StopIteration:
                self._read = iter(())
                raise self._end() from None
        self.position += 1
        pair = self.stream.pair
        return sample if pair is None else pair(sample)

    def state(self) -> tuple[int, Any]:
        """Return a position, not after this one, and the state of the iterable there.

        It is None where the iterable has none.
        """
        if self._batch:
            return self._before_batch
        return self.position, copy.deepcopy(_state(self._holder, self.keeps_state))

    def _next(self) -> Any:
        assert self._read is not None
        loader = self.stream.source
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return next(self._read)
        if not self._batch:
            self._before_batch = self.state()
            self._batch.extend(_samples_of(next(self._read)))
        return self._batch.popleft()

    def _open(self) -> Iterator[Any]:
        source = self.stream.to_read(self.number, self.count)
        _set_epoch(source, self.epoch)
        _, state = self._begin
        is_holder = _has_state(source)
        if is_holder and state is not None:
            source.load_state_dict(copy.deepcopy(state))
        read: Iterator[Any] = iter(source)
        self._holder = source if is_holder else read
        if not is_holder and state is not None:
            self._holder.load_state_dict(copy.deepcopy(state))
        return read

    @contextmanager
    def _as_worker(self) -> Iterator[None]:
        """Let the iterable take itself for one of the workers of a DataLoader."""
        with _LOCK:
            if self.count == 1 or self.stream.is_hugging_face:
                yield
                return
            info = _Worker(self.number, self.count, self.stream.source)
            before, worker._worker_info = worker._worker_info, info  # type: ignore[assignment]
            try:
                yield
            finally:
                worker._worker_info = before
                self.heeds_worker |= info.is_asked

    def _end(self) -> StreamEndError:
        samples, position = self.stream.samples, self.position
        if samples is None or self.count == 1:
            more = "" if samples is None else f", and an epoch takes {samples}"
            return StreamEndError(
                f"the stream ends after {position} samples{more}",
                help=f"use gemsc.Stream(..., samples={position})",
            )
        return StreamEndError(
            f"part {self.number + 1} of {self.count} of the stream ends after "
            f"{position} samples, but an epoch of {samples} needs more of them",
            help="leave out samples= to end the epoch with the first part that ends, "
            "or use gemsc.Stream(..., split=False) to let each replica read all",
        )


@dataclass
class _Worker:
    """What `get_worker_info()` returns; it notes whether its number is asked for."""

    id: int
    count: int
    dataset: Any
    seed: int = 0
    is_asked: bool = False

    @property
    def num_workers(self) -> int:
        """The number of parts."""
        self.is_asked = True
        return self.count


def as_dataset(value: Any) -> Any:
    """Return what a user's `dataset()` gave; what can only be iterated is a Stream."""
    kind = type(value)
    no_number = Dataset.__getitem__
    has_numbers = getattr(kind, "__getitem__", no_number) is not no_number
    if isinstance(value, Stream) or (has_numbers and hasattr(kind, "__len__")):
        return value
    is_stateful_loader = hasattr(kind, "__iter__") and _has_state(value)
    if isinstance(value, IterableDataset) or is_stateful_loader:
        return Stream(value)
    return value


def _has_state(holder: Any) -> bool:
    return all(hasattr(holder, name) for name in ("state_dict", "load_state_dict"))


def _set_epoch(source: Any, epoch: int) -> None:
    """Say which epoch begins, where that is of interest; WebDataset counts them."""
    if callable(set_epoch := getattr(source, "set_epoch", None)):
        set_epoch(epoch)
    for stage in getattr(source, "pipeline", ()):
        if isinstance(getattr(stage, "epoch", None), int):
            stage.epoch = epoch - 1


def _state(holder: Any, wanted: bool) -> Any:
    return holder.state_dict() if wanted and _has_state(holder) else None


def _samples_of(batch: Any) -> Iterator[Any]:
    """Yield the samples that a DataLoader has collated."""
    leaves = pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1 or len(tensors) < len(leaves):
        raise GemscError(
            "a batch of the DataLoader cannot be split into samples: its tensors do "
            "not all have the same number of rows",
            help="give the DataLoader batch_size=None: gemsc makes the batches",
        )
    for row in range(*sizes):
        yield pytree.tree_map(lambda leaf: leaf[row], batch)  # noqa: B023
