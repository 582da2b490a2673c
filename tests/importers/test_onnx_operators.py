"""Every operator of ONNX does what the standard says, or is refused by its name."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from nightly import at_night

pytest.importorskip("onnx")

from onnx_cases import cases, group, outcome, reason

PARTS = 48
DOCS = Path(__file__).parents[2] / "docs" / "onnx.md"


def part(number: int) -> list[str]:
    """Return every eighth case, of an order that has nothing to do with their names."""
    names = sorted(cases())
    random.Random(0).shuffle(names)
    return names[number::PARTS]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *at_night(*range(1, PARTS))])
def test_a_case_of_an_operator_is_right_or_refused(number: int):
    outcomes = {name: outcome(cases()[name]) for name in part(number)}
    bad = {
        name: f"{result.kind}: {result.words}"
        for name, result in outcomes.items()
        if result.kind in ("wrong", "raised")
        or (result.kind == "refused" and reason(result.words) is None)
    }
    assert not bad
    assert Counter(result.kind for result in outcomes.values())["passed"] > 25


@pytest.mark.nightly
def test_the_docs_say_how_many_cases_are_right():
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases().values():
        counts[group(case)][outcome(case).kind] += 1
    rows = {
        f"| {name} | {n['passed']} | {n['refused']} | {n['wrong'] + n['raised']} |"
        for name, n in counts.items()
    }
    said = {
        line
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and line.count("|") == 5
    }
    assert rows <= said, "\n".join(sorted(rows))
