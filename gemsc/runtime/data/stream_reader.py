"""Samples of a stream by their number, read forward, and from where a run ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from gemsc.base.rng import preserve_rng
from gemsc.datasets.stream import Stream, StreamPart
from gemsc.runtime.data.batches import digest
from gemsc.runtime.data.held_generators import SeededReader
from gemsc.runtime.data.shapes import ShapeClasses
from gemsc.runtime.process.status import Status


@dataclass(frozen=True)
class Mark:
    """Where a part of a stream was, and what it gave there, to go on from.

    In `state`, if it has one, its iterable was at `position`; `digest` is that of the
    `count` samples from `first` on.
    """

    position: int
    state: Any
    first: int
    count: int
    digest: str


class StreamReader:
    """Reads samples by their number, forward in each of `num_parts` parts.

    All generators are seeded for each sample, also for those that are only skipped.
    """

    def __init__(
        self, stream: Stream, seed: int, shapes: ShapeClasses | None = None
    ) -> None:
        """Take a stream; `shapes` say how its samples are padded for a batch."""
        self.stream = stream
        self.num_parts = 1
        self.shapes = shapes
        self.keeps_marks = False
        self.notes: list[str] = []
        self._seed = seed
        self._seeds = SeededReader(stream, seed)
        self._parts: dict[int, StreamPart] = {}
        self._last: dict[int, Any] = {}
        self._marks: dict[int, Mark] = {}
        self._marked = 0  # the epoch of the marks

    def resume(self, epoch: int, marks: Mapping[int, Mark]) -> None:
        """Go to these marks when samples of this epoch are read."""
        self._marked, self._marks = epoch, dict(marks)

    def can_split(self, number: int, count: int) -> bool:
        """Whether part `number` of `count` begins otherwise than the next one."""
        if self.stream.is_hugging_face:
            return True
        digests = set()
        for part_number in (number, (number + 1) % count):
            part = StreamPart(self.stream, part_number, count)
            try:
                with preserve_rng():
                    seeds = SeededReader(self.stream, self._seed)
                    digests.add(digest(_take(part, seeds, 0, 0)))
            except Exception:  # it has no sample, or cannot be copied
                return False
            if not part.heeds_worker:
                return False
        return len(digests) > 1

    def read(self, epoch: int, index: int) -> Any:
        """Return a sample.

        Raises:
            StreamEndError: the part that it belongs to has ended.
        """
        position = index // self.num_parts
        part = self._approach(epoch, index)
        if part.position == position:
            self._advance(part)
        return self._last[part.number]

    def place(self, epoch: int, index: int) -> tuple[int, Any]:
        """Return where a part is before a sample is read, and the state there."""
        part = self._approach(epoch, index)
        if part.position > index // self.num_parts:
            return 0, None
        return part.state()

    def padded(self, sample: Any) -> Any:
        """Return a sample as it is in a batch."""
        return sample if self.shapes is None else self.shapes.padded(sample, 0)

    def close(self, number: int) -> None:
        """Let go of a part."""
        self._parts.pop(number, None)
        self._last.pop(number, None)

    def _approach(self, epoch: int, index: int) -> StreamPart:
        """Let the sample be the next one of its part, or the last one."""
        position, number = divmod(index, self.num_parts)
        part = self._parts.get(number)
        is_new = part is None
        if part is None:
            part = self._parts[number] = StreamPart(self.stream, number, self.num_parts)
            part.keeps_state = self.keeps_marks
        if is_new or part.epoch != epoch or position < part.position - 1:
            self._begin(part, epoch, position)
        while part.position < position:
            self._advance(part)
        return part

    def _begin(self, part: StreamPart, epoch: int, position: int) -> None:
        """Go to the mark of a part, if there is one before a position."""
        part.begin(epoch)
        if epoch != self._marked:
            return
        mark = self._marks.pop(part.number, None)
        if mark is None or position < mark.first + mark.count:
            return
        why = "it has no state_dict() that a checkpoint can hold"
        if mark.state is not None:
            part.begin(epoch, mark.position, mark.state)
            if self._comes_back(part, mark):
                return
            part.begin(epoch)
            why = "its state_dict() does not bring it back"
        start = time.perf_counter()
        if not self._comes_back(part, mark):
            part.begin(epoch)
            self.notes.append(
                "warning: the stream does not repeat what it returned before this "
                "run was interrupted: the run continues with other data"
            )
            return
        if not mark.first:  # nothing but that was read again
            return
        self.notes.append(
            f"{part.position} samples of the stream were read again, and dropped, in "
            f"{time.perf_counter() - start:.1f} s: {why}"
        )

    def _comes_back(self, part: StreamPart, mark: Mark) -> bool:
        """Whether a part gives again what it gave at its mark."""
        digests = []
        try:
            while part.position < mark.first + mark.count:
                self._advance(part)
                if part.position > mark.first:
                    last = self.padded(self._last[part.number])
                    digests.append(digest(tensors_of_row(default_collate([last]), 0)))
        except Exception:  # whatever a state that does not fit brings about
            return False
        return digest(digests) == mark.digest

    def _advance(self, part: StreamPart) -> None:
        # what is drawn as reading begins, all parts draw alike: an order, for instance
        index = part.position * part.count + part.number if part.position else 0
        Status.go_on()
        self._last[part.number] = _take(part, self._seeds, part.epoch, index)


def _take(part: StreamPart, seeds: SeededReader, epoch: int, index: int) -> Any:
    """Return a part's next sample, read under the seeds of its index."""
    position = part.position

    def sample() -> Any:
        if part.position != position:  # once more, after generators were found
            part.again()
        if part.is_new:
            seeds.seed(epoch, 0)
            part.open()
            seeds.seed(epoch, index)
        return part.take()

    return seeds.read(epoch, index, sample)


def tensors_of_row(data: Any, row: int) -> list[Tensor]:
    """Return the tensors of a sample in a batch."""
    leaves = pytree.tree_leaves(data)
    return [leaf[row] for leaf in leaves if isinstance(leaf, Tensor)]
