"""ONNX files become the networks that they were: outputs, gradients, buffers, names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx_files import NEWER, OLDER, exported, file_of, imported, network_of, node
from torch import Tensor, nn

from gemsc.errors import GemscError, InternalError
from gemsc.importers.folder import import_file
from gemsc.importers.network import ImportOptions
from gemsc.importers.onnx.operators import OPERATORS

onnx = pytest.importorskip("onnx")
numpy_helper = onnx.numpy_helper
RANDOM = np.random.default_rng(0)


def numbers(*shape: int, dtype: str = "f4") -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(dtype)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.PReLU(8)
        )
        self.depthwise = nn.Conv2d(8, 8, 5, padding=2, groups=8)
        self.up = nn.ConvTranspose2d(8, 6, 4, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.max_pool2d(x + torch.relu(self.depthwise(x)), 2)
        x = self.norm(self.up(x)) * self.scale
        return self.head(torch.tanh(x).mean((2, 3)))


class Words(nn.Module):
    """A head that is tied to the table, attention, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.rand(1, 5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.lstm = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.table(x) + self.position)
        return self.head(self.lstm(x)[0])


def example(model: type[nn.Module], batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if model is Words:
        return torch.randint(11, (batch, 5), generator=generator)
    return torch.rand(batch, 3, 12, 12, generator=generator, dtype=torch.float64)


def made(model: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = model().double().eval()
        for parameter in network.parameters():  # none like another one: none is merged
            nn.init.uniform_(parameter, -0.5, 0.5)
        for name, buffer in network.named_buffers():
            if "running" in name:
                nn.init.uniform_(buffer, 0.5, 1.5)
        return network


CASES = [(Picture, NEWER), (Picture, OLDER), (Words, NEWER), (Words, OLDER)]
NAMES = ["picture-newer", "picture-older", "words-newer", "words-older"]


@pytest.fixture(scope="module", params=CASES, ids=NAMES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[type[nn.Module], Path, nn.Module, Any]:
    model, how = request.param
    path = tmp_path_factory.mktemp("onnx") / "file.onnx"
    exported(made(model), [example(model)], path, **how)
    return model, path, *imported(path)


@pytest.mark.by_day(2)
def test_outputs_are_those_of_the_reference_in_float64(case):
    model, path, network, _ = case
    x = example(model)
    reference = onnx.reference.ReferenceEvaluator(str(path))
    (wanted,) = reference.run(None, {reference.input_names[0]: x.numpy()})
    output = network.eval()(x).detach().numpy()
    np.testing.assert_allclose(output, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.slow(1)
def test_the_network_says_what_the_file_gives(case):
    model, _, network, read = case
    x = example(model)
    (wanted,) = read.reference([x.numpy()])
    output = network.eval()(x).detach().numpy()
    np.testing.assert_allclose(output, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.slow(2)
def test_a_step_of_training_is_that_of_the_model_that_made_the_file(case):
    model, path, _, _ = case
    ours, theirs = network_of(path.with_suffix("")).train(), made(model).train()
    x = example(model)
    for network in (ours, theirs):
        network(x).square().sum().backward()
    wanted = dict(theirs.named_parameters())
    named = dict(ours.named_parameters())
    if model is Words:  # the exporter takes one of the two names of a tied tensor
        (name,) = named.keys() & {"table.weight", "head.weight"}
        wanted[name] = wanted.pop("table.weight")
    named = {name.replace("in_proj.", "in_proj_"): p for name, p in named.items()}
    assert set(named) == set(wanted)
    for name, parameter in named.items():
        gradient = wanted[name].grad.reshape(parameter.shape)  # (6, 1, 1) or (6,)
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)


def test_running_statistics_are_of_biased_variances(tmp_path):
    path = exported(made(Picture), [example(Picture)], tmp_path / "a.onnx", **OLDER)
    network, _ = imported(path)
    theirs = made(Picture).train()
    x = example(Picture)
    network.train()(x)
    theirs(x)
    count = 2 * 6 * 6  # of each channel, after the first convolution
    old = made(Picture).stem[1].running_var
    new = theirs.stem[1].running_var
    torch.testing.assert_close(
        network.stem["1"].running_var,
        0.9 * old + (new - 0.9 * old) * (count - 1) / count,
        rtol=1e-9,
        atol=1e-9,
    )
    torch.testing.assert_close(
        network.stem["1"].running_mean, theirs.stem[1].running_mean, rtol=1e-9, atol=0
    )


@pytest.mark.slow(2)
def test_any_batch_goes_through(case):
    model, _, network, read = case
    assert not read.model.fixes_batch
    assert len(network.eval()(example(model, batch=3))) == 3


def test_a_copy_without_training_is_the_file_itself(case, tmp_path):
    _, path, _, read = case
    copy = tmp_path / "copy.onnx"
    read.tensors.write_copy(copy, lambda name: None)
    assert onnx.load(copy) == onnx.load(path)


def test_what_is_written_back_is_what_was_trained(case, tmp_path):
    *_, network, read = case
    name, weight = next(iter(read.model.weights.items()))
    (source,) = weight.sources
    new = np.full(read.tensors.table[source].shape, 0.125, "f8")
    copy = tmp_path / "copy.onnx"
    read.tensors.write_copy(copy, lambda one: new if one == source else None)
    changed, _ = imported(copy)
    state = dict(network.state_dict())
    for key, tensor in changed.state_dict().items():
        if read.model.weights.get(key, weight).sources != weight.sources:
            torch.testing.assert_close(tensor, state[key], rtol=0, atol=0)
    assert (changed.state_dict()[name] == 0.125).all()


# ------------------------------------------------------------------ files by hand


def agree(path: Path, *inputs: np.ndarray, within: float = 1e-5) -> nn.Module:
    network, _ = imported(path)
    reference = onnx.reference.ReferenceEvaluator(str(path))
    names = reference.input_names[: len(inputs)]
    wanted = reference.run(None, dict(zip(names, inputs, strict=True)))
    with torch.no_grad():
        outputs = network.eval()(*map(torch.from_numpy, inputs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for one, two in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), two, rtol=within, atol=within)
    return network


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "asymmetric": {"pads": [0, 1, 2, 1]},
    "same upper": {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    "same lower": {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    "dilated": {"dilations": [2, 1], "pads": [2, 1, 2, 1], "group": 1},
}


@pytest.mark.parametrize("settings", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_pad_as_the_file_says(settings, tmp_path):
    nodes = [node("Conv", ["x", "c.weight", "c.bias"], ["y"], **settings)]
    weights = {"c.weight": numbers(4, 3, 4, 3), "c.bias": numbers(4)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 3, 9, 8]}, weights)
    network = agree(path, numbers(2, 3, 9, 8))
    assert isinstance(network.c, nn.Conv2d)


TRANSPOSED: dict[str, dict[str, Any]] = {
    "begin": {"pads": [1, 0], "strides": [2]},
    "end": {"pads": [0, 1], "strides": [2]},
    "same upper": {"auto_pad": "SAME_UPPER", "strides": [2]},
    "output padding": {"pads": [1, 1], "strides": [3], "output_padding": [2]},
    "groups": {"group": 2, "dilations": [2]},
}


@pytest.mark.parametrize("settings", TRANSPOSED.values(), ids=TRANSPOSED)
def test_transposed_convolutions_crop_as_the_file_says(settings, tmp_path):
    groups = settings.get("group", 1)
    nodes = [node("ConvTranspose", ["x", "w"], ["y"], **settings)]
    weights = {"w": numbers(4, 6 // groups, 3)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4, 7]}, weights)
    if groups > 1:  # the reference implementation has none
        runtime = pytest.importorskip("onnxruntime")
        x = numbers(2, 4, 7)
        (wanted,) = runtime.InferenceSession(str(path)).run(None, {"x": x})
        network, _ = imported(path)
        output = network.eval()(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-5)
    else:
        agree(path, numbers(2, 4, 7))


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 2.0), (1.0, 0.0)])
def test_a_product_is_a_linear_layer_and_its_factors_stay_outside(
    turned, factors, tmp_path
):
    alpha, beta = factors
    settings = {"alpha": alpha, "beta": beta, "transB": turned}
    nodes = [node("Gemm", ["x", "f.weight", "f.bias"], ["y"], **settings)]
    weight = numbers(5, 4) if turned else numbers(4, 5)
    weights = {"f.weight": weight, "f.bias": numbers(5)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": ["batch", 4]}, weights)
    network = agree(path, numbers(3, 4))
    assert isinstance(network.f, nn.Linear)
    kept = network.f.weight.detach().numpy()
    np.testing.assert_array_equal(kept if turned else kept.T, weight)


RECURRENT = {
    kind + direction: (kind, direction)
    for kind in ("LSTM", "GRU", "RNN")
    for direction in ("forward", "reverse", "bidirectional")
}


@pytest.mark.parametrize("what", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_in_each_direction(what, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    kind, direction = what
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    count = 2 if direction == "bidirectional" else 1
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    outputs = ["y", "h", "c"] if kind == "LSTM" else ["y", "h"]
    names = ["x", "w", "r", "b", "", "h0"]
    nodes = [
        node(kind, names, outputs, hidden_size=3, direction=direction, **more),
    ]
    weights = {
        "w": numbers(count, gates * 3, 4),
        "r": numbers(count, gates * 3, 3),
        "b": numbers(count, gates * 6),
    }
    shapes = {"x": [5, 2, 4], "h0": [count, 2, 3]}
    path = file_of(tmp_path / "a.onnx", nodes, shapes, weights, outputs)
    given = {name: numbers(*shape) for name, shape in shapes.items()}
    wanted = runtime.InferenceSession(str(path)).run(None, given)
    network, _ = imported(path)
    with torch.no_grad():
        computed = network.eval()(*map(torch.from_numpy, given.values()))
    for one, two in zip(computed, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), two, rtol=1e-5, atol=1e-5)


def test_a_recurrent_layer_may_begin_with_what_is_trained(tmp_path):
    nodes = [
        node("Expand", ["start", "sizes"], ["h0"]),
        node("RNN", ["x", "w", "r", "", "", "h0"], ["y"], hidden_size=3),
    ]
    weights = {
        "start": numbers(1, 1, 3),
        "sizes": np.array([1, 2, 3]),
        "w": numbers(1, 3, 4),
        "r": numbers(1, 3, 3),
    }
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [5, 2, 4]}, weights)
    network = agree(path, numbers(5, 2, 4))
    assert len(list(network.parameters())) == 3


def test_weights_of_half_precision_that_are_cast_are_parameters(tmp_path):
    nodes = [
        node("Cast", ["a.weight"], ["wide"], to=onnx.TensorProto.FLOAT),
        node("Transpose", ["wide"], ["turned"], perm=[1, 0]),
        node("MatMul", ["x", "turned"], ["y"]),
    ]
    weights = {"a.weight": numbers(5, 4, dtype="f2")}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]}, weights)
    network, read = imported(path)
    assert network.a.weight.dtype is torch.float32
    assert network.a.weight.requires_grad
    assert read.model.weights["a.weight"].sources == ("a.weight",)
    agree(path, numbers(2, 4))


def test_weights_in_constant_nodes_are_parameters(tmp_path):
    value = numpy_helper.from_array(numbers(4, 5))
    nodes = [
        node("Constant", [], ["a"], value=value),
        node("Identity", ["a"], ["b"]),
        node("MatMul", ["x", "b"], ["y"], name="first"),
    ]
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]})
    network = agree(path, numbers(2, 4))
    assert [p.requires_grad for p in network.parameters()] == [True]
    _, read = imported(path)
    new = np.ones((4, 5), "f4")
    read.tensors.write_copy(tmp_path / "b.onnx", lambda name: new)
    assert (next(imported(tmp_path / "b.onnx")[0].parameters()) == 1).all()


def test_one_tensor_that_two_layers_hold_is_one_parameter(tmp_path):
    nodes = [
        node("Gather", ["table.weight", "x"], ["a"]),
        node("Transpose", ["table.weight"], ["turned"], perm=[1, 0]),
        node("LayerNormalization", ["a", "n.weight", "n.bias"], ["b"]),
        node("LayerNormalization", ["b", "n.weight", "m.bias"], ["c"]),
        node("MatMul", ["c", "turned"], ["y"]),
    ]
    weights = {
        "table.weight": numbers(7, 4),
        "n.weight": numbers(4),
        "n.bias": numbers(4),
        "m.bias": numbers(4),
    }
    kind = onnx.TensorProto.INT64
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 3]}, weights, kind=kind)
    network = agree(path, np.array([[0, 6, 2], [3, 3, 1]]))
    assert len(list(network.parameters())) == 4


def test_what_no_number_of_evaluation_tells_is_that_of_the_file(tmp_path):
    """The momentum of a norm, the share that is dropped, what is large and learned."""
    nodes = [
        node("BatchNormalization", ["x", *"sbmv"], ["a"], momentum=0.7),
        node("Dropout", ["a"], ["b"]),
        node("Dropout", ["b", "ratio"], ["c"]),
        node("Add", ["c", "position"], ["y"]),
    ]
    weights = {name: np.abs(numbers(3)) + 1 for name in "sbmv"}
    weights["ratio"] = np.array(0.2, "f4")
    weights["position"] = np.array([-150.0, 0.0, 2.0], "f4")
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 3]}, weights)
    network, _ = imported(path)
    layers = list(network.children())
    assert [layer.momentum for layer in layers if hasattr(layer, "momentum")] == [0.3]
    assert [layer.p for layer in layers if hasattr(layer, "p")] == [0.5, 0.2]
    assert "position" in dict(network.named_parameters())


def test_what_is_added_to_hide_is_a_constant_and_what_may_be_one_is_told(tmp_path):
    nodes = [
        node("Add", ["x", "attn_mask"], ["a"]),
        node("Add", ["a", "attn_far"], ["b"]),
        node("Add", ["b", "position"], ["y"]),
    ]
    mask = np.array([[0, -100], [-100, 0]], "f4")
    far = np.array([[0, -np.inf], [0, 0]], "f4")
    weights = {"attn_mask": mask, "attn_far": far, "position": numbers(2, 2)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [3, 2, 2]}, weights)
    network = agree(path, numbers(3, 2, 2))
    assert [name for name, _ in network.named_parameters()] == ["position"]
    _, read = imported(path)
    (note,) = [n for n in read.notes if n.startswith("trained though")]
    assert "4 parameters: position; " in note
    source = path.with_suffix("") / "model.py"
    text = source.read_text()
    line = "self.position = nn.Parameter(torch.empty(2, 2))"
    assert line in text
    changed = 'self.register_buffer("position", torch.empty(2, 2))'
    source.write_text(text.replace(line, changed))  # what the note advises
    network = network_of(source.parent)
    assert not list(network.parameters())
    np.testing.assert_array_equal(network.position, weights["position"])


SINGLE = {  # a number where the standard has a row of one
    "Unsqueeze": (["x", "one"], {}),
    "Squeeze": (["x", "one"], {}),
    "ReduceSum": (["x", "two"], {}),
    "ReduceMax": (["x", "two"], {}),
    "Slice": (["x", "one", "three", "two", "one"], {}),
    "Split": (["x", "four"], {"axis": 2}),
    "Pad": (["x", "pads", "", "two"], {}),
    "TopK": (["x", "one"], {"axis": 2}),
    "Reshape": (["x", "less"], {}),
}


@pytest.mark.parametrize("kind", SINGLE)
def test_a_single_axis_need_not_be_in_a_row(kind, tmp_path):
    inputs, attributes = SINGLE[kind]
    x = numbers(3, 1, 4)
    computed = []
    for name, shape in (("a", ()), ("b", (1,))):
        rows = {"one": 1, "two": 2, "three": 3, "four": 4, "less": -1}
        weights = {n: np.full(shape, value) for n, value in rows.items()}
        weights["pads"] = np.array([1, 2])
        used = {n: w for n, w in weights.items() if n in inputs}
        outputs = ["y", ""] if kind == "TopK" else ["y"]
        nodes = [node(kind, inputs, outputs, name="n", **attributes)]
        path = file_of(tmp_path / f"{name}.onnx", nodes, {"x": [3, 1, 4]}, used)
        computed.append(network_of(import_and_folder(path))(torch.from_numpy(x)))
    torch.testing.assert_close(*computed, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Add", "Div", "Pow"])
def test_an_old_file_says_where_the_axes_of_an_operand_stand(kind, tmp_path):
    nodes = [node(kind, ["x", "w"], ["y"], broadcast=1, axis=1)]
    weights = {"w": np.abs(numbers(3)) + 1}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 3, 3]}, weights, opset=6)
    x, w = torch.rand(2, 3, 3), torch.from_numpy(weights["w"])
    function = {"Add": torch.add, "Div": torch.div, "Pow": torch.pow}[kind]
    y = network_of(import_and_folder(path))(x)
    torch.testing.assert_close(y, function(x, w[:, None]))


@pytest.mark.parametrize("way", ["bug", "damage"])
def test_a_bug_of_ours_is_not_called_damage_of_the_file(way, tmp_path, monkeypatch):
    nodes = [node("Gemm", ["x", "w", "w"], ["y"], "g", alpha=2.0)]
    weights = {"w": numbers(4 if way == "bug" else 5, 4)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [4, 4]}, weights)
    if way == "damage":
        assert "a.onnx: Gemm 'g' has operands or attributes that do not" in refused(
            path
        )
        return

    def broken(node: Any) -> Any:
        return {}[node.kind]

    monkeypatch.setitem(OPERATORS, "Gemm", broken)
    with pytest.raises(InternalError, match=r"a\.onnx: Gemm 'g' KeyError: 'Gemm'"):
        import_file(path, tmp_path / "a", ImportOptions())


def import_and_folder(path: Path) -> Path:
    import_file(path, path.with_suffix(""), ImportOptions(), check=False)
    return path.with_suffix("")


class Grouped(nn.Module):
    """Attention of four heads that share two keys."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.keys = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.heads(x).view(batch, length, 4, 4).transpose(1, 2)
        k, v = self.keys(x).view(batch, length, 2, 2, 4).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2)


@pytest.mark.slow(1)
@pytest.mark.parametrize("optimize", [False, True])
def test_heads_that_share_keys_are_read(optimize, tmp_path):
    x = torch.rand(2, 5, 8)
    model = Grouped().eval()
    path = exported(model, [x], tmp_path / "a.onnx", **(NEWER | {"optimize": optimize}))
    network, _ = imported(path)
    torch.testing.assert_close(network(x), model(x), rtol=1e-5, atol=1e-5)


def test_numbers_that_are_made_of_known_ones_are_computed_at_once(tmp_path):
    """Range is a loop in the standard, and CenterCropPad depends on types."""
    nodes = [
        node("Constant", [], ["start"], value_float=0.0),
        node("Range", ["start", "limit", "delta"], ["numbers"]),
        node("Add", ["x", "numbers"], ["y"]),
    ]
    weights = {"limit": np.float32(100), "delta": np.float32(1)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 100]}, weights)
    assert not list(agree(path, numbers(2, 100)).parameters())
    nodes = [node("CenterCropPad", ["x", "sizes"], ["y"], axes=[1, 2])]
    sizes = {"sizes": np.array([5, 3])}
    agree(
        file_of(tmp_path / "b.onnx", nodes, {"x": [2, 4, 6]}, sizes), numbers(2, 4, 6)
    )


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 27, reason="an older standard")
@pytest.mark.parametrize("left_out", [[], [""], ["", ""]])
def test_functions_of_the_standard_without_their_last_inputs(left_out, tmp_path):
    nodes = [node("CausalConvWithState", ["x", "w", *left_out], ["y", ""])]
    weights = {"w": numbers(4, 1, 3)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4, 8]}, weights, opset=27)
    x = numbers(2, 4, 8)
    network, _ = imported(path)
    padded = F.pad(torch.from_numpy(x), (2, 0))
    wanted = F.conv1d(padded, torch.from_numpy(weights["w"]), groups=4)
    assert torch.allclose(network(torch.from_numpy(x)), wanted, atol=1e-6)


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 27, reason="an older standard")
def test_a_function_that_leaves_an_input_out_before_another_is_named(tmp_path):
    heads = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "gated"}
    nodes = [node("LinearAttention", ["x", "x", "x", "", "d"], ["y", ""], "l", **heads)]
    path = file_of(
        tmp_path / "a.onnx", nodes, {"x": [2, 5, 8]}, {"d": numbers(2, 5, 2)}, opset=27
    )
    message = refused(path)
    assert "a.onnx: LinearAttention 'l' leaves input 3 out, and gives later" in message
    assert "damaged" not in message


def test_a_function_of_the_file_that_calls_itself_is_refused(tmp_path):
    path = file_of(tmp_path / "a.onnx", [node("Relu", ["x"], ["y"])], {"x": [2, 3]})
    model = onnx.load(path)
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    call = onnx.helper.make_node("F", ["x"], ["y"], domain="own")
    model.functions.append(
        onnx.helper.make_function("own", "F", ["x"], ["y"], [call], model.opset_import)
    )
    model.graph.node[0].CopyFrom(call)
    path.write_bytes(model.SerializeToString())
    assert "a.onnx: its functions cannot be inlined: " in refused(path)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("size", [(7, 9), (8, 6), (6, 5), (5, 11)])
def test_means_of_windows_with_gaps_between_them(mode, size, tmp_path):
    """The last window may end before the image does: then nothing is padded."""
    runtime = pytest.importorskip("onnxruntime")  # the reference cannot do it
    settings = {"kernel_shape": [2, 3], "strides": [3, 4], "auto_pad": mode}
    nodes = [
        node("AveragePool", ["x"], ["a"], **settings),
        node("AveragePool", ["x"], ["b"], count_include_pad=1, **settings),
    ]
    x = numbers(2, 3, *size)
    path = file_of(tmp_path / "a.onnx", nodes, {"x": x.shape}, outputs=["a", "b"])
    wanted = runtime.InferenceSession(str(path)).run(None, {"x": x})
    outputs = imported(path)[0](torch.from_numpy(x))
    for one, two in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), two, rtol=1e-5, atol=1e-5)


def test_branches_and_loops_that_do_not_depend_on_data_are_unrolled(tmp_path):
    helper = onnx.helper
    info = [helper.make_tensor_value_info("then", 1, None)]
    other = [helper.make_tensor_value_info("else", 1, None)]
    then_branch = helper.make_graph([node("Relu", ["x"], ["then"])], "t", [], info)
    else_branch = helper.make_graph([node("NonZero", ["x"], ["else"])], "e", [], other)
    values = [
        helper.make_tensor_value_info("i", 7, []),
        helper.make_tensor_value_info("going", 9, []),
        helper.make_tensor_value_info("before", 1, None),
    ]
    results = [
        helper.make_tensor_value_info("going", 9, []),
        helper.make_tensor_value_info("after", 1, None),
        helper.make_tensor_value_info("row", 1, None),
    ]
    round_ = [
        node("MatMul", ["before", "w"], ["after"]),
        node("Identity", ["after"], ["row"]),
    ]
    body = helper.make_graph(round_, "body", values, results)
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Size", ["shape"], ["rank"]),
        node("Equal", ["rank", "two"], ["flat"]),
        node("If", ["flat"], ["a"], then_branch=then_branch, else_branch=else_branch),
        node("Loop", ["three", "", "a"], ["y", "rows"], body=body),
    ]
    weights = {"two": np.array(2), "three": np.array(3), "w": numbers(4, 4)}
    path = file_of(
        tmp_path / "a.onnx", nodes, {"x": [2, 4]}, weights, outputs=["y", "rows"]
    )
    network, _ = imported(path)
    x = torch.rand(2, 4)
    rows = [x.relu() @ torch.from_numpy(weights["w"])]
    for _ in range(2):
        rows.append(rows[-1] @ torch.from_numpy(weights["w"]))
    y, stacked = network(x)
    torch.testing.assert_close(y, rows[-1])
    torch.testing.assert_close(stacked, torch.stack(rows))
    assert len(list(network.parameters())) == 1


def test_tensors_in_other_files_are_read_and_written_back(tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    weight = numbers(4, 300)
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]}, {"w": weight})
    (tmp_path / "in").mkdir()
    outside = tmp_path / "in" / "b.onnx"
    onnx.save(
        onnx.load(path),
        outside,
        save_as_external_data=True,
        location="b.data",
        size_threshold=0,
    )
    network, read = imported(outside)
    assert read.tensors.files == ("b.data",)
    np.testing.assert_array_equal(next(network.parameters()).detach().numpy().T, weight)
    read.tensors.write_copy(outside.with_name("c.onnx"), lambda name: weight + 1)
    read.tensors.write_copy(tmp_path / "out" / "c.onnx", lambda name: weight + 2)
    for path, number in [(outside, 0), (outside.with_name("c.onnx"), 1)]:
        kept = numpy_helper.to_array(onnx.load(path).graph.initializer[0])
        np.testing.assert_array_equal(kept, weight + number)
    kept = onnx.load(tmp_path / "out" / "c.onnx").graph.initializer[0]
    np.testing.assert_array_equal(numpy_helper.to_array(kept), weight + 2)


def test_a_number_of_the_file_is_written_in_the_form_that_it_has(tmp_path):
    weights = {"w": numbers(4, 5), "b": numbers(5)}
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "b"], ["y"])]
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]}, weights)
    model = onnx.load(path)
    plain = onnx.helper.make_tensor("b", 1, [5], weights["b"])
    assert plain.float_data
    model.graph.initializer[1].CopyFrom(plain)
    onnx.save(model, path)
    _, read = imported(path)
    read.tensors.write_copy(tmp_path / "b.onnx", lambda n: read.tensors.read(n) * 2)
    copied = onnx.load(tmp_path / "b.onnx")
    assert copied.graph.initializer[1].float_data
    for tensor in copied.graph.initializer:
        array = numpy_helper.to_array(tensor)
        np.testing.assert_array_equal(array, weights[tensor.name] * 2)


# -------------------------------------------------------------------- what is refused


def refused(path: Path, options: ImportOptions | None = None) -> str:
    with pytest.raises(GemscError) as caught:
        import_file(path, path.with_suffix(""), options or ImportOptions())
    assert not path.with_suffix("").exists()
    return str(caught.value)


def test_operators_that_are_unknown_are_listed_once_with_their_number(tmp_path):
    nodes = [
        node("NonZero", ["x"], ["a"], name="first"),
        node("NonZero", ["x"], ["b"]),
        node("Fancy", ["x"], ["y"], domain="com.example"),
    ]
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]})
    assert (
        "a.onnx has operators that gemsc does not support: NonZero (2 nodes, first "
        "'first'), com.example.Fancy (1 node, first 'y')"
    ) in refused(path)


def test_options_for_keras_are_refused(tmp_path):
    path = file_of(tmp_path / "a.onnx", [node("Relu", ["x"], ["y"])], {"x": [2, 4]})
    message = refused(path, ImportOptions(channels_first=True))
    assert "--channels-first is only for Keras images" in message
    message = refused(path, ImportOptions(custom=Path(__file__)))
    assert "is only for Keras layers" in message


def test_a_quantized_file_is_refused(tmp_path):
    nodes = [
        node("DequantizeLinear", ["w", "s"], ["v"], name="q"),
        node("MatMul", ["x", "v"], ["y"]),
    ]
    weights = {"w": np.ones((4, 4), "i1"), "s": np.array(0.1, "f4")}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]}, weights)
    message = refused(path)
    assert "is a quantized file: DequantizeLinear (1 node, first 'q')" in message
    assert "export the float model" in message


def test_a_branch_that_the_data_choose_is_refused_by_name(tmp_path):
    info = [onnx.helper.make_tensor_value_info("z", 1, None)]
    branch = onnx.helper.make_graph([node("Relu", ["x"], ["z"])], "b", [], info)
    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Cast", ["m"], ["c"], to=9),
        node("If", ["c"], ["y"], "head/If_3", then_branch=branch, else_branch=branch),
    ]
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]})
    assert "a.onnx: If 'head/If_3' depends on data " in refused(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"linear_before_reset": 0}, "resets before its product"),
        ({"linear_before_reset": 1, "clip": 1.0}, "clips its cells"),
        (
            {"linear_before_reset": 1, "activations": ["Relu", "Tanh"]},
            "has the activations Relu, Tanh",
        ),
    ],
)
def test_recurrent_layers_that_torch_has_not_are_refused(settings, words, tmp_path):
    nodes = [node("GRU", ["x", "w", "r"], ["y"], "g", hidden_size=3, **settings)]
    weights = {"w": numbers(1, 9, 4), "r": numbers(1, 9, 3)}
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [5, 2, 4]}, weights)
    assert f"a.onnx: GRU 'g' {words}" in refused(path)


def test_sizes_that_the_file_leaves_open_are_asked_for(tmp_path):
    nodes = [node("Relu", ["x"], ["y"])]
    path = file_of(tmp_path / "a.onnx", nodes, {"x": ["n", 3, "height", 8]})
    assert "input 'x' has the shape 2x3x?x8: the file leaves sizes open" in refused(
        path
    )
    wrong = ImportOptions(shapes={"X": (4, 3, 6, 8)})
    assert "a.onnx has no input 'X'" in refused(path, wrong)
    shapes = {"x": (4, 3, 6, 8)}
    _, read = imported(path, ImportOptions(shapes=shapes))
    assert read.model.inputs[0].shape == (4, 3, 6, 8)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"x": (3, 4)}, "--shape x=3x4 has 2 sizes; in the file the input is ?x3x?x8"),
        ({"y": (3, 4)}, "a.onnx has no input 'y'"),
    ],
)
def test_shapes_that_are_none_of_an_input_are_refused(shapes, words, tmp_path):
    nodes = [node("Relu", ["x"], ["y"])]
    path = file_of(tmp_path / "a.onnx", nodes, {"x": ["n", 3, "height", 8]})
    assert words in refused(path, ImportOptions(shapes=shapes))


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "missing.data"])
def test_tensors_outside_of_the_folder_are_refused(location, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(64))
    folder = tmp_path / "in"
    folder.mkdir()
    path = file_of(
        folder / "a.onnx",
        [node("MatMul", ["x", "w"], ["y"])],
        {"x": [2, 4]},
        {"w": numbers(4, 4)},
    )
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path.write_bytes(model.SerializeToString())
    assert "tensor 'w' cannot be read" in refused(path)


@pytest.mark.parametrize("length", [0, 1, 40, 200])
def test_a_file_that_is_cut_off_is_an_error_of_one_line(length, tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]}, {"w": numbers(4, 60)})
    path.write_bytes(path.read_bytes()[:length])
    assert "a.onnx" in refused(path)


def test_a_network_that_gives_other_numbers_than_its_file_is_refused(
    tmp_path, monkeypatch
):
    nodes = [node("LeakyRelu", ["x"], ["y"], alpha=0.5)]
    path = file_of(tmp_path / "a.onnx", nodes, {"x": [2, 4]})
    _, read = imported(path)
    assert "compared with the file's own definition: within 0e+00" in read.notes
    monkeypatch.setitem(OPERATORS, "LeakyRelu", lambda node: node.gives("x * 0.5"))
    assert "gives different numbers than the network that was read from it" in refused(
        path.rename(tmp_path / "b.onnx")
    )


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["x", "w", "w"], "has a bias of (4, 2, 3, 3), and needs (4,)"),
        (["x", "w", "x"], "has a bias of (2, 2, 6, 6)"),
        (["x", "whole"], "do not fit"),
        (["x"], "do not fit"),
    ],
    ids=str,
)
def test_a_convolution_of_other_operands_than_it_has_is_refused(
    inputs, words, tmp_path
):
    weights = {"w": numbers(4, 2, 3, 3), "whole": np.ones((4, 2, 3, 3), "i8")}
    used = {name: array for name, array in weights.items() if name in inputs}
    path = file_of(
        tmp_path / "a.onnx", [node("Conv", inputs, ["y"])], {"x": [2, 2, 6, 6]}, used
    )
    assert words in refused(path)


@pytest.mark.parametrize(("steps", "told"), [(4, True), (3, False)])
def test_a_shape_that_fits_two_batches_is_told(
    steps: int, told: bool, tmp_path: Path
) -> None:
    """Of (16, 2) again (4, 4, 2), either 4 may be the batch."""
    shapes = {"rows": [4 * steps, 2], "parts": [steps, 4, 2]}
    nodes = [
        node("Transpose", ["x"], ["a"], perm=[1, 0, 2]),
        node("Reshape", ["a", "rows"], ["b"]),
        node("Reshape", ["b", "parts"], ["c"]),
        node("Transpose", ["c"], ["y"], perm=[1, 0, 2]),
    ]
    weights = {name: np.array(shape) for name, shape in shapes.items()}
    path = file_of(tmp_path / "two.onnx", nodes, {"x": [4, steps, 2]}, weights)
    _, read = imported(path)
    note = "within 0e+00. Of 8 samples it gives other results than of 4 and 4: keep to"
    assert any(note in text for text in read.notes) == told
