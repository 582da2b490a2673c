"""Keras models of every kind, small: what is imported, cut and trained in tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_support import keras

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from keras_unet.make_network import unet

__all__ = ["KERAS_MODELS", "unet"]

layers = keras.layers


def small_unet() -> Any:
    """Skips over levels, BatchNormalization, transposed convolutions."""
    return unet(size=32, base=4, levels=2)


def mobile() -> Any:
    """Strides with padding 'same', depthwise and separable convolutions."""
    picture = keras.Input((31, 33, 3), name="picture")
    x = layers.Rescaling(2, offset=-1)(picture)
    x = layers.Conv2D(8, 3, strides=2, padding="same", name="stem")(x)
    x = layers.ReLU(6.0, name="stem_relu")(layers.BatchNormalization(name="bn")(x))
    for number in (1, 2):
        y = layers.DepthwiseConv2D(3, padding="same", name=f"depth{number}")(x)
        y = layers.BatchNormalization(name=f"depth{number}_bn")(y)
        y = layers.Conv2D(8, 1, name=f"point{number}")(layers.ReLU(6.0)(y))
        x = layers.Add(name=f"add{number}")([x, y])
    x = layers.SeparableConv2D(12, 3, strides=2, padding="same", name="sep")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(
        picture, layers.Dense(5, activation="softmax", name="top")(x), name="mobile"
    )


def inception() -> Any:
    """Branches side by side."""
    x = picture = keras.Input((16, 16, 4), name="picture")
    for block in (1, 2):
        rows = [layers.Conv2D(8, 1, activation="relu", name=f"one{block}")(x)]
        for size in (3, 5):
            y = layers.Conv2D(8, 1, activation="relu", name=f"to{size}_{block}")(x)
            conv = layers.Conv2D(
                8, size, padding="same", activation="relu", name=f"by{size}_{block}"
            )
            rows.append(conv(y))
        y = layers.AveragePooling2D(3, strides=1, padding="same", name=f"mean{block}")(
            x
        )
        rows.append(layers.Conv2D(8, 1, name=f"mean{block}_conv")(y))
        x = layers.Concatenate(name=f"join{block}")(rows)
    x = layers.GlobalMaxPooling2D(name="pool")(x)
    return keras.Model(picture, layers.Dense(3, name="top")(x), name="inception")


def transformer() -> Any:
    """Words, positions, heads."""
    words = keras.Input((6,), dtype="int32", name="words")
    x = layers.Embedding(20, 8, name="embedding")(words)
    for number in (1, 2):
        normed = layers.LayerNormalization(name=f"norm{number}a")(x)
        attention = layers.MultiHeadAttention(2, 4, name=f"attention{number}")
        x = layers.Add(name=f"add{number}a")([x, attention(normed, normed)])
        y = layers.LayerNormalization(name=f"norm{number}b")(x)
        y = layers.Dense(16, activation="gelu", name=f"wide{number}")(y)
        y = layers.Dense(8, name=f"thin{number}")(y)
        x = layers.Add(name=f"add{number}b")([x, y])
    return keras.Model(words, layers.Dense(20, name="head")(x), name="transformer")


def recurrent() -> Any:
    """A sequence, forwards and backwards."""
    return keras.Sequential(
        [
            keras.Input((7, 3), name="sound"),
            layers.Conv1D(6, 3, padding="causal", activation="tanh", name="hear"),
            layers.Bidirectional(layers.LSTM(5, return_sequences=True), name="both"),
            layers.GRU(6, name="gru"),
            layers.Dense(2, name="say"),
        ],
        name="recurrent",
    )


def siamese() -> Any:
    """Two inputs through one nested model; two results by name."""
    tower = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", name="wide"),
            layers.BatchNormalization(name="bn"),
            layers.Dense(4, name="thin"),
        ],
        name="tower",
    )
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    a, b = tower(left), tower(right)
    both = layers.Concatenate(name="both")([a, b])
    near = layers.Dense(1, activation="sigmoid", name="near")(both)
    product = layers.Multiply(name="product")([a, b])
    results = {"near": near, "product": product}
    return keras.Model([left, right], results, name="siamese")


KERAS_MODELS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (small_unet, mobile, inception, transformer, recurrent, siamese)
}
