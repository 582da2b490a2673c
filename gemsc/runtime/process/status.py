"""What a rank is doing, noted where others can read it however the rank ends.

Each rank of a job has a file in the job's status folder, mapped into its memory:

    bytes    0-255   the action of the moment; the rank writes it as the action begins
    bytes  256-1023  what its watch saw last, about once a second, as JSON: `RankState`

Writing costs a memory copy. The other ranks and `gemsc run` read the files, also those
of ranks that were killed or stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

STATUS_VARIABLE = "GEMSC_STATUS_FOLDER"
REPORTED = "reported"  # file in that folder: a rank has said why all end
ACTION_BYTES = 256
STATUS_BYTES = 1024
START = "the start"
BETWEEN_STEPS = "between two steps"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What the watch of a rank saw when it last looked.

    limit: seconds without a change after which the job is stopped; 0 for never.
    seen, changed: when the watch looked, and when the rank last went on: seconds of the
        machine's monotonic clock, which its processes share.
    doing: the rank's action, as in `Status`.
    place: the line that runs.
    is_idle: whether the user's own loop has it, between two steps.
    needs: what the rank waits for, and the ranks that takes, as the bits of a number.
    """

    rank: int
    pid: int
    limit: float
    seen: float
    changed: float
    doing: str
    place: str = ""
    is_idle: bool = False
    needs: tuple[tuple[str, int], ...] = ()

    @property
    def is_starting(self) -> bool:
        """Whether the first step, or the data for it, has not begun."""
        return self.doing.startswith(f"{START}, ")


def note_worker() -> None:
    """Note this data loader's process: it may leave tensors in shared memory.

    What it left is removed with the status folder (`scratch_folder`).
    """
    folder = os.environ.get(STATUS_VARIABLE)
    if folder is not None:
        with contextlib.suppress(OSError):  # another host, or the job has ended
            Path(folder, f"worker{os.getpid()}").touch()


class Status:
    """The action of the moment, in memory that outlives a killed process.

    `changes` counts the actions. Without a status folder nobody else can read them.
    """

    current: Status | None = None  # the one of this process, for its last report

    def __init__(self, rank: int | None = None) -> None:
        Status.current = self
        self.rank = rank
        self.step = 0
        self.what = START
        self.stage: object = ""
        self.micro_batch: int | None = None
        self.changes = 0
        self.read_seconds = 0.0  # in which the ranks waited for data
        self._memory: mmap.mmap | None = None
        folder = os.environ.get(STATUS_VARIABLE)
        if folder and rank is not None and Path(folder).is_dir():  # on this host
            path = Path(folder) / f"rank{rank}"
            path.write_bytes(bytes(STATUS_BYTES))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), STATUS_BYTES)
            self._publish()

    @classmethod
    def of(cls, rank: int) -> Status:
        """Return this process's status as that rank, a new one if it has none."""
        current = cls.current
        return current if current is not None and current.rank == rank else cls(rank)

    def enter(
        self, what: str, stage: object = "", micro_batch: int | None = None
    ) -> None:
        """Say what begins."""
        self.what, self.stage, self.micro_batch = what, stage, micro_batch
        self.changes += 1
        self._publish()

    @classmethod
    def go_on(cls) -> None:
        """Say that the action of this process, which takes long, goes on."""
        if cls.current is not None:
            cls.current.changes += 1

    def idle(self) -> None:
        """Say that a step has ended."""
        self.enter(BETWEEN_STEPS)

    def while_reading(self, source: Iterable[T]) -> Iterator[T]:
        """Yield what a source of data gives; meanwhile that is the action."""
        start = self._begin_reading()
        for item in source:
            self.read_seconds += perf_counter() - start
            self.idle()
            yield item
            start = self._begin_reading()

    def _begin_reading(self) -> float:
        self.enter("reading the dataset")
        return perf_counter()

    @property
    def is_idle(self) -> bool:
        """Whether no step, nor anything else of gemsc's, runs."""
        return self.what == BETWEEN_STEPS

    def __str__(self) -> str:
        """Return for example `backward of stage 2, micro-batch 3, step 17`."""
        text = self.what
        if self.stage:
            text += f" of {self.stage}"
        if self.micro_batch is not None:
            text += f", micro-batch {self.micro_batch}"
        return f"{text}, step {self.step}"

    def _publish(self) -> None:
        if self._memory is not None:
            text = str(self).encode()[: ACTION_BYTES - 1]
            self._memory[: len(text) + 1] = text + b"\0"

    def publish_state(self, state: RankState) -> None:
        """Write what the watch saw, with as many needs as there is room for."""
        if self._memory is None:
            return
        needs, room = state.needs, STATUS_BYTES - ACTION_BYTES - 1
        while len(data := json.dumps(dataclasses.asdict(state)).encode()) > room:
            if not needs:
                return
            needs = needs[:-1]
            state = dataclasses.replace(state, needs=needs, place=state.place[:80])
        self._memory[ACTION_BYTES : ACTION_BYTES + len(data) + 1] = data + b"\0"


def read_status(folder: Path, rank: int) -> str | None:
    """Return what a rank was doing when it last said so."""
    try:
        return _text((folder / f"rank{rank}").read_bytes()[:ACTION_BYTES]) or None
    except OSError:
        return None


def read_states(folder: Path) -> dict[int, RankState]:
    """Return what the watches of this machine's ranks saw, by rank."""
    states = {}
    for path in folder.glob("rank*"):
        for _ in range(3):  # a rank may be writing
            try:
                state = _decoded(path.read_bytes())
            except (OSError, ValueError, TypeError):
                continue
            states[state.rank] = state
            break
    return dict(sorted(states.items()))


def _decoded(data: bytes) -> RankState:
    doing = _text(data[:ACTION_BYTES])
    state = RankState(**json.loads(_text(data[ACTION_BYTES:])))
    if state.doing != doing:  # what the watch saw is over
        return dataclasses.replace(state, doing=doing, needs=(), place="")
    needs = tuple((what, ranks) for what, ranks in state.needs)
    return dataclasses.replace(state, needs=needs)


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")
