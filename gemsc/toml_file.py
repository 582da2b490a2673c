"""TOML files that people edit: a wrong entry is reported with its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemsc.errors import GemscError, SourceLocation

__all__ = ["TomlFile"]

_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?")
_ENTRY = re.compile(r"\s*([\w.\-\"']+)\s*=")
_LINE = re.compile(r"\(at line (\d+)")


@dataclass(frozen=True)
class TomlFile:
    """The entries of a file, and where each of them stands."""

    path: Path
    text: str
    entries: dict[str, Any]

    @classmethod
    def read(cls, path: Path, *, what: str) -> TomlFile:
        """Read a file; `what` names its kind in errors ("hardware file").

        Raises:
            GemscError: the file cannot be read, or is no TOML; names the line.
        """
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, text, tomllib.loads(text))
        except OSError as error:
            why = (error.strerror or type(error).__name__).lower()
            raise GemscError(f"{what} {path}: {why}", help="give its path") from None
        except UnicodeDecodeError as error:
            raise GemscError(
                f"{what} {path} is no text: {error}", help="save it as UTF-8"
            ) from None
        except tomllib.TOMLDecodeError as error:
            found = _LINE.search(str(error))
            at = SourceLocation(str(path), int(found[1])) if found else None
            raise GemscError(
                f"{what} {path.name} is no TOML: {error}",
                at=at,
                help="see toml.io for how entries are written",
            ) from None

    def error(self, keys: Sequence[str], message: str, *, help: str) -> GemscError:
        """Return an error at the entry `keys` (its tables' names, then its own)."""
        return GemscError(message, at=self.location(keys), help=help)

    def location(self, keys: Sequence[str]) -> SourceLocation:
        """Return the line of an entry, or of the innermost table that is there."""
        known: dict[tuple[str, ...], int] = {(): 1}
        table: tuple[str, ...] = ()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := _HEADER.match(line):
                table = _split(header[1])
                known.setdefault(table, number)
            elif entry := _ENTRY.match(line):
                known.setdefault((*table, *_split(entry[1])), number)
        wanted = tuple(keys)
        while wanted not in known:
            wanted = wanted[:-1]
        return SourceLocation(str(self.path), known[wanted])


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip(" \"'") for part in dotted.split("."))
