"""What a pass makes of a small model: tests/golden/passes/<pass>/<case>.txt.

A case is a model in Python, the program before the pass and the program after it.
`pytest --update-golden` writes the last two.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from torch import nn

from gemsc import compiler
from gemsc.ir.dump import dump
from gemsc.ir.program import Program
from gemsc.passes.base import Pass

CASES = sorted((GOLDEN / "passes").glob("*/*.txt"))
BEFORE, AFTER = "---- before\n", "---- after\n"


@pytest.mark.slow(5)
@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_pass(
    path: Path, golden: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = path.read_text(encoding="utf-8").split(BEFORE)[0]
    file = tmp_path / f"{path.stem}.py"  # lines of the program show it
    file.write_text(source, encoding="utf-8")
    case = runpy.run_path(str(file), {"torch": torch, "nn": nn, "F": F})
    options = {"loss": torch.mean, "check": False, **case.get("options", {})}
    seen = watch(path.parent.name, monkeypatch)
    compiler.compile(case["Model"](), case["inputs"], **options)
    before, after = seen[0]
    text = f"{source}{BEFORE}{before}{AFTER}{after}"
    golden(text, f"{path.parent.name}/{path.name}")


def watch(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that gets the programs before and after each run of a pass."""
    kind = next(kind for kind in Pass.__subclasses__() if kind.name == name)
    apply: Any = kind.apply
    seen = []

    def watched(step: Pass, program: Program) -> Program:
        before = dump(program)
        result: Program = apply(step, program)
        seen.append((before, dump(result)))
        return result

    monkeypatch.setattr(kind, "apply", watched)
    return seen
