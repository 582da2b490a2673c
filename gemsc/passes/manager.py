"""Run passes in order, checking what each requires, provides and leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

from gemsc.errors import GemscError, InternalError
from gemsc.ir.invariants import verify
from gemsc.ir.program import Program
from gemsc.passes.base import Pass

__all__ = ["Observer", "run_passes"]

Observer = Callable[[Pass, Program, float], None]


def run_passes(
    program: Program, passes: Iterable[Pass], *, after_each: Observer | None = None
) -> Program:
    """Return the program after all passes.

    `after_each(pass, program, seconds)` is the one hook for printing and timing.

    Raises:
        GemscError: a pass refused the model; a note names the pass.
        InternalError: a pass broke its contract or an invariant.
    """
    for step in passes:
        _check_facts(step, step.requires, program, "requires")
        start = perf_counter()
        try:
            program = step.apply(program)
            seconds = perf_counter() - start
            _check_facts(step, step.provides, program, "provides")
            verify(program)
        except (GemscError, InternalError) as error:
            error.add_note(f"while running pass `{step.name}`")
            raise
        if after_each is not None:
            after_each(step, program, seconds)
    return program


def _check_facts(
    step: Pass, names: tuple[str, ...], program: Program, verb: str
) -> None:
    missing = [name for name in names if getattr(program, name) is None]
    if missing:
        raise InternalError(
            f"pass `{step.name}` {verb} {', '.join(missing)}: not there"
        )
