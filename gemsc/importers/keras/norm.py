"""Normalization: by the batch, by the sample, by groups of channels, by constants."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

import gemsc.nn
from gemsc.importers.keras.layer import Laid, LayerCall, dimension, translates
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array, Weight, constant


def _scales(call: LayerCall, *sizes: int, always: bool = False) -> dict[str, Weight]:
    """Return gamma and beta; ones and zeros, which are not trained, for what is off.

    Nothing if both are, unless a layer has them `always`.
    """
    scale, center = bool(call.config["scale"]), bool(call.config["center"])
    if not (scale or center or always):
        return {}
    ones, zeros = np.ones(sizes, np.float32), np.zeros(sizes, np.float32)
    return {
        "weight": call.variable(0) if scale else constant(ones),
        "bias": call.variable(int(scale)) if center else constant(zeros),
    }


def _axes(call: LayerCall) -> list[int]:
    """Return the axes that are normalized together, as Keras counts them."""
    axis, rank = call.config["axis"], len(call.inputs[0].shape)
    axes = sorted(a % rank for a in (axis if isinstance(axis, list) else [axis]))
    if not axes or axes[0] == 0 or len(set(axes)) < len(axes):
        raise call.refuse(f"has axis={axis!r:.40}, and the batch is not normalized")
    return axes


def _channels(call: LayerCall) -> tuple[Symbol, bool]:
    """Return the input with its axis as the channels, and whether it is the last."""
    rank, axes = len(call.inputs[0].shape), _axes(call)
    if axes == [rank - 1]:
        return call.first(), True
    if axes == [1]:
        return call.last(), False
    raise call.refuse(f"has axis={call.config['axis']!r:.40}, and takes 1 or -1")


@translates("BatchNormalization")
def _batch(call: LayerCall) -> Laid:
    """Keras' momentum is the share of the past, PyTorch's that of the batch."""
    config = call.config
    if config.get("renorm"):
        raise call.refuse("has renorm=True", help="build it without")
    x, last = _channels(call)
    rank, size = len(x.shape), x.shape[1]
    weights = _scales(call, size, always=call.layer.frozen)
    count = int(bool(config["scale"])) + int(bool(config["center"]))
    weights["running_mean"] = call.variable(count)
    weights["running_var"] = call.variable(count + 1)
    eps = float(config["epsilon"])
    if call.layer.frozen:
        name = call.add(
            lambda: gemsc.nn.FrozenBatchNorm(size, eps=eps), "", (), **weights
        )
        return call.gives(f"{name}({x})", first=last)
    if not 2 <= rank <= 5:
        raise call.refuse(f"has an input of {rank} axes, and 2 to 5 are supported")
    make = getattr(gemsc.nn, f"BatchNorm{max(rank - 2, 1)}d")
    momentum = round(1.0 - float(config["momentum"]), 12)
    affine = "weight" in weights
    name = call.add(
        lambda: make(size, eps=eps, momentum=momentum, affine=affine), "", (), **weights
    )
    return call.gives(f"{name}({x})", first=last)


@translates("LayerNormalization", "RMSNormalization")
def _layer(call: LayerCall) -> Laid:
    """Normalize the last axes; others go there, and back."""
    if call.config.get("rms_scaling"):
        raise call.refuse("has rms_scaling=True", help="use RMSNormalization")
    x, axes = call.last(), _axes(call)
    sizes, eps = [x.shape[axis] for axis in axes], float(call.config["epsilon"])
    if call.layer.kind == "RMSNormalization":
        name = call.add(lambda: nn.RMSNorm(sizes, eps), weight=call.variable(0))
    else:
        held = _scales(call, *sizes)
        name = call.add(lambda: nn.LayerNorm(sizes, eps, bool(held)), "", (), **held)
    rank = len(x.shape)
    order = [axis for axis in range(rank) if axis not in axes] + axes
    if order == sorted(order):
        return call.gives(f"{name}({x})")
    back = [order.index(axis) for axis in range(rank)]
    there = f"{x}.permute({', '.join(map(str, order))})"
    return call.gives(f"{name}({there}).permute({', '.join(map(str, back))})")


@translates("GroupNormalization")
def _group(call: LayerCall) -> Laid:
    x, last = _channels(call)
    size, groups = x.shape[1], call.config["groups"]
    groups = size if groups == -1 else groups
    weights = _scales(call, size)
    eps, affine = float(call.config["epsilon"]), bool(weights)
    name = call.add(lambda: nn.GroupNorm(groups, size, eps, affine), "", (), **weights)
    if last and call.inputs[0].value in call.sheet.inputs:
        # PyTorch 2.13 crashes in the backward of a permuted input without gradient
        return call.gives(f"{name}({x}.contiguous())", first=last)
    return call.gives(f"{name}({x})", first=last)


@translates("UnitNormalization")
def _unit(call: LayerCall) -> Laid:
    (x,), first = call.alike()
    rank = len(x.shape)
    dims = tuple(dimension(axis, rank, first) for axis in _axes(call))
    dim = dims[0] if len(dims) == 1 else dims
    return call.gives(f"F.normalize({x}, dim={dim})", first=first)


# --------------------------------------------------------------------- by constants


@translates("Rescaling")
def _rescaling(call: LayerCall) -> Laid:
    """Write x * scale + offset: of numbers, or of one for each channel."""
    (x,), first = call.alike()
    text = f"{x}"
    for name, sign, neutral in (("scale", "*", 1.0), ("offset", "+", 0.0)):
        value = _numbers(call.config[name])
        if value.ndim == 0:
            number = float(value)
            text += f" {sign} {number!r}" if number != neutral else ""
        else:
            text += f" {sign} {_constant(call, name, value, first)}"
    if text == f"{x}":
        return call.inputs[0]
    return call.gives(text, first=first)


def _numbers(value: Any) -> Array:
    if isinstance(value, dict):  # an array that Keras has made a dict of
        value = value["config"]["value"]
    numbers: Array = np.array(value, np.float64)
    return numbers


def _constant(call: LayerCall, name: str, value: Array, first: bool) -> Symbol:
    """Add numbers for the last axes of Keras."""
    rank = len(call.inputs[0].shape)
    sizes = (1,) * (rank - value.ndim) + value.shape
    array = _of_samples(value.astype(np.float32).reshape(sizes), first)
    return call.tensor(name, array.shape, constant(array), trained=False)


def _of_samples(array: Array, first: bool) -> Array:
    """Return numbers beside all axes as they stand beside each sample."""
    inner: Array = (np.moveaxis(array, -1, 1) if first else array)[0]
    return inner


@translates("Normalization")
def _normalization(call: LayerCall) -> Laid:
    """Write (x - mean) / max(sqrt(variance), 1e-7), or the way back."""
    (x,), first = call.alike()
    shape = call.inputs[0].shape
    axis = call.config["axis"]
    axes = [] if axis is None else axis if isinstance(axis, list) else [axis]
    kept = {a % len(shape) for a in axes}
    if 0 in kept:
        raise call.refuse("keeps the axis of the batch")
    broadcast = [n if a in kept else 1 for a, n in enumerate(shape)]

    def laid(array: Array) -> Array:
        return _of_samples(array.reshape(broadcast), first)

    held = []
    for index, name in enumerate(("mean", "variance")):
        given = call.config.get(name)
        if given is None:
            weight = call.variable(index).then(laid)
        else:
            numbers = _numbers(given).astype(np.float32)
            if numbers.ndim:
                numbers = numbers.reshape([n for n in broadcast if n > 1] or [1])
            weight = constant(laid(np.broadcast_to(numbers, broadcast)))
        sizes = laid(np.broadcast_to(np.int8(0), broadcast)).shape
        held.append(call.tensor(name, sizes, weight, trained=False))
    mean, deviation = held[0], f"{held[1]}.sqrt().clamp(min=1e-07)"
    if call.config.get("invert"):
        return call.gives(f"{mean} + {x} * {deviation}", first=first)
    return call.gives(f"({x} - {mean}) / {deviation}", first=first)
