"""Functions of keras.ops between the layers of a Functional model.

Example: `keras.ops.multiply(x, 2.0)` is an operation of the class Multiply and gives
    multiply = x * 2.0  # Multiply 'multiply'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from gemsc.importers.keras.activation import ELU, LEAKY_RELU, NAMES, unary
from gemsc.importers.keras.config import found_in, snake
from gemsc.importers.keras.core import BATCH, joined
from gemsc.importers.keras.layer import (
    OPERATIONS,
    Function,
    Laid,
    LayerCall,
    dimension,
    translates,
)
from gemsc.importers.sheet import filled
from gemsc.importers.weight import constant


def operation(kind: str) -> Callable[[Function], Function]:
    """Let a function translate the calls of a function of keras.ops."""
    return translates(kind, table=OPERATIONS)


def _elementwise(template: str, call: LayerCall) -> Laid:
    """Write a function of two arguments, element by element."""
    given = _given(call, "x1", "x2")
    tensors = [value for value in given if isinstance(value, Laid)]
    firsts = {laid.first for laid in tensors}
    ranks = {len(laid.value.shape) for laid in tensors}
    plain = any(isinstance(value, np.ndarray) for value in given)
    first = firsts == {True} and len(ranks) == 1 and not plain
    texts = [_text(call, value, first) for value in given]
    return call.gives(template.format(*texts), first=first)


def _extreme(kind: str, call: LayerCall) -> Laid:
    """Write the larger or smaller of two; of a value and a number, its bound."""
    numbers = [v for v in call.arguments if isinstance(v, int | float)]
    if not numbers:
        return _elementwise(f"torch.{kind}imum({{0}}, {{1}})", call)
    bound = "min" if kind == "max" else "max"
    given = replace(call, arguments=[call.inputs[0], *numbers])
    return _elementwise(f"{{0}}.clamp({bound}={{1}})", given)


def _given(call: LayerCall, *names: str) -> list[Any]:
    """Return the arguments that a function takes, by place, by name or as settings."""
    return [*call.arguments, *map(call.setting, names[len(call.arguments) :])]


def _text(call: LayerCall, value: Any, first: bool) -> str:
    if isinstance(value, Laid):
        return str(value.ordered(call.sheet, first=first))
    if isinstance(value, np.ndarray):
        array = value.astype(np.float32)
        part = f"constant_{len(call.layer.tensors)}"
        return str(call.tensor(part, array.shape, constant(array), trained=False))
    if isinstance(value, bool | int | float):
        return f"({value!r})" if value < 0 else repr(value)
    raise call.refuse(f"is given {type(value).__name__}", help="give a number")


@operation("Gelu")
def _gelu(call: LayerCall) -> Laid:
    laid = call.inputs[0]
    how = ', approximate="tanh"' if call.config.get("approximate", True) else ""
    return call.gives(f"F.gelu({laid.value}{how})", first=laid.first)


def _along(template: str, call: LayerCall) -> Laid:
    laid = call.inputs[0]
    axis = int(call.setting("axis", -1))
    dim = dimension(axis, len(laid.value.shape), laid.first)
    return call.gives(template.format(x=laid.value, dim=dim), first=laid.first)


def _reduction(template: str, call: LayerCall) -> Laid:
    """Write a function that leaves axes out."""
    laid, axis = call.inputs[0], call.config.get("axis")
    rank = len(laid.value.shape)
    axes = range(rank) if axis is None else found_in(axis, int)
    if any(a % rank == 0 for a in axes):
        raise call.refuse("goes over the samples of the batch", help=BATCH)
    keep = bool(call.config.get("keepdims"))
    channels = {a % rank for a in axes} == set(range(1, rank - 1))
    first = laid.first and (keep or channels)
    x = laid.value if first else laid.ordered(call.sheet, first=False)
    dims = tuple(sorted(dimension(a, rank, first) for a in axes))
    kept = ", keepdim=True" if keep else ""
    text = template.format(x=x, dims=dims, keep=kept)
    if (start := call.config.get("initial")) is not None:
        bound = "min" if call.layer.kind == "Max" else "max"
        text += f".clamp({bound}={float(start)!r})"
    return call.gives(text, first=first and keep)


# -------------------------------------------------------------------------- shapes


@operation("Reshape")
def _reshape(call: LayerCall) -> Laid:
    x = call.last()
    batch, *sizes = call.config["newshape"]
    known = [-1 if size is None else int(size) for size in sizes]
    if batch not in (None, -1, x.shape[0]) or (batch == x.shape[0] and -1 in known):
        raise call.refuse("changes the size of the batch", help=BATCH)
    # the batch alone may be open
    texts = map(str, filled(known, math.prod(x.shape[1:])))
    return call.gives(f"{x}.reshape(-1, {', '.join(texts)})")


@operation("Transpose")
def _transpose(call: LayerCall) -> Laid:
    x, axes = call.last(), call.config.get("axes")
    if axes is None or axes[0] != 0:
        raise call.refuse("moves the axis of the batch", help=BATCH)
    return call.gives(f"{x}.permute({', '.join(str(int(axis)) for axis in axes)})")


@operation("Swapaxes")
def _swapped(call: LayerCall) -> Laid:
    x = call.last()
    axes = [int(call.config[name]) % len(x.shape) for name in ("axis1", "axis2")]
    if 0 in axes:
        raise call.refuse("moves the axis of the batch", help=BATCH)
    return call.gives(f"{x}.transpose({axes[0]}, {axes[1]})")


@operation("ExpandDims")
def _expanded(call: LayerCall) -> Laid:
    x = call.last()
    axis = int(call.config["axis"]) % (len(x.shape) + 1)
    if axis == 0:
        raise call.refuse("moves the axis of the batch", help=BATCH)
    return call.gives(f"{x}.unsqueeze({axis})")


@operation("Squeeze")
def _squeezed(call: LayerCall) -> Laid:
    x, axis = call.last(), call.config.get("axis")
    rank = len(x.shape)
    if axis is None:
        axis = [a for a, size in enumerate(x.shape) if a and size == 1]
    axes = tuple(int(a) % rank for a in found_in(axis, int))
    if any(a == 0 or x.shape[a] != 1 for a in axes):
        raise call.refuse(f"takes axes of more than one element: {axes}")
    return call.gives(f"{x}.squeeze({axes})")


@operation("Split")
def _split(call: LayerCall) -> Sequence[Laid]:
    x, parts = call.last(), call.config["indices_or_sections"]
    axis = int(call.config.get("axis", 0)) % len(x.shape)
    if axis == 0:
        raise call.refuse("splits the batch", help=BATCH)
    if isinstance(parts, int):
        sizes = [x.shape[axis] // parts] * parts
    else:
        ends = [0, *map(int, parts), x.shape[axis]]
        sizes = [after - before for before, after in pairwise(ends)]
    return call.several(f"{x}.split({sizes}, {axis})", len(sizes))


@operation("GetItem")
def _item(call: LayerCall) -> Laid:
    """Write x[:, 1:, -1]; each sample of the batch is treated alike."""
    x = call.last()
    key = _given(call, "x", "key")[1]
    keys = list(key) if isinstance(key, list | tuple) else [key]
    texts = [_key(call, item) for item in keys]
    if texts[:1] not in ([":"], ["..."]):
        raise call.refuse("takes samples out of the batch", help=BATCH)
    return call.gives(f"{x}[{', '.join(texts)}]")


def _key(call: LayerCall, item: Any) -> str:
    if item is Ellipsis or item is None:
        return "..." if item is Ellipsis else "None"
    if type(item) is int:
        return str(item)
    if isinstance(item, slice):
        bounds = (item.start, item.stop, item.step)
        if all(bound is None or type(bound) is int for bound in bounds):
            texts = ["" if bound is None else str(bound) for bound in bounds]
            if (item.step or 1) > 0:
                return ":".join(texts if item.step else texts[:2])
    raise call.refuse("takes elements in a way that PyTorch has not")


@operation("Matmul")
def _matmul(call: LayerCall) -> Laid:
    return call.gives(f"{call.last(0)} @ {call.last(1)}")


@operation("Cast")
def _cast(call: LayerCall) -> Laid:
    laid, name = call.inputs[0], str(call.config.get("dtype"))
    if name in ("float", "float32", "float64"):  # as the network
        return call.gives(f"{laid.value}.float()", first=laid.first)
    if "int" in name:
        return call.gives(f"{laid.value}.long()", first=laid.first)
    advice = "leave it out: gemsc compile --precision has bfloat16 and float16"
    raise call.refuse(f"casts to {name!r:.40}", advice if "float" in name else None)


# ----------------------------------------------------------------- one line for each


# what PyTorch has under the same name
_SAME = (
    "Abs Ceil Cos Erf Exp Expm1 Floor Log Log1p Reciprocal Rsqrt Sigmoid Sign Sin "
    "Sqrt Square Tanh"
)
# activations without settings
_ACTIVATIONS = (
    "HardSigmoid HardSilu HardTanh LogSigmoid Relu Relu6 Selu Silu Softplus Softsign "
    "SparsePlus SparseSigmoid TanhShrink"
)
for _name in _SAME.split():
    operation(_name)(partial(unary, f"torch.{_name.lower()}({{x}})"))
for _name in _ACTIVATIONS.split():
    operation(_name)(partial(unary, NAMES[snake(_name)]))
for _name, _template in {
    "Add": "{0} + {1}",
    "Divide": "{0} / {1}",
    "Multiply": "{0} * {1}",
    "Power": "{0} ** {1}",
    "Subtract": "{0} - {1}",
    "TrueDivide": "{0} / {1}",
}.items():
    operation(_name)(partial(_elementwise, _template))
for _name, _template in {
    "Amax": "{x}.amax({dims}{keep})",
    "Amin": "{x}.amin({dims}{keep})",
    "Max": "{x}.amax({dims}{keep})",
    "Mean": "{x}.mean({dims}{keep})",
    "Min": "{x}.amin({dims}{keep})",
    "Std": "{x}.std({dims}, correction=0{keep})",
    "Sum": "{x}.sum({dims}{keep})",
    "Var": "{x}.var({dims}, correction=0{keep})",
}.items():
    operation(_name)(partial(_reduction, _template))
operation("Absolute")(partial(unary, "torch.abs({x})"))
operation("Concatenate")(partial(joined, "cat", 0))
operation("Clip")(partial(unary, "{x}.clamp({x_min!r}, {x_max!r})", x_min=0, x_max=0))
operation("Elu")(partial(unary, ELU, alpha=1.0))
operation("LeakyRelu")(partial(unary, LEAKY_RELU, negative_slope=0.2))
operation("LogSoftmax")(partial(_along, "F.log_softmax({x}, {dim})"))
operation("Maximum")(partial(_extreme, "max"))
operation("Minimum")(partial(_extreme, "min"))
operation("Negative")(partial(unary, "-{x}"))
operation("Softmax")(partial(_along, "F.softmax({x}, {dim})"))
operation("Stack")(partial(joined, "stack", 0))
