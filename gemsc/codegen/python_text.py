"""Python expressions as a formatter writes them, however they are written.

Who makes an expression writes a short text, with parentheses around all that may need
them, and does not care for spaces and quotes. Here it is read with `ast` and written
once more.
"""

from __future__ import annotations

import ast
import math
from functools import lru_cache

from gemsc.base.nests import nest_text

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
    ast.Set: ("{", "}"),
    ast.Tuple: ("(", ")"),
    ast.Dict: ("{", "}"),
}


def parsed(text: str) -> ast.expr:
    """Return the tree of an expression."""
    return ast.parse(text.strip(), mode="eval").body


@lru_cache(maxsize=4096)
def formatted(text: str) -> str:
    """Return an expression, or an assignment, as a formatter writes it on one line."""
    (statement,) = ast.parse(text).body
    match statement:
        case ast.Assign(targets=[target], value=value):
            is_open = isinstance(target, ast.Tuple) and not is_single(target)
            left = ", ".join(items(target)) if is_open else one_line(target)
            return f"{left} = {one_line(value)}"
        case ast.Expr(value=value):
            return one_line(value)
    raise ValueError(text)


def literal_text(value: object) -> str:
    """Return the text of a constant: None, numbers, text, and lists and dicts of them.

    Raises:
        TypeError: it has something else in it.
    """
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or value is ... or isinstance(value, bool | int | float | complex):
        return "..." if value is ... else repr(value).replace("e+", "e")
    if isinstance(value, list | tuple | dict):
        return nest_text(value, literal_text)
    raise TypeError(f"{type(value).__name__} has no literal")


def quoted(text: str) -> str:
    """Return a string in double quotes, or in single ones where that saves escapes."""
    quote = "'" if '"' in text and text.count('"') > text.count("'") else '"'
    escaped = ""
    for letter in text:
        if letter in (quote, "\\"):
            escaped += f"\\{letter}"
        elif letter.isprintable():
            escaped += letter
        else:
            escaped += letter.encode("unicode_escape").decode("ascii")
    return f"{quote}{escaped}{quote}"


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
            return f"{_operand(function)}({', '.join(arguments(node))})"
        case ast.Subscript(value=value, slice=index):
            return f"{_operand(value)}[{_index(index)}]"
        case ast.List() | ast.Set() | ast.Tuple() | ast.Dict():
            start, end = BRACKETS[type(node)]
            return start + ", ".join(items(node)) + "," * is_single(node) + end
        case ast.Starred(value=value):
            return f"*{_inside(value, 5)}"
    return None


def _inside(node: ast.expr, level: int) -> str:
    """Return the text of an operand, in parentheses if it binds less than that."""
    text, strength = _text(node)
    return text if strength >= level else f"({text})"


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
        return ", ".join(map(_index_part, node.elts)) + comma
    return _index_part(node)


def _index_part(node: ast.expr) -> str:
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


def arguments(node: ast.Call) -> list[str]:
    """Return what stands in the parentheses of a call."""
    words = [
        f"{keyword.arg}={one_line(keyword.value)}"
        if keyword.arg
        else f"**{_operand(keyword.value)}"
        for keyword in node.keywords
    ]
    return [*map(one_line, node.args), *words]


def items(node: ast.expr) -> list[str]:
    """Return what stands in the brackets of a list, tuple or dict."""
    if isinstance(node, ast.Dict):
        return [
            f"{one_line(key)}: {one_line(value)}" if key else f"**{_operand(value)}"
            for key, value in zip(node.keys, node.values, strict=True)
        ]
    if isinstance(node, ast.List | ast.Set | ast.Tuple):
        return [one_line(item) for item in node.elts]
    return []


def is_single(node: ast.expr) -> bool:
    """Whether it is a tuple of one item."""
    return isinstance(node, ast.Tuple) and len(node.elts) == 1
