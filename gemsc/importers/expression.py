"""Expressions in statements that fit their lines.

What is too long for a line becomes several statements, in the order in which Python
would have computed it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from gemsc.codegen.python_text import (
    BRACKETS,
    OPERATORS,
    arguments,
    is_single,
    items,
    one_line,
)
from gemsc.codegen.writer import Writer, columns

CONTAINERS = (*BRACKETS,)
LONGEST_CHAIN = 40  # of self.a["b"].c within a longer expression


def names_in(node: ast.AST) -> set[str]:
    """Return the names that a piece of code reads."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


# ------------------------------------------------------------------ statements


def write_statement(
    writer: Writer,
    head: str,
    node: ast.expr,
    fresh: Callable[[], str],
    note: str = "",
) -> None:
    """Write `head` and an expression, as one statement or after others.

    `head` is `x = ` or `return `, and `fresh` gives names for what is computed before.
    """
    while not _fits(writer, head, node):
        part = next(_parts(node), None)
        if part is None:
            break
        name = fresh()
        write_statement(writer, f"{name} = ", part, fresh, note)
        node, note = _Replaced(part, name).visit(node), ""
    text = head + one_line(node)
    is_long = len(text) > writer.room
    if note and (is_long or columns(f"{text}  # {note}") > writer.room):
        writer.line(f"# {note}")
        note = ""
    match node:
        case ast.Call(func=function) if is_long:
            writer.bracketed(f"{head}{one_line(function)}(", arguments(node), ")")
        case ast.List() | ast.Tuple() | ast.Dict() if is_long:
            start, end = BRACKETS[type(node)]
            end = f",{end}" if is_single(node) else end
            writer.bracketed(head + start, items(node), end)
        case ast.BinOp() | ast.Compare() | ast.IfExp() if is_long:
            _write_operation(writer, head, node)
        case _:
            writer.line(f"{text}  # {note}" if note else text)


def _write_operation(
    writer: Writer, head: str, node: ast.BinOp | ast.Compare | ast.IfExp
) -> None:
    """Write an operation on long names: in a line of its own, or each in its line."""
    if isinstance(node, ast.IfExp):
        words = ["", "if ", "else "]
        operands = [node.body, node.test, node.orelse]
    else:
        ops = [node.op] if isinstance(node, ast.BinOp) else node.ops
        words = ["", *(f"{OPERATORS[type(op)][0]} " for op in ops)]
        others = [node.right] if isinstance(node, ast.BinOp) else node.comparators
        operands = [node.left, *others]
    with writer.block(f"{head}("):
        if len(text := one_line(node)) <= writer.room:
            writer.line(text)
        else:
            for word, operand in zip(words, operands, strict=True):
                writer.line(word + one_line(operand))
    writer.line(")")


def _fits(writer: Writer, head: str, node: ast.expr) -> bool:
    """Whether a statement is one line, or a call or a list with an item in each."""
    if len(head + one_line(node)) <= writer.room:
        return True
    inside = writer.room - 4
    match node:
        case ast.Call(func=function) if _is_chain(function):
            start = f"{head}{one_line(function)}("
            parts = arguments(node)
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
        case ast.List() | ast.Tuple() | ast.Dict() if _is_list(node):
            start, parts = head + "[", items(node)
            values = node.values if isinstance(node, ast.Dict) else node.elts
        case _:
            return False
    if len(start) > writer.room or not parts:
        return False
    return all(
        len(item) < inside or _fits_broken(value, inside - 4)
        for item, value in zip(parts, values, strict=True)
    )


def _fits_broken(node: ast.expr, room: int) -> bool:
    """Whether a list is one with an item in each line."""
    return _is_list(node) and all(len(item) < room for item in items(node))


def _is_list(node: ast.expr) -> bool:
    return isinstance(node, CONTAINERS) and len(items(node)) > 1


def _is_chain(node: ast.expr) -> bool:
    """Whether it is a name with dots and constant subscripts."""
    match node:
        case (
            ast.Attribute(value=value)
            | ast.Subscript(value=value, slice=ast.Constant())
        ):
            return _is_chain(value)
    return isinstance(node, ast.Name)


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """Yield what can be computed before an expression, the first one first."""
    children = [*_children(node)]
    is_list = isinstance(node, ast.Call | ast.List | ast.Tuple | ast.Dict)
    for child in children:
        is_index = isinstance(node, ast.Subscript) and child is node.slice
        is_inside = (is_list or is_index) and isinstance(child, CONTAINERS)
        if is_inside or isinstance(child, ast.Slice | ast.Starred):
            yield from _parts(child)
        elif _is_chain(child):
            if len(one_line(child)) > LONGEST_CHAIN:
                yield child
        elif not _is_constant(child):
            yield child
    if is_list:
        yield from filter(_is_list, children)


def _children(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the operands of an expression; of a method, what it is of."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            yield child.value
        elif isinstance(node, ast.Call) and child is node.func:
            yield child.value if isinstance(child, ast.Attribute) else node.func
        elif isinstance(child, ast.expr):
            yield child


def _is_constant(node: ast.expr) -> bool:
    operand = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(operand, ast.Constant)


class _Replaced(ast.NodeTransformer):
    """Puts a name into the place of a part of an expression."""

    def __init__(self, part: ast.expr, name: str) -> None:
        self.part, self.name = part, name

    def visit(self, node: ast.AST) -> Any:
        return ast.Name(self.name) if node is self.part else self.generic_visit(node)
