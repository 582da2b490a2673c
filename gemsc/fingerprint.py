"""Fingerprints of the user's source files, one for each definition in them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from pathlib import Path

__all__ = ["changed_definitions", "fingerprint", "source_fingerprints"]

# a program may run with other data, another optimizer and other metrics than at
# compile time: none of them is compiled in
RUNTIME_ONLY = {"dataset", "eval_dataset", "optimizer", "metrics"}


def fingerprint(text: str) -> str:
    """Return 16 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_fingerprints(path: Path) -> dict[str, str]:
    """Return the fingerprint of each top-level definition of a Python file.

    Comments, layout and what only matters at run time do not count. Everything that is
    no definition counts as `(module)`; a file that cannot be parsed has one entry.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {"(unreadable)": ""}
    parts: dict[str, list[str]] = {}
    for item in tree.body:
        name = getattr(item, "name", "(module)")
        if name in RUNTIME_ONLY or _is_docstring(item):
            continue
        parts.setdefault(name, []).append(ast.dump(item))
    return {name: fingerprint("\n".join(dumps)) for name, dumps in parts.items()}


def changed_definitions(recorded: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return what differs from the recorded files, as `model.py: class UNet`."""
    changes = []
    for file, definitions in recorded.items():
        now = source_fingerprints(Path(file))
        for name in sorted({*definitions, *now}):
            if definitions.get(name) != now.get(name):
                how = "changed"
                if name not in now:
                    how = "is gone"
                elif name not in definitions:
                    how = "is new"
                changes.append(f"{Path(file).name}: {name} {how}")
    return changes


def _is_docstring(item: ast.stmt) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
