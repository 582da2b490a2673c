"""Keras, on PyTorch: a test file that imports this is skipped where Keras is absent."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is loaded

h5py = pytest.importorskip("h5py")
keras = pytest.importorskip("keras")

from keras.src.backend.common.dtypes import BIT64_TO_BIT32_DTYPE  # noqa: E402

from gemsc.importers.folder import import_file  # noqa: E402
from gemsc.importers.network import ImportedNetwork, ImportOptions  # noqa: E402
from gemsc.importers.weight import Array  # noqa: E402

__all__ = [
    "Step",
    "assert_same",
    "example",
    "floatx",
    "imported",
    "keras",
    "one_step",
]

EXACT = {"float32": 1e-5, "float64": 1e-9}  # of the largest number of a tensor


@contextmanager
def floatx(name: str) -> Iterator[None]:
    """Let Keras build models of float32 or float64, and compute in that.

    Keras rounds float64 to float32 between layers, as JAX does.
    """
    before = keras.config.floatx()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
    try:
        with mock.patch.dict(BIT64_TO_BIT32_DTYPE, float64=name):
            yield
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)


@dataclass
class Step:
    """What one step of training gives, by names of model.weights.h5.

    `values` has the gradient of what is trained, and the new value of what is not.
    """

    outputs: list[Array]
    loss: float
    values: Mapping[str, Array]


def example(model: Any, batch: int = 2, seed: int = 0) -> list[Array]:
    """Return inputs for a model: normal numbers, and small integers."""
    draw = np.random.default_rng(seed)
    arrays = []
    for value in model.inputs:
        shape = (batch, *value.shape[1:])
        is_float = "float" in value.dtype
        numbers = draw.normal(size=shape) if is_float else draw.integers(0, 5, shape)
        # what float32 holds is the same number in float64
        arrays.append(numbers.astype("float32").astype(value.dtype))
    return arrays


def rounded(model: Any) -> None:
    """Give weights that are not all alike, and that float32 holds."""
    draw = np.random.default_rng(1)
    for variable in model.variables:
        if "float" not in variable.dtype:
            continue
        numbers = np.array(keras.ops.convert_to_numpy(variable))
        noise = draw.uniform(0.05, 0.15, numbers.shape)
        variable.assign((numbers + noise).astype("float32").astype(variable.dtype))


def one_step(
    model: Any, inputs: Sequence[Array], targets: Sequence[Array], folder: Path
) -> Step:
    """Return what a step with the mean squared error gives in Keras.

    The model's variables are what they were before.
    """
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.variables]
    given = [torch.from_numpy(array) for array in inputs]
    outputs = keras.tree.flatten(model(_packed(model, given), training=True))
    loss = _squares(outputs, targets)
    model.zero_grad()
    if model.trainable_variables:
        loss.backward()
    for variable in model.trainable_variables:
        gradient = variable.value.grad
        zero = np.zeros(variable.shape, variable.dtype)
        variable.assign(zero if gradient is None else gradient.numpy().copy())
    path = folder / "step.weights.h5"
    model.save_weights(path)
    for variable, array in zip(model.variables, before, strict=True):
        variable.assign(array)
    with h5py.File(path) as file:
        values: dict[str, Array] = {}
        file.visititems(
            lambda name, item: (
                values.update({name: item[()]})
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return Step([o.detach().numpy() for o in outputs], float(loss.detach()), values)


def _squares(outputs: Sequence[torch.Tensor], targets: Sequence[Array]) -> Any:
    pairs = zip(outputs, targets, strict=True)
    return sum(((o - torch.from_numpy(t)) ** 2).mean() for o, t in pairs)


def imported(
    model: Any, folder: Path, options: ImportOptions | None = None
) -> tuple[ImportedNetwork, nn.Module]:
    """Save and import a model; return what was read, and model() of its model.py."""
    path = folder / "network.keras"
    model.save(path)
    network = import_file(path, folder / "network", options or ImportOptions())
    spec = importlib.util.spec_from_file_location(
        f"model_{id(network)}", folder / "network" / "model.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return network, module.model()


def assert_same(
    model: Any,
    folder: Path,
    *,
    inputs: Sequence[Array] | None = None,
    training: bool = True,
    options: ImportOptions | None = None,
    within: float | None = None,
) -> nn.Module:
    """Compare a Keras model with what gemsc makes of its file.

    Outputs in evaluation, and of one step of training the outputs, the loss, every
    gradient and every moving average. The weights are changed to numbers that are not
    all alike. Returns the imported network.
    """
    rounded(model)
    network, net = imported(model, folder, options)
    inputs = example(model) if inputs is None else inputs
    tensors = [torch.from_numpy(array) for array in inputs]
    within = within or EXACT[keras.config.floatx()]
    if keras.config.floatx() == "float64":
        net = net.double()
    net.eval()
    wanted = keras.tree.flatten(model(_packed(model, tensors), training=False))
    wanted = [tensor.detach().numpy() for tensor in wanted]
    outputs = keras.tree.flatten(net(*tensors))
    for number, (w, f) in enumerate(zip(wanted, outputs, strict=True)):
        close(f.detach().numpy(), w, within, f"output {number}")
    if training:
        draw = np.random.default_rng(2)
        targets = [draw.normal(size=w.shape).astype(w.dtype) for w in wanted]
        step = one_step(model, inputs, targets, folder)
        _same_step(network, net, tensors, targets, step, within)
    return net


def _packed(model: Any, tensors: Sequence[torch.Tensor]) -> Any:
    structure = getattr(model, "_inputs_struct", None)
    if structure is None:
        return tensors[0] if len(tensors) == 1 else list(tensors)
    return keras.tree.pack_sequence_as(structure, list(tensors))


def _same_step(
    network: ImportedNetwork,
    net: nn.Module,
    tensors: Sequence[torch.Tensor],
    targets: Sequence[Array],
    step: Step,
    within: float,
) -> None:
    net.train()
    outputs = keras.tree.flatten(net(*tensors))
    loss = _squares(outputs, targets)
    net.zero_grad()
    if any(parameter.requires_grad for parameter in net.parameters()):
        loss.backward()
    for number, (w, f) in enumerate(zip(step.outputs, outputs, strict=True)):
        close(f.detach().numpy(), w, within, f"output {number} in training")
    assert abs(float(loss.detach()) - step.loss) <= within * abs(step.loss)
    parameters = dict(net.named_parameters())
    seen = set()
    for name, weight in network.model.weights.items():
        if not weight.sources:  # of no variable of Keras
            assert name not in parameters or not parameters[name].requires_grad, name
            continue
        seen |= set(weight.sources)
        wanted = weight.made(step.values.__getitem__)
        if name not in parameters or not parameters[name].requires_grad:
            actual = net.state_dict()[name]
        else:
            gradient = parameters[name].grad
            actual = torch.zeros(wanted.shape) if gradient is None else gradient
        close(actual.detach().numpy(), wanted, within, name)
    floats = {n for n, array in step.values.items() if array.dtype.kind == "f"}
    assert floats <= seen


def close(actual: Array, wanted: Array, within: float, what: str) -> None:
    """Compare with the largest number of a tensor, or with 1e-3 if that is more."""
    assert actual.shape == wanted.shape, what
    largest = max(float(np.abs(wanted).max(initial=0)), 1e-3)
    error = float(np.abs(actual - wanted).max(initial=0)) / largest
    assert error <= within, f"{what} is off by {error:.2g}"
