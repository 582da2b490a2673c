"""The compile page: the hook sees every pass, and tiles alike are annotated once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_support import options
from torch import nn

from gemsc.compiler import Traced, lower, trace
from gemsc.costs.signature import signature
from gemsc.passes import annotate
from gemsc.passes.base import Pass
from gemsc.passes.manager import Runs


@pytest.fixture(scope="module")
def traced() -> Traced:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 1, 3, padding=1),
    )
    x = torch.randn(1, 1, 24, 24)
    loss = nn.functional.mse_loss
    return trace(model, (x,), loss=loss, example_target=torch.randn(x.shape))


def fresh(traced: Traced) -> Traced:
    return replace(traced, facts={})


@pytest.mark.slow(1)
@pytest.mark.parametrize("tiles", ["2x2", "auto"])
def test_the_hook_sees_every_pass_that_runs(
    traced: Traced, tiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: Counter[str] = Counter()

    def counted(apply: Any) -> Any:
        def wrapped(step: Any, program: Any) -> Any:
            ran[step.name] += 1
            return apply(step, program)

        return wrapped

    for kind in Pass.__subclasses__():
        monkeypatch.setattr(kind, "apply", counted(kind.apply))
    seen: list[str] = []
    plan = options(ranks=4, tiles=tiles, micro_batches=1)
    lower(fresh(traced), plan, after_each=lambda step, *_: seen.append(step.name))
    assert Counter(seen) == ran
    assert ran["split-tiles"] >= 8
    assert ran["annotate"] >= 4


def test_a_pass_that_ran_on_a_program_does_not_run_again(traced: Traced) -> None:
    seen: list[str] = []
    run = Runs(lambda step, *_: seen.append(step.name))
    first = run(traced.program, annotate.Annotate())
    assert run(traced.program, annotate.Annotate()) is first
    assert seen == ["annotate"]


@pytest.mark.slow
def test_tiles_that_are_alike_are_annotated_once(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = annotate.annotate

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        real(*args, **kwargs)

    monkeypatch.setattr(annotate, "annotate", counted)
    plan = options(ranks=9, tiles="3x3", micro_batches=1)
    shared = lower(fresh(traced), plan)
    # corners, upper and lower edge, left and right edge, and the tile inside
    assert len(calls) == 4
    texts = shared.rank_modules()
    calls.clear()
    monkeypatch.setattr(
        "gemsc.passes.annotate.signature", lambda program: program.graph
    )
    alone = lower(fresh(traced), plan)
    assert len(calls) == 9
    assert alone.rank_modules() == texts
    assert alone.plan.stages == shared.plan.stages
    signatures = {signature(tile.program) for tile in alone.compilation.tiles}
    assert len(signatures) == 4
