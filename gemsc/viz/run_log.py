"""What a run has left of itself in its folder: its log, and how it was started."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gemsc.errors import GemscError

Curve = list[tuple[int, float]]  # step and value
LOG = "log.jsonl"
TAIL = 200  # bytes by which a log is known again


@dataclass
class RunLog:
    """The figures of a run by step, those of evaluations by name, and its options."""

    name: str
    loss: Curve = field(default_factory=list)
    figures: dict[str, Curve] = field(default_factory=dict)
    rates: Curve = field(default_factory=list)  # samples per second
    memory: list[Curve] = field(default_factory=list)  # bytes of each rank
    options: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)  # what was logged last
    last_step: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The last step."""
        return max((curve[-1][0] for curve in self._curves if curve), default=0)

    @property
    def _curves(self) -> list[Curve]:
        return [self.loss, *self.figures.values()]

    @classmethod
    def read(cls, folder: Path) -> RunLog:
        """Read the log in a run's folder; a line that a kill has cut is left out.

        Raises:
            GemscError: there is none.
        """
        path = folder / LOG
        try:
            text = path.read_text("utf-8", "replace")
        except OSError as error:
            raise GemscError(
                f"{path}: {(error.strerror or 'unreadable').lower()}",
                help="give the folder of a run, as --save names it: PROGRAM/runs/1",
            ) from None
        log = cls(folder.name, options=_options(folder / "run.json"))
        log.add(text)
        return log

    def add(self, text: str) -> None:
        """Add what lines of a log say; those that say nothing are left out."""
        for line in text.splitlines():
            try:
                self._add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue

    def _add(self, record: dict[str, Any]) -> None:
        step = int(record["step"])
        self.last = record
        if record["event"] == "step":
            self.last_step = record
            if _is_number(record["loss"]):
                self.loss.append((step, record["loss"]))
            if _is_number(record.get("samples_per_second")):
                self.rates.append((step, record["samples_per_second"]))
        elif record["event"] == "evaluation":
            for name, value in record["figures"].items():
                if _is_number(value):
                    self.figures.setdefault(str(name), []).append((step, value))
        elif record["event"] == "ranks":
            self.memory += [[] for _ in record["ranks"][len(self.memory) :]]
            for curve, rank in zip(self.memory, record["ranks"], strict=False):
                if _is_number(held := rank["memory_bytes"]):
                    curve.append((step, held))


class GrowingLog:
    """The log of a run that goes on: each time, only what is new is read."""

    def __init__(self, folder: Path) -> None:
        """Begin at the start; there may be no log yet."""
        self.folder = folder
        self.log = RunLog(folder.name)
        self._file = 0  # its number on the disk
        self._end = 0  # of what was read, in bytes
        self._tail = b""  # the last of it

    def read(self) -> bool:
        """Read on; return whether anything is new.

        A log that was cut or written anew, as `--resume` and `--overwrite` do, is read
        again from its start.
        """
        try:
            with (self.folder / LOG).open("rb") as file:
                return self._read(file)
        except OSError:
            return self._forget()

    def _read(self, file: IO[bytes]) -> bool:
        number = os.fstat(file.fileno()).st_ino
        file.seek(self._end - len(self._tail))
        is_new = number != self._file or file.read(len(self._tail)) != self._tail
        if is_new:
            self._forget()
            file.seek(0)
        self._file = number
        lines, newline, _ = file.read().rpartition(b"\n")  # the last one may grow
        self.log.add(lines.decode("utf-8", "replace"))
        read = lines + newline
        self._end += len(read)
        self._tail = (self._tail + read)[-TAIL:]
        return is_new or bool(read)

    def _forget(self) -> bool:
        had_any = self._end > 0
        self.log, self._file, self._end, self._tail = (
            RunLog(self.folder.name),
            0,
            0,
            b"",
        )
        return had_any


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _options(path: Path) -> dict[str, Any]:
    """Return the options of the last start of a run, as far as they are known."""
    try:
        options = json.loads(path.read_text("utf-8"))["starts"][-1]["options"]
        return {str(name): value for name, value in options.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}
