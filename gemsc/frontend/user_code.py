"""Find the user's line that is running, and the name it gives its value."""

from __future__ import annotations

import ast
import linecache
import opcode
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from gemsc.errors import GemscError, SourceLocation

_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parents[1])  # torch, gemsc
_SKIPPED = tuple(f"{folder}/" for folder in _FOLDERS)
# It stands for a function of torch: it says what values are called, and not where.
_NAMED = str(Path(__file__).with_name("attention.py"))
# Within these, lines are those of whoever calls them.
_INNER = re.compile(r"/einops/|/keras/src/(?!layers/)|/keras/src/layers/layer\.py$")
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_Span = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class UserLine:
    """Where the user's code stands.

    `target` is what the line assigns this very value to: a name, a nest of names
    for `a, (b, c) = ...`, or None. `operator` says whether the value comes from an
    operator (`a + b`) rather than a call.
    """

    location: SourceLocation
    target: str | tuple[object, ...] | None
    operator: bool


def user_line(boundary: CodeType) -> UserLine | None:
    """Return the innermost line of the user's code below the frame of `boundary`."""
    direct = True
    named = None
    frames = _frames(boundary)
    for frame in frames:
        if is_user_file(frame.f_code.co_filename):
            line = _read(frame, direct=direct)
            location = replace(line.location, caller=_caller(frame, frames))
            return replace(named or line, location=location)
        if frame.f_code.co_filename == _NAMED:
            named = named or _read(frame, direct=True)
        if frame.f_code.co_name == "forward":
            direct = False  # a module of torch called the layer, not the line itself
    return None


def _caller(frame: FrameType, outer: Iterator[FrameType]) -> SourceLocation | None:
    """Return the user's own line that called a line of an installed package."""
    if not _is_package(frame.f_code.co_filename):
        return None
    for caller in outer:
        file = caller.f_code.co_filename
        if is_user_file(file) and not _is_package(file):
            return SourceLocation(file, caller.f_lineno)
    return None


def _is_package(file: str) -> bool:
    return "-packages/" in file


def failing_line(
    trace: TracebackType | None, boundary: CodeType, *, own_first: bool = False
) -> SourceLocation | None:
    """Return the user's innermost line in a traceback, below `boundary`.

    With `own_first`, a line of an installed package is taken only if there is no other.
    """
    line = caller = None
    below = False
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is boundary:
            below, line, caller = True, None, None
        elif below and is_user_file(code.co_filename):
            at = SourceLocation(code.co_filename, trace.tb_lineno)
            if not _is_package(code.co_filename):
                line = caller = at
            elif not own_first or line is None:
                line = replace(at, caller=caller)
        trace = trace.tb_next
    return line


def printed_line(trace: str) -> SourceLocation | None:
    """Return the user's innermost line in a printed traceback."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    for file, line in reversed(frames):
        if is_user_file(file):
            return SourceLocation(file, int(line))
    return None


def _frames(boundary: CodeType) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not boundary:
        yield frame
        frame = frame.f_back


@cache
def is_user_file(file: str) -> bool:
    """Return whether a file belongs neither to torch, Python nor gemsc.

    Of einops and Keras, only the layers of Keras count.
    """
    if file.startswith("<ipython"):
        return True
    if file.startswith("<") or file.startswith(_SKIPPED) or _INNER.search(file):
        return False
    return not file.startswith(_STDLIB) or "-packages/" in file


def _read(frame: FrameType, *, direct: bool) -> UserLine:
    code = frame.f_code
    location = SourceLocation(code.co_filename, frame.f_lineno)
    if not direct:
        return UserLine(location, None, operator=False)
    target = _targets(code.co_filename).get(_running(frame))
    name = opcode.opname[code.co_code[frame.f_lasti]]
    is_operator = name in ("BINARY_OP", "COMPARE_OP") or name.startswith("UNARY_")
    return UserLine(location, target, operator=is_operator)


def _running(frame: FrameType) -> _Span:
    """Return the span of the expression that a frame computes."""
    spans = frame.f_code.co_positions()
    return next(islice(spans, frame.f_lasti // 2, None), (None,) * 4)


@cache
def _tree(file: str) -> ast.Module:
    """Return what a file holds; nothing, where it is not Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _targets(file: str) -> dict[_Span, str | tuple[object, ...]]:
    """Map the span of each assigned expression to the names it is assigned to."""
    targets: dict[_Span, str | tuple[object, ...]] = {}
    for node in ast.walk(_tree(file)):
        match node:
            case ast.Assign(targets=[target], value=value):
                spans: list[ast.expr | ast.stmt] = [value]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                spans = [value]
            case ast.NamedExpr(target=target, value=value):
                spans = [value]
            case ast.AugAssign(target=target):
                spans = [node]
            case _:
                continue
        name = _names(target)
        if name is not None:
            targets.update((_span(part), name) for part in spans)
    return targets


def _names(target: ast.expr) -> str | tuple[object, ...] | None:
    match target:
        case ast.Name(id=name):
            return name if name.strip("_") else None
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_names(part) for part in parts)
    return None


def _span(node: ast.expr | ast.stmt) -> _Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def guarded(frame: FrameType) -> bool | None:
    """Return which value of the test that a frame asks for takes no branch.

    None, where the branch is not one that only raises, or that replaces what is not
    finite: such a one is part of what the model computes. A function that does no more
    than `return bool(test)` asks for its caller.
    """
    file, span = frame.f_code.co_filename, _running(frame)
    if span in _passed_on(file) and frame.f_back is not None:
        return guarded(frame.f_back)
    return _guards(file).get(span)


@cache
def _passed_on(file: str) -> set[_Span]:
    """Return the spans of `bool(test)` where that is what a function returns."""
    return {
        _span(node.value)
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Return)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "bool"
    }


@cache
def _guards(file: str) -> dict[_Span, bool]:
    """Map the span of each test of a guard to the value that takes no branch."""
    guards: dict[_Span, bool] = {}
    for node in ast.walk(_tree(file)):
        match node:
            case ast.Assert(test=test):
                asked = dict(_asked(test, True))
            case ast.If(test=test) if _only_raises(node) or _repairs(node):
                asked = dict(_asked(test, False))
            case _:
                continue
        guards |= asked
        if len({*asked.values()}) == 1:  # Python 3.11 tells only the statement
            guards[_span(node)] = next(iter(asked.values()))
    return guards


def _asked(test: ast.expr, value: bool) -> Iterator[tuple[_Span, bool]]:
    """Yield what Python asks the truth of, and what it must be for all to be `value`.

    Of `a and b` either may be false: that both are is asked, which is enough.
    """
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _asked(operand, not value)
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from _asked(part, value)
        case _:
            yield _span(test), value


def _only_raises(node: ast.If) -> bool:
    """Whether nothing goes on behind what an `if` does."""
    leaves = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)
    inside = [inner for part in node.body for inner in ast.walk(part)]
    return isinstance(node.body[-1], ast.Raise) and not any(
        isinstance(inner, leaves) for inner in inside
    )


def _repairs(node: ast.If) -> bool:
    """Whether an `if` computes something else of what is not finite, and no more."""
    asks = {
        getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node.test)
    }
    return (
        not node.orelse
        and not asks.isdisjoint({"isfinite", "isinf", "isnan"})
        and all(isinstance(part, ast.Assign) for part in node.body)
    )


def line_of_function(made: Any) -> SourceLocation | None:
    """Return where a function of the user's begins; None of other callables."""
    code = getattr(made, "__code__", None)
    return SourceLocation(code.co_filename, code.co_firstlineno) if code else None


@contextmanager
def at_line_of(made: Any) -> Iterator[None]:
    """Let errors that name no line name that of a function of the user's."""
    try:
        yield
    except GemscError as error:
        error.at = error.at or line_of_function(made)
        raise
