"""What an import of a Keras model refuses or reports, and layers of the user's own."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from import_support import filled
from keras_support import assert_same, imported, keras

from gemsc.errors import GemscError
from gemsc.importers.folder import import_file
from gemsc.importers.network import ImportOptions, read
from gemsc.user_model import load_user_model

layers = keras.layers
SEQUENCE = (5, 4)


def of(layer: Any, shape: Any = SEQUENCE, **call: Any) -> Any:
    inputs = keras.Input(shape)
    return keras.Model(inputs, layer(inputs, **call))


def steps(*then: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), layers.Dense(3), *then])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "recurrent_dropout": (
        lambda: of(layers.LSTM(3, recurrent_dropout=0.2, name="a")),
        "LSTM 'a' has recurrent_dropout=0.2",
    ),
    "reset_after": (
        lambda: of(layers.GRU(3, reset_after=False, name="a")),
        "GRU 'a' has reset_after=False",
    ),
    "activation": (
        lambda: of(layers.LSTM(3, activation="relu", name="a")),
        "LSTM 'a' has activation='relu', where PyTorch's layer has tanh",
    ),
    "recurrent_activation": (
        lambda: of(layers.GRU(3, recurrent_activation="hard_sigmoid", name="a")),
        "has recurrent_activation='hard_sigmoid'",
    ),
    "stateful": (
        lambda: keras.Sequential(
            [keras.Input(batch_shape=(2, 5, 4)), layers.LSTM(3, stateful=True)]
        ),
        "is stateful",
    ),
    "dropout of two directions": (
        lambda: of(layers.Bidirectional(layers.LSTM(3, dropout=0.2))),
        "has dropout=0.2: each direction has its own mask",
    ),
    "two directions": (
        lambda: of(
            layers.Bidirectional(
                layers.LSTM(3), backward_layer=layers.LSTM(2, go_backwards=True)
            )
        ),
        "two directions with different settings",
    ),
    "two activations": (
        lambda: of(
            layers.Bidirectional(
                layers.SimpleRNN(3),
                backward_layer=layers.SimpleRNN(
                    3, activation="relu", go_backwards=True
                ),
            )
        ),
        "two directions with different settings",
    ),
    "a mask of its own": (
        lambda: keras.Model(
            [x := keras.Input(SEQUENCE), y := keras.Input((5,), dtype="bool")],
            layers.LSTM(3, name="a")(x, mask=y),
        ),
        "LSTM 'a' is given a mask",
    ),
    "a forward layer that goes backwards": (
        lambda: of(
            layers.Bidirectional(
                layers.LSTM(3, go_backwards=True),
                backward_layer=layers.LSTM(3),
                name="a",
            )
        ),
        "Bidirectional 'a' has a forward layer with go_backwards",
    ),
    "one draw for all": (
        lambda: of(layers.Dropout(0.2, noise_shape=(1, None, 400), name="a")),
        "Dropout 'a' has the noise_shape [1, None, 400]: one draw for several samples",
    ),
    "masking": (lambda: of(layers.Masking(name="a")), "Masking 'a' masks steps"),
    "activity": (
        lambda: of(layers.Dense(3, activity_regularizer="l2", name="a")),
        "Dense 'a' has an activity_regularizer",
    ),
    "activity in both directions": (
        lambda: of(
            layers.Bidirectional(layers.LSTM(3, activity_regularizer="l2"), name="a")
        ),
        "Bidirectional 'a' has an activity_regularizer",
    ),
    "activity of a cell": (
        lambda: of(
            layers.RNN(
                [layers.GRUCell(3), layers.LSTMCell(3, activity_regularizer="l2")],
                name="a",
            )
        ),
        "RNN 'a' has an activity_regularizer",
    ),
    "activity layer": (
        lambda: of(layers.ActivityRegularization(0.1, name="a")),
        "ActivityRegularization 'a' adds its input to the loss",
    ),
    "renorm": (
        lambda: of(layers.BatchNormalization(renorm=True, name="a")),
        "BatchNormalization 'a' has renorm=True",
    ),
    "rms_scaling": (
        lambda: of(layers.LayerNormalization(rms_scaling=True, name="a")),
        "LayerNormalization 'a' has rms_scaling=True",
    ),
    "normalized steps": (
        lambda: of(layers.TimeDistributed(layers.BatchNormalization(), name="a")),
        "TimeDistributed 'a' normalizes each step of time",
    ),
    "normalized steps of a model": (
        lambda: of(
            layers.TimeDistributed(steps(layers.BatchNormalization()), name="a")
        ),
        "TimeDistributed 'a' normalizes each step of time",
    ),
    "attention axes": (
        lambda: keras.Model(
            x := keras.Input((3, 4, 5)), layers.MultiHeadAttention(2, 3)(x, x)
        ),
        "attends over axes",
    ),
    "window": (
        lambda: keras.Model(
            x := keras.Input(SEQUENCE),
            layers.MultiHeadAttention(2, 3, sliding_window=2)(x, x),
        ),
        "has a sliding_window",
    ),
    "attention mask": (
        lambda: keras.Model(
            [x := keras.Input(SEQUENCE), y := keras.Input((5, 5), dtype="bool")],
            layers.MultiHeadAttention(2, 3, name="a")(x, x, attention_mask=y),
        ),
        "MultiHeadAttention 'a' is given attention_mask",
    ),
    "rounded": (
        lambda: keras.Model(x := keras.Input(SEQUENCE), keras.ops.cast(x, "bfloat16")),
        "casts to 'bfloat16'",
    ),
    "lambda": (
        lambda: of(layers.Lambda(lambda x: 2 * x, name="a")),
        "'a' (Lambda)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(name: str, tmp_path: Path) -> None:
    build, words = REFUSED[name]
    with pytest.raises(GemscError, match=re.escape(words)) as caught:
        imported(build(), tmp_path)
    assert caught.value.help
    assert not (tmp_path / "network").exists()


def test_weights_in_bfloat16_are_refused(tmp_path: Path) -> None:
    half = of(layers.Dense(3, dtype="bfloat16"))
    with pytest.raises(GemscError, match="is bfloat16") as caught:
        imported(half, tmp_path)
    assert "model.set_weights(other.get_weights())" in str(caught.value.help)
    whole = of(layers.Dense(3))
    whole.set_weights(half.get_weights())
    imported(whole, tmp_path)


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e999"])
def test_a_setting_that_is_no_number_is_refused(number: str, tmp_path: Path) -> None:
    of(layers.ELU(0.625)).save(tmp_path / "a.keras")
    with (
        zipfile.ZipFile(tmp_path / "a.keras") as whole,
        zipfile.ZipFile(tmp_path / "b.keras", "w") as damaged,
    ):
        for name in whole.namelist():
            text = whole.read(name)
            damaged.writestr(name, text.replace(b"0.625", number.encode()))
    with pytest.raises(GemscError, match=f"is damaged: {number} among its numbers"):
        read(tmp_path / "b.keras", ImportOptions())


# --------------------------------------------------------------------------- masks


def masked(*then: Any) -> Any:
    words = layers.Embedding(6, 4, mask_zero=True, name="words")
    return keras.Sequential([keras.Input((5,), dtype="int32"), words, *then])


@pytest.mark.parametrize(
    "then",
    [
        [layers.LSTM(3)],
        [layers.Dense(3), layers.Dropout(0.1), layers.GlobalAveragePooling1D()],
        [keras.Sequential([layers.Dense(3)]), layers.GRU(2)],
        [keras.Sequential([layers.Dense(3), layers.SimpleRNN(2)])],
    ],
    ids=["LSTM", "later", "out of a model", "in a model"],
)
def test_a_mask_that_is_used_is_refused_where_it_is(then: Any, tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="leaves out steps that 'words' masks"):
        imported(masked(*then), tmp_path)


def test_the_operations_of_a_mask_are_said_to_be_those_of_a_mask(
    tmp_path: Path,
) -> None:
    words = keras.Input((5,), dtype="int32")
    x = layers.Embedding(6, 4, mask_zero=True, name="words")(words)
    with pytest.raises(GemscError, match="NotEqual") as caught:
        imported(keras.Model(words, layers.LSTM(3)(x)), tmp_path)
    assert "masks, which are not supported (words)" in str(caught.value.help)


def test_a_mask_that_is_forgotten_is_none(tmp_path: Path) -> None:
    assert_same(masked(layers.Flatten(), layers.Dense(3)), tmp_path)


def test_a_mask_of_an_output_is_noted(tmp_path: Path) -> None:
    network, _ = imported(masked(layers.Dense(3)), tmp_path)
    assert any("'words' masks" in note for note in network.notes)


# --------------------------------------------------------------------------- notes


def test_regularizers_and_constraints_are_noted(tmp_path: Path) -> None:
    dense = layers.Dense(
        3, kernel_regularizer=keras.regularizers.L2(0.01), name="dense"
    )
    lstm = layers.LSTM(3, recurrent_constraint="unit_norm", name="lstm")
    model = keras.Sequential(
        [keras.Input(SEQUENCE), dense, layers.Bidirectional(lstm, name="both")]
    )
    network, _ = imported(model, tmp_path)
    notes = "\n".join(network.notes)
    assert "'dense': L2(l2=0.01) of its kernel" in notes
    assert "weight_decay=0.02 is the same under SGD" in notes
    assert "'both': UnitNorm(axis=0) of its recurrent is left out: set" in notes
    assert "in a register_step_post_hook of optimizer(params)" in notes


def test_matrices_of_low_rank_are_noted(tmp_path: Path) -> None:
    model = of(layers.TimeDistributed(layers.Dense(3, lora_rank=2), name="a"))
    network, _ = imported(model, tmp_path)
    assert any("'a': lora_rank=2 trains" in note for note in network.notes)


def test_outputs_that_are_nested_have_an_optimizer_and_no_loss(tmp_path: Path) -> None:
    one, two = (layers.Dense(3) for _ in range(2))
    x = keras.Input(SEQUENCE)
    model = keras.Model(x, [one(x), {"b": two(x)}])
    model.compile("sgd", "mse")
    network, _ = imported(model, tmp_path)
    assert any("the outputs are nested" in note for note in network.notes)
    assert [text.split("(")[0] for text in network.functions] == ["def optimizer"]


def test_what_begins_anew_of_an_optimizer_is_said(tmp_path: Path) -> None:
    model, optimizers = of(layers.LSTM(3)), keras.optimizers
    inputs, targets = torch.ones(2, *SEQUENCE), torch.ones(2, 3)
    rate = optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    for optimizer, wanted in [
        (optimizers.SGD(0.1), ""),
        (optimizers.SGD(0.1, momentum=0.9), "here its moments begin anew"),
        (optimizers.SGD(rate), "here the steps of its rate begin anew"),
    ]:
        model.compile(optimizer, "mse")
        for updates in range(2):
            folder = tmp_path / f"{updates}{wanted}"
            folder.mkdir()
            notes = "\n".join(imported(model, folder)[0].notes)
            assert ("begin anew" in notes) == bool(updates and wanted)
            model.train_on_batch(inputs, targets)
        assert f"optimizer: 1 updates are in the file: {wanted}" in notes or not wanted


def test_a_direction_or_cell_that_keras_does_not_train_is_frozen(
    tmp_path: Path,
) -> None:
    both = layers.Bidirectional(layers.LSTM(3), name="both")
    cells = [layers.LSTMCell(3), layers.GRUCell(3)]
    for name, layer in [("both", both), ("cells", layers.RNN(cells, name="cells"))]:
        model = of(layer)
        frozen = both.forward_layer if name == "both" else cells[0]
        frozen.trainable = False
        (tmp_path / name).mkdir()
        _, net = imported(model, tmp_path / name)
        trained = {n for n, p in net.named_parameters() if p.requires_grad}
        mine = {n for n in trained if n.endswith("_reverse") or "cells.1" in n}
        assert trained == mine
        assert len(mine) == {"both": 3, "cells": 4}[name]


def test_the_second_bias_of_a_recurrent_layer_is_not_trained(tmp_path: Path) -> None:
    _, net = imported(of(layers.LSTM(3, name="lstm")), tmp_path)
    frozen = {n for n, p in net.named_parameters() if not p.requires_grad}
    assert frozen == {"lstm.bias_hh_l0"}
    assert not net.lstm.bias_hh_l0.any()


def test_regularizers_of_several_cells_are_noted(tmp_path: Path) -> None:
    cells = [layers.GRUCell(3), layers.LSTMCell(3, kernel_regularizer="l2")]
    read, _ = imported(of(layers.RNN(cells, name="rnn"), (4, 5)), tmp_path)
    assert any("'rnn': L2(" in note and "its kernel" in note for note in read.notes)


def test_dropout_of_an_lstm_leaves_out_features_of_whole_sequences(
    tmp_path: Path,
) -> None:
    _, net = imported(of(layers.LSTM(3, dropout=0.5, name="lstm"), (4, 100)), tmp_path)
    seen = []
    net.lstm["cell"].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    net.train()
    net(torch.ones(2, 4, 100))
    (given,) = seen
    assert set(given.unique().tolist()) == {0.0, 2.0}
    assert (given == given[:, :1]).all()
    assert (given[0] != given[1]).any()


def test_each_of_several_cells_leaves_out_features_of_its_own(tmp_path: Path) -> None:
    cells = [layers.LSTMCell(90, dropout=0.5), layers.GRUCell(3, dropout=0.5)]
    _, net = imported(of(layers.RNN(cells, name="rnn"), (4, 90)), tmp_path)
    seen = []
    for cell in net.rnn["cells"].values():
        cell.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    net.train()
    net(torch.ones(2, 4, 90))
    assert len(seen) == 2
    for given in seen:
        left_out = given == 0
        assert 0.2 < left_out.float().mean() < 0.8
        assert (left_out == left_out[:, :1]).all()
    assert not torch.equal(*(given == 0 for given in seen))


@pytest.mark.parametrize(
    ("layer", "spread"),
    [
        (layers.GaussianNoise(0.5), 0.5),
        (layers.GaussianDropout(0.2), 0.5),
        (layers.Dropout(0.2), 0.5),
        (layers.Dropout(0.2, noise_shape=(None, 1, 400)), 0.5),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_noise_is_there_in_training_only(
    layer: Any, spread: float, tmp_path: Path
) -> None:
    _, net = imported(of(layer, (40, 400)), tmp_path)
    x = torch.ones(2, 40, 400)
    assert torch.equal(net.eval()(x), x)
    torch.manual_seed(0)
    noisy = net.train()(x)
    assert abs(noisy.mean().item() - 1) < 0.1
    assert abs(noisy.std().item() - spread) < 0.05
    is_one_draw = getattr(layer, "noise_shape", None) is not None  # for all 40 rows
    assert (noisy == noisy[:, :1]).all() == is_one_draw


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.MultiHeadAttention(2, 3, dropout=0.5),
        lambda: layers.GroupQueryAttention(4, 4, 2, dropout=0.5),
        lambda: layers.Attention(dropout=0.5),
    ],
)
def test_attention_drops_weights_in_training_only(
    make: Any, scores: bool, tmp_path: Path
) -> None:
    x, layer = keras.Input(SEQUENCE), make()
    given = ([x, x],) if isinstance(layer, layers.Attention) else (x, x)
    y = layer(*given, return_attention_scores=scores)
    net = assert_same(keras.Model(x, y), tmp_path, training=False)
    steps = torch.rand(2, *SEQUENCE)
    one, other = (keras.tree.flatten(net.train()(steps))[0] for _ in range(2))
    assert not torch.equal(one, other)


# ------------------------------------------------------------- layers of one's own


@keras.saving.register_keras_serializable(package="Mine")
class Scale(layers.Layer):  # type: ignore[misc,name-defined]
    def __init__(self, units: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units))
        self.bias = self.add_weight(shape=(self.units,))

    def call(self, x: Any, factor: float = 1.0) -> Any:
        return keras.ops.matmul(x, self.kernel) * factor + self.bias

    def get_config(self) -> Any:
        return {**super().get_config(), "units": self.units}


CUSTOM = """
import torch
from torch import nn

class ScaleModule(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(4, units))
        self.bias = nn.Parameter(torch.empty(units))

    def forward(self, x, *, factor=1.0):
        return x @ self.kernel * factor + self.bias

def Scale(config):
    return ScaleModule(config["units"])

class Twice(nn.Module):
    def forward(self, x):
        return 2 * x

def double_it(config):
    assert "function" not in config
    return Twice()
"""


def with_scale() -> Any:
    inputs = keras.Input((5, 6, 3))
    x = layers.Conv2D(4, 1)(inputs)
    x = Scale(2, name="scale")(x, factor=2.5)
    return keras.Model(inputs, layers.Lambda(lambda z: 2 * z, name="double-it")(x))


def custom(folder: Path, text: str) -> ImportOptions:
    (folder / "own_layers.py").write_text(text)
    return ImportOptions(custom=folder / "own_layers.py")


def test_layers_of_ones_own_are_called_with_the_axes_of_keras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert_same(with_scale(), tmp_path, options=custom(tmp_path, CUSTOM))
    text = (tmp_path / "network" / "model.py").read_text()
    assert 'self.scale = own_layers.Scale({"units": 2})' in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("(4, units)", "(units, 4)"), "4x2, layers/scale/vars/1 2 in the file"),
        (("return Twice()", "return 3"), "returns an object of type int"),
        (("return Twice()", "return 1 / 0"), "double_it() of own_layers.py fails"),
        (("import torch", "import torc"), "importing it fails: ModuleNotFoundError"),
        (("return 2 * x", "return x[:, 9]"), "Lambda 'double-it' does not fit"),
        (("return 2 * x", "return x.no"), "self.double_it(scale) fails: Attrib"),
        (("return 2 * x", "return [3]"), "'double-it' gives an object of type int"),
        (("def double_it", "def triple"), "'double-it' (Lambda)"),
    ],
)
def test_a_layer_of_ones_own_that_does_not_fit_is_named(
    change: tuple[str, str], words: str, tmp_path: Path
) -> None:
    options = custom(tmp_path, CUSTOM.replace(*change, 1))
    with pytest.raises(GemscError, match=re.escape(words)) as caught:
        imported(with_scale(), tmp_path, options)
    assert "own_layers.py" in f"{caught.value} {caught.value.help}"


class Two(layers.Layer):
    """Has parts whose variables have one shape; the file has `key` before `query`."""

    def build(self, shape: Any) -> None:
        self.query, self.key = (layers.Dense(4, use_bias=False) for _ in range(2))
        for part in (self.query, self.key):
            part.build(shape)

    def call(self, x: Any) -> Any:
        return 2 * self.query(x) - self.key(x)


PARTS = """
import torch
from torch import nn

class TwoModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.ParameterDict({"kernel": torch.empty(4, 4)})
        self.key = nn.ParameterDict({"kernel": torch.empty(4, 4)})

    def forward(self, x):
        return 2 * x @ self.query["kernel"] - x @ self.key["kernel"]

def Two(config):
    return TwoModule()
"""


def test_parts_of_a_layer_of_ones_own_are_known_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Two()(inputs))
    one, other = tmp_path / "with_parts.py", tmp_path / "with_others.py"
    one.write_text(PARTS)
    other.write_text(PARTS.replace("self.query", "self.questions"))
    with pytest.raises(GemscError, match="in which order: key, query"):
        imported(model, tmp_path, ImportOptions(custom=other))
    assert_same(model, tmp_path, options=ImportOptions(custom=one))


def test_a_train_py_imports_a_model_with_layers_of_ones_own(tmp_path: Path) -> None:
    with_scale().save(tmp_path / "m.keras")
    (tmp_path / "layers").mkdir()
    options = custom(tmp_path / "layers", CUSTOM)
    import_file(tmp_path / "m.keras", tmp_path / "own_net", options)
    train = tmp_path / "train.py"
    train.write_text("from own_net.model import example_inputs, model")
    model = filled(load_user_model(str(train)))
    assert [*model.scale.state_dict()]
