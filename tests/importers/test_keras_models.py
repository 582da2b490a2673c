"""Keras models of all kinds: outputs, gradients and moving averages are Keras' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from keras_support import assert_same, example, floatx, imported, keras
from nightly import at_night

from gemsc.errors import GemscError
from gemsc.importers.network import ImportOptions

L = keras.layers
O = keras.ops  # noqa: E741  as Keras' own pages name it


def row(*layers: Any, shape: tuple[int, ...] = (9, 10, 3)) -> Any:
    return keras.Sequential([L.Input(shape), *layers])


def residual() -> Any:
    image = L.Input((16, 16, 3), name="image")
    x = L.Conv2D(4, 3, strides=2, padding="same", use_bias=False, name="stem")(image)
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    pooled = L.MaxPooling2D()(x)
    x = L.Conv2D(4, 1, activation="relu")(pooled)
    x = L.Concatenate()([L.Add()([pooled, x]), x])
    return keras.Model(image, L.Dense(5)(L.GlobalAveragePooling2D()(x)))


def unet() -> Any:
    image = L.Input((16, 16, 3))
    x = skip = L.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = L.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    x = L.BatchNormalization()(x)
    x = L.Conv2DTranspose(4, 2, strides=2)(x)
    x = L.Concatenate()([x, L.UpSampling2D()(L.AveragePooling2D(2)(skip))])
    return keras.Model(image, L.Conv2D(2, 1, activation="sigmoid")(x))


def nested() -> Any:
    """An encoder that is called twice, and holds models itself."""
    inner = keras.Sequential([L.Conv2D(4, 3), L.BatchNormalization()], name="inner")
    one = L.Input((8, 8, 3))
    encoder = keras.Model(one, [inner(one), L.Conv2D(4, 3, name="class")(one)])
    a, b = L.Input((8, 8, 3), name="a"), L.Input((8, 8, 3), name="b")
    (x, y), (z, _) = encoder(a), encoder(b)
    return keras.Model([a, b], L.Flatten()(L.Add()([x, y, z])))


def shared() -> Any:
    """A(B(A(B(x)))): calls that the list of layers does not have in their order."""
    x = image = L.Input((8, 8, 4))
    one, other = L.Conv2D(4, 3, padding="same"), L.Dense(4, activation="tanh")
    for layer in (other, one, other, one):
        x = layer(x)
    return keras.Model(image, x)


def structures() -> Any:
    a, b = L.Input((4,), name="zebra"), L.Input((3,), name="ant")
    x, y = L.Dense(2)(a), L.Dense(2)(b)
    return keras.Model({"zebra": a, "ant": b}, {"sum": L.Add()([x, y]), "both": [x, y]})


def frozen() -> Any:
    image = L.Input((8, 8, 3))
    base = keras.Sequential([L.Conv2D(4, 3), L.BatchNormalization()])
    x = base(image)
    base.trainable = False
    norm = L.BatchNormalization(trainable=False)
    return keras.Model(image, L.Conv2D(2, 3)(norm(x)))


def thawed() -> Any:
    """Freeze models and a wrapper, of which some layers are trained after all."""
    image = L.Input((4, 8))
    norm, last = L.BatchNormalization(), L.Dense(4)
    base = keras.Sequential([L.Dense(8), norm, L.Dense(5), last])
    steps, both = L.TimeDistributed(L.Dense(4)), L.Bidirectional(L.LSTM(3))
    model = keras.Model(image, both(steps(base(image))))
    base.trainable = steps.trainable = both.trainable = False
    norm.trainable = last.trainable = steps.layer.trainable = True
    both.backward_layer.trainable = True
    return model


def operations() -> Any:
    image = L.Input((6, 8, 4))
    x = L.Conv2D(4, 1)(image)
    x = O.multiply(x, 2.0) + 1 - x / np.arange(1, 5, dtype="float32")
    y = O.concatenate([x[:, 1:, ::2], O.relu(x)[:, 1:, 1::2]], axis=-1)
    y = O.mean(y, axis=(1, 2), keepdims=True) * y
    y = O.reshape(y, (-1, 20, 8))
    return keras.Model(image, O.matmul(y, O.transpose(y, (0, 2, 1))))


MODELS: list[Callable[[], Any]] = [
    *(residual, unet, nested, shared, structures, frozen, thawed, operations)
]


@pytest.mark.slow(4)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_step_of_training_is_that_of_keras(tmp_path, make):
    with floatx("float64"):
        assert_same(make(), tmp_path)


def test_a_step_in_float32_is_that_of_keras(tmp_path):
    assert_same(residual(), tmp_path)


# Layers in rows, a test for several: to build a model costs more than to run it.
ROWS: dict[str, Callable[[], Any]] = {
    "same": lambda: row(
        L.Conv2D(4, 3, strides=2, padding="same"),
        L.Conv2D(4, (2, 3), padding="same", groups=2, activation="relu"),
        L.Conv2D(4, 3, dilation_rate=2, padding="same"),
        L.MaxPooling2D(2, 1, "same"),
        L.MaxPooling2D(3, 2, "same"),
        L.MaxPooling2D(2, padding="same"),
    ),
    "same, of what is below zero": lambda: row(L.MaxPooling2D(2, 1, "same")),
    "depthwise": lambda: row(
        L.DepthwiseConv2D(3, depth_multiplier=2, padding="same", strides=2),
        L.SeparableConv2D(5, 3, depth_multiplier=2, activation="tanh"),
    ),
    "transposed": lambda: row(
        L.Conv2DTranspose(4, 3, strides=2, padding="same"),
        L.Conv2DTranspose(4, 4, strides=2, padding="same", use_bias=False),
        L.Conv2DTranspose(2, 2, strides=3, output_padding=1),
        L.Conv2DTranspose(2, 3, dilation_rate=2, padding="same"),
        shape=(4, 5, 3),
    ),
    "transposed sequence": lambda: row(
        L.Conv1DTranspose(2, 1, strides=2),  # a kernel that is shorter than the steps
        L.Conv1DTranspose(2, 1, strides=3, padding="same"),
        L.Conv1DTranspose(2, 3, strides=2, padding="same", output_padding=0),
        L.Conv1DTranspose(2, 2, strides=3, padding="same", output_padding=2),
        shape=(3, 2),
    ),
    "sequence": lambda: row(
        L.Conv1D(4, 3, padding="causal", dilation_rate=2),
        L.DepthwiseConv1D(3, padding="same"),
        L.SeparableConv1D(4, 3),
        L.Conv1DTranspose(4, 3, strides=2, padding="same"),
        L.ZeroPadding1D((1, 2)),
        L.Cropping1D((0, 1)),
        L.UpSampling1D(2),
        L.AveragePooling1D(2),
        L.BatchNormalization(),
        L.GlobalMaxPooling1D(),
        shape=(9, 3),
    ),
    "volume": lambda: row(
        L.Conv3D(3, (3, 2, 3), strides=2, padding="same"),
        L.Conv3DTranspose(4, 3, strides=2, padding="same"),
        L.ZeroPadding3D((1, 2, 3)),
        L.Cropping3D(1),
        L.UpSampling3D((1, 2, 1)),
        L.BatchNormalization(),
        L.AveragePooling3D(2),
        L.GlobalAveragePooling3D(),
        shape=(4, 5, 6, 2),
    ),
    "norms": lambda: row(
        L.Rescaling(1 / 127.5, offset=-1),
        L.Normalization(mean=[1.0, 2.0, 3.0], variance=[1.0, 0.5, 3.0]),
        L.Conv2D(6, 1),
        L.BatchNormalization(scale=False, momentum=0.9, epsilon=0.1),
        L.GroupNormalization(3, center=False, epsilon=0.1),
        L.GroupNormalization(-1),
        L.Conv2D(3, 1),
        L.Normalization(mean=[1.0, 2.0, 3.0], variance=[1.0, 0.5, 3.0], invert=True),
        L.Conv2D(4, 1),
        L.LayerNormalization(),
        L.LayerNormalization(axis=[1, 3], scale=False),
        L.RMSNormalization(),
        L.BatchNormalization(axis=1, center=False),
    ),
    "a channel without variance": lambda: row(
        L.Normalization(mean=[1.0, 2.0, 3.0], variance=[0.0, 0.0, 0.0])
    ),
    "sizes": lambda: row(
        L.Normalization(),
        L.UpSampling2D((2, 3), interpolation="bilinear"),
        L.Resizing(4, 12, antialias=True),
        L.Resizing(8, 6, interpolation="nearest"),
        L.Resizing(6, 3, crop_to_aspect_ratio=True),
        L.ZeroPadding2D(((1, 2), (3, 0))),
        L.Cropping2D(((0, 1), (1, 0))),
        L.SpatialDropout2D(0.0),
        L.Conv2D(2, 1),
        L.UnitNormalization(),
        L.AdaptiveAveragePooling2D(2),
    ),
    "sizes of one ratio": lambda: row(
        L.Resizing(4, 4, crop_to_aspect_ratio=True),
        L.Resizing(6, 3, pad_to_aspect_ratio=True, fill_value=0.5),
        L.Resizing(7, 8, antialias=True),
        L.GlobalAveragePooling2D(keepdims=True),
        shape=(5, 8, 2),
    ),
    "channels first": lambda: row(
        L.Conv2D(4, 3, strides=2, padding="same", data_format="channels_first"),
        L.BatchNormalization(axis=1),
        L.MaxPooling2D(data_format="channels_first"),
        L.GlobalAveragePooling2D(data_format="channels_first"),
        shape=(3, 9, 10),
    ),
}


@pytest.mark.slow(6)
@pytest.mark.parametrize("name", ROWS)
def test_layers_for_images_are_those_of_keras(tmp_path, name):
    keras.utils.set_random_seed(0)  # of some weights, rounding makes more
    with floatx("float64"):  # the matrices of a resized image are of float32
        within = 1e-6 if name.startswith("sizes") else None
        assert_same(ROWS[name](), tmp_path, within=within)


@pytest.mark.parametrize(("n", "k", "s"), [(7, 4, 1), (8, 3, 2), (8, 4, 3), (5, 2, 2)])
def test_a_padded_mean_is_of_what_is_in_the_image(tmp_path, n, k, s):
    """Keras 3.15 has it so on JAX and TensorFlow, and not on PyTorch: keras#23233."""
    model = row(L.AveragePooling1D(k, s, "same"), shape=(n, 3))
    _, net = imported(model, tmp_path)
    (x,) = example(model)
    total = max((-(-n // s) - 1) * s + k - n, 0)
    starts = [i * s - total // 2 for i in range(-(-n // s))]
    wanted = [x[:, max(i, 0) : i + k].mean(1) for i in starts]
    means = net(torch.from_numpy(x)).numpy()
    assert np.allclose(means, np.stack(wanted, 1), atol=1e-6)


def test_a_bicubic_kernel_is_that_of_keys(tmp_path):
    """PyTorch's own, with which Keras computes there, has another parameter."""
    model = row(L.UpSampling2D(2, interpolation="bicubic"), shape=(1, 8, 1))
    _, net = imported(model, tmp_path)
    pixels = torch.zeros(1, 1, 8, 1)
    pixels[0, 0, 4] = 1
    kernel = net(pixels)[0, 0, 6:10, 0]
    near, far = 0.8671875, 0.2265625
    assert kernel.tolist() == pytest.approx([-0.0703125, far, near, near])


def test_images_stay_as_pytorch_has_them_on_demand(tmp_path):
    model = unet()
    _, net = imported(model, tmp_path, ImportOptions(channels_first=True))
    (x,) = example(model)
    output = net.eval()(torch.from_numpy(np.moveaxis(x, -1, 1).copy()))
    wanted = model(x, training=False).detach().numpy()
    assert np.allclose(np.moveaxis(output.detach().numpy(), 1, -1), wanted, atol=1e-5)
    text = (tmp_path / "network" / "model.py").read_text()
    assert "permute" not in text


def test_a_network_permutes_at_its_ends_alone(tmp_path):
    imported(unet(), tmp_path)
    text = (tmp_path / "network" / "model.py").read_text()
    assert text.count("permute") == 2


def test_open_sizes_are_given_by_the_user(tmp_path):
    model = keras.Sequential([L.Input((None, None, 3), name="image"), L.Conv2D(2, 3)])
    with pytest.raises(GemscError, match=r"'image' has the shape 2x\?x\?x3: the"):
        imported(model, tmp_path)
    with pytest.raises(GemscError, match=r"has 2 sizes; in the file .* \?x\?x\?x3"):
        imported(model, tmp_path, ImportOptions(shapes={"image": (8, 9)}))
    options = ImportOptions(shapes={"image": (2, 8, 9, 3)})
    _, net = imported(model, tmp_path, options)
    assert net(torch.zeros(2, 8, 9, 3)).shape == (2, 6, 7, 2)
    with pytest.raises(GemscError, match="has no input 'picture'"):
        imported(model, tmp_path, ImportOptions(shapes={"picture": (1, 8, 8, 3)}))


def test_a_model_of_two_sizes_is_refused(tmp_path):
    layers = L.Input((None, None, 3)), L.Conv2D(3, 3, strides=2, padding="same")
    inner = keras.Sequential(layers, name="inner")
    image = L.Input((9, 9, 3))
    model = keras.Model(image, inner(inner(L.ZeroPadding2D(((0, 1), (0, 1)))(image))))
    with pytest.raises(GemscError, match="'inner' is called with images of two sizes"):
        imported(model, tmp_path)


def test_a_layer_that_would_pad_two_images_differently_is_refused(tmp_path):
    one, other = L.Input((9, 9, 3)), L.Input((8, 8, 3))
    conv = L.Conv2D(3, 3, strides=2, padding="same", name="conv")
    with pytest.raises(GemscError, match="'conv' is called with images of sizes that"):
        imported(keras.Model([one, other], [conv(one), conv(other)]), tmp_path)


def test_rows_are_normalized_where_they_stand(tmp_path):
    """Keras 3.15 has it so on JAX and TensorFlow, and fails on PyTorch."""
    model = row(L.LayerNormalization(axis=1, epsilon=0.1))
    _, net = imported(model, tmp_path)
    x = torch.from_numpy(example(model)[0])
    wanted = torch.nn.functional.layer_norm(x.movedim(1, -1), (9,), eps=0.1)
    torch.testing.assert_close(net(x), wanted.movedim(-1, 1))


def test_channels_of_an_image_are_dropped_as_a_whole(tmp_path):
    _, net = imported(row(L.SpatialDropout2D(0.5), shape=(4, 5, 100)), tmp_path)
    dropped = net.train()(torch.ones(2, 4, 5, 100))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert (dropped == dropped[:, :1, :1]).all()
    assert (dropped[0] != dropped[1]).any()


APPLICATIONS = ("MobileNetV2", "ResNet50", "DenseNet121", "EfficientNetB0")


@pytest.mark.parametrize("name", at_night(*APPLICATIONS))
def test_an_application_trains_as_in_keras(tmp_path, name):
    with floatx("float64"):
        make = getattr(keras.applications, name)
        config = make(weights=None, input_shape=(64, 64, 3), classes=10).get_config()
        for layer in config["layers"]:
            if layer["class_name"] == "Dropout":
                layer["config"]["rate"] = (
                    0.0  # which numbers are drawn is another thing
                )
        assert_same(keras.Model.from_config(config), tmp_path)
