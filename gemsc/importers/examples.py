"""Example inputs: numbers that the network can be computed with.

Zeros would do for shapes alone. But where an input of integers picks rows of a table,
random rows are better examples, and no row must be beyond the table's end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc.codegen.python_text import one_line
from gemsc.importers.expression import names_in
from gemsc.importers.sheet import Sheet, Symbol, sheet_of


def examples(sheet: Sheet) -> list[str]:
    """Return an expression for each input of a network."""
    known = _bounds(sheet)
    return [_example(value, known.get(value.text)) for value in sheet.inputs]


def _example(value: Symbol, bound: int | None) -> str:
    sizes = ", ".join(map(str, value.shape))
    dtype = value.tensor.dtype
    kind = "" if dtype is torch.float32 else f", dtype={dtype}"
    if bound is not None:
        shape = f"({sizes}{',' * (value.tensor.dim() == 1)})"
        kind = "" if dtype is torch.int64 else f", dtype={dtype}"
        return f"torch.randint({bound}, {shape}{kind})"
    if dtype.is_floating_point or dtype.is_complex:
        return f"torch.rand({sizes or '()'}{kind})"
    return f"torch.ones({sizes or '()'}{kind})"  # masks, lengths


def _bounds(sheet: Sheet) -> dict[str, int]:
    """Return below which number the indices have to be, by the names of the values."""
    bounds: dict[str, int] = {}
    for line, tree in reversed(sheet.used_lines()):
        found = [bounds[name] for name in line.names if name in bounds]
        flows = [(tree, bound) for bound in found]
        for part, bound in [*flows, *_indices(sheet, tree)]:
            for name in names_in(part):
                bounds[name] = min(bound, bounds.get(name, bound))
    return bounds


def _indices(sheet: Sheet, tree: ast.expr) -> Iterator[tuple[ast.expr, int]]:
    """Yield the parts of a line that pick rows of a table, and how many it has."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function, args=arguments):
                rows = _rows(sheet, sheet.empty(one_line(function)), arguments)
                for part, bound in zip(arguments, rows, strict=False):
                    if bound is not None:
                        yield part, bound
            case ast.Subscript(value=value, slice=index) if names_in(index):
                table = sheet.empty(one_line(value))
                if isinstance(table, Tensor) and not isinstance(index, ast.Tuple):
                    yield index, table.shape[0]


def _rows(sheet: Sheet, called: Any, arguments: list[ast.expr]) -> list[int | None]:
    """Return below which number each argument of a call has to be, where it does."""
    if isinstance(called, nn.Embedding):
        return [called.num_embeddings]
    if called is F.embedding and len(arguments) > 1:
        return [sheet.empty(one_line(arguments[1])).shape[0]]
    if (inner := sheet_of(called)) is not None:
        bounds = _bounds(inner)
        return [bounds.get(value.text) for value in inner.inputs]
    return []
