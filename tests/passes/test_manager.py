"""The manager holds passes to their contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from program_support import run_passes
from torch import nn

from gemsc.errors import GemscError, InternalError
from gemsc.frontend import record
from gemsc.ir.program import Block, Program
from gemsc.passes.base import Pass


@dataclass(frozen=True)
class Step(Pass):
    """A pass that does what a test wants."""

    requires = ()
    provides = ()
    work: Callable[[Program], Program] = field(default=lambda program: program)

    def apply(self, program: Program) -> Program:
        return self.work(program)


class NeedsBlocks(Step):
    requires = ("blocks",)


class GivesBlocks(Step):
    provides = ("blocks",)


@pytest.fixture
def program() -> Program:
    return record(nn.Linear(2, 2), (torch.zeros(1, 2),), training=False)


def whole(program: Program) -> Program:
    return replace(program, blocks=(Block(0, "all", program.compute_nodes),))


def test_a_missing_fact_is_an_internal_error(program: Program) -> None:
    with pytest.raises(
        InternalError, match="`needs-blocks` requires blocks: not there"
    ):
        run_passes(program, (NeedsBlocks(),))


def test_a_fact_that_is_not_provided_is_an_internal_error(program: Program) -> None:
    with pytest.raises(
        InternalError, match="`gives-blocks` provides blocks: not there"
    ):
        run_passes(program, (GivesBlocks(),))


def test_what_one_pass_provides_the_next_may_require(program: Program) -> None:
    done = run_passes(program, (GivesBlocks(whole), NeedsBlocks()))
    assert done.blocks is not None
    assert program.blocks is None


def test_a_pass_that_breaks_an_invariant_is_caught(program: Program) -> None:
    broken = GivesBlocks(lambda program: replace(program, blocks=()))
    with pytest.raises(
        InternalError, match="blocks are not the graph's nodes"
    ) as caught:
        run_passes(program, (broken,))
    assert caught.value.__notes__ == ["while running pass `gives-blocks`"]


def test_an_error_of_the_users_names_the_pass(program: Program) -> None:
    def refuse(program: Program) -> Program:
        raise GemscError("this model cannot be cut")

    with pytest.raises(GemscError) as caught:
        run_passes(program, (Step(refuse),))
    text = str(caught.value)
    assert text == "error: this model cannot be cut\nnote: while running pass `step`"


def test_the_observer_sees_each_pass_with_its_result_and_time(program: Program) -> None:
    seen: list[tuple[str, Program, float]] = []

    def observe(step: Pass, result: Program, seconds: float) -> None:
        seen.append((step.name, result, seconds))

    done = run_passes(program, (Step(), GivesBlocks(whole)), after_each=observe)
    assert [name for name, _, _ in seen] == ["step", "gives-blocks"]
    assert seen[0][1] is program
    assert seen[1][1] is done
    assert all(seconds >= 0 for _, _, seconds in seen)
