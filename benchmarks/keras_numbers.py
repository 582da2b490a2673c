"""How far an imported network is from Keras, in float64 and in float32.

    python -W ignore benchmarks/keras_numbers.py       # all networks, 2 minutes
    python -W ignore benchmarks/keras_numbers.py ResNet50 lstm

One step of training on two samples with the mean squared error, with the weights that
Keras draws. A number is the largest difference within a tensor, relative to the largest
number of the tensor, or to 1e-3 of the largest of all tensors of its kind: a gradient
that is zero but for rounding has no digits. In float64 gemsc is compared with Keras; in
float32 both are compared with Keras in float64.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from imported_keras import KERAS_MODELS, unet
from keras_support import example, floatx, imported, keras, one_step

from gemsc.importers.network import ImportedNetwork
from gemsc.importers.weight import Array

KINDS = ("outputs", "loss", "gradients", "moving averages")
Numbers = Mapping[str, Mapping[str, Array]]  # of each kind, by name


def application(name: str) -> Callable[[], Any]:
    """Return a function that makes a network of keras.applications, without Dropout."""

    def make() -> Any:
        network = getattr(keras.applications, name)
        config = network(weights=None, input_shape=(64, 64, 3), classes=10).get_config()
        for layer in config["layers"]:
            if layer["class_name"] == "Dropout":
                layer["config"]["rate"] = 0.0
        return keras.Model.from_config(config)

    return make


def lstm() -> Any:
    """Return two layers of 64 units over 20 steps."""
    layers = keras.layers
    rows = [layers.LSTM(64, return_sequences=True), layers.LSTM(64), layers.Dense(10)]
    return keras.Sequential([keras.Input((20, 32)), *rows])


APPLICATIONS = ("ResNet50", "MobileNetV2", "DenseNet121", "EfficientNetB0")
NETWORKS: dict[str, Callable[[], Any]] = {
    **{name: application(name) for name in APPLICATIONS},
    "unet": lambda: unet(size=64, base=8, levels=3),
    "lstm": lstm,
    "transformer": KERAS_MODELS["transformer"],
}


def built(make: Callable[[], Any], weights: Sequence[Array] = ()) -> Any:
    """Return a network with given weights, or with drawn ones that float32 holds."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = make()
    drawn = weights or [np.float32(array) for array in model.get_weights()]
    model.set_weights(drawn)
    return model


def numbers(
    network: ImportedNetwork,
    net: nn.Module,
    outputs: Sequence[Array],
    loss: float,
    read: Callable[[str], Array],
) -> Numbers:
    """Sort the numbers of a step; `read` gives those of the file's tensors."""
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    arrays = {n: read(n) for n, w in network.model.weights.items() if w.sources}
    return {
        "outputs": {str(index): output for index, output in enumerate(outputs)},
        "loss": {"": np.asarray(loss)},
        "gradients": {n: a for n, a in arrays.items() if n in trained},
        "moving averages": {n: a for n, a in arrays.items() if "running_" in n},
    }


def of_keras(
    network: ImportedNetwork,
    net: nn.Module,
    model: Any,
    data: tuple[list[Array], list[Array]],
    folder: Path,
) -> Numbers:
    """Return what a step in Keras gives."""
    step = one_step(model, *(_like(arrays, model) for arrays in data), folder)
    weights = network.model.weights
    return numbers(
        *(network, net, step.outputs, step.loss),
        lambda name: weights[name].made(step.values.__getitem__),
    )


def of_gemsc(
    network: ImportedNetwork,
    net: nn.Module,
    model: Any,
    data: tuple[list[Array], list[Array]],
) -> Numbers:
    """Return what a step of the import gives."""
    inputs, targets = (
        [torch.from_numpy(array) for array in _like(arrays, model)] for arrays in data
    )
    outputs = keras.tree.flatten(net.train()(*inputs))
    loss: Any = sum(
        ((o - t) ** 2).mean() for o, t in zip(outputs, targets, strict=True)
    )
    loss.backward()
    state = dict(net.state_dict())
    state |= {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    return numbers(
        *(network, net, [o.detach().numpy() for o in outputs], float(loss.detach())),
        lambda name: state[name].numpy(),
    )


def _like(arrays: Sequence[Array], model: Any) -> list[Array]:
    kind = model.compute_dtype
    return [a.astype(kind) if a.dtype.kind == "f" else a for a in arrays]


def far(actual: Numbers, wanted: Numbers) -> list[float]:
    """Return the largest relative difference of each kind."""
    rows = []
    for kind in KINDS:
        largest = {name: float(np.abs(a).max()) for name, a in wanted[kind].items()}
        least = 1e-3 * max(largest.values(), default=0.0)
        assert actual[kind].keys() == largest.keys()
        differences = [
            float(np.abs(actual[kind][name] - array).max()) / max(largest[name], least)
            for name, array in wanted[kind].items()
        ]
        rows.append(max(differences, default=0.0))
    return rows


def row(name: str, folder: Path) -> str:
    """Return the row of a network."""
    make = NETWORKS[name]
    with floatx("float64"):
        model = built(make)
        weights = model.get_weights()
        inputs = example(model)
        draw = np.random.default_rng(2)
        shapes = [(2, *output.shape[1:]) for output in model.outputs]
        data = inputs, [np.float32(draw.normal(size=shape)) for shape in shapes]
        network, net = imported(model, folder)
        exact = of_keras(network, net, model, data, folder)
        double = of_gemsc(network, copy.deepcopy(net).double(), model, data)
    with floatx("float32"):
        model = built(make, weights)
        theirs = of_keras(network, net, model, data, folder)
        ours = of_gemsc(network, net.float(), model, data)
    pairs = [far(numbers, exact) for numbers in (double, ours, theirs)]
    cells = [
        f"{a:.0e} / {b:.0e} / {c:.0e}" if a or b or c else ""
        for a, b, c in zip(*pairs, strict=True)
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print a table: gemsc in float64 / gemsc in float32 / Keras in float32."""
    print(f"| float64 / float32 / Keras' float32 | {' | '.join(KINDS)} |")
    print("|---|" + "---|" * len(KINDS))
    for name in sys.argv[1:] or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            print(row(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
