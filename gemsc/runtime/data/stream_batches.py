"""Batches of a stream, of one whose end nobody knows as well.

The samples of a stream in P parts have numbers: 0 is the first one of part 0, 1 that
of part 1, P the second one of part 0. A batch has the next samples in this order, those
of one part side by side, so that each of P replicas reads one part:

    P = 2    batch 0: 0 2 4 | 1 3 5    batch 1: 6 8 10 | 7 9 11
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from gemsc.datasets.samples import pair_error
from gemsc.datasets.stream import ENDLESS, Stream, StreamEndError
from gemsc.errors import GemscError, user_place
from gemsc.runtime.data.batches import Batch, Batches, _Collated, _Read, digest
from gemsc.runtime.data.order import BatchRow
from gemsc.runtime.data.stream_reader import Mark, StreamReader, tensors_of_row


class _Rows(NamedTuple):
    """What to read of a batch: its samples from `start` to `end`, in their order.

    Those of `until` only have to be there: the batch is whole then.
    """

    epoch: int
    samples: list[int]
    start: int
    end: int
    until: tuple[int, ...] = ()
    has_digests: bool = False
    wants_places: bool = False
    fills_up: bool = False
    closes: bool = False  # its part, which belongs to others


@dataclass
class _Facts:
    """The samples of a batch that are there, and what reading them has shown.

    places: of the parts that are read, before the batch.
    """

    count: int
    places: dict[int, tuple[int, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _StreamSamples(Dataset[Any]):
    """Samples of a stream for a DataLoader: it is asked for one `_Rows` at a time."""

    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader

    def __getitems__(self, keys: list[_Rows]) -> list[_Read | GemscError]:
        (rows,) = keys
        self.at = rows.samples[0]
        try:
            return [*self._read(rows)]
        except GemscError as error:  # perhaps the end
            return [error]
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            return [
                GemscError(
                    f"sample {self.at} of the stream cannot be read: {what}",
                    at=user_place(error.__traceback__),
                    help="try `for sample in dataset(): pass` in Python",
                )
            ]

    def _read(self, rows: _Rows) -> list[_Read]:
        epoch, samples = rows.epoch, rows.samples
        places: dict[int, tuple[int, Any]] = {}
        read: list[_Read] = []
        first = 0 if rows.fills_up else rows.start
        for place, index in enumerate(samples[first : rows.end], first):
            self.at = index
            number = index % self.reader.num_parts
            if rows.wants_places and number not in places:
                places[number] = self.reader.place(epoch, index)
            try:
                sample = self.reader.read(epoch, index)
            except StreamEndError:
                if not (rows.fills_up and place):
                    raise
                return self._filled(rows, read, place)
            if wrong := pair_error(sample):
                raise wrong
            texts = (digest(sample),) if rows.has_digests else ()
            read.append(_Read(index, self._padded(index, sample), texts))
        count = self._count(rows)
        if rows.closes:
            self.reader.close(samples[0] % self.reader.num_parts)
        read = read[rows.start - first :]
        return self._with_facts(read, count, places)

    def _padded(self, index: int, sample: Any) -> Any:
        try:
            return self.reader.padded(sample)
        except GemscError as error:
            error.message = f"sample {index}: {error.message}"
            raise

    def _count(self, rows: _Rows) -> int:
        """Return how many samples of a batch are there, past those that were read."""
        for index in rows.until:
            self.reader.read(rows.epoch, index)
        if rows.fills_up:
            for place, index in enumerate(rows.samples[rows.end :], rows.end):
                try:
                    self.reader.read(rows.epoch, index)
                except StreamEndError:
                    return place
        return len(rows.samples)

    def _filled(self, rows: _Rows, read: list[_Read], count: int) -> list[_Read]:
        """Return a batch that has ended, filled up with its last sample."""
        filled = [read[min(i, count - 1)] for i in range(rows.start, rows.end)]
        return self._with_facts(filled, count, {})

    def _with_facts(
        self, read: list[_Read], count: int, places: dict[int, tuple[int, Any]]
    ) -> list[_Read]:
        notes, self.reader.notes = (*self.reader.notes,), []
        read[0] = read[0]._replace(facts=_Facts(count, places, notes))
        return read


class StreamBatches(Batches):
    """Batches of a stream, in its order; its end may be unknown (`is_open`).

    In training each copy of the model reads its own part of the stream after a call of
    `split`. One process at most reads ahead. With `keeps_marks`, `marks` says where the
    batch that was given last began.
    """

    def __init__(
        self,
        dataset: Stream,
        size: int | Sequence[int],
        *,
        keeps_marks: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dataset, size, **options)
        self.is_open = self.num_samples == ENDLESS
        self.workers = 0 if dataset.is_loader else min(self.workers, 1)
        (self.size,) = self.order.sizes  # a stream has samples of one shape
        self._drops_rest = [*self.order.least] == [self.size]
        self._part_size = self.size // self.num_copies
        self._start = self._part * self._part_size
        self.stream = dataset
        self.reader = StreamReader(dataset, self.seed, self.shapes)
        self.reader.keeps_marks = keeps_marks
        self._dataset = _StreamSamples(self.reader)
        self._given: tuple[list[int], Any, _Facts] | None = None  # the last batch
        self._resumed: tuple[int, Mapping[int, Mark]] = -1, {}  # an epoch, its marks

    @property
    def num_parts(self) -> int:
        """The parts of the stream."""
        return self.reader.num_parts

    def can_split(self) -> bool:
        """Whether each copy of the model could read a part of the stream."""
        drops_rest = self.shuffle and self._drops_rest
        if not drops_rest or self.stream.is_loader or not self.stream.split:
            return False
        return self.reader.can_split(self._part, self.num_copies)

    def split(self, count: int) -> None:
        """Read the stream in so many parts."""
        self.reader.num_parts = count

    def resume(self, epoch: int, marks: Mapping[int, Mark]) -> None:
        """Go on in an epoch, from marks if there are any."""
        self._resumed, self._given = (epoch, marks), None
        self.reader.resume(epoch, marks)

    def marks(self, epoch: int) -> dict[int, Mark]:
        """Return, by their number, where the parts were that are read here."""
        if self._given is None:
            return dict(self._resumed[1]) if epoch == self._resumed[0] else {}
        indices, data, facts = self._given
        marks = {}
        for number, (position, state) in facts.places.items():
            rows = [
                i for i, index in enumerate(indices) if index % self.num_parts == number
            ]
            text = digest([digest(tensors_of_row(data, i)) for i in rows])
            first = indices[rows[0]] // self.num_parts
            marks[number] = Mark(position, state, first, len(rows), text)
        return marks

    def rows(self, number: int, first: int = 0) -> Iterator[BatchRow]:
        """Yield the samples of each batch of an epoch, those of all parts."""
        return (BatchRow(self.indices(batch)) for batch in range(first, len(self)))

    def _count(self, batch: int) -> int:
        return self.order.place(batch)[2]

    def indices(self, batch: int) -> list[int]:
        """Return the samples of a batch of an epoch, in the order of parts."""
        start = batch * self.size
        rows = range(start, start + self._count(batch))
        return sorted(rows, key=lambda index: (index % self.num_parts, index))

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """Yield this part of each batch, from the `first` one on."""
        batches = range(first, len(self))
        keys = ([self._rows(number, i, i == first)] for i in batches)
        digests = self._common(number, first)
        read = self._with_ends(self._until_end(self._load(keys)))
        for i, (collated, ends) in zip(batches, read, strict=False):
            facts: _Facts = collated.facts
            count = facts.count if self.is_open else self._count(i)
            indices = self._rows_of_part(self.indices(i)[:count])
            texts = zip(indices, collated.digests, strict=True)
            digests |= {index: text for index, text in texts if text}
            is_kept = self.reader.keeps_marks
            self._given = (indices, collated.data, facts) if is_kept else None
            yield Batch(
                collated.data,
                is_full=count == self.size,
                targets=collated.data[1],
                digests=digests,
                count=count,
                ends=ends,
                notes=facts.notes,
            )
            digests = {}

    def _rows(self, number: int, batch: int, is_first: bool) -> _Rows:
        """Return what this part reads of a batch."""
        rows, until = self.indices(batch), list[int]()
        start, end = self._start, self._start + self._part_size
        is_filled = self.is_open and not self.shuffle
        if not self.is_open:
            rows, start, end = self._rows_of_part(rows), 0, self._part_size
        elif self.shuffle:
            parts = {index % self.num_parts for index in rows[start:end]}
            until = [max(i for i in rows if i % self.num_parts == p) for p in parts]
        return _Rows(
            number,
            rows,
            start,
            end,
            tuple(until),
            has_digests=is_first or self.compare_all,
            wants_places=self.reader.keeps_marks and self.shuffle,
            fills_up=is_filled,
        )

    def _rows_of_part(self, rows: list[int]) -> list[int]:
        """Return this part of a batch, filled up with the last sample."""
        places = range(self._start, self._start + self._part_size)
        return [rows[min(place, len(rows) - 1)] for place in places]

    def _common(self, number: int, first: int) -> dict[int, tuple[str, ...]]:
        """Read what part 0 reads anyway, so that those of all copies are compared.

        A stream in parts has no sample for all; its first one is read in the beginning.
        """
        is_new, self._is_new = self._is_new, False
        if not self._start or not (self.num_parts == 1 or (is_new and not first)):
            return {}
        index = self.indices(first)[0]
        closes = self.num_parts > 1
        key = _Rows(number, [index], 0, 1, has_digests=True, closes=closes)
        collated = next(self._until_end(self._load(iter([[key]]))), None)
        return {} if collated is None else {index: collated.digests[0]}

    def _until_end(self, read: Iterator[_Collated]) -> Iterator[_Collated]:
        try:
            yield from read
        except StreamEndError:
            if not self.is_open:
                raise

    def _with_ends(self, read: Iterator[_Collated]) -> Iterator[tuple[_Collated, bool]]:
        """Say of each batch whether it is the last one: the next one is read before."""
        if not self.is_open:
            yield from ((batch, False) for batch in read)
            return
        ahead = next(read, None)
        while ahead is not None:
            here, ahead = ahead, next(read, None)
            yield here, ahead is None


def batches_of(
    dataset: Any,
    size: int | Sequence[int],
    *,
    keeps_marks: bool = False,
    **options: Any,
) -> Batches:
    """Return the batches of a dataset or a stream."""
    if isinstance(dataset, Stream):
        return StreamBatches(dataset, size, keeps_marks=keeps_marks, **options)
    return Batches(dataset, size, **options)
