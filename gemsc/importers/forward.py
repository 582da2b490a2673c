"""The forward of a class of model.py: the lines of its sheet that are of use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torch import Tensor

from gemsc.codegen.python_text import parsed
from gemsc.codegen.writer import Names, Writer, comment
from gemsc.errors import InternalError
from gemsc.importers.expression import names_in, write_statement
from gemsc.importers.sheet import Line, Sheet

LONGEST_NOTE = 60  # columns
LONGEST_TARGETS = 60
MOST_KINDS = 4  # in an annotation


def used_lines(sheet: Sheet) -> list[tuple[Line, ast.expr]]:
    """Return the lines that what is returned depends on, and their trees."""
    found = []
    wanted = names_in(parsed(sheet.result))
    for line in reversed(sheet.lines):
        if wanted.isdisjoint(line.names):
            continue
        tree = parsed(line.text)
        found.append((line, tree))
        wanted |= names_in(tree)
    return found[::-1]


def write_forward(writer: Writer, sheet: Sheet) -> None:
    """Write the method of a sheet."""
    arguments = ["self", *(f"{value}: Tensor" for value in sheet.inputs)]
    kind = annotation(sheet.empty(sheet.result))
    writer.bracketed("def forward(", arguments, f") -> {kind}:")
    lines = used_lines(sheet)
    known = {"self", *(value.text for value in sheet.inputs)}
    for line, tree in lines:
        known |= {*line.names, *names_in(tree)}
    names = Names([*known])

    def fresh() -> str:
        return names.unique("part")

    with writer.indented():
        before = ""
        for line, tree in lines:
            note = _note(line) if line.note != before else ""
            before = line.note
            targets = ", ".join(line.names)
            if len(line.names) > 1 and len(targets) > LONGEST_TARGETS:
                parts = fresh()
                write_statement(writer, f"{parts} = ", tree, fresh, note)
                for index, name in enumerate(line.names):
                    if name != "_":
                        writer.line(f"{name} = {parts}[{index}]")
            else:
                write_statement(writer, f"{targets} = ", tree, fresh, note)
        write_statement(writer, "return ", parsed(sheet.result), fresh)


def _note(line: Line) -> str:
    """Return what a line comes from, unless its text has that name."""
    words = set(re.findall(r"\w+", f"{line.text} {' '.join(line.names)}"))
    end = f"/{line.note.partition(' ')[0]}"  # torch.onnx writes /encoder/conv1/Conv
    paths = (name.removesuffix(end) for name in re.findall(r"'([^']*)'", line.note))
    named = [re.sub(r"\W", "_", path.rpartition("/")[2]) for path in paths]
    if not line.note or (named and words.issuperset(named)):
        return ""
    return comment(line.note, LONGEST_NOTE)[2:]


def annotation(value: object) -> str:
    """Return the type of what forward returns."""
    if isinstance(value, Tensor):
        return "Tensor"
    if isinstance(value, dict):
        return f"dict[str, {' | '.join(_kinds(value.values()))}]"
    if isinstance(value, list):
        return f"list[{' | '.join(_kinds(value))}]"
    if isinstance(value, tuple):
        kinds = [annotation(item) for item in value]
        if len(kinds) > 1 and (len({*kinds}) == 1 or len(kinds) > MOST_KINDS):
            return f"tuple[{' | '.join(dict.fromkeys(kinds))}, ...]"
        return f"tuple[{', '.join(kinds)}]"
    raise InternalError(f"a network returns {type(value).__name__}")


def _kinds(values: object) -> Iterator[str]:
    assert isinstance(values, (list, type({}.values())))
    return iter(dict.fromkeys(map(annotation, values)))
