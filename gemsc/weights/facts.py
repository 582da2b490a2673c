"""What is known of a file that was written: so that a damaged one is found."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


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
