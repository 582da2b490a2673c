"""Fingerprints of the user's source files, one for each definition in them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from pathlib import Path

__all__ = ["changed_definitions", "fingerprint", "source_fingerprints"]

# a program may run with other data, another optimizer and other metrics than at
# compile time: none of them is compiled in
RUNTIME_ONLY = {"dataset", "eval_dataset", "metrics", "optimizer", "scheduler"}
REST = "(module)"
UNREADABLE = "(unreadable)"


def fingerprint(text: str) -> str:
    """Return 16 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_fingerprints(path: Path) -> dict[str, str]:
    """Return the fingerprint of each top-level definition of a Python file.

    Comments, layout and what only matters at run time do not count. Everything that
    defines no name counts as `(module)`; a file that cannot be parsed has one entry.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {UNREADABLE: ""}
    parts: dict[str, list[ast.stmt]] = {}
    for item in tree.body:
        if not _is_docstring(item):
            parts.setdefault(_name(item), []).append(item)
    ignored = _runtime_only(parts)
    return {
        name: fingerprint("\n".join(map(ast.dump, items)))
        for name, items in parts.items()
        if name not in ignored
    }


def changed_definitions(recorded: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return what differs from the recorded files, as `model.py: UNet changed`."""
    changes = []
    for file, definitions in recorded.items():
        path = Path(file)
        now = source_fingerprints(path)
        if UNREADABLE in now:
            how = "is no Python any more" if path.exists() else "is not there any more"
            changes.append(f"{file} {how}")
            continue
        for name in sorted({*definitions, *now}):
            if definitions.get(name) != now.get(name):
                how = "changed"
                if name not in now:
                    how = "is gone"
                elif name not in definitions:
                    how = "is new"
                changes.append(f"{path.name}: {name} {how}")
    return changes


def _name(item: ast.stmt) -> str:
    match item:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return REST


def _runtime_only(parts: Mapping[str, list[ast.stmt]]) -> set[str]:
    """Return the names that only the data, the optimizer and the metrics use."""
    uses = {
        name: {
            node.id
            for item in items
            for node in ast.walk(item)
            if isinstance(node, ast.Name)
        }
        for name, items in parts.items()
    }
    found = RUNTIME_ONLY & parts.keys()
    grows = True
    while grows:
        more = set()
        for name in parts.keys() - found:
            users = {other for other in parts if name in uses[other]} - {name}
            if users and users <= found:
                more.add(name)
        found |= more
        grows = bool(more)
    return found


def _is_docstring(item: ast.stmt) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
