"""How many lines each room of gemsc/ has, beside the most that it may have.

    python tests/house/size.py

The marks are in pyproject.toml, under [tool.size]. A change that makes a room grow past
its mark raises it, and its message says why that is worth what all readers pay.
"""

from __future__ import annotations

import ast
import functools
import tokenize
import tomllib
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    """The files of a room, all their lines, and those that have code."""

    files: int
    lines: int
    code: int


def room_of(path: Path) -> str:
    """Return the folder of gemsc/ that a file is in; of one at the top `top`."""
    words = path.relative_to(ROOT / "gemsc").parts
    return words[0] if len(words) > 1 else "top"


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return the syntax of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def rooms() -> dict[str, list[Path]]:
    """Return the files of each room."""
    files: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "gemsc").rglob("*.py")):
        files.setdefault(room_of(path), []).append(path)
    return files


def sizes() -> dict[str, Size]:
    """Return the size of each room, the largest first."""
    by_room = {
        name: Size(
            len(paths), sum(map(count_lines, paths)), sum(map(count_code, paths))
        )
        for name, paths in rooms().items()
    }
    return dict(sorted(by_room.items(), key=lambda item: -item[1].lines))


def count_lines(path: Path) -> int:
    """Return the number of all lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def count_code(path: Path) -> int:
    """Return the number of lines that are no blank, comment or docstring."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    code: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NO_CODE and token.type != tokenize.ENCODING:
                code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(path)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            code.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(code)


def marks() -> dict[str, int]:
    """Return the most lines that each room may have."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return settings["tool"]["size"]


def main() -> None:
    """Print a table."""
    most, by_room = marks(), sizes()
    print(f"{'room':12}{'files':>7}{'lines':>9}{'code':>9}{'mark':>9}")
    for name, size in by_room.items():
        mark = most.get(name, 0)
        print(f"{name:12}{size.files:7}{size.lines:9,}{size.code:9,}{mark:9,}")
    files, lines, code = (
        sum(n) for n in zip(*map(astuple, by_room.values()), strict=True)
    )
    print(f"{'all':12}{files:7}{lines:9,}{code:9,}{sum(most.values()):9,}")


if __name__ == "__main__":
    main()
