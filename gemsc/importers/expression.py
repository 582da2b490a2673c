"""Python expressions as a formatter writes them, in statements that fit their lines.

Readers write short texts and do not care for spaces, quotes and widths. Here they are
read with `ast` and written once more; what is too long for a line becomes several
statements, in the order in which Python would have computed it.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

from gemsc.codegen.writer import Writer, columns

BRACKETS: dict[type[ast.AST], tuple[str, str]] = {
    ast.List: ("[", "]"),
    ast.Tuple: ("(", ")"),
    ast.Dict: ("{", "}"),
}
CONTAINERS = (*BRACKETS,)
CLOSE = "\0"  # no space before it
LONGEST_CHAIN = 40  # of self.a["b"].c within a longer expression


def parsed(text: str) -> ast.expr:
    """Return the tree of an expression."""
    return ast.parse(text.strip(), mode="eval").body


def names_in(node: ast.AST) -> set[str]:
    """Return the names that a piece of code reads."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def literal_text(value: object) -> str:
    """Return the text of a constant: None, numbers, text, and lists and dicts of them.

    Raises:
        TypeError: it has something else in it.
    """
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float) and (value != value or value in (1e999, -1e999)):
        return f'float("{value}")'
    if value is None or value is ... or isinstance(value, bool | int | float | complex):
        return "..." if value is ... else repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal_text, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        pairs = (
            f"{literal_text(key)}: {literal_text(each)}" for key, each in value.items()
        )
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"{type(value).__name__} has no literal")


def _quoted(text: str) -> str:
    """Return a string in double quotes, or in single ones where that saves escapes."""
    quote = "'" if '"' in text and text.count('"') > text.count("'") else '"'
    found = ""
    for letter in text:
        if letter in (quote, "\\"):
            found += f"\\{letter}"
        elif letter.isprintable():
            found += letter
        else:
            found += letter.encode("unicode_escape").decode("ascii")
    return f"{quote}{found}{quote}"


# ----------------------------------------------------------------- on one line


def one_line(node: ast.AST) -> str:
    """Return an expression on one line: `ast.unparse`, spelled as a formatter does."""
    text = ast.unparse(_Spelled().visit(copy.deepcopy(node)))
    return text.replace(f" ** {CLOSE}", "**")


class _Spelled(ast.NodeTransformer):
    """Puts ready text, as a name, where `ast.unparse` would write it otherwise."""

    # Write strings in double quotes, and infinity as a call
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_number = isinstance(node.value, int | complex)
        is_finite = isinstance(node.value, float) and math.isfinite(node.value)
        if is_number or is_finite or isinstance(node.value, bytes):
            return node
        return ast.Name(literal_text(node.value))

    # Leave the parts of an f-string
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    # Put a number into parentheses before a dot
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is_number(node.value):
            node.value = ast.Name(f"({one_line(node.value)})")
        return self.generic_visit(node)

    # Put a power into parentheses behind a sign
    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        match node:
            case ast.UnaryOp(op=ast.Not()):
                pass
            case ast.UnaryOp(operand=ast.BinOp(op=ast.Pow()) as power):
                node.operand = ast.Name(f"({one_line(power)})")
        return self.generic_visit(node)

    # Put no operand into parentheses that needs none
    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        for index, value in enumerate(node.values):
            is_inside = isinstance(value, ast.BoolOp) and (
                isinstance(node.op, ast.And) or isinstance(value.op, ast.Or)
            )
            is_loose = is_inside or isinstance(value, ast.IfExp | ast.Lambda)
            text = one_line(value)
            node.values[index] = ast.Name(f"({text})" if is_loose else text)
        return node

    # Write a power of short operands without spaces
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        is_power = isinstance(node.op, ast.Pow) and not isinstance(
            node.left, ast.UnaryOp
        )
        if is_power and _is_simple(node.left) and _is_simple(node.right):
            node.right = ast.Name(CLOSE + one_line(node.right))
        return self.generic_visit(node)

    # Write spaces around the colons if a bound is more than a name
    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        bounds = [node.lower, node.upper, node.step]
        if any(bound is not None and not _is_short(bound) for bound in bounds):
            if node.lower is not None:
                node.lower = ast.Name(f"{one_line(node.lower)} ")
            if node.upper is not None:
                end = " " * (node.step is not None)
                node.upper = ast.Name(f" {one_line(node.upper)}{end}")
            if node.step is not None:
                node.step = ast.Name(f" {one_line(node.step)}")
        return self.generic_visit(node)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(
        node.value, int | float | complex
    )


def _is_simple(node: ast.expr) -> bool:
    """Whether a power is written without spaces around such an operand."""
    match node:
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Invert(), operand=operand):
            return _is_simple(operand)
        case ast.Attribute(value=ast.Name() | ast.Attribute() as value):
            return _is_simple(value)
    return isinstance(node, ast.Name) or _is_number(node)


def _is_short(node: ast.expr) -> bool:
    """Whether a bound of a slice stands without spaces around its colon."""
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and _is_short(node.operand)
    return isinstance(node, ast.Name | ast.Constant)


def _sign(op: ast.operator | ast.cmpop) -> str:
    """Return how an operator is written."""
    a, b = ast.Name("a"), ast.Name("b")
    pair = (
        ast.Compare(a, [op], [b]) if isinstance(op, ast.cmpop) else ast.BinOp(a, op, b)
    )
    return ast.unparse(pair)[2:-2]


def _items(node: ast.expr) -> list[str]:
    """Return the arguments of a call, or what a list, tuple or dict has in it."""
    match node:
        case ast.Call(args=arguments, keywords=keywords):
            return [one_line(part) for part in (*arguments, *keywords)]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [one_line(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            heads = [f"{one_line(key)}: " if key else "**" for key in keys]
            return [h + one_line(v) for h, v in zip(heads, values, strict=True)]
    return []


def _is_single(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple) and len(node.elts) == 1


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
    elif note:
        text += f"  # {note}"
    match node:
        case ast.Call(func=function) if is_long:
            writer.call(f"{head}{one_line(function)}(", _items(node))
        case ast.List() | ast.Tuple() | ast.Dict() if is_long:
            start, end = BRACKETS[type(node)]
            end = f",{end}" if _is_single(node) else end
            writer.items(head + start, _items(node), end)
        case ast.BinOp() | ast.Compare() | ast.IfExp() if is_long:
            with writer.block(f"{head}("):
                for line in _operation(node, writer.room):
                    writer.line(line)
            writer.line(")")
        case _:
            writer.line(text)


def _operation(node: ast.BinOp | ast.Compare | ast.IfExp, room: int) -> list[str]:
    """Return an operation on long names: in one line, or each in its line."""
    if len(text := one_line(node)) <= room:
        return [text]
    match node:
        case ast.IfExp(test=test, body=body, orelse=other):
            parts = [("", body), ("if ", test), ("else ", other)]
        case ast.BinOp(left=left, op=op, right=right):
            parts = [("", left), (f"{_sign(op)} ", right)]
        case ast.Compare(left=left, ops=ops, comparators=others):
            signs = [f"{_sign(op)} " for op in ops]
            parts = [("", left), *zip(signs, others, strict=True)]
    return [word + one_line(operand) for word, operand in parts]


def _fits(writer: Writer, head: str, node: ast.expr) -> bool:
    """Whether a statement is one line, or a call or a list with an item in each."""
    if len(head + one_line(node)) <= writer.room:
        return True
    inside = writer.room - 4
    match node:
        case ast.Call(func=function) if _is_chain(function):
            start = f"{head}{one_line(function)}("
            items = _items(node)
            values = [*node.args, *(each.value for each in node.keywords)]
        case ast.List() | ast.Tuple() | ast.Dict() if _is_list(node):
            start, items = head + "[", _items(node)
            values = node.values if isinstance(node, ast.Dict) else node.elts
        case _:
            return False
    if len(start) > writer.room or not items:
        return False
    return all(
        len(item) < inside or _fits_broken(value, inside - 4)
        for item, value in zip(items, values, strict=True)
    )


def _fits_broken(node: ast.expr, room: int) -> bool:
    """Whether a list is one with an item in each line."""
    return _is_list(node) and all(len(item) < room for item in _items(node))


def _is_list(node: ast.expr) -> bool:
    return isinstance(node, CONTAINERS) and len(_items(node)) > 1


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
