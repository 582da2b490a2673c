"""Gradients of imported operators, against differences of onnx' own evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_files import file_of, imported, node, onnx

from gemsc.importers.weight import Array

STEP = 1e-6
WEIGHTS: dict[str, tuple[int, ...]] = {
    "LayerNormalization": (4, 6, 5),
    "InstanceNormalization": (4,),
    "ConvTranspose": (4, 3, 3, 2),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("AveragePool", {"kernel_shape": [3, 2], "pads": [2, 0, 1, 1]}),
    ("AveragePool", {"kernel_shape": [2, 3], "pads": [0, 1, 1, 2], "strides": [2, 1]}),
    ("MaxPool", {"kernel_shape": [3, 2], "pads": [2, 0, 1, 1], "strides": [1, 2]}),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("Resize", {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}),
    ("Resize", {"mode": "linear", "antialias": 1}),
    ("LRN", {"size": 4, "alpha": 0.3, "beta": 0.6, "bias": 1.5}),
    ("LayerNormalization", {"axis": 1, "epsilon": 1e-3}),
    ("InstanceNormalization", {"epsilon": 1e-3}),
    ("HardSigmoid", {"alpha": 0.4, "beta": 0.3}),
    ("Clip", {}),
    ("ReduceL2", {"keepdims": 0}),
    ("ReduceLogSumExp", {}),
    ("ReduceLogSum", {}),
    ("ReduceSumSquare", {}),
    ("ReduceL1", {}),
    (
        "ConvTranspose",
        {"pads": [0, 1, 2, 0], "strides": [2, 3], "output_padding": [1, 0]},
    ),
    ("ConvTranspose", {"auto_pad": "SAME_LOWER", "strides": [1, 2]}),
]


def settings(kind: str, words: dict[str, Any]) -> dict[str, Array]:
    """Return the operands that are no weights, by name."""
    if kind == "Resize":
        factor = 0.6 if "antialias" in words else 1.7
        return {"": np.zeros(0), "scales": np.array([1, 1, factor, 1.5], "f4")}
    if kind == "Clip":
        return {"least": np.array(-0.4), "most": np.array(0.8)}
    return {"axes": np.array([1, 3])} if kind.startswith("Reduce") else {}


@pytest.mark.parametrize(("kind", "words"), CASES)
def test_gradients_are_the_differences_of_the_outputs(
    kind: str, words: dict[str, Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 4, 6, 5))  # onnx' LRN wants as many as channels
    if kind == "ReduceLogSum":
        x = abs(x)
    names = ("weight", "bias") if kind in WEIGHTS else ()
    weights = {name: rng.standard_normal(WEIGHTS[kind]) for name in names}
    if kind == "ConvTranspose":
        weights["bias"] = weights["bias"][0, :, 0, 0]
    known = settings(kind, words)
    operator = node(kind, ["x", *weights, *known], ["y"], **words)
    path = file_of(
        tmp_path / "net.onnx",
        [operator],
        {"x": x.shape},
        weights | {name: array for name, array in known.items() if name},
        kind=onnx.TensorProto.DOUBLE,
    )
    module, network = imported(path)
    given = torch.from_numpy(x).requires_grad_()
    output = module.eval()(given)
    factor = rng.standard_normal(output.shape)
    (output * torch.from_numpy(factor)).sum().backward()

    def loss(moved: dict[str, Array], step: float) -> float:
        file = onnx.load(path)
        for tensor in file.graph.initializer:
            if tensor.name in moved:
                array = weights[tensor.name] + step * moved[tensor.name]
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        evaluator = onnx.reference.ReferenceEvaluator(file)
        (outputs,) = evaluator.run(None, {"x": x + step * moved["x"]})
        assert outputs.dtype == np.float64
        return float((outputs * factor).sum())

    moved = {"x": x} | weights
    for _ in range(3):
        moved = {name: rng.standard_normal(a.shape) for name, a in moved.items()}
        assert given.grad is not None
        slope = float((given.grad.numpy() * moved["x"]).sum())
        for name, parameter in module.named_parameters():
            direction = network.model.weights[name].made(moved.__getitem__)
            assert parameter.grad is not None
            slope += float((parameter.grad.numpy() * direction).sum())
        wanted = (loss(moved, STEP) - loss(moved, -STEP)) / (2 * STEP)
        assert slope == pytest.approx(wanted, rel=1e-5, abs=1e-6)
