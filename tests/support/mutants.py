"""Mutants of Python code: one thing left out or turned round, in a running process.

    for mutant in mutants_of(streams):
        with mutant:
            ...                       # the function has the code of the mutant

What can be left out: a statement that is a call; the `with` around some lines; the wait
in `x.take()`; the event of `Pending(tensor, event)`. What is turned round: the test of
an `if`, of a `while` and of `a if test else b` is always true, or always false.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, ModuleType
from typing import Any

__all__ = ["Mutant", "mutants_of"]

Change = Callable[[Any], ast.AST | list[ast.stmt]]


@dataclass(eq=False)
class Mutant:
    """One function of a module with one change, which runs in a `with`."""

    module: ModuleType
    function: str  # Class.method
    text: str
    mutated: Callable[[], ast.Module] = field(repr=False)  # the module's code
    _before: CodeType | None = None

    @property
    def name(self) -> str:
        """Where it is, and what was changed."""
        return f"{self.module.__name__.rsplit('.', 1)[-1]}.{self.function}: {self.text}"

    def __enter__(self) -> None:
        """Give the function the mutant's code."""
        function = self._function()
        code = compile(self.mutated(), str(self.module.__file__), "exec")
        self._before, function.__code__ = function.__code__, self._search(code)

    def __exit__(self, *_: object) -> None:
        """Give it its own code again."""
        self._function().__code__ = self._before

    def _function(self) -> Any:
        target: Any = self.module
        for name in self.function.split("."):
            target = inspect.getattr_static(target, name)
        target = getattr(target, "fget", None) or getattr(target, "func", target)
        return inspect.unwrap(target)

    def _search(self, code: CodeType) -> CodeType:
        inner = [const for const in code.co_consts if isinstance(const, CodeType)]
        for nested in inner:
            if nested.co_qualname == self.function:
                return nested
        return next(
            self._search(nested)
            for nested in inner
            if self.function.startswith(nested.co_name)
        )


def mutants_of(module: ModuleType, *, leave: tuple[str, ...] = ()) -> Iterator[Mutant]:
    """Yield the mutants of all functions of a module, but for those to `leave`."""
    tree = ast.parse(inspect.getsource(module))
    for name, function in _functions(tree):
        if name in leave or name.split(".")[0] in leave:
            continue
        for number, node in enumerate(ast.walk(function)):
            for text, change in _changes(node):
                mutated = partial(_mutated, tree, name, number, change)
                yield Mutant(module, name, text, mutated)


def _mutated(tree: ast.Module, name: str, number: int, change: Change) -> ast.Module:
    """Return a copy of a module with one change, of a node by its place in a walk."""
    copied = copy.deepcopy(tree)
    function = dict(_functions(copied))[name]
    target = next(n for i, n in enumerate(ast.walk(function)) if i == number)
    _Replace(target, change).visit(copied)
    return ast.fix_missing_locations(copied)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", member


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"without {ast.unparse(node)}", lambda _: ast.Pass()
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        for value in (True, False):
            text = f"{ast.unparse(node.test)} is {value}"
            yield text, lambda n, value=value: _with_test(n, value)
    if isinstance(node, ast.With):
        yield f"without with {ast.unparse(node.items[0])}", lambda n: n.body
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "take":
            text = f"no wait in {ast.unparse(node)}"
            yield (
                text,
                lambda n: ast.Attribute(n.func.value, "tensor", ast.Load()),
            )
        if getattr(function, "id", "") == "Pending" and len(node.args) > 1:
            yield (
                f"no event in {ast.unparse(node)}",
                lambda n: ast.Call(n.func, n.args[:1], []),
            )


def _with_test(node: Any, value: bool) -> Any:
    node.test = ast.Constant(value)
    return node


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, change: Change) -> None:
        self.target = target
        self.change = change

    def visit(self, node: ast.AST) -> Any:
        return self.change(node) if node is self.target else self.generic_visit(node)
