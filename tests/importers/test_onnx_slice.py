"""Slices of ONNX: backwards, and from beyond the first or the last element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")

from onnx import helper, numpy_helper
from onnx_cases import imported_module

FAR = 2**40


@pytest.mark.parametrize(
    ("start", "end", "step", "wanted"),
    [
        (FAR, -FAR, -1, [4, 3, 2, 1, 0]),
        (-8, -FAR, -2, [0]),  # a start before the first element is the first
        (-1, -4, -2, [4, 2]),
        (1, FAR, 3, [1, 4]),
        (3, 1, 1, []),
    ],
)
def test_a_slice_takes_what_the_standard_says(
    start: int, end: int, step: int, wanted: list[int]
):
    numbers = {"start": [start], "end": [end], "axis": [1], "step": [step]}
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", *numbers], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", 1, [2, 5])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.array(v), name) for name, v in numbers.items()],
    )
    opsets = [helper.make_opsetid("", 13)]
    module = imported_module(helper.make_model(graph, opset_imports=opsets))
    x = torch.arange(10.0).reshape(2, 5)
    assert torch.equal(module(x), x[:, wanted])
