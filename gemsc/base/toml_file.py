"""TOML files that people edit: read into dataclasses, errors name file and line."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gemsc.errors import GemscError, SourceLocation

T = TypeVar("T")
Keys = tuple[str | int, ...]  # names of tables and entries; numbers count `[[tables]]`

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?")
_ENTRY = re.compile(r"\s*([\w.\-\"']+)\s*=")
_LINE = re.compile(r"\(at line (\d+)")
_WORDS = {dict: "table", int: "number", float: "number", str: "text", list: "list"} | {
    bool: "true or false"
}


@dataclass(frozen=True)
class TomlFile:
    """The entries of a file, and where each of them stands.

    `advice` says how one comes by a file without errors.
    """

    path: Path
    text: str
    entries: dict[str, Any]
    advice: str

    @classmethod
    def read(cls, path: Path, *, what: str, advice: str) -> TomlFile:
        """Read a file; `what` names its kind in errors ("hardware file").

        Raises:
            GemscError: the file cannot be read, or is not valid TOML; names the line.
        """
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, text, tomllib.loads(text), advice)
        except OSError as error:
            why = (error.strerror or type(error).__name__).lower()
            raise GemscError(f"{what} {path}: {why}", help="give its path") from None
        except UnicodeDecodeError as error:
            raise GemscError(
                f"{what} {path} is not text: {error}", help="save it as UTF-8"
            ) from None
        except RecursionError:
            raise GemscError(
                f"{what} {path} is not valid TOML: it is nested too deeply", help=advice
            ) from None
        except tomllib.TOMLDecodeError as error:
            match = _LINE.search(str(error))
            line = int(match[1]) if match else max(1, len(text.splitlines()))
            raise GemscError(
                f"{what} {path.name} is not valid TOML: {error}",
                at=SourceLocation(str(path), line),
                help=f"see toml.io for how entries are written, or {advice}",
            ) from None

    def error(
        self, keys: Sequence[str | int], message: str, *, help: str, word: str = ""
    ) -> GemscError:
        """Return an error at the entry `keys` (its tables' names, then its own)."""
        return GemscError(message, at=self.location(keys, word), help=help)

    def location(self, keys: Sequence[str | int], word: str = "") -> SourceLocation:
        """Return the line of an entry, or of the innermost table that is there.

        With `word` it is the entry's first line that holds the word, if one does.
        """
        known: dict[Keys, int] = {(): 1}
        order: list[int] = []
        counts: dict[Keys, int] = {}
        table: Keys = ()
        lines = self.text.splitlines()
        for number, line in enumerate(lines, start=1):
            if header := _HEADER.match(line):
                *outer, last = _split(header[2])
                table = (*_inside(outer, counts), last)
                if header[1] == "[[":
                    counts[table] = counts.get(table, -1) + 1
                table = _inside(_split(header[2]), counts)
            elif entry := _ENTRY.match(line):
                known.setdefault((*table, *_split(entry[1])), number)
            else:
                continue
            known.setdefault(table, number)
            order.append(number)
        wanted = tuple(keys)
        while wanted not in known:
            wanted = wanted[:-1]
        first = known[wanted]
        end = min(
            (number for number in order if number > first), default=len(lines) + 1
        )
        holding = (n for n in range(first, end) if word in lines[n - 1])
        return SourceLocation(str(self.path), next(holding, first))

    def build(
        self,
        kind: type[T],
        check: Callable[[Keys, float], str | None] = lambda keys, number: None,
        *,
        strict: bool = True,
    ) -> T:
        """Return the dataclass that the file holds.

        Its annotations say what entries there are, and of what type. `check(keys,
        number)` says what is wrong with a number, or None. Unless `strict`, unknown
        entries are left out.

        Raises:
            GemscError: an entry is missing, unknown or wrong; names the line.
        """
        return _Builder(self, check, strict).table(kind, self.entries, ())


@dataclass(frozen=True)
class _Builder:
    """Makes dataclasses of one file's entries."""

    file: TomlFile
    check: Callable[[Keys, float], str | None]
    strict: bool

    def table(self, kind: type[T], entries: dict[str, Any], keys: Keys) -> T:
        hints = _hints(kind)  # type: ignore[arg-type]
        for name in entries if self.strict else ():
            if name not in hints:
                close = get_close_matches(name, hints, n=1)
                raise self.file.error(
                    (*keys, name),
                    f"unknown entry '{_dotted((*keys, name))}'",
                    help=f"did you mean {close[0]}?"
                    if close
                    else f"known: {', '.join(hints)}",
                )
        values = {}
        for item in fields(kind):  # type: ignore[arg-type]
            here = (*keys, item.name)
            if item.name in entries:
                values[item.name] = self.value(
                    hints[item.name], entries[item.name], here
                )
            elif item.default is MISSING and item.default_factory is MISSING:
                raise self.file.error(
                    keys,
                    f"there is no entry '{_dotted(here)}'",
                    help=f"add it, or {self.file.advice}",
                )
        return kind(**values)

    def value(self, hint: Any, value: Any, keys: Keys) -> Any:
        """Return one entry as the type that its field has."""
        origin = get_origin(hint) or hint
        if origin is Any:
            return value
        if origin is dict and isinstance(value, dict):
            inner = get_args(hint)[1]
            return {
                key: self.value(inner, entry, (*keys, key))
                for key, entry in value.items()
            }
        if origin is list and isinstance(value, list):
            inner = get_args(hint)[0]
            return [
                self.value(inner, entry, (*keys, index))
                for index, entry in enumerate(value)
            ]
        if hasattr(hint, "__dataclass_fields__") and isinstance(value, dict):
            return self.table(hint, value, keys)
        if origin in (int, float) and type(value) in (int, float):
            wrong = None if isfinite(value) else "give a finite number"
            if wrong := wrong or self.check(keys, value):
                raise self.file.error(keys, f"{_dotted(keys)} is {value}", help=wrong)
            if origin is int and value != int(value):
                raise self.file.error(
                    keys, f"{_dotted(keys)} is {value}", help="give a whole number"
                )
            return origin(value)
        if origin in (str, bool) and isinstance(value, origin):
            return value
        raise self.file.error(
            keys,
            f"{_dotted(keys)} is {value!r}, which is not a "
            f"{_WORDS.get(origin, 'table')}",
            help=f"correct the entry, or {self.file.advice}",
        )


@functools.cache  # a plan has thousands of tables of one kind
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip(" \"'") for part in dotted.split("."))


def _inside(names: Sequence[str], counts: Mapping[Keys, int]) -> Keys:
    """Return the keys of a table inside the last ones of its lists, so far."""
    keys: Keys = ()
    for name in names:
        keys = (*keys, name)
        if keys in counts:
            keys = (*keys, counts[keys])
    return keys


def _dotted(keys: Keys) -> str:
    """Return `stages[1].ranks` for ("stages", 1, "ranks")."""
    parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys]
    return "".join(parts).removeprefix(".")
