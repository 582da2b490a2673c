"""What others get wrong when they import or export a network; gemsc must not.

onnx2torch (with the numbers of its issues), torch.onnx, Keras on PyTorch.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gemsc.importers.folder import import_file
from gemsc.importers.network import ImportedNetwork, ImportOptions
from gemsc.importers.weight import Array

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

Shape = Sequence[int | str]


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def write_onnx(
    path: Path,
    nodes: Sequence[Any],
    inputs: Mapping[str, Shape],
    outputs: Sequence[str],
    weights: Mapping[str, Array] | None = None,
    opset: int = 17,
) -> Path:
    """Write a graph of these nodes."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
            for n, s in inputs.items()
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save(model, path)
    return path


def imported(path: Path, batch: int = 2) -> tuple[ImportedNetwork, nn.Module]:
    """Import a file; return what was read, and the network of its model.py."""
    folder = path.with_suffix("")
    network = import_file(path, folder, ImportOptions(batch=batch))
    spec = importlib.util.spec_from_file_location(folder.name, folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return network, module.model()


def assert_as_the_standard_says(path: Path, *inputs: Array) -> nn.Module:
    """Compare with the reference implementation of ONNX; return the network."""
    _, net = imported(path, len(inputs[0]))
    wanted = ReferenceEvaluator(str(path)).run(
        None,
        dict(zip((i.name for i in onnx.load(path).graph.input), inputs, strict=True)),
    )
    with torch.no_grad():
        outputs = net.eval()(*map(torch.from_numpy, inputs))
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    for one, other in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-5, atol=1e-5)
    return net


def norm_weights(size: int) -> dict[str, Array]:
    """Return scale, bias, mean and variance."""
    return {
        "gamma": numbers(size, seed=1),
        "beta": numbers(size, seed=2),
        "mean": numbers(size, seed=3),
        "var": np.abs(numbers(size, seed=4)) + 0.5,
    }


NORM = ["x", *norm_weights(1)]
X = numbers(2, 3, 5, 5)


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_part_of_a_sequence_may_lose_its_axis(keepdims: int, tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("SplitToSequence", ["x"], ["parts"], axis=1, keepdims=keepdims),
        node("SequenceAt", ["parts", "place"], ["part"]),
        node("Mul", ["part", "scale"], ["y"]),
    ]
    weights = {"place": np.array(-1), "scale": numbers(5)}
    path = write_onnx(tmp_path / "n.onnx", nodes, {"x": X.shape}, ["y"], weights)
    assert_as_the_standard_says(path, X)


@pytest.mark.parametrize("training_mode", [0, 1])
def test_batchnorm_is_trained_whatever_the_mode_of_the_file(
    training_mode: int, tmp_path: Path
) -> None:
    """onnx2torch puts it in evaluation for good, and refuses training_mode=1."""
    outputs = ["y", "running_mean", "running_var"][: 1 + 2 * training_mode]
    nodes = [
        helper.make_node(
            "BatchNormalization", NORM, outputs, training_mode=training_mode
        )
    ]
    path = write_onnx(
        tmp_path / "n.onnx", nodes, {"x": X.shape}, ["y"], norm_weights(3)
    )
    _, net = imported(path)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    y = net.train()(torch.from_numpy(X))
    assert y.mean((0, 2, 3)).tolist() == pytest.approx(
        norm_weights(3)["beta"].tolist(), abs=1e-5
    )
    changed = {n for n, t in net.state_dict().items() if not torch.equal(t, before[n])}
    assert {name.rpartition(".")[2] for name in changed} >= {
        "running_mean",
        "running_var",
    }
    assert {n.rpartition(".")[2] for n, _ in net.named_parameters()} == {
        "weight",
        "bias",
    }


def test_the_factors_of_a_product_are_parameters_under_their_names(
    tmp_path: Path,
) -> None:
    """onnx2torch has `onnx_initializer_0`, a buffer; nothing to optimize (#194)."""
    weights = {"head.weight": numbers(4, 3), "head.bias": numbers(3)}
    nodes = [
        helper.make_node("MatMul", ["x", "head.weight"], ["xw"]),
        helper.make_node("Add", ["xw", "head.bias"], ["y"]),
    ]
    path = write_onnx(tmp_path / "n.onnx", nodes, {"x": ["N", 4]}, ["y"], weights)
    net = assert_as_the_standard_says(path, numbers(2, 4))
    assert {name for name, _ in net.named_parameters()} == set(weights)
    torch.optim.SGD(net.parameters(), lr=0.1)


def test_a_product_of_two_inputs_needs_no_weight(tmp_path: Path) -> None:
    """onnx2torch #132."""
    nodes = [helper.make_node("Gemm", ["a", "b"], ["y"], transB=1, alpha=0.5)]
    path = write_onnx(tmp_path / "n.onnx", nodes, {"a": [2, 4], "b": [3, 4]}, ["y"])
    net = assert_as_the_standard_says(path, numbers(2, 4), numbers(3, 4, seed=1))
    assert not [*net.parameters()]


def test_all_outputs_of_a_node_are_outputs_of_the_graph(tmp_path: Path) -> None:
    """onnx2torch gives one of them."""
    nodes = [helper.make_node("Split", ["x"], ["a", "b"], axis=1, num_outputs=2)]
    path = write_onnx(tmp_path / "n.onnx", nodes, {"x": ["N", 6]}, ["b", "a"], opset=18)
    assert_as_the_standard_says(path, numbers(2, 6))


def test_a_pool_may_pad_more_at_the_end(tmp_path: Path) -> None:
    """onnx2torch #172, #203."""
    for number, kind in enumerate(["AveragePool", "MaxPool"]):
        pool: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2]}
        nodes = [helper.make_node(kind, ["x"], ["y"], pads=[0, 0, 1, 1], **pool)]
        path = tmp_path / f"n{number}.onnx"
        shape = ("N", 3, 6, 6)
        write_onnx(path, nodes, {"x": shape}, ["y"])
        assert_as_the_standard_says(path, numbers(2, 3, 6, 6))


@pytest.mark.parametrize("count", [0, 1])
def test_windows_beyond_the_image_are_averaged_as_the_standard_says(
    count: int, tmp_path: Path
) -> None:
    """torch.onnx writes its own pools so, and means something else: pytorch#183528."""
    nodes = [
        helper.make_node(
            "AveragePool",
            ["x"],
            ["y"],
            kernel_shape=[3, 3],
            strides=[2, 2],
            pads=[1, 1, 1, 1],
            ceil_mode=1,
            count_include_pad=count,
        )
    ]
    path = write_onnx(
        tmp_path / "n.onnx", nodes, {"x": ["N", 3, 6, 6]}, ["y"], opset=19
    )
    assert_as_the_standard_says(path, numbers(2, 3, 6, 6))


@pytest.mark.parametrize("opset", [7, 9, 13, 15, 21])
def test_old_and_new_versions_of_operators_are_known(
    opset: int, tmp_path: Path
) -> None:
    """onnx2torch: BatchNormalization-7, Dropout-7, Transpose-21 (#192, #152, #251)."""
    nodes = [
        helper.make_node("BatchNormalization", NORM, ["z"]),
        helper.make_node("Dropout", ["z"], ["d"]),
        helper.make_node("Transpose", ["d"], ["y"], perm=[0, 2, 3, 1]),
    ]
    shape, weights = ("N", *X.shape[1:]), norm_weights(3)
    path = write_onnx(tmp_path / "n.onnx", nodes, {"x": shape}, ["y"], weights, opset)
    _, net = imported(path)
    gamma, beta, mean, var = (w[:, None, None] for w in weights.values())
    wanted = gamma * (X - mean) / np.sqrt(var + 1e-5) + beta
    with torch.no_grad():
        output = net.eval()(torch.from_numpy(X)).permute(0, 3, 1, 2)
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-5)


def test_a_weight_in_a_constant_node_is_a_parameter(tmp_path: Path) -> None:
    """onnx2torch #230, #243: as PaddlePaddle writes them."""
    kernel = numpy_helper.from_array(numbers(4, 3, 3, 3), "kernel")
    nodes = [
        helper.make_node("Constant", [], ["kernel"], value=kernel),
        helper.make_node("Conv", ["x", "kernel"], ["y"], pads=[1, 1, 1, 1]),
    ]
    path = write_onnx(tmp_path / "n.onnx", nodes, {"x": ("N", *X.shape[1:])}, ["y"])
    net = assert_as_the_standard_says(path, X)
    assert [tuple(p.shape) for p in net.parameters()] == [(4, 3, 3, 3)]


def test_the_batch_of_the_file_is_not_fixed(tmp_path: Path) -> None:
    """onnx/models#576: the Reshape of a file holds the batch that it was made with."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    weights = {"shape": np.array([1, 75]), "w": numbers(75, 2)}
    path = write_onnx(tmp_path / "n.onnx", nodes, {"x": [1, 3, 5, 5]}, ["y"], weights)
    _, net = imported(path, batch=1)
    with torch.no_grad():
        both = net(torch.from_numpy(X))
    np.testing.assert_allclose(both, X.reshape(2, 75) @ weights["w"], rtol=1e-4)


class Normed(nn.Module):
    """A convolution, and a norm that may have no running statistics."""

    def __init__(self, tracks: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, track_running_stats=tracks)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def export(model: nn.Module, path: Path, **how: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.from_numpy(X),), path, verbose=False, **how)
    return path


@pytest.mark.slow
def test_a_folded_batchnorm_is_told(tmp_path: Path) -> None:
    """torch.onnx folds it by default, also of a model in training."""
    path = export(Normed(tracks=True).train(), tmp_path / "n.onnx", dynamo=True)
    assert not [n for n in onnx.load(path).graph.node if "Norm" in n.op_type]
    network, net = imported(path)
    (note,) = [note for note in network.notes if "folded" in note]
    assert note.startswith("1 BatchNormalization folded into convolutions")
    assert "optimize=False" in note
    assert [*net.parameters()]


def test_numbers_that_an_exporter_has_made_up_are_not_trained(tmp_path: Path) -> None:
    """torch.onnx writes GroupNorm as InstanceNormalization by ones and zeros."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4))
    older = {"dynamo": False, "do_constant_folding": False}
    for how in (older, {"dynamo": True, "optimize": False}):
        _, net = imported(export(model, tmp_path / "n.onnx", **how))
        counts = [sum(p.numel() for p in m.parameters()) for m in (net, model)]
        assert counts[0] == counts[1]
        assert {"1.weight", "1.bias"} <= {name.lstrip("_") for name in net.state_dict()}


def test_a_norm_without_running_statistics_stays_so(tmp_path: Path) -> None:
    """torch.onnx writes training_mode=1 for it, also in evaluation: pytorch#75252."""
    torch.manual_seed(0)
    model = Normed(tracks=False).eval()
    _, net = imported(export(model, tmp_path / "n.onnx", dynamo=False))
    x = torch.from_numpy(X)
    with torch.no_grad():
        for module in (net.eval(), net.train()):
            torch.testing.assert_close(module(x), model(x), rtol=1e-4, atol=1e-5)
