"""Python expressions as a formatter writes them, in statements that fit their lines.

Readers write short texts and do not care for spaces, quotes and widths. Here they are
read with `ast` and written once more; what is too long for a line becomes several
statements, in the order in which Python would have computed it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from gemsc.codegen.writer import Writer, columns

OPERATORS: dict[type[ast.AST], tuple[str, int]] = {
    ast.Or: ("or", 1),
    ast.And: ("and", 2),
    ast.BitOr: ("|", 5),
    ast.BitXor: ("^", 6),
    ast.BitAnd: ("&", 7),
    ast.LShift: ("<<", 8),
    ast.RShift: (">>", 8),
    ast.Add: ("+", 9),
    ast.Sub: ("-", 9),
    ast.Mult: ("*", 10),
    ast.Div: ("/", 10),
    ast.FloorDiv: ("//", 10),
    ast.Mod: ("%", 10),
    ast.MatMult: ("@", 10),
    ast.Pow: ("**", 12),
    ast.Eq: ("==", 4),
    ast.NotEq: ("!=", 4),
    ast.Lt: ("<", 4),
    ast.LtE: ("<=", 4),
    ast.Gt: (">", 4),
    ast.GtE: (">=", 4),
    ast.Is: ("is", 4),
    ast.IsNot: ("is not", 4),
    ast.In: ("in", 4),
    ast.NotIn: ("not in", 4),
    ast.Not: ("not ", 3),
    ast.USub: ("-", 11),
    ast.UAdd: ("+", 11),
    ast.Invert: ("~", 11),
}
CONDITION, COMPARISON, POWER, ATOM = 0, 4, 12, 20
BRACKETS: dict[type[ast.AST], tuple[str, str]] = {
    ast.List: ("[", "]"),
    ast.Tuple: ("(", ")"),
    ast.Dict: ("{", "}"),
}
CONTAINERS = (*BRACKETS,)
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


def one_line(node: ast.expr) -> str:
    """Return an expression on one line."""
    return _text(node)[0]


def _text(node: ast.expr) -> tuple[str, int]:
    """Return the text of an expression, and how tightly its outermost part binds."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(left, op, right)
        case ast.UnaryOp(op=op, operand=operand):
            sign, level = OPERATORS[type(op)]
            is_power = _text(operand)[1] == POWER
            return sign + _inside(operand, level + 2 * is_power), level
        case ast.BoolOp(op=op, values=values):
            word, level = OPERATORS[type(op)]
            return f" {word} ".join(_inside(v, level + 1) for v in values), level
        case ast.Compare():
            return _comparison(node), COMPARISON
        case ast.IfExp(test=test, body=body, orelse=other):
            parts = (_inside(part, CONDITION + 1) for part in (body, test))
            return " if ".join(parts) + f" else {one_line(other)}", CONDITION
    text = _atom(node)
    return (ast.unparse(node), -1) if text is None else (text, ATOM)


def _atom(node: ast.expr) -> str | None:
    """Return the text of what needs no parentheses anywhere; None of what does."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Constant(value=value) if not isinstance(value, bytes):
            return literal_text(value)
        case ast.Attribute(value=value, attr=name):
            return f"{_operand(value)}.{name}"
        case ast.Call(func=function):
            return f"{_operand(function)}({', '.join(_arguments(node))})"
        case ast.Subscript(value=value, slice=index):
            return f"{_operand(value)}[{_index(index)}]"
        case ast.List() | ast.Tuple() | ast.Dict():
            start, end = BRACKETS[type(node)]
            return start + ", ".join(_items(node)) + "," * _is_single(node) + end
        case ast.Starred(value=value):
            return f"*{_inside(value, 5)}"
    return None


def _inside(node: ast.expr, level: int) -> str:
    """Return the text of an operand, in parentheses if it binds less than that."""
    text, own = _text(node)
    return text if own >= level else f"({text})"


def _operand(node: ast.expr) -> str:
    """Return the text of what a dot or a bracket follows."""
    is_number = isinstance(node, ast.Constant) and not isinstance(node.value, str)
    return f"({one_line(node)})" if is_number else _inside(node, ATOM)


def _binary(left: ast.expr, op: ast.operator, right: ast.expr) -> tuple[str, int]:
    word, level = OPERATORS[type(op)]
    if level == POWER:
        is_plain = _text(left)[1] > POWER and _is_simple(left) and _is_simple(right)
        space = " " * (not is_plain)
        exponent = right.operand if isinstance(right, ast.UnaryOp) else right
        after = (
            one_line(right) if _text(exponent)[1] >= POWER else f"({one_line(right)})"
        )
        return f"{_inside(left, POWER + 1)}{space}{word}{space}{after}", level
    return f"{_inside(left, level)} {word} {_inside(right, level + 1)}", level


def _is_simple(node: ast.expr) -> bool:
    """Whether a power is written without spaces around such an operand."""
    match node:
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Invert(), operand=operand):
            return _is_simple(operand)
        case ast.Constant(value=value):
            return isinstance(value, int | float | complex)
        case ast.Attribute(value=value):
            return isinstance(value, ast.Name) or (
                isinstance(value, ast.Attribute) and _is_simple(value)
            )
    return isinstance(node, ast.Name)


def _comparison(node: ast.Compare) -> str:
    text = _inside(node.left, COMPARISON + 1)
    for op, right in zip(node.ops, node.comparators, strict=True):
        text += f" {OPERATORS[type(op)][0]} {_inside(right, COMPARISON + 1)}"
    return text


def _index(node: ast.expr) -> str:
    """Return what stands in the brackets of a subscript."""
    if isinstance(node, ast.Tuple) and node.elts:
        comma = "," * (len(node.elts) == 1)
        return ", ".join(_index(each) for each in node.elts) + comma
    if not isinstance(node, ast.Slice):
        return one_line(node)
    parts = [node.lower, node.upper, *([node.step] if node.step else [])]
    wide = any(part is not None and not _is_short(part) for part in parts)
    text = "" if parts[0] is None else one_line(parts[0])
    for part in parts[1:]:
        text += " :" if wide and text and not text.endswith(":") else ":"
        if part is not None:
            text += f"{' ' * wide}{one_line(part)}"
    return text


def _is_short(node: ast.expr) -> bool:
    """Whether a bound of a slice stands without spaces around its colon."""
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and _is_short(node.operand)
    return isinstance(node, ast.Name | ast.Constant)


def _arguments(node: ast.Call) -> list[str]:
    words = [
        f"{each.arg}={one_line(each.value)}"
        if each.arg
        else f"**{_operand(each.value)}"
        for each in node.keywords
    ]
    return [*map(one_line, node.args), *words]


def _items(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Dict):
        return [
            f"{one_line(key)}: {one_line(value)}" if key else f"**{_operand(value)}"
            for key, value in zip(node.keys, node.values, strict=True)
        ]
    if isinstance(node, ast.List | ast.Tuple):
        return [one_line(item) for item in node.elts]
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
    match node:
        case ast.Call(func=function) if len(text) > writer.room:
            if note:
                writer.line(f"# {note}")
            writer.call(f"{head}{one_line(function)}(", _arguments(node))
        case ast.List() | ast.Tuple() | ast.Dict() if len(text) > writer.room:
            start, end = BRACKETS[type(node)]
            if note:
                writer.line(f"# {note}")
            end = f",{end}" if _is_single(node) else end
            writer.items(head + start, _items(node), end)
        case ast.BinOp() | ast.Compare() | ast.IfExp() if len(text) > writer.room:
            _write_operation(writer, head, node, note)
        case _ if note and columns(f"{text}  # {note}") > writer.room:
            writer.line(f"# {note}")
            writer.line(text)
        case _:
            writer.line(f"{text}  # {note}" if note else text)


def _write_operation(
    writer: Writer, head: str, node: ast.BinOp | ast.Compare | ast.IfExp, note: str
) -> None:
    """Write an operation on long names: in a line of its own, or each in its line."""
    if note:
        writer.line(f"# {note}")
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
            items = _arguments(node)
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
