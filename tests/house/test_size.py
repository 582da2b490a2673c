"""No room of gemsc/ grows past its mark without a reason."""

from __future__ import annotations

import ast
from pathlib import Path

from size import count_code, count_lines, marks, rooms, tree

FILES = [*(Path(__file__).parents[2] / "gemsc").rglob("*.py")]
MOST_LINES, MOST_METHODS = 450, 35


def lines_of_rooms() -> dict[str, int]:
    return {name: sum(map(count_lines, paths)) for name, paths in rooms().items()}


def test_each_room_is_below_its_mark() -> None:
    """Make something superfluous, or raise the mark and say why in the commit."""
    most, sizes = marks(), lines_of_rooms()
    assert sizes.keys() == most.keys()
    above = {n: (lines, most[n]) for n, lines in sizes.items() if lines > most[n]}
    assert not above, (
        f"{above} lines and marks: find what the change makes superfluous, or raise "
        "the mark in pyproject.toml, [tool.size], with the reason in the commit"
    )


def test_a_mark_follows_a_room_that_shrinks() -> None:
    sizes = lines_of_rooms()
    loose = {n: most for n, most in marks().items() if most > 50 + sizes[n]}
    assert not loose, f"lower the marks of {loose} in pyproject.toml, [tool.size]"


def test_a_file_is_one_idea() -> None:
    """Find what is superfluous in it, or split it: a file has the name of one idea."""
    lengths = {str(path): count_lines(path) for path in FILES}
    long = {path: length for path, length in lengths.items() if length > MOST_LINES}
    assert lengths
    assert not long


def test_a_class_has_not_too_many_methods() -> None:
    classes = [
        (path.name, node.name, sum(isinstance(n, ast.FunctionDef) for n in node.body))
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert max(count for *_, count in classes) > 20, "methods are not counted"
    assert not [row for row in classes if row[2] > MOST_METHODS]


def test_lines_of_code_are_those_that_are_neither_blank_nor_text(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.py"
    text = '"""One.\n\nTwo.\n"""\n\n# three\nx = 1  # four\n\n\ndef f():\n'
    file.write_text(text + '    """Five."""\n    y = """\n    six"""\n    return y\n')
    assert count_lines(file) == 14
    assert count_code(file) == 5  # x, def, y and its second line, return
