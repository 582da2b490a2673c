"""Run passes in order, checking what each requires, provides and leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import perf_counter
from typing import Any, TypeVar

from gemsc.errors import GemscError, InternalError
from gemsc.ir.invariants import lost_nothing, verify
from gemsc.ir.program import Program
from gemsc.passes.base import Pass

Observer = Callable[[Pass, Program, float], None]
T = TypeVar("T")


class Runs:
    """Runs passes, and remembers what each gave: plans that agree so far share it.

    `after_each(pass, program, seconds)` is the one hook for printing and timing: it is
    called for each pass that runs.
    """

    def __init__(self, after_each: Observer | None = None) -> None:
        self._after_each = after_each
        self._known: dict[Hashable, Any] = {}

    def __call__(self, program: Program, *passes: Pass) -> Program:
        """Return the program after all passes.

        Raises:
            GemscError: a pass refused the model; a note names the pass.
            InternalError: a pass broke its contract or an invariant.
        """
        for step in passes:
            program, _ = self.once((id(program), step), self._run, step, program)
        return program

    def once(self, key: Hashable, make: Callable[..., T], *args: Any) -> T:
        """Return `make(*args)`, made when the key is seen for the first time."""
        if key not in self._known:
            self._known[key] = make(*args)
        result: T = self._known[key]
        return result

    def _run(self, step: Pass, program: Program) -> tuple[Program, Program]:
        """Return the program after a pass, and the one before, which keeps its id."""
        _check_facts(step, step.requires, program, "requires")
        start = perf_counter()
        try:
            result = step.apply(program)
            seconds = perf_counter() - start
            _check_facts(step, step.provides, result, "provides")
            verify(result)
            if result.module is not program.module and not step.of_one_rank:
                lost_nothing(program, [result])
        except (GemscError, InternalError) as error:
            error.add_note(f"while running pass `{step.name}`")
            raise
        if self._after_each is not None:
            self._after_each(step, result, seconds)
        return result, program


def _check_facts(
    step: Pass, names: tuple[str, ...], program: Program, verb: str
) -> None:
    missing = [name for name in names if getattr(program, name) is None]
    if missing:
        raise InternalError(
            f"pass `{step.name}` {verb} {', '.join(missing)}: not there"
        )
