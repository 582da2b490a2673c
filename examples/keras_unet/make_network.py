"""Write unet.keras: a U-Net of Keras layers, compiled, not trained yet.

It stands for a file that you have already. Only this script needs Keras; any backend
will do: KERAS_BACKEND=torch python make_network.py
"""

from pathlib import Path

import keras
from keras import layers


def double_conv(x, filters, name):
    for number in (1, 2):
        conv = layers.Conv2D(
            filters, 3, padding="same", use_bias=False, name=f"{name}_conv{number}"
        )
        x = layers.BatchNormalization(name=f"{name}_bn{number}")(conv(x))
        x = layers.Activation("relu", name=f"{name}_relu{number}")(x)
    return x


def unet(size=128, base=8, levels=4):
    """Return the U-Net for pictures of (size, size, 3), with numbers from 0 to 255."""
    picture = keras.Input((size, size, 3), name="picture")
    x = layers.Rescaling(1 / 255, name="rescale")(picture)
    skips = []
    for level in range(levels):
        skips.append(double_conv(x, base * 2**level, f"down{level}"))
        x = layers.MaxPooling2D(name=f"down{level}_pool")(skips[-1])
    x = double_conv(x, base * 2**levels, "bottom")
    for level in reversed(range(levels)):
        filters = base * 2**level
        grow = layers.Conv2DTranspose(
            filters, 2, strides=2, padding="same", name=f"up{level}_grow"
        )
        x = layers.Concatenate(name=f"up{level}_join")([skips.pop(), grow(x)])
        x = double_conv(x, filters, f"up{level}")
    stain = layers.Conv2D(1, 1, activation="sigmoid", name="stain")(x)
    model = keras.Model(picture, stain, name="unet")
    model.compile(
        optimizer=keras.optimizers.SGD(0.2, momentum=0.9),
        loss=keras.losses.BinaryCrossentropy(),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    return model


def main():
    keras.utils.set_random_seed(0)
    path = Path(__file__).with_name("unet.keras")
    model = unet()
    model.save(path)
    print(f"{path}: {len(model.layers)} layers, {model.count_params()} parameters")


if __name__ == "__main__":
    main()
