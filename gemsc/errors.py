"""Errors that people read: where, what, and what to do about it."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import TypeVar

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """One line of the user's code; `caller`: of theirs, where it is of a package."""

    file: str
    line: int
    caller: SourceLocation | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return `file:line`, the file relative to the working directory if in it."""
        path = Path(self.file)
        try:
            shown = path.relative_to(Path.cwd())
        except ValueError:
            shown = path
        return f"{shown}:{self.line}"

    @property
    def short(self) -> str:
        """`name:line`, without folders: the form that generated files use."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def text(self) -> str:
        """The source line itself, stripped; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


class GemscError(Exception):
    """A mistake that the user can correct. The command line exits with 1.

    `message` starts in lower case and names values; `help` says what to do;
    `notes` are (location, text) pairs that point at other lines involved.
    """

    def __init__(
        self,
        message: str,
        *,
        at: SourceLocation | None = None,
        help: str | None = None,
        notes: tuple[tuple[SourceLocation | None, str], ...] = (),
    ) -> None:
        """Keep the parts; `str()` puts them together."""
        super().__init__(message)
        self.message = message
        self.at = at
        self.help = help
        self.notes_at = notes

    def __str__(self) -> str:
        """Return `file:line: error: message`, the source line, notes and help."""
        where = f"{self.at}: " if self.at else ""
        lines = [f"{where}error: {self.message}"]
        if self.at and self.at.text:
            lines.append(f"    {self.at.text}")
        if self.at and self.at.caller:
            lines.append(f"{self.at.caller}: note: called here: {self.at.caller.text}")
        for location, text in self.notes_at:
            prefix = f"{location}: " if location else ""
            lines.append(f"{prefix}note: {text}")
        for text in getattr(self, "__notes__", ()):
            lines.append(f"note: {text}")
        if self.help:
            lines.append(f"help: {self.help}")
        return "\n".join(lines)


class UsageError(GemscError):
    """A command line that cannot be read. The command line exits with 2."""


class InternalError(Exception):
    """A bug in gemsc itself. The command line exits with 70."""


def warn(message: str, *, at: object = None, help: str = "") -> None:
    """Print a warning on stderr, which is passed on at once."""
    text = f"{at}: warning: {message}" if at else f"warning: {message}"
    text += f"\nhelp: {help}" if help else ""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def say_note(text: str) -> None:
    """Print a note on stderr, which is passed on at once."""
    print(f"note: {text}", file=sys.stderr, flush=True)  # noqa: T201


def one_of(name: str, known: Collection[str]) -> str:
    """Return advice for a name that is not known: the one it looks like, and all."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}choose one of {', '.join(known)}"


LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parent))


def user_place(trace: TracebackType | None) -> SourceLocation | None:
    """Return the innermost line of the user's."""
    place = None
    for frame in traceback.extract_tb(trace):
        if is_users(Path(frame.filename)) and frame.lineno is not None:
            place = SourceLocation(frame.filename, frame.lineno)
    return place


def is_users(path: Path) -> bool:
    """Whether a file is of neither Python, a package, gemsc nor a program."""
    file = str(path)
    if file.startswith(("<", *LIBRARIES)) or "-packages" in file:
        return False
    return not (path.parent / "plan.toml").is_file()


def choose(what: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Return the entry of a table that an option names.

    Raises:
        GemscError: there is no entry of that name.
    """
    if name not in table:
        raise GemscError(f"unknown {what} '{name}'", help=one_of(name, table))
    return table[name]
