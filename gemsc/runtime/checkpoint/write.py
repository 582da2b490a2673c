"""Save: each rank streams its pieces into a file, the first one makes it a checkpoint.

    all ranks    what each holds; then each knows what to write (sharing_out.py)
    all ranks    rank1.safetensors, then rank1.json: size, digest, pieces, progress
    rank 0       once all of these are there: manifest.json, then the step's name

In the background the same is done by a thread of each rank, with copies of the tensors
in the host's memory; threads talk through the folder alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from gemsc.base.dtypes import dtype_name
from gemsc.base.files import FileFacts, write_text
from gemsc.errors import GemscError, InternalError
from gemsc.runtime.checkpoint.folder import (
    Retention,
    clear_space,
    discard,
    last_step,
    publish,
)
from gemsc.runtime.checkpoint.holdings import Extra, HeldTensor, Holdings
from gemsc.runtime.checkpoint.manifest import Manifest, Stored
from gemsc.runtime.checkpoint.optimizer_state import slots_of, split_state, state_of
from gemsc.runtime.checkpoint.pieces import TensorPiece, make_up
from gemsc.runtime.checkpoint.sharing_out import (
    Item,
    cut_rows,
    digest_of,
    own_rows_of,
    tables_of,
)
from gemsc.runtime.checkpoint.states import encode, generator_states
from gemsc.runtime.process.status import Status
from gemsc.runtime.process.stop import told_by_all
from gemsc.runtime.worker.updates import Updates
from gemsc.runtime.worker.worker import Worker
from gemsc.weights.write import Entry, write_stream

POLL_SECONDS = 0.05
FAILED = "failed"


@dataclass
class PendingSave:
    """A checkpoint that a thread of this rank writes; all threads are waited for."""

    folder: Path | None = None
    thread: threading.Thread | None = None
    problem: GemscError | None = None

    def run(self, act: Callable[[], None]) -> None:
        """Do the work in a thread."""

        def work() -> None:
            try:
                act()
            except GemscError as error:
                self.problem = error

        self.thread = threading.Thread(target=work, name="checkpoint")
        self.thread.start()

    def check(self) -> None:
        """Raise what has gone wrong so far."""
        if self.problem is not None:
            raise self.problem

    def wait(self) -> GemscError | None:
        """Return what went wrong, once the thread has come to its end."""
        if self.thread is not None:
            self.thread.join()
        return self.problem


def check_savable(worker: Worker) -> None:
    """Make sure that a checkpoint can hold what optimizers and schedulers keep.

    Raises:
        GemscError: it cannot.
    """
    _share(worker, {}, {}, {})


def save(
    worker: Worker,
    directory: Path,
    *,
    extra: Mapping[str, Any],
    callbacks: Mapping[str, Any],
    tensors: Extra,
    kept: Retention,
    background: bool,
) -> PendingSave:
    """Write a checkpoint of all ranks: see `Trainer.save`."""
    transport, step = worker.transport.host, worker.steps.done
    share, beside, problem = _Share(), directory, None
    try:
        share = _share(worker, extra, tensors, callbacks)
        if transport.rank == 0:
            with _told_where(directory, step):
                beside = clear_space(directory, step)
    except GemscError as error:
        problem = error
    items = [Item.of(held) for held in share.held]
    said = step, digest_of(items), str(beside), problem
    everyone = told_by_all(transport, "trainer.save()", said)
    steps, digests, places, told = zip(*everyone, strict=True)
    beside = Path(places[0])
    problems = [problem for problem in told if problem is not None]
    if len(set(steps)) > 1:
        problems.append(
            GemscError(
                f"the ranks save after different steps: {[*steps]}",
                help="call trainer.save() on every rank, after the same step",
            )
        )
    if problems:
        if transport.rank == 0 and beside != directory:
            discard(beside)
        raise problems[0]
    tables = tables_of(transport, items, digests)
    share = share.cut(own_rows_of(transport.rank, digests, tables))
    keys = {item.key for items in tables.values() for item in items}
    rank, ranks = transport.rank, transport.size
    job = _Job(directory, beside, step, rank, ranks, kept, frozenset(keys))
    if background:
        saving = PendingSave(directory)
        share = share.copied()
        saving.run(lambda: job.run(share))
        return saving
    _on_all_ranks(transport, lambda: job.write(share, Status.go_on), beside)
    _on_all_ranks(transport, job.complete if transport.rank == 0 else None, beside)
    return PendingSave()


def _on_all_ranks(transport: Any, act: Callable[[], None] | None, beside: Path) -> None:
    """Do something on this rank; if it fails on any, it fails on all of them."""
    problem = None
    try:
        if act is not None:
            act()
    except GemscError as error:
        problem = error
    everyone = transport.all_gather_object(problem)
    for theirs in everyone:
        if theirs is not None:
            if transport.rank == 0:
                discard(beside)
            raise theirs


@contextmanager
def _told_where(directory: Path, step: int) -> Iterator[None]:
    """Say what could not be written, where to, and how to go on elsewhere."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        more = f" and --resume {directory}" if last_step(directory) else ""
        raise GemscError(
            f"the checkpoint of step {step} cannot be written to {directory}: {error}",
            help=f"free space there, or choose another folder with --save{more}",
        ) from error


# -------------------------------------------------- what a rank has to say


@dataclass(frozen=True)
class _Share:
    """What one rank saves: tensors and JSON, and what it has `held` like others."""

    held: Sequence[HeldTensor] = ()
    tensors: Mapping[str, HeldTensor] = field(default_factory=dict)
    texts: Mapping[str, Any] = field(default_factory=dict)

    def cut(self, rows: Mapping[str, tuple[int, int]]) -> _Share:
        """Return what this rank writes, if that is some rows of what it holds."""
        held = {h.key: cut_rows(h, rows[h.key]) for h in self.held if h.key in rows}
        return _Share((), {**held, **self.tensors}, self.texts)

    def copied(self) -> _Share:
        """Return the same with tensors that nobody changes, in the host's memory."""
        copies = {
            key: replace(held, tensor=held.tensor.to("cpu", copy=True))
            for key, held in self.tensors.items()
        }
        return _Share((), copies, self.texts)


def _share(
    worker: Worker,
    extra: Mapping[str, Any],
    tensors: Extra,
    callbacks: Mapping[str, Any],
) -> _Share:
    rank, holdings = worker.transport.host.rank, Holdings(worker)
    held = [*holdings.tensors(tensors)]
    updates = worker.variants.updates
    states = {name: _states(phase, holdings) for name, phase in updates.items()}
    for of_optimizer, *_ in states.values():
        held += of_optimizer
    written = {gradient.key: gradient for gradient in holdings.gradients()}

    def put(tensor: Tensor) -> str:
        key = f"private/{rank}/{len(written)}"
        whole = TensorPiece.whole(tensor.shape)
        written[key] = HeldTensor(key, tensor, whole)
        return key

    encoded = {
        name: {
            "kinds": kinds,
            **encode(state, put, "the state of the optimizer"),
            "scheduler": encode(scheduler, put, "the state of the scheduler"),
        }
        for name, (_, kinds, state, scheduler) in states.items()
    }
    of_rank = {
        **encoded.pop(""),
        **({"phases": encoded} if encoded else {}),
        "generators": encode(generator_states(worker.device), put, "a generator"),
        "callbacks": encode(callbacks, put, "the state of callbacks"),
        "layout": holdings.digest(),
    }
    texts = {"aliases": holdings.aliases(), "rank": of_rank}
    if rank == 0:
        scales = {
            name: scaler.state_dict()
            for name, phase in updates.items()
            if (scaler := phase.scaler) is not None
        }
        texts["run"] = {
            "scaler": scales.pop("", None),
            **({"scalers": scales} if scales else {}),
            "accumulate": worker.steps.accumulate,
            "waiting": worker.steps.waiting,
            "pending": {
                name: {"terms": encode(phase.terms, put, ""), "spoilt": phase.is_spoilt}
                for name, phase in updates.items()
            },
            "seed": worker.seed,
            "extra": encode(extra, put, "the extra state"),
        }
    return _Share(held, written, texts)


def _states(
    updates: Updates, holdings: Holdings
) -> tuple[list[HeldTensor], dict[str, str], dict[str, Any], Any]:
    """Return an optimizer's tensors in pieces, kinds, and the rest of both."""
    kinds: dict[str, str] = {}
    others: dict[str, Any] = {"groups": [], "values": {}, "rest": {}}
    held: list[HeldTensor] = []
    scheduler = None
    if updates.optimizer is not None:
        kinds["optimizer"] = type(updates.optimizer).__name__
        state = state_of(updates.optimizer)
        slots = slots_of(updates.optimizer, state, holdings.updated(updates))
        held, others = split_state(state, slots)
    if updates.scheduler is not None:
        kinds["scheduler"] = type(updates.scheduler).__name__
        scheduler = updates.scheduler.state_dict()
    return held, kinds, others, scheduler


# ------------------------------------------------------ files and threads


@dataclass(frozen=True)
class _Job:
    """The writing of one checkpoint: what follows from now on needs no messages."""

    directory: Path
    beside: Path
    step: int
    rank: int
    ranks: int
    kept: Retention
    shared: frozenset[str]  # keys of what ranks hold

    def run(self, share: _Share) -> None:
        """Do this rank's part; the first one waits for all others and completes it."""
        try:
            self.write(share)
        except GemscError as error:
            with suppress(OSError):
                self._tell({FAILED: error.message, "help": error.help})
            raise
        if self.rank == 0:
            try:
                self._wait()
                self.complete()
            except GemscError:
                discard(self.beside)
                raise

    def write(self, share: _Share, go_on: Callable[[], None] | None = None) -> None:
        """Write this rank's file, then what there is in it; tell of each tensor."""
        table = {
            key: Entry(held.tensor.dtype, held.piece.sizes)
            for key, held in share.tensors.items()
        }

        def read(key: str) -> Tensor:
            if go_on is not None:
                go_on()
            held = share.tensors[key]
            return held.tensor.detach().reshape(held.piece.sizes)

        with _told_where(self.directory, self.step):
            facts = write_stream(self.beside / self._file, table, read, sync=True)
            pieces = {
                key: (
                    dtype_name(held.tensor.dtype),
                    held.piece.shape,
                    held.piece.intervals,
                )
                for key, held in share.tensors.items()
            }
            self._tell({"facts": vars(facts), "tensors": pieces, **share.texts})

    def complete(self) -> None:
        """Make a checkpoint of what all ranks have written."""
        with _told_where(self.directory, self.step):
            everyone = [self._told(rank) for rank in range(self.ranks)]
            files: dict[str, FileFacts] = {}
            aliases: dict[str, str] = {}
            pieces: dict[str, list[tuple[str, TensorPiece]]] = defaultdict(list)
            kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
            for rank, said in enumerate(everyone):
                name = f"rank{rank}.safetensors"
                files[name] = FileFacts(**said["facts"])
                aliases |= said["aliases"]
                for key, (dtype, shape, intervals) in said["tensors"].items():
                    piece = TensorPiece.read(shape, intervals)
                    pieces[key].append((name, piece))
                    kinds[key] = dtype, tuple(shape)
                (self.beside / f"rank{rank}.json").unlink()
            tensors = {key: Stored(*kinds[key], tuple(p)) for key, p in pieces.items()}
            _check_complete(tensors, self.shared)
            if not all((self.beside / name).is_file() for name in files):
                raise self._removed
            ranks = [said["rank"] for said in everyone]
            for of_rank in ranks[1:]:
                if of_rank["callbacks"] == ranks[0]["callbacks"]:
                    del of_rank["callbacks"]
            progress = {**everyone[0]["run"], "ranks": ranks}
            manifest = Manifest(
                self.step, self.ranks, files, tensors, aliases, progress
            )
            manifest.write(self.beside)
            publish(self.directory, self.beside, self.kept)

    def _wait(self) -> None:
        """Wait until all ranks have written, or one of them has failed."""
        for rank in range(self.ranks):
            path = self.beside / f"rank{rank}.json"
            while not path.exists():
                self._check_own()
                time.sleep(POLL_SECONDS)
            if FAILED in (said := self._told(rank)):
                raise GemscError(said[FAILED], help=said["help"])

    @property
    def _file(self) -> str:
        return f"rank{self.rank}.safetensors"

    def _tell(self, said: Mapping[str, Any]) -> None:
        write_text(self.beside / f"rank{self.rank}.json", json.dumps(said))

    def _told(self, rank: int) -> dict[str, Any]:
        path = self.beside / f"rank{rank}.json"
        if not path.is_file():
            self._check_own()
            raise GemscError(
                f"rank 0 does not see {path}, which rank {rank} wrote",
                help="choose a --save folder that all machines share",
            )
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return said

    def _check_own(self) -> None:
        """Make sure that what rank 0 has written is still there."""
        if not (self.beside / "rank0.json").exists():
            raise self._removed

    @property
    def _removed(self) -> GemscError:
        return GemscError(
            f"another run removed {self.beside} while this one was writing there",
            help="let only one run at a time save to a folder",
        )


def _check_complete(tensors: Mapping[str, Stored], keys: Iterable[str]) -> None:
    """Make sure that each element of what ranks hold was written, and by one of them.

    Raises:
        InternalError: it was not.
    """
    for key in keys:
        stored = tensors.get(key)
        pieces = [piece for _, piece in stored.pieces] if stored else []
        if not stored or not make_up(TensorPiece.whole(stored.shape), pieces):
            raise InternalError(f"the ranks did not write '{key}' once: {pieces}")
