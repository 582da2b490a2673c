"""Layers of Keras for vectors and sequences compute the same after an import.

Each setting is a model of one or a few layers: outputs in evaluation and in training,
the loss of a step, and the gradient of every variable.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_support import assert_same, floatx, keras
from nightly import at_night

layers = keras.layers
Build = Callable[..., Any]
SEQUENCE, VECTOR, IMAGE = (5, 4), (6,), (4, 3, 2)


def recurrent() -> dict[str, tuple[Any, Build]]:
    table: dict[str, tuple[Any, Build]] = {}

    def add(name: str, build: Build, *shapes: Any) -> None:
        table[name] = (shapes or (SEQUENCE,), build)

    for kind in (layers.LSTM, layers.GRU, layers.SimpleRNN):
        word = kind.__name__

        def both(x: Any, kind: Any = kind, **settings: Any) -> Any:
            return kind(3, return_sequences=True, return_state=True, **settings)(x)

        add(f"{word}", lambda x, kind=kind: kind(3)(x))
        add(f"{word} sequences and states", both)
        add(f"{word} no bias", lambda x, f=both: f(x, use_bias=False))
        add(f"{word} backwards", lambda x, f=both: f(x, go_backwards=True))
        add(
            f"{word} unrolled, stacked",
            lambda x, k=kind: k(2, unroll=True)(k(3, return_sequences=True)(x)),
        )
        add(
            f"{word} from states",
            lambda x, y, k=kind: k(3)(
                y, initial_state=list(k(3, return_state=True)(x))[1:]
            ),
            SEQUENCE,
            (2, 4),
        )
        for mode in ("concat", "sum", "mul", "ave", None):
            add(
                f"Bidirectional {word} {mode}",
                lambda x, k=kind, m=mode: layers.Bidirectional(k(3), merge_mode=m)(x),
            )
            add(
                f"Bidirectional {word} {mode} sequences and states",
                lambda x, k=kind, m=mode: layers.Bidirectional(
                    k(3, return_sequences=True, return_state=True), merge_mode=m
                )(x),
            )
        add(
            f"Bidirectional {word} from states",
            lambda x, y, k=kind: layers.Bidirectional(k(3))(
                y,
                initial_state=list(
                    layers.Bidirectional(k(3, return_state=True))(x)[1:]
                ),
            ),
            SEQUENCE,
            (2, 4),
        )
    add("SimpleRNN relu", lambda x: layers.SimpleRNN(3, activation="relu")(x))
    add(
        "RNN of a cell",
        lambda x: layers.RNN(layers.GRUCell(3), return_sequences=True)(x),
    )
    add(
        "RNN of cells",
        lambda x: layers.RNN(
            [layers.LSTMCell(3), layers.LSTMCell(2), layers.GRUCell(3)]
        )(x),
    )
    add(
        "RNN of cells, sequences",
        lambda x: layers.RNN(
            [layers.SimpleRNNCell(3), layers.SimpleRNNCell(2)], return_sequences=True
        )(x),
    )
    return table


def attention() -> dict[str, tuple[Any, Build]]:
    table: dict[str, tuple[Any, Build]] = {}

    def add(name: str, layer: Build, **call: Any) -> None:
        def build(query: Any, value: Any, key: Any) -> Any:
            return layer()(query, value, key, **call)

        table[name] = (((5, 4), (3, 6), (3, 8)), build)

    heads = layers.MultiHeadAttention
    add("MultiHeadAttention", lambda: heads(2, 3))
    add("MultiHeadAttention value_dim", lambda: heads(2, 3, value_dim=5))
    add("MultiHeadAttention no bias", lambda: heads(2, 3, use_bias=False))
    add("MultiHeadAttention causal", lambda: heads(2, 3), use_causal_mask=True)
    add("MultiHeadAttention to 7", lambda: heads(2, 3, output_shape=7))
    add("MultiHeadAttention to 3x2", lambda: heads(2, 3, output_shape=(3, 2)))
    add("MultiHeadAttention gate", lambda: heads(2, 3, value_dim=5, use_gate=True))
    add(
        "MultiHeadAttention scores",
        lambda: heads(2, 3),
        return_attention_scores=True,
    )
    add(
        "MultiHeadAttention scores, causal",
        lambda: heads(2, 3),
        return_attention_scores=True,
        use_causal_mask=True,
    )
    grouped = layers.GroupQueryAttention
    for settings in ({}, {"use_causal_mask": True}, {"return_attention_scores": True}):
        table[f"GroupedQueryAttention {settings}"] = (
            ((5, 4), (3, 4), (3, 4)),
            lambda *x, s=settings: grouped(3, 4, 2)(*x, **s),
        )
    table["MultiHeadAttention of one"] = ((SEQUENCE,), lambda x: heads(2, 3)(x, x))
    table["MultiHeadAttention by name"] = (
        (SEQUENCE, (3, 6)),
        lambda x, y: heads(2, 3)(x, value=y),
    )

    def listed(name: str, layer: Build, **call: Any) -> None:
        def build(query: Any, value: Any, key: Any) -> Any:
            return layer()([query, value, key], **call)

        table[name] = (((5, 4), (3, 6), (3, 4)), build)

    for kind in (layers.Attention, layers.AdditiveAttention):
        word = kind.__name__
        listed(word, kind)
        listed(f"{word} causal", kind, use_causal_mask=True)
        listed(f"{word} scores", kind, return_attention_scores=True)
        listed(f"{word} scale", lambda k=kind: k(use_scale=True), use_causal_mask=True)
        listed(f"{word} no scale", lambda k=kind: k(use_scale=False))
        table[f"{word} of two"] = (
            ((5, 4), (3, 4)),
            lambda x, y, k=kind: k()([x, y]),
        )
    listed("Attention concat", lambda: layers.Attention(score_mode="concat"))
    listed(
        "Attention concat scale",
        lambda: layers.Attention(score_mode="concat", use_scale=True),
        return_attention_scores=True,
    )
    return table


def core() -> dict[str, tuple[Any, Build]]:
    table: dict[str, tuple[Any, Build]] = {}

    def add(name: str, layer: Any, *shapes: Any) -> None:
        table[name] = (shapes or (VECTOR,), lambda x, layer=layer: layer()(x))

    add("Dense", lambda: layers.Dense(3))
    add("Dense no bias", lambda: layers.Dense(3, use_bias=False))
    add("Dense rank 3", lambda: layers.Dense(3, activation="relu"), SEQUENCE)
    add("Dense rank 4", lambda: layers.Dense(3, activation="softmax"), IMAGE)
    for equation, shape, axes, x in (
        ("abc,cd->abd", (None, 3), "d", SEQUENCE),
        ("abc,cde->abde", (None, 2, 3), "de", SEQUENCE),
        ("abc,bcd->ad", 3, None, SEQUENCE),
        ("abc,cde->abde", (None, 2, 3), "e", SEQUENCE),
        ("abc,bd->adc", (3, None), "d", SEQUENCE),
        ("...x,xy->...y", 3, "y", IMAGE),
        ("ab,bc->ac", 3, "c", VECTOR),
    ):
        add(
            f"EinsumDense {equation} {axes}",
            lambda e=equation, s=shape, a=axes: layers.EinsumDense(
                e, output_shape=s, bias_axes=a, activation="tanh"
            ),
            x,
        )
    add("TimeDistributed Dense", lambda: layers.TimeDistributed(layers.Dense(3)), IMAGE)
    add(
        "TimeDistributed Conv2D",
        lambda: layers.TimeDistributed(layers.Conv2D(3, 2)),
        (3, *IMAGE),
    )
    add(
        "TimeDistributed Sequential",
        lambda: layers.TimeDistributed(
            keras.Sequential([layers.Conv1D(3, 2), layers.Flatten(), layers.Dense(2)])
        ),
        (3, 5, 4),
    )
    add("Flatten", layers.Flatten, IMAGE)
    add("Flatten rank 2", layers.Flatten)
    add(
        "Flatten channels first",
        lambda: layers.Flatten(data_format="channels_first"),
        IMAGE,
    )
    add("Reshape", lambda: layers.Reshape((3, 2)))
    add("Reshape -1", lambda: layers.Reshape((2, -1, 3)), IMAGE)
    add("Permute", lambda: layers.Permute((3, 1, 2)), IMAGE)
    add("RepeatVector", lambda: layers.RepeatVector(3))
    add("Identity", layers.Identity)
    add("Dropout 0", lambda: layers.Dropout(0.0))
    table["Conv, Flatten, Dense"] = (
        (IMAGE,),
        lambda x: layers.Dense(3)(layers.Flatten()(layers.Conv2D(3, 2)(x))),
    )
    table["Conv, Permute, LSTM"] = (
        (IMAGE,),
        lambda x: layers.LSTM(3)(
            layers.Reshape((2, -1))(layers.Permute((2, 1, 3))(layers.Conv2D(3, 2)(x)))
        ),
    )

    def shared(x: Any, y: Any) -> Any:
        dense, lstm = layers.Dense(3, activation="tanh"), layers.LSTM(3)
        return [lstm(dense(x)), lstm(dense(y))]

    table["shared"] = ((SEQUENCE, (3, 4)), shared)
    return table


def merge() -> dict[str, tuple[Any, Build]]:
    table: dict[str, tuple[Any, Build]] = {}
    for kind in ("Add", "Multiply", "Average", "Maximum", "Minimum", "Concatenate"):
        layer = getattr(layers, kind)
        table[kind] = ((VECTOR,) * 3, lambda *x, f=layer: f()(list(x)))
        table[f"{kind} of images"] = (
            (IMAGE, IMAGE),
            lambda x, y, f=layer: f()([layers.Conv2D(2, 1)(x), y]),
        )
    table["Subtract"] = ((IMAGE, IMAGE), lambda x, y: layers.Subtract()([x, y]))
    table["Add ranks"] = (((4,), (5, 4)), lambda x, y: layers.Add()([x, y]))
    table["Multiply 1"] = (
        (IMAGE, (1, 1, 2)),
        lambda x, y: layers.Multiply()([layers.Conv2D(2, 1)(x), y]),
    )
    for axis in (1, 2, 3):
        table[f"Concatenate {axis}"] = (
            (IMAGE, IMAGE),
            lambda x, y, a=axis: layers.Concatenate(axis=a)(
                [layers.Conv2D(2, 1)(x), y]
            ),
        )
    for axes, shapes in (
        (1, (VECTOR, VECTOR)),
        ((2, 1), ((5, 4), (4, 3))),
        (-1, ((5, 4), (3, 4))),
        ((1, 2), ((4,), (3, 4))),
        ((2, 1), ((5, 4), (4, 3, 2))),
    ):
        for normalize in (False, True):
            table[f"Dot {axes} {shapes} {normalize}"] = (
                shapes,
                lambda x, y, a=axes, n=normalize: layers.Dot(axes=a, normalize=n)(
                    [x, y]
                ),
            )
    return table


def activations() -> dict[str, tuple[Any, Build]]:
    table: dict[str, tuple[Any, Build]] = {}
    for name in sorted(
        n for n in dir(keras.activations) if not n.startswith("_") and n.islower()
    ):
        if name in ("get", "serialize", "deserialize", "threshold"):
            continue
        table[f"activation {name}"] = (
            ((4, 3, 4),),
            lambda x, n=name: layers.Activation(n)(layers.Conv2D(4, 1)(x)),
        )
        table[f"Dense activation {name}"] = (
            (VECTOR,),
            lambda x, n=name: layers.Dense(4, activation=n)(x),
        )
    for settings in (
        {},
        {"max_value": 6.0},
        {"max_value": 0.5},
        {"negative_slope": 0.2},
        {"threshold": 0.3},
        {"max_value": 0.5, "negative_slope": 0.2},
        {"max_value": 0.5, "threshold": 0.3},
        {"max_value": 6.0, "negative_slope": 0.2, "threshold": 0.3},
    ):
        table[f"ReLU {settings}"] = (
            (VECTOR,),
            lambda x, s=settings: layers.ReLU(**s)(x),
        )
    table["LeakyReLU"] = ((VECTOR,), lambda x: layers.LeakyReLU()(x))
    table["LeakyReLU 0.1"] = ((VECTOR,), lambda x: layers.LeakyReLU(0.1)(x))
    table["ELU"] = ((VECTOR,), lambda x: layers.ELU(0.5)(x))
    for axis in (-1, 1, 2, [1, 2]):
        table[f"Softmax {axis}"] = (
            (IMAGE,),
            lambda x, a=axis: layers.Softmax(a)(layers.Conv2D(3, 1)(x)),
        )
    for axes in (None, [1, 2], [1], [1, 2, 3]):
        table[f"PReLU {axes}"] = (
            (IMAGE,),
            lambda x, a=axes: layers.PReLU(shared_axes=a)(layers.Conv2D(3, 1)(x)),
        )
    table["PReLU of vectors"] = ((VECTOR,), lambda x: layers.PReLU()(x))
    table["a layer as activation"] = (
        (VECTOR,),
        lambda x: layers.Dense(3, activation=layers.LeakyReLU(0.15))(x),
    )
    return table


TABLE = {**recurrent(), **attention(), **core(), **merge(), **activations()}
NAMES = sorted(TABLE)
# functions of keras.ops, of each element
POSITIVE = "log log1p reciprocal rsqrt sqrt"
ANY = (
    "abs absolute ceil cos erf exp expm1 floor gelu hard_sigmoid hard_silu hard_tanh "
    "log_sigmoid negative relu relu6 selu sigmoid sign silu sin softplus softsign "
    "sparse_plus sparse_sigmoid square tanh tanh_shrink"
)
BY_DAY = NAMES[::4]  # the others at night


def model(name: str) -> Any:
    """Return a model of a setting, with a layer in front that needs its gradient."""
    shapes, build = TABLE[name]
    inputs = [keras.Input(shape) for shape in shapes]
    before = [layers.Dense(x.shape[-1])(x) for x in inputs]
    return keras.Model(inputs, build(*before))


@pytest.mark.slow(12)
@pytest.mark.by_day(20)
@pytest.mark.parametrize(
    "name", [*BY_DAY, *at_night(*(n for n in NAMES if n not in BY_DAY))]
)
def test_a_layer_computes_what_keras_computes(name: str, tmp_path: Path) -> None:
    with floatx("float64"):
        assert_same(model(name), tmp_path)


@pytest.mark.parametrize("name", ["LSTM", "Conv, Flatten, Dense", "GRU"])
def test_a_layer_computes_the_same_in_float32(name: str, tmp_path: Path) -> None:
    assert_same(model(name), tmp_path)


def test_tokens_go_through_a_table(tmp_path: Path) -> None:
    tokens = keras.Input((5,), dtype="int32")
    numbers = keras.Input((5,))  # numbers that are whole: Keras casts them
    outputs = [layers.Embedding(6, 4)(x) for x in (tokens, numbers)]
    inputs = [np.arange(10).reshape(2, 5) % 6] * 2
    assert_same(
        keras.Model([tokens, numbers], outputs),
        tmp_path,
        inputs=[inputs[0].astype("int32"), inputs[1].astype("float32")],
    )


def test_functions_of_each_element_are_those_of_keras(tmp_path: Path) -> None:
    x = keras.Input(VECTOR)
    positive = keras.ops.sigmoid(x) + 0.5
    outputs = [getattr(keras.ops, name)(positive) for name in POSITIVE.split()]
    outputs += [getattr(keras.ops, name)(x * 3.0) for name in ANY.split()]
    outputs += [keras.ops.max(x, 1, initial=0.3), keras.ops.min(x, 1, initial=-0.3)]
    assert_same(keras.Model(x, outputs), tmp_path)
