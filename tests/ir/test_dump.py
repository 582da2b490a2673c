"""A program as text: always the same, and never an address."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from networks import mean
from program_support import Net
from torch import Tensor, fx

from gemsc.frontend import record
from gemsc.ir.dump import dump, target_name


def test_a_traced_graph(golden: Callable[[str, str], None]) -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Any:
        h = self.a(x).chunk(2, 1)[0] + 1
        h[:, 0] = float("inf")
        y = F.softmax(h.to(torch.float64), dim=-1) * 1.5
        return {"y": y.masked_fill(mask, -1e9), "sum": torch.stack([y, y]).sum()}

    inputs = torch.zeros(2, 4), torch.zeros(2, 2, dtype=torch.bool)
    golden(dump(record(Net(forward), inputs, loss=mean)), "traced.txt")


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["encoder", "densecnn"])
def test_the_text_is_the_same_each_time_and_holds_no_address(name: str) -> None:
    case = MODELS[name]
    texts = set()
    for _ in range(2):
        program = record(case.build(), case.example_inputs, training=False)
        texts.add(dump(program))
    (text,) = texts
    assert not re.search(r"0x[0-9a-f]{6}", text)
    assert text.count("\n") > 20


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (operator.add, "operator.add"),
        (torch.relu, "torch.relu"),
        (F.relu, "torch.nn.functional.relu"),
        (F.max_pool2d, "torch.nn.functional.max_pool2d"),
        (F.linear, "nn.linear"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (getattr, "builtins.getattr"),
    ],
)
def test_targets_have_public_names(target: Any, name: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, x))
    assert target_name(node) == name
