"""Rarer settings of ONNX's operators: what the evaluator of the package onnx gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx_files import file_of, imported, node
from torch import nn

from gemsc.errors import GemscError
from gemsc.importers.onnx.standard import LRN

onnx = pytest.importorskip("onnx")
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
    output = imported(path)[0].eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [3, 5])
def test_a_local_norm_of_the_standard_is_that_of_pytorch(size: int) -> None:
    """Of an odd size. The evaluator of onnx itself takes samples for channels."""
    x = numbers(2, 7, 3, 3)
    module = nn.LocalResponseNorm(size, alpha=0.3, beta=0.6, k=1.5)
    settings = {"alpha": 0.3, "beta": 0.6, "bias": 1.5, "size": size}
    (output,) = LRN._run(None, x, **settings)  # type: ignore[arg-type]
    np.testing.assert_allclose(output, module(torch.from_numpy(x)), rtol=1e-5)


# ------------------------------------- what one comparison of the outputs does not see


def test_random_numbers_are_between_their_bounds(tmp_path: Path) -> None:
    nodes = [
        node("RandomUniform", [], ["r"], low=2.0, high=3.0, shape=[100, 4]),
        node("RandomNormal", [], ["n"], mean=50.0, scale=0.5, shape=[100, 4]),
        node("Add", ["r", "n"], ["s"]),
        node("Add", ["x", "s"], ["y"]),
    ]
    network = imported(file_of(tmp_path / "a.onnx", nodes, {"x": [100, 4]}))[0]
    sums = network(torch.zeros(100, 4))
    assert abs(float(sums.mean()) - 52.5) < 0.2
    assert abs(float(sums.std()) - (1 / 12 + 0.25) ** 0.5) < 0.1


def test_layers_that_have_rows_of_one_weight_in_common_are_refused(
    tmp_path: Path,
) -> None:
    """Each would train its own."""
    nodes = [
        node("Slice", ["weight", "zero", "four", "zero"], ["one"]),
        node("Slice", ["weight", "two", "six", "zero"], ["other"]),
        node("MatMul", ["x", "one"], ["a"]),
        node("MatMul", ["x", "other"], ["b"]),
        node("Add", ["a", "b"], ["y"]),
    ]
    places = {"zero": ints(0), "two": ints(2), "four": ints(4), "six": ints(6)}
    weights = {"weight": numbers(6, 3), **places}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]}, weights)
    with pytest.raises(GemscError, match="has elements of 'weight'"):
        imported(path)


def test_what_the_file_does_not_hold_is_not_trained(tmp_path: Path) -> None:
    value = onnx.numpy_helper.from_array(np.array([0.5], "float32"))
    nodes = [
        node("ConstantOfShape", ["size"], ["bias"], value=value),
        node("Conv", ["x", "weight", "bias"], ["y"]),
    ]
    weights = {"weight": numbers(3, 2, 1), "size": ints(3)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 2, 5]}, weights)
    (layer,) = imported(path)[0].children()
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ((5, 3), {}, "has sequences of several lengths"),
        ((5, 5), {"input_forget": 1}, "has one gate for input and forgetting"),
        ((5, 5), {"clip": 0.5}, "clips its cells"),
    ],
)
def test_recurrence_that_pytorch_has_not_is_refused(
    lengths: tuple[int, int], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The evaluator of onnx does not heed these."""
    names = ["x", "weight", "recurrence", "", "lengths"]
    nodes = [node("LSTM", names, ["y"], hidden_size=4, **settings)]
    weights = {"weight": numbers(1, 16, 3), "recurrence": numbers(1, 16, 4)}
    weights["lengths"] = np.array(lengths, "int32")
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [5, 2, 3]}, weights)
    with pytest.raises(GemscError, match=message):
        imported(path)


def _rows(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda x: function(x.flatten(1)).reshape(x.shape)


@pytest.mark.parametrize(
    ("kind", "settings", "same"),
    [
        ("Softmax", {}, _rows(lambda x: x.softmax(1))),
        ("LogSoftmax", {"axis": -3}, _rows(lambda x: x.log_softmax(1))),
        ("Hardmax", {"axis": 1}, _rows(lambda x: F.one_hot(x.argmax(1), 24).float())),
        ("LpNormalization", {"axis": 1, "p": 1}, lambda x: F.normalize(x, p=1, dim=1)),
        ("Softmax", {"axis": 1, "opset": 13}, lambda x: x.softmax(1)),
    ],
)
def test_what_the_evaluator_of_onnx_does_otherwise_is_as_the_standard_says(
    kind: str, settings: dict[str, Any], same: Any, tmp_path: Path
) -> None:
    """In what is computed at import, and in what the import is compared with."""
    c, opset = numbers(2, 2, 3, 4), settings.get("opset", 11)
    given = {name: value for name, value in settings.items() if name != "opset"}
    nodes = [node(kind, [name], [f"of_{name}"], **given) for name in ("x", "c")]
    nodes.append(node("Sub", ["of_x", "of_c"], ["y"]))
    path = file_of(tmp_path / "a.onnx", nodes, {"x": c.shape}, {"c": c}, opset=opset)
    x = torch.from_numpy(numbers(*c.shape))
    output = imported(path)[0].eval()(x)
    torch.testing.assert_close(output, same(x) - same(torch.from_numpy(c)))
