"""Rarer settings of ONNX's operators: what the evaluator of the package onnx gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_files import file_of, imported, node
from torch import nn

from gemsc.importers.onnx.standard import LRN

reference = pytest.importorskip("onnx.reference")
DRAW = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype("float32")


def ints(*values: int) -> np.ndarray:
    return np.array(values, "int64")


@dataclass
class Case:
    """One node: its settings, the shape of x, and its other inputs by their names."""

    kind: str
    shape: tuple[int, ...]
    more: dict[str, np.ndarray] = field(default_factory=dict)
    opset: int = 20
    settings: dict[str, Any] = field(default_factory=dict)


def case(kind: str, *shape: int, opset: int = 20, **given: Any) -> Case:
    """Return a case; arrays are inputs, in their order, and the rest is settings."""
    more = {k: v for k, v in given.items() if isinstance(v, np.ndarray)}
    settings = {k: v for k, v in given.items() if k not in more}
    return Case(kind, shape, more, opset, settings)


NONE = np.array([], "float32")  # of an input that is left out
CASES = {
    "edges of channels": case(
        *("Pad", 1, 2, 3, 3), pads=ints(0, 1, 1, 0, 0, 1, 0, 1), mode="edge"
    ),
    "a window behind the values": case(
        *("AveragePool", 1, 1, 3),
        opset=22,
        kernel_shape=[2],
        strides=[3],
        pads=[0, 1],
        ceil_mode=1,
    ),
    "columns to an image": case(
        *("Col2Im", 1, 4, 20),
        image_shape=ints(3, 4),
        block_shape=ints(2, 2),
        pads=[1, 0, 1, 2],
    ),
    "larger, without steps": case(
        *("Resize", 1, 1, 3, 4),
        roi=NONE,
        scales=np.array([1, 1, 1.5, 2], "float32"),
        mode="linear",
        antialias=1,
    ),
    "more channels, too": case(
        *("Resize", 1, 2, 2, 3),
        roi=NONE,
        scales=np.array([1, 2, 2, 2], "float32"),
    ),
    "local, of an even size": case("LRN", 2, 5, 3, 3, size=4, alpha=0.5, beta=0.75),
    "statistics": case(
        *("BatchNormalization", 2, 3, 4),
        scale=numbers(3),
        shift=numbers(3),
        mean=numbers(3),
        variance=numbers(3) ** 2,
        epsilon=0.1,
    ),
    "statistics, a scale of ones": case(
        *("BatchNormalization", 2, 3, 4),
        onnx__Mul_1=np.ones(3, "float32"),
        shift=numbers(3),
        mean=numbers(3),
        variance=numbers(3) ** 2,
    ),
    "instances": case(
        *("InstanceNormalization", 2, 3, 4),
        onnx__Mul_1=np.ones(3, "float32"),
        onnx__Add_2=np.zeros(3, "float32"),
        epsilon=0.5,
    ),
    "local": case("LRN", 1, 5, 3, 3, size=3, alpha=0.5, beta=0.75),
    "a shrinkage of what is small": case("Shrink", 3, 4, lambd=-0.5, bias=-0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_what_the_evaluator_gives(name: str, tmp_path: Path) -> None:
    of = CASES[name]
    more = {key.replace("__", "::"): array for key, array in of.more.items()}
    names = [key if array.size else "" for key, array in more.items()]
    path = file_of(
        tmp_path / "a.onnx",
        [node(of.kind, ["x", *names], ["y"], **of.settings)],
        {"x": of.shape},
        {key: array for key, array in more.items() if array.size},
        opset=of.opset,
    )
    x = numbers(*of.shape)
    evaluator = reference.ReferenceEvaluator(str(path), new_ops=[LRN])
    (wanted,) = evaluator.run(None, {"x": x})
    found = imported(path)[0].eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [3, 5])
def test_a_local_norm_of_the_standard_is_that_of_pytorch(size: int) -> None:
    """Of an odd size. The evaluator of onnx itself takes samples for channels."""
    x = numbers(2, 7, 3, 3)
    module = nn.LocalResponseNorm(size, alpha=0.3, beta=0.6, k=1.5)
    settings = {"alpha": 0.3, "beta": 0.6, "bias": 1.5, "size": size}
    (found,) = LRN._run(None, x, **settings)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, module(torch.from_numpy(x)), rtol=1e-5)
