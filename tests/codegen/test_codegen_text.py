"""Expressions and the writer: texts that mean what the graph means."""

from __future__ import annotations

import ast
import operator
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from program_support import X
from ruff.__main__ import find_ruff_bin
from torch import fx

from gemsc.base.boxes import tile_boxes
from gemsc.codegen.constants import box_constants
from gemsc.codegen.expressions import access, expression, literal
from gemsc.codegen.python_text import quoted
from gemsc.codegen.writer import Names, Writer, comment, split_arguments
from gemsc.errors import GemscError


class Cube(torch.autograd.Function):
    """One of a user's."""


def graph_node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    args = fx.node.map_aggregate(args, lambda a: x if a is X else a)
    return graph.call_function(target, args, kwargs)


def text_of(target: Any, *args: Any, **kwargs: Any) -> str:
    node = graph_node(target, *args, **kwargs)
    return expression(node, lambda n: n.name, None, lambda item: item.qualname)


INFIX = (
    operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor,
    operator.lt, operator.ge, operator.eq, operator.ne, operator.pow, operator.floordiv,
    operator.mod, operator.lshift,
)  # fmt: skip
Tree = tuple[Any, ...]
leaves = st.one_of(st.integers(-3, 4), st.just("x"))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(INFIX), inner, inner),
        st.tuples(st.sampled_from([operator.neg, operator.invert]), inner),
    ),
    max_leaves=7,
)


@pytest.mark.slow
@given(trees.filter(lambda tree: isinstance(tree, tuple)), st.integers(-3, 3))
@settings(deadline=None, max_examples=150)
def test_nested_operators_mean_what_the_graph_means(tree: Any, x: int) -> None:
    graph = fx.Graph()
    place = graph.placeholder("x")
    nested = {place: "x"}

    def compute(tree: Any) -> Any:
        if not isinstance(tree, tuple):
            return x if tree == "x" else tree
        values = [compute(part) for part in tree[1:]]
        small = all(abs(value) < 50 for value in values)
        if not small or (tree[0] is operator.lshift and values[1] < 0):
            raise ValueError
        return tree[0](*values)

    def write(tree: Any) -> Any:
        if not isinstance(tree, tuple):
            return place if tree == "x" else tree
        node = graph.call_function(tree[0], tuple(map(write, tree[1:])))
        nested[node] = expression(node, nested.__getitem__, None, lambda item: "")
        return node

    try:
        expected = compute(tree)
    except (ValueError, ZeroDivisionError, TypeError):
        return
    text = nested[write(tree)]
    assert eval(text, {"x": x}) == expected, text


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (0, "x[0]"),
        (-1, "x[-1]"),
        (slice(None), "x[:]"),
        (slice(1, None), "x[1:]"),
        (slice(None, -1), "x[:-1]"),
        (slice(None, None, 2), "x[::2]"),
        (slice(0, 8, 2), "x[0:8:2]"),
        ((slice(None), None, Ellipsis), "x[:, None, ...]"),
        ((0,), "x[0,]"),
        ((), "x[()]"),
        ([0, 2], "x[[0, 2]]"),
        ((0, (1, 2)), "x[0, (1, 2)]"),
        ((slice(1, None), (1,)), "x[1:, (1,)]"),
        ((True, slice(None)), "x[True, :]"),
    ],
)
def test_subscripts(index: Any, text: str) -> None:
    assert text_of(operator.getitem, X, index) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-05, "1e-05"),
        (float("inf"), 'float("inf")'),
        (float("-inf"), 'float("-inf")'),
        (float("nan"), 'float("nan")'),
        (1 + 2j, "complex(1.0, 2.0)"),
        (torch.float16, "torch.float16"),
        (torch.channels_last, "torch.channels_last"),
        (torch.strided, "torch.strided"),
        (torch.per_tensor_affine, "torch.per_tensor_affine"),
        (torch.device("cpu"), "device"),
        (range(1, 7, 2), "range(1, 7, 2)"),
        (None, "None"),
        (True, "True"),
        (Ellipsis, "..."),
        (-7, "-7"),
    ],
)
def test_constants_have_exact_texts(value: Any, text: str) -> None:
    assert literal(value) == text


class Small(int):
    """A number whose repr is no number."""

    def __repr__(self) -> str:
        return "<Small>"


def test_numbers_of_other_types_are_plain_numbers() -> None:
    import numpy as np

    assert literal(np.float64(0.1)) == "0.1"
    assert literal(Small(3)) == "3"


@given(st.text(alphabet=st.characters(), max_size=20))
@settings(deadline=None)
def test_strings_hold_any_text_on_one_line(text: str) -> None:
    shown = quoted(text)
    assert ast.literal_eval(shown) == text
    assert len(shown.splitlines()) == 1
    assert shown.isprintable()


def test_calls_of_every_kind() -> None:
    assert text_of(torch.cat, [X, X], dim=1) == "torch.cat([x, x], dim=1)"
    assert text_of(F.relu, X) == "F.relu(x)"
    assert text_of(F.pad, X, (1,)) == "F.pad(x, (1,))"
    assert text_of(torch.ops.aten.add.Tensor, X, 1) == "torch.ops.aten.add.Tensor(x, 1)"
    assert text_of(getattr, X, "T") == "x.T"
    assert text_of(operator.setitem, X, 0, 1.5) == "x[0] = 1.5"
    assert text_of(operator.setitem, X, (slice(2), 1), X) == "x[:2, 1] = x"
    assert text_of(Cube.apply, X) == "Cube.apply(x)"
    assert text_of(torch.special.expit, X) in (
        "torch.special.expit(x)",
        "torch.expit(x)",
    )
    assert text_of(operator.pow, X, 2) == "x**2"
    assert text_of(operator.pow, X, -0.5) == "x**-0.5"
    assert text_of(torch.sub, 1e22, X) == "torch.sub(1e22, x)"
    assert text_of(torch.einsum, "a,b", X) == 'torch.einsum("a,b", x)'
    assert text_of(torch.full, {"a": X}) == 'torch.full({"a": x})'


def test_what_differs_in_evaluation_is_chosen_when_it_runs() -> None:
    node = graph_node(F.dropout, X, training=True)
    for value, text in (
        (True, "True"),
        (False, "self.training"),
        (None, "True if self.training else None"),
    ):
        twin = graph_node(F.dropout, X, training=value)
        shown = expression(node, lambda n: n.name, twin, lambda item: "")
        assert shown == f"F.dropout(x, training={text})"


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(GemscError, match="gemsc cannot write a call of"):
        text_of(lambda x: x, X)


def test_paths_that_are_no_attributes_are_subscripts() -> None:
    assert access("a.0.conv") == 'self.a["0"].conv'
    assert access("class.b") == 'self["class"].b'
    assert access('a"b') == "self['a\"b']"
    assert access("__x.__y__") == 'self["__x"].__y__'


def test_boxes_keep_their_order() -> None:
    rows = tile_boxes([(0, 2), (2, 4)], [(0, 3), (3, 6)])
    columns = (rows[0], rows[2], rows[1], rows[3])
    for boxes in (rows, rows[::-1], columns, rows[:1], rows[:3], rows[:1] * 3):
        assert eval(box_constants(boxes)) == boxes


# The writer


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("f(a, b)", ("f(", ["a", "b"], ")")),
        ("x.f(1)(a, (b, c), d=[1, 2])", ("x.f(1)(", ["a", "(b, c)", "d=[1, 2]"], ")")),
        ('f("a, b)", c)', ("f(", ['"a, b)"', "c"], ")")),
        ('f(\'"(\', "\'\\"(")', ("f(", ["'\"('", '"\'\\"("'], ")")),
        ("[a, f(b)]", ("[", ["a", "f(b)"], "]")),
        ("f()", ("f(", [], ")")),
    ],
)
def test_arguments_are_split_outside_of_strings(source: str, parts: Any) -> None:
    assert split_arguments(source) == parts


def test_names_are_valid_and_unique() -> None:
    names = Names(["self"])
    wishes = [
        "x",
        "x",
        "class",
        "self",
        "1x",
        "a.b-c",
        "größe",
        "",
        "match",
        "sum",
        "_",
    ]
    unique = [names.unique(wish) for wish in wishes]
    assert len(unique) == len(set(unique))
    for name in unique:
        ast.parse(f"{name} = 0")
    assert unique[:3] == ["x", "x_2", "class_2"]
    names.release("x")
    assert names.unique("x") == "x"


@pytest.mark.slow
@given(st.text(max_size=200), st.integers(20, 88))
@settings(deadline=None)
def test_a_comment_is_one_line_of_the_width(text: str, room: int) -> None:
    line = comment(text, room)
    assert len(line) <= room
    assert line.splitlines() == [line]
    assert ast.dump(ast.parse(line)) == ast.dump(ast.parse(""))


@pytest.mark.parametrize("size", range(60, 80))
def test_a_tuple_of_one_item_keeps_its_comma(size: int) -> None:
    """Also where it is as long as the line."""
    writer = Writer()
    item = f"f({'v' * size})"
    writer.statement(f"x = function(values=({item},), other=1)")
    long = ast.parse(writer.text())
    assert ast.dump(long) == ast.dump(
        ast.parse(f"x = function(values=({item},), other=1)")
    )


def test_long_calls_break_as_a_formatter_breaks_them(tmp_path: Path) -> None:
    writer = Writer()
    values = [f"value_number_{i}" for i in range(4)]
    many = [*values, *values]
    rows, pairs = ", ".join(many), ", ".join(f"'{value}': 1" for value in many)
    for text in (
        f"x = f({', '.join(values)})",
        f"x = some_function_of_many({rows})",
        f"x = some_function_of_many([{rows}], 1)",
        f"x = f(g({rows}), key=({rows}))",
        f"{', '.join(values * 2)} = f({', '.join(values)})",
        f"{', '.join(values)} = some_long_function_name(a)",
        f"x = {{{pairs}}}",
    ):
        writer.statement(text)
    writer.statement(f"{', '.join(values[:3])} = some_function({rows})", "why")
    writer.statement(
        f"x = f({', '.join(values)})",
        "a trailing comment too long for its line",
    )
    writer.bracketed("for x in (", many, "):")
    with writer.indented():
        writer.line("pass")
    path = tmp_path / "text.py"
    path.write_text(writer.text())
    command = [find_ruff_bin(), "format", "--diff", "--isolated", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ""


NAMES = st.sampled_from(["a", "long_name", "self.block", "submodule.layers0", "b" * 30])
KEYS = st.sampled_from(['"1"', '"a, b"', "'(['", "2", '"x = y"', "...", "a:b", "::2"])


def _grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return strategies of longer expressions, of every kind that is written."""
    several = st.lists(parts, max_size=4)
    operands = st.one_of(
        NAMES,
        st.tuples(NAMES, KEYS).map(lambda two: f"{two[0]}[{two[1]}]"),
        parts.map(lambda part: f"({part})"),
    )
    keyed = st.tuples(KEYS.filter(lambda key: ":" not in key), parts)
    return st.one_of(
        st.tuples(operands, several).map(lambda two: f"{two[0]}({', '.join(two[1])})"),
        st.tuples(operands, parts).map(lambda two: f"{two[0]}(x, dim={two[1]})"),
        st.tuples(operands, KEYS).map(lambda two: f"{two[0]}[{two[1]}]"),
        st.tuples(operands, parts).map(lambda two: f"{two[0]}[{two[1]}]"),
        st.tuples(operands, parts).map(lambda two: f"{two[0]}[{two[1]},]"),
        st.tuples(operands, parts, KEYS).map(lambda all: "{}[{}, {}]".format(*all)),
        st.tuples(operands, operands).map(" + ".join),
        st.tuples(operands, operands).map("**".join),
        st.tuples(operands, operands).map(
            lambda two: f"({two[0]} if self.training else {two[1]})"
        ),
        operands.map(lambda part: f"-{part}"),
        parts.map(lambda part: f"({part},)"),
        several.map(lambda texts: f"[{', '.join(texts)}]"),
        st.lists(parts, min_size=2, max_size=4).map(
            lambda texts: f"({', '.join(texts)})"
        ),
        st.lists(keyed, max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{key}: {part}" for key, part in pairs) + "}"
        ),
    )


EXPRESSIONS = st.recursive(NAMES, _grown, max_leaves=12)


@given(EXPRESSIONS, st.sampled_from(["x = ", "", "x, y = ", 'x["a = (b", 0] = ']))
@settings(max_examples=150)
def test_breaking_lines_never_changes_meaning(text: str, head: str) -> None:
    """Neither in a statement nor as an argument, however little room there is."""
    whole = ast.dump(ast.parse(head + text))
    call = ast.dump(ast.parse(f"{head}f({text}, y=({text}))"))
    for level in range(0, 21, 2):
        writer = Writer()
        with writer.block("if x:"), ExitStack() as deeper:
            for _ in range(level):
                deeper.enter_context(writer.indented())
            writer.statement(head + text)
        (block,) = ast.parse(writer.text()).body
        assert ast.dump(ast.Module(block.body, [])) == whole, writer.text()
        writer = Writer()
        with writer.block("if x:"), ExitStack() as deeper:
            for _ in range(level):
                deeper.enter_context(writer.indented())
            writer.statement(f"{head}f({text}, y=({text}))")
        (block,) = ast.parse(writer.text()).body
        assert ast.dump(ast.Module(block.body, [])) == call, writer.text()
