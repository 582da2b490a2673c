"""What compile() was given to does the same in the text that an import writes.

Losses with their gradients, and three updates of optimizers that are said to be equal.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from keras_support import imported, keras
from torch import Tensor

from gemsc.importers.keras.compiled import TrainingText, training_text
from gemsc.importers.keras.losses import LOSSES, ModelOutput
from gemsc.importers.keras.optimizers import OPTIMIZERS, SCHEDULES

losses, optimizers = keras.losses, keras.optimizers
schedules = keras.optimizers.schedules
CLASSES = 4
OUTPUT = ModelOutput("dense", (8, CLASSES))


def text_of(outputs: list[ModelOutput] | None = None, **settings: Any) -> TrainingText:
    """Return the text for a model that was compiled so."""
    inputs = keras.Input((3,))
    network = keras.Model(inputs, keras.layers.Dense(CLASSES)(inputs))
    network.compile(**settings)
    config = json.loads(json.dumps(network.get_compile_config()))
    return training_text(config, outputs or [OUTPUT])


def functions(text: TrainingText) -> Mapping[str, Any]:
    space: dict[str, Any] = {"torch": torch, "F": F, "Tensor": Tensor}
    exec("import math\n" + "\n\n".join(text.functions), space)
    return space


LOSS_SETTINGS = [
    losses.MeanSquaredError(),
    losses.MeanSquaredError(reduction="sum"),
    losses.MeanAbsoluteError(),
    losses.MeanAbsolutePercentageError(),
    losses.MeanSquaredLogarithmicError(),
    losses.CosineSimilarity(),
    losses.CosineSimilarity(axis=1),
    losses.Huber(delta=0.7),
    losses.LogCosh(),
    losses.Hinge(),
    losses.SquaredHinge(),
    losses.CategoricalHinge(),
    losses.KLDivergence(),
    losses.Poisson(),
    losses.BinaryCrossentropy(),
    losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.2),
    losses.BinaryFocalCrossentropy(gamma=1.5, apply_class_balancing=True),
    losses.BinaryFocalCrossentropy(from_logits=True, label_smoothing=0.1),
    losses.CategoricalCrossentropy(),
    losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2),
    losses.CategoricalCrossentropy(label_smoothing=0.2, reduction="sum"),
    losses.CategoricalCrossentropy(axis=1, reduction="sum"),
    losses.CategoricalFocalCrossentropy(alpha=0.3),
    losses.CategoricalFocalCrossentropy(axis=1, reduction="sum"),
    losses.CategoricalFocalCrossentropy(from_logits=True, label_smoothing=0.1),
    losses.SparseCategoricalCrossentropy(),
    losses.SparseCategoricalCrossentropy(from_logits=True),
    losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1),
    losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=1, reduction="sum"
    ),
    losses.CategoricalGeneralizedCrossEntropy(q=0.6),
    losses.Dice(),
    losses.Dice(axis=(1, 2, 3)),
    losses.Dice(axis=(1, 2, 3), reduction="sum"),
    losses.Tversky(alpha=0.3, beta=0.6),
]
SHAPES = [(8, CLASSES), (8, 1), (2, 3, 5, CLASSES)]


def name_of(setting: Any) -> str:
    config = setting.get_config()
    options = (f"{k}={v}" for k, v in config.items() if k not in ("name", "dtype"))
    return f"{type(setting).__name__}({', '.join(options)})"


@pytest.mark.parametrize("setting", LOSS_SETTINGS, ids=name_of)
def test_a_loss_and_its_gradient_are_those_of_keras(setting: Any) -> None:
    # some settings, such as Huber's delta, are not saved by Keras
    setting = type(setting).from_config(setting.get_config())
    draw = np.random.default_rng(0)
    tried = 0
    for shape in SHAPES:
        if getattr(setting, "axis", None) == (1, 2, 3) and len(shape) != 4:
            continue
        text = text_of([ModelOutput("dense", shape)], loss=setting)
        space = functions(text)
        one = draw.uniform(0.05, 0.95, shape)
        if "Categorical" in name_of(setting) and shape[-1] == 1:
            continue
        target = space["example_target"]()
        if target.dtype is torch.int64:
            wanted_target = draw.integers(0, CLASSES, target.shape)
        elif "Categorical" in name_of(setting):
            wanted_target = np.eye(CLASSES)[draw.integers(0, CLASSES, shape[:-1])]
        else:
            wanted_target = draw.integers(0, 2, shape).astype(float)
            if "MeanAbsolutePer" in name_of(setting):
                wanted_target += 0.5
        assert target.shape == wanted_target.shape
        given = torch.tensor(wanted_target, dtype=target.dtype)
        ours = _gradient(lambda x, s=space, g=given: s["loss"](x, g), one)
        keras_loss, keras_target = setting, given
        if (
            len(shape) == 4
            and "Sparse" in name_of(setting)
            and "from_logits=False" in name_of(setting)
        ):
            # Keras' own has no gradient there: "grad_input must be contiguous"
            keras_loss = losses.CategoricalCrossentropy()
            keras_target = F.one_hot(given, CLASSES)
        wanted = _gradient(lambda x, f=keras_loss, g=keras_target: f(g, x), one)
        for a, b in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        tried += 1
    assert tried


def _gradient(loss: Any, output: Any) -> tuple[Any, Any]:
    leaf = torch.tensor(output, dtype=torch.float32, requires_grad=True)
    value = loss(leaf)
    value.backward()
    return value.detach().numpy(), leaf.grad


def test_every_loss_of_the_table_is_compared() -> None:
    tested = {type(setting).__name__ for setting in LOSS_SETTINGS}
    assert len(tested) == len(LOSSES) >= 12


@pytest.mark.parametrize(
    "alias", ["mse", "mae", "mape", "msle", "bce", "kld", "log_cosh", "MSE"]
)
def test_a_loss_is_known_by_its_short_name(alias: str) -> None:
    x = 0.1 + 0.8 * torch.rand(8, CLASSES)
    y = 0.1 + 0.8 * torch.rand(8, CLASSES)
    loss = functions(text_of(loss=alias))["loss"](x, y)
    torch.testing.assert_close(loss, losses.get(alias)(y, x).mean())


@pytest.mark.parametrize("shape", [(8, 1), (8,), (4, 4, 1), (1, 5, 5, 1)])
@pytest.mark.parametrize("loss", ["mse", "binary_crossentropy", "dice"])
def test_labels_may_have_one_axis_more_or_less(loss: str, shape: Any) -> None:
    output = ModelOutput("dense", shape)
    space = functions(text_of([output], loss=loss, metrics=["binary_accuracy"]))
    x = torch.rand(shape)
    y = torch.rand(shape[:-1] if len(shape) > 1 else (8, 1)).round()
    wanted = keras.losses.get(loss)
    metric = keras.metrics.BinaryAccuracy()
    metric.update_state(y, x)
    for labels in (y, y.reshape(x.shape)):
        given = labels.reshape(x.shape)
        torch.testing.assert_close(space["loss"](x, labels), wanted(given, x).mean())
        accuracy = space["metrics"](x, labels)["binary_accuracy"]
        assert accuracy == float(metric.result())


@pytest.mark.parametrize("weights", [0.3, [0.3], {"dense": 0.3}, {"whatever": 0.3}])
def test_the_loss_of_an_only_output_may_have_a_weight(weights: Any) -> None:
    x, y = torch.rand(8, CLASSES), torch.rand(8, CLASSES)
    wanted = 0.3 * F.mse_loss(x, y)
    for place in ("", '["dense"]'):  # a model may give a dict of one
        output, config = replace(OUTPUT, place=place), {"loss": "mse"}
        space = functions(training_text(config | {"loss_weights": weights}, [output]))
        given = ({"dense": x}, {"dense": y}) if place else (x, y)
        torch.testing.assert_close(space["loss"](*given), wanted)


def test_what_keras_saves_of_no_loss_is_said() -> None:
    for setting, said in ((losses.Huber(0.3), True), ("huber", False)):
        assert any("delta" in note for note in text_of(loss=setting).notes) == said


@pytest.mark.parametrize("channels", [1, CLASSES])
def test_the_crossentropy_goes_by_the_number_of_classes(channels: int) -> None:
    output = ModelOutput("dense", (8, channels))
    config = {"loss": "crossentropy"}
    space = functions(training_text(config, [output]))
    x = torch.rand(8, channels)
    y = torch.randint(0, max(channels, 2), (8,))
    kinds = losses.BinaryCrossentropy, losses.SparseCategoricalCrossentropy
    wanted = kinds[channels > 1]()(y[:, None], x)
    torch.testing.assert_close(space["loss"](x, y), wanted)


def test_a_loss_over_the_samples_is_said_to_be_of_a_whole_batch() -> None:
    for axis, whole in (((0, 1), True), ((1,), False)):
        notes = text_of(loss=losses.Dice(axis=axis)).notes
        assert any("of a whole batch" in note for note in notes) == whole


def test_channels_may_come_first() -> None:
    output = ModelOutput("dense", (2, CLASSES, 3, 5), first=True)
    for setting in (
        losses.SparseCategoricalCrossentropy(),
        losses.CategoricalCrossentropy(from_logits=True),
        losses.CosineSimilarity(),
    ):
        space = functions(text_of([output], loss=setting, metrics=["accuracy"]))
        x = torch.rand(output.shape)
        y = torch.randint(0, CLASSES, (2, 3, 5))
        given = last = y
        if space["example_target"]().dtype is torch.float32:
            last = F.one_hot(y, CLASSES).float()
            given = last.movedim(-1, 1)
        wanted = setting(last, x.movedim(1, -1))
        torch.testing.assert_close(space["loss"](x, given), wanted)
        accuracy = (x.argmax(1) == y).float().mean()
        torch.testing.assert_close(space["metrics"](x, given)["accuracy"], accuracy)


def test_several_outputs_have_weighted_losses_and_metrics() -> None:
    outputs = [
        ModelOutput("mask", (8, 1), '["mask"]'),
        ModelOutput("kind", (8, CLASSES), '["kind"]'),
    ]
    text = training_text(
        {
            "loss": {"mask": "binary_crossentropy", "kind": "mse"},
            "loss_weights": {"mask": 2.0, "kind": 0.5},
            "metrics": {"mask": ["accuracy"], "kind": "mae"},
        },
        outputs,
    )
    space = functions(text)
    x = {"mask": torch.rand(8, 1), "kind": torch.rand(8, CLASSES)}
    y = {"mask": torch.rand(8, 1).round(), "kind": torch.rand(8, CLASSES)}
    wanted = 2 * F.binary_cross_entropy(x["mask"], y["mask"])
    wanted = wanted + 0.5 * F.mse_loss(x["kind"], y["kind"])
    torch.testing.assert_close(space["loss"](x, y), wanted)
    assert set(space["metrics"](x, y)) == {"mask_accuracy", "kind_mae"}
    assert {k: v.shape for k, v in space["example_target"]().items()} == {
        k: v.shape for k, v in y.items()
    }


def test_a_loss_of_ones_own_is_named_in_a_note() -> None:
    def own(y: Any, x: Any) -> Any:
        return ((y - x) ** 4).mean()

    text = text_of(loss=own)
    assert "loss" not in functions(text)
    assert any("'own'" in note for note in text.notes)


@pytest.mark.parametrize(
    ("metric", "indices"),
    [
        ("accuracy", True),
        ("accuracy", False),
        ("mae", False),
        (keras.metrics.TopKCategoricalAccuracy(k=2), False),
        (keras.metrics.SparseTopKCategoricalAccuracy(k=2), True),
        (keras.metrics.BinaryAccuracy(threshold=0.3), False),
        (keras.metrics.CategoricalCrossentropy(), False),
        (keras.metrics.CosineSimilarity(), False),
    ],
    ids=str,
)
def test_a_metric_is_that_of_keras(metric: Any, indices: bool) -> None:
    loss = "sparse_categorical_crossentropy" if indices else "mse"
    text = text_of(loss=loss, metrics=[metric])
    x = torch.softmax(torch.rand(8, CLASSES), 1)
    y = torch.randint(0, CLASSES, (8,))
    if not indices:
        y = F.one_hot(y, CLASSES).float()
    (figure,) = functions(text)["metrics"](x, y).values()
    kinds = keras.metrics.CategoricalAccuracy, keras.metrics.SparseCategoricalAccuracy
    wanted = kinds[indices]() if metric == "accuracy" else keras.metrics.get(metric)
    if isinstance(wanted, keras.metrics.Metric):
        wanted.update_state(y, x)
        value = wanted.result()
    else:
        value = wanted(y, x).mean()
    torch.testing.assert_close(figure, torch.as_tensor(value), check_dtype=False)


def test_accuracy_of_two_classes_takes_labels_in_a_row_and_in_a_column() -> None:
    output = ModelOutput("dense", (4, 1))
    text = text_of([output], loss="binary_crossentropy", metrics=["accuracy"])
    metrics = functions(text)["metrics"]
    x, y = torch.tensor([[0.2], [0.7], [0.9], [0.6]]), torch.tensor([0, 1, 1, 0])
    for labels in (y, y.unsqueeze(1)):
        assert metrics(x, labels)["accuracy"] == 0.75


def test_the_class_accuracy_counts_equal_numbers() -> None:
    metric = keras.metrics.Accuracy()
    text = text_of(loss="mse", metrics=[metric])
    x, y = torch.tensor([[1.0, 2, 0, 0]]), torch.tensor([[1.0, 0, 0, 0]])
    metric.update_state(y, x)
    (figure,) = functions(text)["metrics"](x, y).values()
    assert figure == float(metric.result()) == 0.75


def test_equal_classes_are_in_the_first_k() -> None:
    metric = keras.metrics.SparseTopKCategoricalAccuracy(k=2)
    text = text_of(loss="sparse_categorical_crossentropy", metrics=[metric])
    x, y = torch.tensor([[0.1, 0.4, 0.4, 0.4], [0.1, 0.2, 0.4, 0.3]]), torch.arange(2)
    metric.update_state(y + 1, x)
    (figure,) = functions(text)["metrics"](x, y + 1).values()
    assert figure == float(metric.result()) == 1.0


def test_a_metric_that_is_no_mean_is_named_in_a_note() -> None:
    text = text_of(loss="mse", metrics=[keras.metrics.AUC(), "mae"])
    assert list(functions(text)["metrics"](torch.ones(1), torch.ones(1))) == ["mae"]
    assert any("auc" in note for note in text.notes)


# ---------------------------------------------------------------------- optimizers

CLIFF = schedules.PiecewiseConstantDecay([1], [0.1, 0.02])
OPTIMIZER_SETTINGS = [
    optimizers.SGD(0.1),
    optimizers.SGD(0.1, weight_decay=0.05),
    optimizers.SGD(0.1, momentum=0.9),
    optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    optimizers.SGD(0.1, nesterov=True),
    optimizers.SGD(CLIFF),
    optimizers.SGD(CLIFF, momentum=0.9),
    optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    optimizers.Adam(0.1),
    optimizers.Adam(0.1, amsgrad=True, beta_1=0.8),
    optimizers.Adam(0.1, epsilon=0.1),
    optimizers.Adam(0.1, weight_decay=0.05),
    optimizers.AdamW(0.1),
    optimizers.AdamW(0.1, weight_decay=0.0),
    optimizers.RMSprop(0.1),
    optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    optimizers.Adagrad(0.1),
    optimizers.Adadelta(0.1, rho=0.9),
    optimizers.Adamax(0.1),
    optimizers.Nadam(0.1),
]


@pytest.mark.parametrize("setting", OPTIMIZER_SETTINGS, ids=lambda s: s.name)
def test_an_optimizer_does_what_keras_does_or_says_that_it_does_not(
    setting: Any,
) -> None:
    """What is the same for gradients that are much larger is compared for such."""
    text = text_of(optimizer=setting, loss="mse")
    space = functions(text)
    start = np.array([1.0, -2.0, 3.0, 0.5], dtype="float32")
    gradients = np.random.default_rng(0).normal(size=(4, 4)).astype("float32") + 2
    copy = type(setting).from_config(setting.get_config())
    variable = keras.Variable(start)
    parameter = torch.nn.Parameter(torch.tensor(start))
    optimizer = space["optimizer"]([("weight", parameter)])
    scheduler = space["scheduler"](optimizer) if "scheduler" in space else None
    for gradient in gradients:
        copy.apply([torch.tensor(gradient)], [variable])
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        if scheduler:
            scheduler.step()
    wanted = variable.value.detach().numpy()
    error = np.abs(parameter.detach().numpy() - wanted).max()
    exact = not any(n.endswith("not the same") or "changes" in n for n in text.notes)
    epsilon = setting.get_config().get("epsilon") == 0.1
    assert (error < 1e-5) == (exact and not epsilon)
    if epsilon:
        assert any("epsilon" in note for note in text.notes)


@pytest.mark.parametrize("kind", ["Adam", "RMSprop"])
def test_the_epsilon_that_is_told_makes_the_first_step_that_of_keras(kind: str) -> None:
    """It is told in one digit; PyTorch's own would make a much larger one."""
    setting, gradient = getattr(optimizers, kind)(0.1), torch.tensor([1e-6])
    (note,) = (n for n in text_of(optimizer=setting).notes if "epsilon" in n)
    epsilon = float(re.findall(r"as if it were (\S+):", note)[0])
    variable = keras.Variable(np.zeros(1, dtype="float32"))
    setting.apply([gradient], [variable])
    (step,) = -variable.value.detach().numpy()
    given = {"alpha": 0.9} if kind == "RMSprop" else {}
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = gradient
    getattr(torch.optim, kind)([parameter], lr=0.1, eps=epsilon, **given).step()
    assert -parameter.item() == pytest.approx(step, rel=0.06)


def test_every_optimizer_of_the_table_is_compared() -> None:
    tested = {type(setting).__name__ for setting in OPTIMIZER_SETTINGS}
    assert tested == set(OPTIMIZERS)


def test_an_optimizer_that_pytorch_has_not_is_named_in_a_note() -> None:
    text = text_of(optimizer="lion", loss="mse")
    assert "optimizer" not in functions(text)
    assert any("no Lion" in note for note in text.notes)


SCHEDULE_SETTINGS = [
    schedules.ExponentialDecay(0.1, 3, 0.5),
    schedules.ExponentialDecay(0.1, 3, 0.5, staircase=True),
    schedules.InverseTimeDecay(0.1, 3, 0.5),
    schedules.InverseTimeDecay(0.1, 3, 0.5, staircase=True),
    schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01]),
    schedules.PolynomialDecay(0.1, 4, 0.02, power=2.0),
    schedules.PolynomialDecay(0.1, 4, 0.02, cycle=True),
    schedules.CosineDecay(0.1, 6, alpha=0.1),
    schedules.CosineDecay(0.1, 6, warmup_steps=3),  # to no rate: there is none
    schedules.CosineDecay(0.0, 6, alpha=0.1, warmup_target=0.1, warmup_steps=3),
    schedules.CosineDecayRestarts(0.1, 3, t_mul=1.0),
    schedules.CosineDecayRestarts(0.1, 3, t_mul=2.0, m_mul=0.5, alpha=0.1),
]


@pytest.mark.parametrize("setting", SCHEDULE_SETTINGS, ids=lambda s: type(s).__name__)
def test_a_schedule_gives_the_rates_of_keras(setting: Any) -> None:
    space = functions(text_of(optimizer=optimizers.SGD(setting), loss="mse"))
    optimizer = space["optimizer"]([("x", torch.nn.Parameter(torch.zeros(1)))])
    scheduler = space["scheduler"](optimizer)
    rates, wanted = [], []
    for step in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        wanted.append(float(setting(step)))
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(rates, wanted, rtol=2e-6, atol=1e-9)


def test_a_schedule_counts_batches_of_which_an_update_has_several() -> None:
    rate = schedules.ExponentialDecay(0.1, 2, 0.5)
    setting = optimizers.SGD(rate, gradient_accumulation_steps=3)
    space = functions(text_of(optimizer=setting, loss="mse"))
    copy = optimizers.SGD.from_config(setting.get_config())
    variable = keras.Variable(np.ones(2, "float32"))
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = space["optimizer"]([("weight", parameter)])
    scheduler = space["scheduler"](optimizer)
    gradient = torch.tensor([1.0, -2.0])
    for _ in range(3):
        for _ in range(3):
            copy.apply([gradient], [variable])
        parameter.grad = gradient
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(variable, parameter.detach(), rtol=1e-6)


def test_every_schedule_of_the_table_is_compared() -> None:
    tested = {type(setting).__name__ for setting in SCHEDULE_SETTINGS}
    assert tested == set(SCHEDULES)


def test_what_gemsc_run_does_is_said_with_its_options() -> None:
    text = text_of(
        optimizer=optimizers.SGD(
            0.1, global_clipnorm=1.5, use_ema=True, ema_overwrite_frequency=7
        ),
        loss="mse",
    )
    notes = " ".join(text.notes)
    assert "--clip-norm 1.5" in notes
    assert "--ema 0.99, and gemsc export --ema" in notes
    assert "every 7 updates" in notes


def test_functions_of_long_names_are_as_ruff_formats_them(tmp_path: Path) -> None:
    names = [f"the_{end}_head_of_a_network_for_histology" for end in ("mask", "class")]
    outputs = [ModelOutput(name, (8, 1), f'["{name}"]') for name in names]
    text = training_text({"loss": "mse", "metrics": [["mae"], ["mae"]]}, outputs)
    path = tmp_path / "model.py"
    path.write_text("\n\n".join(text.functions))
    ruff = str(Path(sys.executable).with_name("ruff"))
    how = [ruff, "format", "--isolated", "--no-cache", "--diff", str(path)]
    done = subprocess.run(how, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert max(map(len, path.read_text().splitlines())) <= 88
    x = dict.fromkeys(names, torch.rand(8, 1))
    assert functions(text)["loss"](x, x) == 0


def test_a_long_loss_has_lines_that_fit() -> None:
    outputs = [ModelOutput("mask", (2, 5, 6, 3))]
    settings = {"from_logits": True, "label_smoothing": 0.2}
    loss = {"class_name": "CategoricalCrossentropy", "config": settings}
    text = training_text({"loss": loss}, outputs)
    (lines,) = [source for source in text.functions if source.startswith("def loss")]
    assert max(map(len, lines.splitlines())) <= 88
    x = torch.rand(2, 5, 6, 3)
    wanted = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2)
    torch.testing.assert_close(functions(text)["loss"](x, x), wanted(x, x))


def test_names_of_outputs_do_not_get_into_the_code() -> None:
    name = 'x"""; import os #'
    outputs = [ModelOutput(name, (8, 1), "[0]"), ModelOutput("b", (8, 1), "[1]")]
    text = training_text({"loss": "mse", "metrics": [["mae"], ["mae"]]}, outputs)
    space = functions(text)
    assert "os" not in space
    pair = torch.rand(8, 1), torch.rand(8, 1)
    assert space["loss"](pair, pair) == 0


def test_steps_of_fit_and_of_the_imported_file_have_the_same_losses(
    tmp_path: Path,
) -> None:
    """A text classifier: loss, optimizer and metrics are those of model.py."""
    layers = keras.layers
    words = keras.Input((6,), dtype="int32", name="words")
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(
        layers.Embedding(20, 5)(words)
    )
    x = layers.Dense(3, activation="softmax")(layers.LSTM(4)(x))
    network = keras.Model(words, x)
    network.compile(
        optimizers.SGD(CLIFF), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    read, net = imported(network, tmp_path)
    space = functions(TrainingText({}, [], read.functions))
    net.train()
    optimizer = space["optimizer"](net.named_parameters())
    scheduler = space["scheduler"](optimizer)
    draw = np.random.default_rng(0)
    ours, wanted = [], []
    for _ in range(4):
        inputs, target = draw.integers(0, 20, (8, 6)), draw.integers(0, 3, 8)
        figures = network.train_on_batch(inputs, target, return_dict=True)
        network.reset_metrics()
        wanted.append((figures["loss"], figures["accuracy"]))
        outputs, given = net(torch.tensor(inputs)), torch.tensor(target)
        loss = space["loss"](outputs, given)
        metrics = space["metrics"](outputs, given)
        ours.append((loss.item(), metrics["accuracy"].item()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(ours, np.array(wanted, float), rtol=1e-5)
    assert len({loss for loss, _ in ours}) == 4


@pytest.mark.parametrize(
    "config",
    [
        {"loss": {"class_name": "Huber", "config": {"delta": "x"}}},
        {"loss": "mse", "loss_weights": 3, "metrics": {"a": {"class_name": 5}}},
        {"loss": "mse", "optimizer": {"class_name": "SGD", "config": []}},
        {"optimizer": {"class_name": "Adam", "config": {"learning_rate": {}}}},
        {"optimizer": {"class_name": "Adam", "config": {"epsilon": [1]}}},
        {"loss": 5, "metrics": 7, "optimizer": 9},
    ],
    ids=str,
)
def test_what_compile_cannot_have_been_given_is_a_note(config: Any) -> None:
    text = training_text(config, [ModelOutput("a", (2, 3))])
    assert text.notes or not text.functions


def test_outputs_of_the_same_name_have_their_own_losses() -> None:
    outputs = [ModelOutput("a", (8, 2), "[0]"), ModelOutput("a", (8, 2), "[1]")]
    metrics = [["mae", "mae"], ["mae"]]
    space = functions(
        training_text({"loss": ["mse", "mae"], "metrics": metrics}, outputs)
    )
    x, y = (torch.rand(8, 2), torch.rand(8, 2)), (torch.rand(8, 2), torch.rand(8, 2))
    wanted = F.mse_loss(x[0], y[0]) + F.l1_loss(x[1], y[1])
    torch.testing.assert_close(space["loss"](x, y), wanted)
    assert len(space["metrics"](x, y)) == 3
