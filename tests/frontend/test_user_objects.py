"""Objects of a user's file, which a rank's file refers to by their names."""

from __future__ import annotations

import decimal
import sys
from pathlib import Path

import pytest
from command_line import compile_here

from gemsc.runtime.worker.program import user_object
from gemsc.user_model import load_user_model

MODEL = """
import torch

class Own:
    size = 3

def model():
    return torch.nn.Linear(Own.size, 1)

def example_inputs():
    return torch.ones(1, Own.size)
"""


def test_ranks_find_a_file_that_has_the_name_of_an_imported_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "decimal.py"
    path.write_text(MODEL)
    monkeypatch.setattr(sys, "path", [*sys.path])
    program = tmp_path / "program"
    compile_here(path, "--ranks", 1, "-o", program)
    user = load_user_model(str(path))
    module = user.model.__module__
    assert sys.modules["decimal"] is decimal
    monkeypatch.delitem(sys.modules, module)  # as in a rank's process
    assert user_object(str(program / "rank0.py"), module, "Own").size == 3
    assert module != "decimal"
