"""A model of Keras itself in a model file, compiled as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from command_line import gemsc_here, start
from keras_support import keras
from safetensors.torch import load_file
from torch import Tensor, nn

import gemsc
from gemsc.errors import GemscError
from gemsc.lowering.tracing import trace
from gemsc.weights.keras_model import KerasModel

layers, ops = keras.layers, keras.ops
random = keras.src.backend.torch.random
here = pytest.fixture(gemsc_here)

MODEL = """\
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch
from keras import layers, ops


class Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=shape[-1:], initializer="ones", name="by")

    def call(self, x):
        return x * self.factor


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(16, activation="relu") for _ in range(2)]
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.1)
        self.scale = Scale()
        self.square = layers.Lambda(lambda x: x * x)
        self.last = layers.Dense(1)

    def call(self, x):
        for layer in self.hidden:
            x = layer(x)
        x = self.scale(self.drop(self.norm(x)))
        return self.last(x + self.square(x))


def model():
    net = Net()
    net(torch.zeros(1, 8))  # now it has weights
    return net


loss = torch.nn.MSELoss()


def example_inputs():
    return (torch.rand(8, 8),)


def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def dataset():
    x = torch.rand(128, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""


class Counting(layers.Layer):
    """A layer with a parameter, a statistic and a counter of its own."""

    def build(self, shape: Any) -> None:
        size = shape[-1:]
        self.factor = self.add_weight(shape=size, initializer="ones", name="factor")
        self.mean = self.add_weight(shape=size, trainable=False, name="mean")
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(1)
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return (x - self.mean) * self.factor


class Plain(keras.Model):  # type: ignore[misc]
    """A model whose call() does not ask for `training`; its layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(4) for _ in range(2)]
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.5)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.drop(self.norm(x))


def plain() -> Any:
    net = Plain()
    net(torch.zeros(1, 8))
    return net


def row(*parts: Any, shape: tuple[int, ...] = (8,)) -> Any:
    return keras.Sequential([keras.Input(shape), *parts, layers.Dense(2)])


def frozen() -> Any:
    net = row(layers.Dense(4), layers.BatchNormalization())
    for layer in net.layers[:2]:
        layer.trainable = False
    return net


def two_in_two_out() -> Any:
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    inner = row(layers.Dense(4), layers.BatchNormalization())
    return keras.Model([a, b], {"sum": inner(a) + inner(b), "a": inner(a)})


MODELS: dict[str, Callable[[], Any]] = {
    "own variables": lambda: row(layers.Dense(4), Counting(), layers.Dropout(0.5)),
    "training not asked for": plain,
    "Lambda": lambda: row(layers.Lambda(lambda x: x * ops.sigmoid(x))),
    "noise": lambda: row(layers.GaussianNoise(0.5), layers.AlphaDropout(0.5)),
    "frozen": frozen,
    "shared": two_in_two_out,
    "images": lambda: row(
        layers.Conv2D(4, 3, padding="same", strides=2),
        layers.BatchNormalization(),
        layers.SpatialDropout2D(0.5),
        layers.GlobalAveragePooling2D(),
        shape=(9, 8, 3),
    ),
    "masks": lambda: row(layers.Masking(), layers.LSTM(4), shape=(5, 3)),
    "attention": lambda: row(
        layers.TimeDistributed(layers.Dense(4)), layers.Bidirectional(layers.GRU(3)),
        shape=(5, 3),
    ),
}  # fmt: skip


def inputs_of(net: Any) -> list[Tensor]:
    """Return random inputs; the last step of a sequence is one that is masked."""
    shapes = (
        [value.shape for value in net.inputs] if hasattr(net, "inputs") else [(1, 8)]
    )
    inputs = [torch.rand(4, *shape[1:]) for shape in shapes]
    for tensor in inputs:
        if tensor.dim() == 3:
            tensor[:, -1] = 0.0
    return inputs


def squares(output: Any) -> Tensor:
    return sum((leaf**2).mean() for leaf in keras.tree.flatten(output))  # type: ignore


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_statistics_are_those_of_keras(
    name: str, training: bool
) -> None:
    net = MODELS[name]()
    inputs = inputs_of(net)
    module = copy.deepcopy(KerasModel(net)).train(training)
    torch.manual_seed(0)
    output = module(*inputs)
    squares(output).backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    with mock.patch.object(random, "torch_seed_generator", return_value=None):
        wanted = net(inputs if len(inputs) > 1 else inputs[0], training=training)
    squares(wanted).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(output, wanted)
    values = {id(variable): tensor for variable, tensor in module._values()}
    assert values.keys() >= {id(v) for v in net.trainable_variables}
    for variable in (v for v in net.variables if id(v) in values):
        tensor, theirs = values[id(variable)], variable.value
        torch.testing.assert_close(tensor.detach(), theirs.detach())
        torch.testing.assert_close(tensor.grad, theirs.grad)


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_traced_in_both_modes(name: str) -> None:
    """The graph is compared with the module as it is traced."""
    module = KerasModel(MODELS[name]())
    before = copy.deepcopy(module.state_dict())
    traced = trace(module, tuple(inputs_of(module._keras.model)), loss=squares)
    written = {n.target for n in traced.program.graph.nodes if n.op == "get_attr"}
    assert written <= {*dict(module.named_parameters()), *dict(module.named_buffers())}
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_it_may_be_a_part_of_a_module() -> None:
    part = gemsc.KerasModel(row(layers.Dense(4), layers.BatchNormalization()))
    traced = trace(
        nn.Sequential(part, nn.Linear(2, 1)), (torch.rand(4, 8),), loss=squares
    )
    names = dict(traced.program.module.named_parameters())
    assert {"0.dense.kernel", "0.batch_normalization.gamma", "1.weight"} <= {*names}


def test_names_do_not_depend_on_what_keras_has_made_before() -> None:
    first, second = (
        KerasModel(row(layers.Dense(4), layers.Dense(4, name="own_7"), Counting()))
        for _ in range(2)
    )
    names = ["dense", "own_7", "counting", "dense_1"]
    assert [name for name, _ in first.named_children()] == names
    assert list(first.state_dict()) == list(second.state_dict())
    assert [n for n, _ in first.counting.named_buffers()] == ["mean", "count"]


@pytest.mark.slow
def test_programs_train_it_and_give_the_weights_back(
    tmp_path: Path, here: Callable[..., Any]
) -> None:
    file, program = tmp_path / "model.py", tmp_path / "program"
    file.write_text(MODEL)
    done = here("compile", file, "--ranks", 2, "--micro-batches", 2, "-o", program)
    assert done.code == 0, done.err
    texts = [(program / f"rank{rank}.py").read_text() for rank in range(2)]
    assert not any("keras" in text for text in texts)
    assert "model.py:14 in scale  return x * self.factor" in "".join(texts)
    trained = tmp_path / "trained"
    done = start("run", program, "--epochs", 6, "--save", trained)
    assert done.code == 0, done.err
    space: dict[str, Any] = {"__name__": "model"}
    exec(file.read_text(), space)
    net, (x, target) = space["model"](), space["dataset"]().tensors
    loss = space["loss"]
    with torch.no_grad():
        before = loss(net(x), target)
        gemsc.load_weights(net, trained / "model.safetensors")
        after = loss(net(x), target)
    assert after < before / 5
    weights = load_file(trained / "model.safetensors")
    assert torch.equal(weights["scale.by"], net.scale.factor.value)
    mean = net.norm.moving_mean.value
    assert torch.equal(weights["batch_normalization.moving_mean"], mean)
    assert mean.abs().max() > 0.01


class Draws(layers.Layer):
    def __init__(self, draw: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.draw, self.seed = draw, keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        return self.draw(x, self.seed)


def again() -> Any:
    with keras.RematScope(mode="full"):
        return row(layers.Dense(4))


def torch_weights() -> Any:
    return row(layers.TorchModuleWrapper(nn.Linear(8, 8)))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (Plain, "is not built"),
    (lambda: row(layers.Dense(4, kernel_regularizer="l2")), "regularizer of 'kernel'"),
    (lambda: row(layers.Dense(4, bias_constraint="non_neg")), "constraint on 'bias'"),
    (lambda: row(layers.Dense(4, activity_regularizer="l2")), "adds to Keras' loss"),
    (again, "RematScope"),
    (lambda: row(layers.Dense(4, dtype="mixed_float16")), "Keras scales the loss"),
    (torch_weights, "holds weights of PyTorch"),
    (
        lambda: row(Draws(lambda x, _: x + keras.random.normal(ops.shape(x), seed=3))),
        "the fixed seed 3",
    ),
    (
        lambda: row(Draws(lambda x, seed: x + ops.cast(seed.next()[0], "float32"))),
        "a seed of its own",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_would_silently_be_something_else_is_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(GemscError, match=message):
        gemsc.compile(make(), (torch.rand(4, 8),), loss=squares, ranks=2)


@pytest.mark.parametrize(
    "loss", [keras.losses.BinaryCrossentropy(), keras.losses.binary_crossentropy]
)
def test_a_loss_that_takes_the_target_first_is_refused(loss: Any) -> None:
    net, inputs = row(layers.Dense(4)), (torch.rand(4, 8),)
    with pytest.raises(GemscError, match="takes the target first"):
        gemsc.compile(net, inputs, loss=loss, example_target=torch.rand(4, 2), ranks=2)


def test_torch_export_is_refused() -> None:
    net, inputs = row(layers.Dense(4)), (torch.rand(4, 8),)
    with pytest.raises(GemscError, match="does not follow Keras models exactly"):
        gemsc.compile(net, inputs, loss=squares, ranks=2, frontend="export")


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        """What Keras has on JAX: no module of PyTorch."""

    monkeypatch.setattr(keras, "Layer", Layer)
    with pytest.raises(GemscError, match="another backend") as error:
        gemsc.compile(Layer(), (torch.rand(1),), ranks=2)  # type: ignore[arg-type]
    assert "KERAS_BACKEND" in str(error.value.help)
