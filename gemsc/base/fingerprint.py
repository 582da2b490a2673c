"""Fingerprints of the user's source files, one for each definition in them.

And of the files of settings that these read, each as a whole.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gemsc.errors import is_users

# a program may run with other data, another optimizer and other metrics than at
# compile time: none of them is compiled in
RUNTIME_ONLY = {
    *("dataset", "eval_dataset", "metrics", "optimizer", "scheduler"),
    *("on_step", "on_epoch", "predict_input", "predict_output", "eval_windows"),
}
SETTINGS = {".json", ".yaml", ".yml", ".toml", ".ini", ".cfg"}
REST = "(module)"
WHOLE = "(file)"
UNREADABLE = "(unreadable)"


def fingerprint(text: str) -> str:
    """Return 16 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_fingerprints(
    path: Path, lines: Collection[int] | None = None
) -> dict[str, str]:
    """Return the fingerprint of each top-level definition of a Python file.

    Comments, layout and what only matters at run time do not count. Everything that
    defines no name counts as `(module)`; a file that cannot be parsed has one entry.
    With `lines`, only definitions that hold one of them count, and what those use.
    A file of settings is one whole.
    """
    try:
        if path.suffix in SETTINGS:
            return {WHOLE: fingerprint(path.read_text("utf-8", "replace"))}
        source = _read(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {UNREADABLE: ""}
    counted = source.parts.keys() - _runtime_only(source.uses)
    if lines is not None:
        counted = _used_by_lines(source.parts, source.uses, lines)
    return {name: text for name, text in source.fingerprints.items() if name in counted}


def names_at_run_time(path: Path) -> set[str]:
    """Return the definitions of a file that only matter at run time."""
    return _runtime_only(_read(path.read_bytes()).uses)


class _Source(NamedTuple):
    """A file's definitions by name: their statements, what they use, fingerprints."""

    parts: Mapping[str, Sequence[ast.stmt]]
    uses: Mapping[str, set[str]]
    fingerprints: Mapping[str, str]


@functools.lru_cache(maxsize=32)  # a compilation asks twice, a comparison more often
def _read(source: bytes) -> _Source:
    parts: dict[str, list[ast.stmt]] = {}
    for item in ast.parse(source).body:
        if not _is_docstring(item):
            parts.setdefault(_name(item), []).append(item)
    return _Source(
        parts,
        {name: _names_in(items) for name, items in parts.items()},
        {n: fingerprint("\n".join(map(ast.dump, items))) for n, items in parts.items()},
    )


def changed_definitions(
    recorded: Mapping[str, Mapping[str, str]], *, whole: bool = True
) -> list[str]:
    """Return what differs from the recorded files, as `model.py: UNet changed`.

    Unless files were recorded `whole`, definitions that are new to them do not count.
    """
    changes = []
    for file, definitions in recorded.items():
        path = Path(file)
        if WHOLE in definitions:
            continue
        now = source_fingerprints(path)
        if UNREADABLE in now:
            how = "is no longer valid Python" if path.exists() else "no longer exists"
            changes.append(f"{file} {how}")
            continue
        for name in sorted({*definitions, *(now if whole else ())}):
            if definitions.get(name) != now.get(name):
                how = "changed"
                if name not in now:
                    how = "is gone"
                elif name not in definitions:
                    how = "is new"
                changes.append(f"{path.name}: {name} {how}")
    return changes


def changed_settings(recorded: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the files of settings that differ from the recorded ones.

    They may well be settings of the optimizer, say, which is not compiled in.
    """
    return [
        file
        for file, whole in recorded.items()
        if WHOLE in whole and source_fingerprints(Path(file)) != whole
    ]


_reads: list[set[str]] = []  # what notes the files that are opened now


@contextmanager
def noting_settings(files: set[str]) -> Iterator[None]:
    """Add to `files` the settings that the user's code opens meanwhile, in any folder.

    Files of packages, and those in hidden folders (caches), do not count.
    """
    _listen()
    _reads.append(files)
    try:
        yield
    finally:
        _reads.pop()


def _note_settings(event: str, arguments: tuple[Any, ...]) -> None:
    if not _reads or event != "open" or not isinstance(arguments[0], str | Path):
        return
    path = Path(arguments[0])
    if path.suffix not in SETTINGS:  # of most, as what is imported
        return
    path = Path(os.path.abspath(path))
    is_hidden = any(part.startswith(".") for part in path.parts)
    if not is_hidden and is_users(path):
        for files in _reads:
            files.add(str(path))


@functools.cache
def _listen() -> None:
    sys.addaudithook(_note_settings)  # which stays: there is no way to take it away


def _name(item: ast.stmt) -> str:
    match item:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return REST


def _names_in(items: Iterable[ast.stmt]) -> set[str]:
    """Return all names that statements read or write."""
    return {
        node.id
        for item in items
        for node in ast.walk(item)
        if isinstance(node, ast.Name)
    }


def _used_by_lines(
    parts: Mapping[str, Sequence[ast.stmt]],
    uses: Mapping[str, set[str]],
    lines: Collection[int],
) -> set[str]:
    """Return the definitions that hold one of the lines, and all that they use."""
    reached: set[str] = set()
    more = {
        name
        for name, items in parts.items()
        for item in items
        if name != REST
        and any(item.lineno <= line <= (item.end_lineno or 0) for line in lines)
    }
    while more:
        reached |= more
        used = set().union(*(uses[name] for name in more))
        more = (used & parts.keys()) - reached
    return reached


def _runtime_only(uses: Mapping[str, set[str]]) -> set[str]:
    """Return the names that only the data, the optimizer and the metrics use."""
    runtime = RUNTIME_ONLY & uses.keys()
    grows = True
    while grows:
        more = set()
        for name in uses.keys() - runtime:
            users = {other for other in uses if name in uses[other]} - {name}
            if users and users <= runtime:
                more.add(name)
        runtime |= more
        grows = bool(more)
    return runtime


def _is_docstring(item: ast.stmt) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
