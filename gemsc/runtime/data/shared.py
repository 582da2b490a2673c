"""A dataset that every rank reads by itself, and a comparison of what they read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gemsc.base.boxes import Box
from gemsc.base.rng import seed_all, seed_of
from gemsc.datasets.samples import check_inputs
from gemsc.errors import GemscError, SourceLocation, warn
from gemsc.runtime.data.batches import Batch, Batches
from gemsc.runtime.data.stream_batches import StreamBatches
from gemsc.runtime.process.stop import Requests
from gemsc.runtime.transport.transport import Transport

# by index and, where a rank reads only a part of each image, the box of it
Digests = dict[tuple[int, Box | None], str]
Key = TypeVar("Key")

ADVICE = (
    "on every rank, the random generators of torch, numpy and Python, and those that "
    "the dataset holds, are seeded alike for each sample; draw from no others, sort "
    "files and sets, and let no sample depend on the time, or on what was read before"
)


@dataclass(frozen=True)
class SharedData:
    """The batches of one dataset on this rank.

    `name` is that of the dataset in the user's file, `at` the line, and `examples` are
    what `example_inputs` returns for each shape, if batches are to be like these.
    """

    batches: Batches
    transport: Transport
    name: str
    at: SourceLocation | None
    examples: Sequence[Any] = ()

    def __post_init__(self) -> None:
        """Make sure that the dataset has as many samples on every rank."""
        lengths = self.transport.all_gather_object(self.batches.num_samples)
        for rank, length in enumerate(lengths):
            if length != lengths[0]:
                raise self._differs(
                    f"has {lengths[0]} samples on rank 0 and {length} on rank {rank}"
                )

    def split(self, *, reads: bool) -> bool:
        """Let each copy of the model read its part of a stream; whether that can be.

        Every rank calls it; those that read have to agree.
        """
        batches, copies = self.batches, self.batches.num_copies
        if not isinstance(batches, StreamBatches) or copies == 1:
            return True
        if not batches.stream.split:  # as it was asked for
            return True
        answers = self.transport.all_gather_object(not reads or batches.can_split())
        batches.split(copies if all(answers) else 1)
        return all(answers)

    def epoch(
        self,
        number: int,
        first: int = 0,
        *,
        requests: Requests | None = None,
        reads: bool = True,
    ) -> Iterator[tuple[Batch, Digests]]:
        """Yield each batch, from the `first` one on, and what all ranks read in it.

        Only the first batch is compared, and gives digests, unless `compare_all` of
        the batches. Every rank iterates; one that does not read gets empty batches.
        Before a batch after which a rank has none, it asks all for the "end".

        Raises:
            GemscError: two ranks have read the same sample and got different data, or
                made another batch of it, or a stream has not even one. If one rank
                gets other data when it reads a sample again, that is said.
        """
        batches = self.batches
        read = batches.epoch if reads else batches.empty
        source = self._located(read(number, first))
        for i in range(first, len(batches)):
            batch = next(source, None)
            # what hooks draw does not depend on what this rank reads, and where
            seed_all(seed_of(batches.seed, number, "batch", i))
            compares = i == first or batches.compare_all
            digests = self._compare(batch, number) if compares else {}
            assert batch is not None
            if self.examples and reads:
                check_inputs(batch.data[0], self.examples[batch.shape], self.at)
            if batch.ends and requests is not None:
                requests.ask("end")
            yield batch, digests
            if requests is not None and requests.agreed("end"):
                return

    def _located(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """Give errors without a place the line of the dataset, and advice its name."""
        try:
            yield from source
        except GemscError as error:
            error.at = error.at or self.at
            if error.help is not None:
                error.help = error.help.replace(" dataset()", f" {self.name}()")
            raise

    def _compare(self, batch: Batch | None, epoch: int) -> Digests:
        batches, mine = self.batches, None
        if batch is not None:
            box = batches.window.box if batches.window is not None else None
            read = {(index, box): texts for index, texts in batch.digests.items()}
            joined = {(part, box): text for part, text in batches.joined(batch).items()}
            mine = read, joined, batch.notes
        gathered = self.transport.all_gather_object(mine)
        known = [of_rank for of_rank in gathered if of_rank is not None]
        if len(known) < len(gathered):
            size = batches.order.sizes[0]
            raise GemscError(
                f"{self.name} ends before its first batch of {size} samples is "
                "complete",
                at=self.at,
                help="add data, compile with fewer --micro-batches or --data, or let "
                "every replica read the whole stream: gemsc.Stream(..., split=False)",
            )
        notes = [note for *_, notes in known for note in notes]
        if notes and self.transport.rank == 0:
            print(max(notes), flush=True)  # noqa: T201 - a warning, if there is one
        once = [{key: texts[0] for key, texts in read.items()} for read, *_ in known]
        if (other := first_difference(once)) is not None:
            (index, _), ranks = other
            when = f", in epoch {epoch + 1}" if batches.shuffle else ""
            how = f"returns different data on {ranks}: sample {index}{when}"
            raise self._differs(how)
        if (other := first_difference(joined for _, joined, _ in known)) is not None:
            error = self._differs(f"and collate give different batches on {other[1]}")
            assert batches.shapes is not None
            error.at = batches.shapes.at.get("collate")
            raise error
        pairs = [pair for read, *_ in known for pair in read.items()]
        changing = [index for (index, _), texts in pairs if len({*texts}) > 1]
        if changing and self.transport.rank == 0:
            warn(
                f"{self.name} returns other data when sample {min(changing)} is read "
                "again: this run cannot be resumed or repeated bit for bit",
                at=self.at,
                help=ADVICE,
            )
        return {key: texts[0] for key, texts in pairs}

    def _differs(self, how: str) -> GemscError:
        return GemscError(f"{self.name} {how}", at=self.at, help=ADVICE)


def first_difference(
    everyone: Iterable[Mapping[Key, str]],
) -> tuple[Key, str] | None:
    """Return a key for which two ranks have different texts, and which ranks they are.

    Each rank has a text for some keys, in the order of ranks.
    """
    known: dict[Key, tuple[int, str]] = {}
    for rank, theirs in enumerate(everyone):
        for key, text in theirs.items():
            first, wanted = known.setdefault(key, (rank, text))
            if text != wanted:
                return key, f"ranks {first} and {rank}"
    return None
