"""Files that are never half there: written beside, then renamed; and what they hold."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ELSEWHERE = "elsewhere.json"  # where a program's weights are, if it has them not itself
DISTRIBUTED = ".metadata"  # the table of a folder of torch.distributed.checkpoint


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give an empty file beside `path` to write; if that succeeds, rename it.

    Whoever writes it, it gets the permissions of any new file. An OSError names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.touch()
    mode = beside.stat().st_mode
    try:
        yield beside
        beside.chmod(mode)
        beside.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file."""
    with replaced(path) as beside:
        beside.write_text(text, encoding="utf-8")


def in_json(nest: Any) -> Any:
    """Return `nest` in JSON's types; a number not finite is null, as is None."""
    if isinstance(nest, Mapping):
        return {str(key): in_json(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return [in_json(part) for part in nest]
    if isinstance(nest, float):
        return nest if math.isfinite(nest) else None
    return nest if isinstance(nest, int | str | None) else str(nest)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FileFacts:
    """What a file must be."""

    bytes: int
    sha256: str


def facts_of(path: Path) -> FileFacts:
    """Return a file's size and digest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(path.stat().st_size, digest)
