"""Stream: a dataset that is read from its beginning, with no sample by its number.

In a model's file, with a dataset of Hugging Face:

    def dataset():
        texts = load_dataset("text", data_files="*.txt", streaming=True)["train"]
        return gemsc.Stream(texts, samples=10_000, pair=tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from gemsc.errors import GemscError


class Stream(Dataset[Any]):
    """The first `samples` samples of an iterable: those of one epoch, in their order.

    Each epoch begins anew, after a call of `set_epoch(epoch)` where the iterable has
    one (those of Hugging Face shuffle by it). Every rank that needs samples goes
    through all of them, and keeps those of its part of the batch; the generators of
    random numbers are seeded before each, as those of any dataset are. A run that goes
    on in the middle of an epoch reads what came before again, and drops it.
    """

    def __init__(
        self,
        source: Iterable[Any],
        samples: int,
        pair: Callable[[Any], Any] | None = None,
    ) -> None:
        """Take an `IterableDataset`, or anything with `__iter__`.

        `pair` makes (input, target) of what it gives, where that is something else.

        Raises:
            GemscError: it cannot be begun anew, or there are no samples.
        """
        kind = type(source).__name__
        if not hasattr(type(source), "__iter__") or hasattr(source, "__next__"):
            raise GemscError(
                f"a Stream of type {kind} cannot be read from its beginning again",
                help="give an object whose __iter__ begins anew, as an IterableDataset "
                "does, not a generator",
            )
        if samples < 1:
            raise GemscError(
                f"a Stream of {samples} samples", help="an epoch takes 1 or more"
            )
        self.source = source
        self.samples = samples
        self.pair = pair
        self.epoch = -1  # the one that is read
        self.position = 0  # of the sample that comes next
        self._read: Iterator[Any] = iter(())
        self._last: Any = None

    def __len__(self) -> int:
        """The number of samples of an epoch."""
        return self.samples

    def begin(self, epoch: int) -> None:
        """Go to the first sample of an epoch."""
        if callable(set_epoch := getattr(self.source, "set_epoch", None)):
            set_epoch(epoch)
        self.epoch, self.position, self._read = epoch, 0, iter(self.source)

    def __getitem__(self, index: int) -> Any:
        """Return the sample that comes next, or the one that came last.

        Raises:
            GemscError: the stream has ended.
            IndexError: it is another one.
        """
        if self.epoch < 0:
            self.begin(0)
        if index not in (self.position, self.position - 1):
            raise IndexError(f"the stream stands at sample {self.position}")
        if index == self.position:
            try:
                found = next(self._read)
            except StopIteration:
                raise GemscError(
                    f"the stream ends after {index} samples, and an epoch takes "
                    f"{self.samples}",
                    help=f"give gemsc.Stream(..., samples={index})",
                ) from None
            self.position += 1
            self._last = found if self.pair is None else self.pair(found)
        return self._last
