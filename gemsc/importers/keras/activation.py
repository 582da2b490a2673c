"""Activations: the names in other layers' settings, and the layers.

Example: `Dense(8, activation="leaky_relu")` gives
    dense = F.leaky_relu(self.dense(x), 0.2)  # Dense 'dense'
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from gemsc.importers.keras.layer import (
    LAYERS,
    Laid,
    LayerCall,
    dimension,
    translates,
)

# What each name of keras.activations computes; {axis} is the last one of Keras.
NAMES: Mapping[str, str] = {
    **{
        name: f"F.{name.replace('_', '')}({{x}})"  # which is the name in PyTorch
        for name in (
            *("celu", "elu", "gelu", "hard_shrink", "hard_sigmoid", "hard_tanh"),
            *("log_sigmoid", "mish", "relu", "relu6", "selu", "silu", "soft_shrink"),
            *("softplus", "softsign", "tanh_shrink"),
        )
    },
    "exponential": "torch.exp({x})",
    "glu": "F.glu({x}, {axis})",
    "hard_silu": "F.hardswish({x})",
    "hard_swish": "F.hardswish({x})",
    "leaky_relu": "F.leaky_relu({x}, 0.2)",
    "linear": "{x}",
    "log_softmax": "F.log_softmax({x}, {axis})",
    "sigmoid": "torch.sigmoid({x})",
    "softmax": "F.softmax({x}, {axis})",
    "sparse_plus": "({x}.clamp(-1, 1) + 1) ** 2 / 4 + F.relu({x} - 1)",
    "sparse_sigmoid": "(({x} + 1) / 2).clamp(0, 1)",
    "squareplus": "({x} + ({x} ** 2 + 4).sqrt()) / 2",
    "swish": "F.silu({x})",
    "tanh": "torch.tanh({x})",
}


def activated(call: LayerCall, text: str, setting: Any, first: bool = False) -> Laid:
    """Add a line: an expression, with an activation of Keras around it.

    `setting` is what a layer's config has: a name, None, or a layer of its own.
    """
    if isinstance(setting, Mapping):
        kind, config = str(setting.get("class_name")), setting.get("config")
        if kind in LAYERS and isinstance(config, Mapping):
            given = call.gives(text, first=first)
            return call.inner(setting, "activation", [given])
        setting = config if isinstance(config, str) else kind  # of keras.activations
    if setting == "sparsemax":
        return _sparsemax(call, call.gives(text, first=first))
    if setting is not None and setting not in NAMES:
        raise call.refuse(
            f"has the activation '{setting}', which is not one of Keras",
            help="give the whole layer in a file of your own: --custom layers.py",
        )
    template = NAMES[setting or "linear"]
    if template.count("{x}") > 1 and not text.isidentifier():
        text = str(call.gives(text, first=first).value)
    axis = 1 if first else -1
    return call.gives(template.format(x=text, axis=axis), first=first)


def _sparsemax(call: LayerCall, of: Laid) -> Laid:
    """Write out max(x - tau, 0) with Keras' tau, on all of its backends.

    It adds up the sums of the largest values, where the paper (Martins et al. 2016) has
    the last of these sums: so results add up to 1 only where one of them is not 0.
    """
    dim = 1 if of.first else -1
    x = of.value
    down = call.sheet.line("down", f"{x}.sort({dim}, descending=True).values")
    sums = call.sheet.line("sums", f"{down}.cumsum({dim})")
    rank = call.sheet.line("rank", f"torch.ones_like({x}).cumsum({dim})")
    inside = call.sheet.line("inside", f"{down} * {rank} > {sums} - 1")
    total = f"({sums} * {inside}).sum({dim}, keepdim=True) - 1"
    count = f"{inside}.sum({dim}, keepdim=True)"
    tau = call.sheet.line("tau", f"({total}) / {count}")
    return call.gives(f"F.relu({x} - {tau})", first=of.first)


# ------------------------------------------------------------------- as layers


def _given(call: LayerCall) -> Laid:
    """Return the input, in the order of axes that it has."""
    if len(call.inputs) != 1:
        raise call.refuse("has a mask", help="masks are not supported: leave it out")
    return call.inputs[0]


@translates("Activation")
def _activation(call: LayerCall) -> Laid:
    setting, x = call.config.get("activation"), _given(call)
    if setting in (None, "linear"):
        return x
    return activated(call, str(x.value), setting, x.first)


def unary(template: str, call: LayerCall, **settings: float) -> Laid:
    """Write a function of one value, which has settings."""
    x = _given(call)
    numbers = {key: float(call.setting(key, v)) for key, v in settings.items()}
    return call.gives(template.format(x=x.value, **numbers), first=x.first)


ELU, LEAKY_RELU = "F.elu({x}, {alpha!r})", "F.leaky_relu({x}, {negative_slope!r})"
translates("ELU")(partial(unary, ELU, alpha=1.0))
translates("LeakyReLU")(partial(unary, LEAKY_RELU, negative_slope=0.3))


@translates("ReLU")
def _relu(call: LayerCall) -> Laid:
    """Write max(x, 0), with a slope for what is below, a bound and a threshold."""
    slope = float(call.config.get("negative_slope") or 0.0)
    threshold = float(call.config.get("threshold") or 0.0)
    bound, of = call.config.get("max_value"), _given(call)
    x = of.value
    if not threshold and bound is None:
        text = f"F.leaky_relu({x}, {slope!r})" if slope else f"F.relu({x})"
        return call.gives(text, first=of.first)
    if threshold:
        text = f"{x} * ({x} > {threshold!r})"
        text = text if bound is None else f"({text}).clamp(0, {float(bound)!r})"
    else:
        text = f"{x}.clamp(0, {float(bound or 0)!r})"
        text = f"F.relu6({x})" if bound == 6 else text
    if slope:
        below = f"{threshold!r} - {x}" if threshold else f"-{x}"
        text = f"{text} - {slope!r} * F.relu({below})"
    return call.gives(text, first=of.first)


@translates("Softmax")
def _softmax(call: LayerCall) -> Laid:
    x, axis = _given(call), call.config.get("axis", -1)
    axes = axis if isinstance(axis, list | tuple) else [axis]
    dims = tuple(dimension(int(axis), len(x.shape), x.first) for axis in axes)
    text = f"F.softmax({x.value}, {dims[0]})"
    if len(dims) > 1:
        whole = f"{x.value}.logsumexp({dims}, keepdim=True)"
        text = f"torch.exp({x.value} - {whole})"
    return call.gives(text, first=x.first)


@translates("PReLU")
def _prelu(call: LayerCall) -> Laid:
    """Use nn.PReLU where there is one slope for all, or one for each channel."""
    x = _given(call)
    rank = len(x.shape)
    shared = {axis % rank for axis in call.config.get("shared_axes") or []}
    unshared = set(range(1, rank)) - shared
    alpha = call.variable(0)
    if {dimension(axis, rank, x.first) for axis in unshared} <= {1}:
        size = x.value.shape[1] if unshared else 1
        layer = call.add(
            lambda: nn.PReLU(size), weight=alpha.then(lambda a: a.reshape(-1))
        )
        return call.gives(f"{layer}({x.value})", first=x.first)
    sizes = [1 if axis in shared else x.shape[axis] for axis in range(1, rank)]
    if x.first:
        sizes = [sizes[-1], *sizes[:-1]]
        alpha = alpha.then(lambda a: np.moveaxis(a, -1, 0))
    slope = call.tensor("alpha", sizes, alpha)
    text = f"F.relu({x.value}) - {slope} * F.relu(-{x.value})"
    return call.gives(text, first=x.first)
