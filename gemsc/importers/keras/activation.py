"""Activations: the names in other layers' settings, and the layers.

Example: `Dense(8, activation="leaky_relu")` gives
    dense = F.leaky_relu(self.dense(x), 0.2)  # Dense 'dense'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from gemsc.importers.keras.layer import Laid, LayerCall, Translator, dimension

# What each name of keras.activations computes; {axis} is the last one of Keras.
NAMES: Mapping[str, str] = {
    "celu": "F.celu({x})",
    "elu": "F.elu({x})",
    "exponential": "torch.exp({x})",
    "gelu": "F.gelu({x})",
    "glu": "F.glu({x}, {axis})",
    "hard_shrink": "F.hardshrink({x})",
    "hard_sigmoid": "F.hardsigmoid({x})",
    "hard_silu": "F.hardswish({x})",
    "hard_swish": "F.hardswish({x})",
    "hard_tanh": "F.hardtanh({x})",
    "leaky_relu": "F.leaky_relu({x}, 0.2)",
    "linear": "{x}",
    "log_sigmoid": "F.logsigmoid({x})",
    "log_softmax": "F.log_softmax({x}, {axis})",
    "mish": "F.mish({x})",
    "relu": "F.relu({x})",
    "relu6": "F.relu6({x})",
    "selu": "F.selu({x})",
    "sigmoid": "torch.sigmoid({x})",
    "silu": "F.silu({x})",
    "soft_shrink": "F.softshrink({x})",
    "softmax": "F.softmax({x}, {axis})",
    "softplus": "F.softplus({x})",
    "softsign": "F.softsign({x})",
    "sparse_plus": "({x}.clamp(-1, 1) + 1) ** 2 / 4 + F.relu({x} - 1)",
    "sparse_sigmoid": "(({x} + 1) / 2).clamp(0, 1)",
    "squareplus": "({x} + ({x} ** 2 + 4).sqrt()) / 2",
    "swish": "F.silu({x})",
    "tanh": "torch.tanh({x})",
    "tanh_shrink": "F.tanhshrink({x})",
}


def activated(
    call: LayerCall, text: str, setting: Any, first: bool = False, part: str = ""
) -> Laid:
    """Add a line: an expression, with an activation of Keras around it.

    `setting` is what a layer's config has: a name, None, or a layer of its own, whose
    variables are in a part of this one.
    """
    if setting is None:
        setting = "linear"
    if isinstance(setting, Mapping):
        return _configured(call, text, setting, first, part or "activation")
    if setting == "sparsemax":
        return _sparsemax(call, call.gives(text, first=first))
    if setting not in NAMES:
        raise call.refuse(
            f"has the activation '{setting}', which is not one of Keras",
            help="give the whole layer in a file of your own: --custom layers.py",
        )
    return _filled(call, NAMES[setting], text, first)


def _configured(
    call: LayerCall, text: str, setting: Mapping[str, Any], first: bool, part: str
) -> Laid:
    """Add a line with an activation that is an object of the config."""
    kind, config = str(setting.get("class_name")), setting.get("config")
    if isinstance(config, str):  # a function of keras.activations
        return activated(call, text, config, first)
    if kind == "Activation" and isinstance(config, Mapping):
        return activated(call, text, config.get("activation"), first, part)
    if kind not in ACTIVATION_LAYERS or not isinstance(config, Mapping):
        return activated(call, text, kind, first)
    return _layer(call, kind, config, call.gives(text, first=first), part)


def _filled(call: LayerCall, template: str, text: str, first: bool) -> Laid:
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


def _activation(call: LayerCall) -> Laid:
    setting = call.config.get("activation")
    (value,), first = call.alike()
    if setting in (None, "linear"):
        return Laid(value, first)
    return activated(call, str(value), setting, first)


def _of_kind(kind: str) -> Translator:
    def translate(call: LayerCall) -> Laid:
        if len(call.inputs) != 1:
            raise call.refuse(
                "has a mask", help="masks are not supported: leave it out"
            )
        (value,), first = call.alike()
        return _layer(call, kind, call.config, Laid(value, first), "")

    return translate


def _layer(
    call: LayerCall, kind: str, config: Mapping[str, Any], of: Laid, part: str
) -> Laid:
    return KINDS[kind](call, config, of, part)


def _elu(call: LayerCall, config: Mapping[str, Any], of: Laid, part: str) -> Laid:
    alpha = float(config.get("alpha", 1.0))
    return call.gives(f"F.elu({of.value}, {alpha!r})", first=of.first)


def _leaky(call: LayerCall, config: Mapping[str, Any], of: Laid, part: str) -> Laid:
    slope = float(config.get("negative_slope", 0.3))
    return call.gives(f"F.leaky_relu({of.value}, {slope!r})", first=of.first)


def _relu(call: LayerCall, config: Mapping[str, Any], of: Laid, part: str) -> Laid:
    """Write max(x, 0), with a slope for what is below, a bound and a threshold."""
    slope = float(config.get("negative_slope") or 0.0)
    threshold = float(config.get("threshold") or 0.0)
    bound = config.get("max_value")
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


def _softmax(call: LayerCall, config: Mapping[str, Any], of: Laid, part: str) -> Laid:
    axis = config.get("axis", -1)
    rank = len(of.shape)
    axes = axis if isinstance(axis, list | tuple) else [axis]
    dims = [dimension(int(each), rank, of.first) for each in axes]
    if len(dims) == 1:
        text = f"F.softmax({of.value}, {dims[0]})"
    else:
        whole = f"{of.value}.logsumexp({tuple(dims)}, keepdim=True)"
        text = f"torch.exp({of.value} - {whole})"
    return call.gives(text, first=of.first)


def _prelu(call: LayerCall, config: Mapping[str, Any], of: Laid, part: str) -> Laid:
    """Use nn.PReLU where there is one slope for all, or one for each channel."""
    rank = len(of.shape)
    shared = {axis % rank for axis in config.get("shared_axes") or []}
    own = set(range(1, rank)) - shared
    alpha = call.variable(0, part)
    dims = {dimension(axis, rank, of.first) for axis in own}
    if dims <= {1}:
        size = of.value.shape[1] if own else 1
        layer = call.add(
            lambda: nn.PReLU(size), part, weight=alpha.then(lambda a: a.reshape(-1))
        )
        return call.gives(f"{layer}({of.value})", first=of.first)
    sizes = [1 if axis in shared else of.shape[axis] for axis in range(1, rank)]
    if of.first:
        sizes = [sizes[-1], *sizes[:-1]]
        alpha = alpha.then(lambda a: np.moveaxis(a, -1, 0))
    slope = call.tensor(part or "alpha", sizes, alpha)
    return call.gives(
        f"F.relu({of.value}) - {slope} * F.relu(-{of.value})", first=of.first
    )


Kind = Callable[[LayerCall, Mapping[str, Any], Laid, str], Laid]
KINDS: Mapping[str, Kind] = {
    "ELU": _elu,
    "LeakyReLU": _leaky,
    "PReLU": _prelu,
    "ReLU": _relu,
    "Softmax": _softmax,
}
ACTIVATION_LAYERS: Mapping[str, Translator] = {
    "Activation": _activation,
    **{kind: _of_kind(kind) for kind in KINDS},
}
