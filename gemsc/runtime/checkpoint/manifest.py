"""`manifest.json`: what belongs to a checkpoint, and where each tensor is.

    {"format": 3, "sha256": "...", "content": {
        "step": 120, "ranks": 2,
        "files": {"rank0.safetensors": {"bytes": 4711, "sha256": "..."}, ...},
        "tensors": {"model/conv.weight": {"dtype": "float32", "shape": [64, 3, 3, 3],
                    "pieces": [["rank0.safetensors", null], ...]}, ...},
        "aliases": {"head.weight": "embedding.weight"},
        "progress": {...}}}

The digest is that of the content. A piece is a file, and the intervals of each
dimension that it has: null for all of the tensor. In its file it has the tensor's key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemsc.base.files import FileFacts, sync
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.pieces import TensorPiece

MANIFEST = "manifest.json"
FORMAT = 3
FILE = re.compile(r"rank\d{1,7}\.safetensors")
MOST = 2**53  # of any number: what JSON surely holds
LARGEST = 2**30  # bytes of a manifest


@dataclass(frozen=True)
class Stored:
    """A tensor, and which file has which piece of it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, TensorPiece], ...]


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint: all of it is of one step."""

    step: int
    ranks: int
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, Stored]
    aliases: Mapping[str, str] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into the folder of its files, onto the disk."""
        content = {
            "step": self.step,
            "ranks": self.ranks,
            "files": {name: vars(facts) for name, facts in self.files.items()},
            "tensors": {key: _to_json(stored) for key, stored in self.tensors.items()},
            "aliases": {**self.aliases},
            "progress": {**self.progress},
        }
        parts = {"format": FORMAT, "sha256": _digest(content), "content": content}
        path = folder / MANIFEST
        path.write_text(json.dumps(parts) + "\n", encoding="utf-8")
        sync(path)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            GemscError: it is missing or damaged, or of another gemsc.
        """
        path = folder / MANIFEST
        try:
            if not path.is_file():
                is_folder = path.is_dir()
                what = "is a folder, not a file" if is_folder else "is missing"
                raise damaged(path, what)
            if path.stat().st_size > LARGEST:
                raise damaged(path, f"is damaged: it has more than {LARGEST} bytes")
            parts = json.loads(path.read_bytes())
            if (kind := parts["format"]) != FORMAT:
                raise _of_another_gemsc(folder, kind)
            content = parts["content"]
            if parts["sha256"] != _digest(content):
                raise damaged(path, "is damaged: it is not what was saved")
            return _from_json(content)
        except (
            *(OSError, ValueError, TypeError, KeyError, AttributeError),
            *(IndexError, ArithmeticError, RecursionError),
        ) as error:
            raise damaged(path, f"is damaged: {_reason(error)}") from None


def damaged(path: Path, what: str) -> GemscError:
    """Return what says that a file of a checkpoint cannot be used."""
    return GemscError(
        f"{path} {what}",
        help="give another checkpoint: --resume with an older step- folder",
    )


def _of_another_gemsc(folder: Path, kind: object) -> GemscError:
    ways = "resume with the gemsc that saved it"
    if kind == 2:
        ways = (
            "resume with the older gemsc that saved it, or start from its weights "
            f"alone: --resume {folder / 'model.safetensors'}"
        )
    return GemscError(
        f"{folder / MANIFEST} has format {kind!s:.20}, this gemsc reads {FORMAT}",
        help=ways,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error).split("\n")[0][:200] or type(error).__name__


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _to_json(stored: Stored) -> dict[str, object]:
    pieces = [
        (file, None if piece.is_whole else piece.intervals)
        for file, piece in stored.pieces
    ]
    return {"dtype": stored.dtype, "shape": stored.shape, "pieces": pieces}


# -------------------------------------------------- checks of what was read


def _from_json(content: Mapping[str, Any]) -> Manifest:
    """Return what a manifest says; anything that it cannot be is an error."""
    files = {
        _file(name): FileFacts(_number(facts["bytes"]), _text(facts["sha256"]))
        for name, facts in content["files"].items()
    }
    manifest = Manifest(
        _number(content["step"]),
        _number(content["ranks"]),
        files,
        {key: _stored(entry, files) for key, entry in content["tensors"].items()},
        {alias: _text(name) for alias, name in content["aliases"].items()},
        dict(content["progress"].items()),
    )
    wanted = {f"rank{rank}.safetensors" for rank in range(len(files))}
    if not files or manifest.ranks != len(files) or files.keys() != wanted:
        raise ValueError("it does not name a file of each rank")
    return manifest


def _stored(entry: Mapping[str, Any], files: Iterable[str]) -> Stored:
    shape = tuple(map(_number, _list(entry["shape"])))
    pieces = []
    for file, intervals in _list(entry["pieces"]):
        if file not in files:
            raise ValueError(f"a tensor is in {file!r:.60}")
        piece = TensorPiece.whole(shape)
        if intervals is not None:
            piece = TensorPiece(shape, tuple(map(_row, _list(intervals))))
            ends = (row[-1][1] if row else 0 for row in piece.intervals)
            if any(a > b for a, b in zip(ends, shape or (1,), strict=True)):
                raise ValueError("a piece is larger than its tensor")
        pieces.append((file, piece))
    return Stored(_text(entry["dtype"]), shape, tuple(pieces))


def _row(pairs: Any) -> tuple[tuple[int, int], ...]:
    row, end = [], 0
    for start, stop in _list(pairs):
        if not end <= _number(start) < _number(stop):
            raise ValueError("the intervals of a piece are not in order")
        row.append((start, stop))
        end = stop
    return tuple(row)


def _number(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= MOST:
        raise ValueError(f"{number!r:.60} is not a whole number")
    return number


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r:.60} is not a text")
    return text


def _list(entries: Any) -> list[Any]:
    if not isinstance(entries, list):
        raise TypeError(f"{entries!r:.60} is not a list")
    return entries


def _file(name: str) -> str:
    if not FILE.fullmatch(name):
        raise ValueError(f"{name!r:.60} is not a file of a checkpoint")
    return name
