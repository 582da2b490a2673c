"""Constants of a user's file that the command line sets: `--set WIDTH=32`.

    WIDTH = 64        is read as        WIDTH = 32

The assignment is replaced before the file runs, so that all that uses the name sees the
new value. Values are literals; nothing else is ever evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from gemsc.base.fingerprint import names_at_run_time
from gemsc.errors import GemscError, SourceLocation

# before the name of a user's file whose own is that of an imported module
RENAMED = "gemsc_user_"
KINDS = (int, float, str, bool, tuple)


class ConstantsLoader(SourceFileLoader):
    """Loads a Python file with other values for some of its constants."""

    def __init__(self, name: str, path: Path, constants: Mapping[str, str]) -> None:
        """Take texts by name; without any, the file is loaded as it is."""
        super().__init__(name, str(path))
        self.constants = constants

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code, never a cached one of other constants."""
        if not self.constants:
            return super().get_code(fullname)
        tree = ast.parse(Path(self.path).read_bytes(), self.path)
        assigned = _assigned(tree)
        for name, text in self.constants.items():
            if name not in assigned:
                raise _unknown(Path(self.path), name, assigned)
            for statement in assigned[name]:
                statement.value = _new_value(Path(self.path), name, text, statement)
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


def split_constants(texts: list[str]) -> dict[str, str]:
    """Read `NAME=VALUE` each.

    Raises:
        GemscError: a text has another form.
    """
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip().isidentifier():
            raise GemscError(
                f"--set {text}: that is not NAME=VALUE",
                help="name a constant of the model's file: --set WIDTH=32",
            )
        found[name.strip()] = value.strip()
    return found


def check_run_constants(path: Path, constants: Mapping[str, str]) -> None:
    """Make sure that a run may change constants: the model does not use them.

    Raises:
        GemscError: what was compiled may use one.
    """
    free = names_at_run_time(path)
    assigned = _assigned(ast.parse(path.read_bytes()))
    for name in constants:
        if name not in assigned:
            raise _unknown(path, name, assigned)
        if name not in free:
            raise GemscError(
                f"{name} may be part of what was compiled: not only the data, the "
                "optimizer, the metrics and the hooks use it",
                at=SourceLocation(str(path), assigned[name][0].lineno),
                help=f"compile again with --set {name}={constants[name]}",
            )


def _assigned(tree: ast.Module) -> dict[str, list[Any]]:
    """Return the statements at the top that give a name a literal."""
    found: dict[str, list[Any]] = {}
    for item in tree.body:
        match item:
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.setdefault(name, []).append(item)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                found.setdefault(name, []).append(item)
    return {
        name: items
        for name, items in found.items()
        if all(_literal(item.value) is not None for item in items)
    }


def _literal(value: ast.expr | str) -> Any:
    """Return the number, text, bool or tuple of them that is written; None if none."""
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    parts = found if isinstance(found, tuple) else (found,)
    return found if all(isinstance(part, KINDS) for part in parts) else None


def _new_value(path: Path, name: str, text: str, statement: Any) -> ast.expr:
    """Return the value as it is written in the file, of the type of the old one."""
    old = _literal(statement.value)
    new = text if isinstance(old, str) else _literal(text)
    if isinstance(old, str) and isinstance(_literal(text), str):
        new = _literal(text)  # in quotes
    if isinstance(old, float) and type(new) is int:
        new = float(new)
    if type(new) is not type(old):
        raise GemscError(
            f"--set {name}={text}: {name} is {old!r}, of type {type(old).__name__}",
            at=SourceLocation(str(path), statement.lineno),
            help="give a value of that type",
        )
    made = ast.parse(repr(new), mode="eval").body
    return ast.copy_location(made, statement.value)


def _unknown(path: Path, name: str, assigned: Mapping[str, Any]) -> GemscError:
    close = get_close_matches(name, assigned, n=1)
    advice = "a constant is a name that a line at the top gives a number or a text"
    if assigned:
        advice = f"it has {', '.join(assigned)}"
    at = None
    if close:
        advice = f"did you mean {close[0]}?"
        at = SourceLocation(str(path), assigned[close[0]][0].lineno)
    return GemscError(f"{path.name} has no constant {name}", at=at, help=advice)
