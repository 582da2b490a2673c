"""Dense layers, embeddings, dropout, and layers that move numbers without computing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from torch import nn

from gemsc.importers.keras.activation import activated
from gemsc.importers.keras.config import class_and_config, found_in
from gemsc.importers.keras.layer import (
    Laid,
    LayerCall,
    dimension,
    translates,
)
from gemsc.importers.sheet import Symbol, filled
from gemsc.importers.weight import Array

BATCH = "build the model of operations within each sample"

# ----------------------------------------------------------------------- products


@translates("Dense")
def _dense(call: LayerCall) -> Laid:
    """Use nn.Linear, whose weight is Keras' kernel transposed."""
    config, x = call.config, call.last()
    layer = linear_layer(
        call, x.shape[-1], config["units"], config.get("use_bias", True)
    )
    return activated(call, f"{layer}({x})", config.get("activation"))


def linear_layer(
    call: LayerCall, inside: int, outside: int, bias: bool, part: str = "", at: str = ""
) -> str:
    """Return the text of an nn.Linear, whose kernel and bias may have more axes.

    They are the first variables of the layer, or of a part of it that is `at` a path.
    """

    def turned(kernel: Array) -> Array:
        return (kernel if kernel.ndim == 2 else kernel.reshape(inside, outside)).T

    return call.add(
        lambda: nn.Linear(inside, outside, bias),
        part,
        weight=call.variable(0, at).then(turned),
        bias=call.variable(1, at).then(lambda a: a.reshape(-1)) if bias else None,
    )


@translates("EinsumDense")
def _einsum_dense(call: LayerCall) -> Laid:
    """Use nn.Linear where the equation is a product of matrices, else torch.einsum."""
    config, x = call.config, call.last()
    equation = str(config["equation"]).replace(" ", "")
    text = _as_linear(call, equation)
    if text is None:
        size = call.size(0)
        kernel = call.tensor("kernel", size, call.variable(0))
        if not re.fullmatch(r"[A-Za-z.,>-]*", equation):
            raise call.refuse(
                f"has the equation {equation!r}, which einsum does not read"
            )
        text = f'torch.einsum("{equation}", {x}, {kernel})'
        if config.get("bias_axes"):
            text += f" + {call.tensor('bias', call.size(1), call.variable(1))}"
    return activated(call, text, config.get("activation"))


def _as_linear(call: LayerCall, equation: str) -> str | None:
    """Return the text with nn.Linear: for `abc,cde->abde`, not for `abc,acd->abd`."""
    before, _, result = equation.partition("->")
    given, _, kernel = before.partition(",")
    given, result = given.replace("...", "."), result.replace("...", ".")
    for count in range(1, len(kernel)):
        summed, made = kernel[:count], kernel[count:]
        leading = given.removesuffix(summed)
        if given.endswith(summed) and leading and result == leading + made:
            break
    else:
        return None
    axes = str(call.config.get("bias_axes") or "")
    if set(summed) & set(made) or axes not in ("", made):
        return None
    x, size = call.last(), call.size(0)
    inside, outside = math.prod(size[:count]), math.prod(size[count:])
    layer = linear_layer(call, inside, outside, bool(axes))
    flat = f"{x}.flatten({-len(summed)})" if len(summed) > 1 else f"{x}"
    text = f"{layer}({flat})"
    return f"{text}.unflatten(-1, {size[count:]})" if len(made) > 1 else text


@translates("Embedding")
def _embedding(call: LayerCall) -> Laid:
    config = call.config
    size = int(config["input_dim"]), int(config["output_dim"])
    table = call.add(lambda: nn.Embedding(*size), weight=call.variable(0))
    indices = call.last()
    if indices.tensor.is_floating_point():
        return call.gives(f"{table}({indices}.long())")
    return call.gives(f"{table}({indices})")


@translates("TimeDistributed")
def _time_distributed(call: LayerCall) -> Laid:
    """Call the layer on all steps in one batch."""
    layer = call.config["layer"]
    if not isinstance(layer, Mapping):
        raise call.refuse("holds no layer")
    if _takes_statistics(layer):
        raise call.refuse(
            "normalizes each step of time by its own statistics, one after the other",
            help="put the BatchNormalization outside of TimeDistributed, or freeze it",
        )
    x = call.last()
    if layer.get("class_name") == "Dense":  # of the last axis, whatever is before it
        return call.inner(layer, "layer", [Laid(x)])
    flat = Laid(call.sheet.line("steps", f"{x}.flatten(0, 1)"))
    made = call.last(call.inner(layer, "layer", [flat]))
    return call.gives(f"{made}.unflatten(0, (-1, {x.shape[1]}))")


def _takes_statistics(setting: Any) -> bool:
    """Return whether a layer in a config is, or holds, a BatchNormalization."""
    if isinstance(setting, list):
        return any(map(_takes_statistics, setting))
    if not isinstance(setting, Mapping):
        return False
    kind, config = class_and_config(setting)
    if kind == "BatchNormalization":
        return config.get("trainable") is not False
    return any(map(_takes_statistics, setting.values()))


# ----------------------------------------------------------------- randomness


@translates("Dropout")
def _dropout(call: LayerCall) -> Laid:
    """Drop elements, or with a noise_shape whole slices, of which one is drawn."""
    rate, noise = float(call.config["rate"]), call.config.get("noise_shape")
    if not rate:
        return call.inputs[0]
    drop = call.add(lambda: nn.Dropout(rate))
    if noise is None:
        (x,), first = call.alike()
        return call.gives(f"{drop}({x})", first=first)
    x = call.last()
    if len(noise) != len(x.shape) or (noise[0] == 1 and x.shape[0] != 1):
        raise call.refuse(
            f"has the noise_shape {noise}: one draw for several samples",
            help="leave the first size of noise_shape open: None",
        )
    cut = [":1" if n == 1 else ":" for n in noise]
    return call.gives(f"{x} * {drop}(torch.ones_like({x}[{', '.join(cut)}]))")


@translates("AlphaDropout")
def _alpha_dropout(call: LayerCall) -> Laid:
    rate = float(call.config["rate"])
    if call.config.get("noise_shape") is not None:
        raise call.refuse("has a noise_shape", help="leave it out")
    (x,), first = call.alike()
    return call.gives(f"{call.add(lambda: nn.AlphaDropout(rate))}({x})", first=first)


@translates("GaussianDropout", "GaussianNoise")
def _noisy(call: LayerCall) -> Laid:
    if call.layer.kind == "GaussianNoise":
        deviation, template = float(call.config["stddev"]), "{x} + {noise}"
    else:
        rate = float(call.config["rate"])
        deviation, template = math.sqrt(rate / (1.0 - rate)), "{x} * (1 + {noise})"
    if not deviation:
        return call.inputs[0]
    (x,), first = call.alike()
    text = template.format(x=x, noise=f"{deviation!r} * torch.randn_like({x})")
    return call.gives(f"{text} if self.training else {x}", first=first)


# -------------------------------------------------------------------- moving


@translates("Identity")
def _identity(call: LayerCall) -> Laid:
    return call.inputs[0]


@translates("Flatten")
def _flatten(call: LayerCall) -> Laid:
    """Flatten in the order that Keras has: channels last."""
    x = call.inputs[0]
    rank = len(x.shape)
    if rank == 1:
        return call.gives(f"{x.value}.unsqueeze(1)")
    if rank == 2:
        return x
    if call.config.get("data_format") == "channels_first":
        axes = ", ".join(map(str, (0, *range(2, rank), 1)))
        return call.gives(f"{call.last()}.permute({axes}).flatten(1)")
    if x.first and math.prod(x.shape[1:-1]) == 1:  # no order to keep
        return call.gives(f"{x.value}.flatten(1)")
    return call.gives(f"{call.last()}.flatten(1)")


@translates("Reshape")
def _reshape(call: LayerCall) -> Laid:
    x = call.last()
    target = [-1 if size is None else int(size) for size in call.config["target_shape"]]
    sizes = [-1, *filled(target, math.prod(x.shape[1:]))]
    return call.gives(f"{x}.reshape({', '.join(map(str, sizes))})")


@translates("Permute")
def _permute(call: LayerCall) -> Laid:
    dims = ", ".join(str(int(axis)) for axis in call.config["dims"])
    return call.gives(f"{call.last()}.permute(0, {dims})")


@translates("RepeatVector")
def _repeat_vector(call: LayerCall) -> Laid:
    count = int(call.config["n"])
    return call.gives(f"{call.last()}.unsqueeze(1).repeat(1, {count}, 1)")


# ----------------------------------------------------------------------------- merging


def _aligned(call: LayerCall) -> tuple[Sequence[str], bool]:
    """Return the inputs with as many axes each; new ones are behind the batch."""
    if len(call.inputs) < 2:
        raise call.refuse("needs two inputs or more")
    values, first = call.alike()
    rank = max(len(value.shape) for value in values)
    texts = [f"{v}" + ".unsqueeze(1)" * (rank - len(v.shape)) for v in values]
    return texts, first


def _joined(template: str, call: LayerCall) -> Laid:
    """Write an operation on two, used from left to right."""
    texts, first = _aligned(call)
    whole = reduce(lambda a, b: template.format(a=a, b=b), texts)
    return call.gives(whole, first=first)


for _kind, _template in {
    "Add": "{a} + {b}",
    "Maximum": "torch.maximum({a}, {b})",
    "Minimum": "torch.minimum({a}, {b})",
    "Multiply": "{a} * {b}",
}.items():
    translates(_kind)(partial(_joined, _template))


@translates("Average")
def _average(call: LayerCall) -> Laid:
    texts, first = _aligned(call)
    return call.gives(f"({' + '.join(texts)}) / {len(texts)}", first=first)


@translates("Subtract")
def _subtract(call: LayerCall) -> Laid:
    if len(call.inputs) != 2:
        raise call.refuse("needs two inputs")
    return _joined("{a} - {b}", call)


def joined(function: str, default: int, call: LayerCall) -> Laid:
    """Write torch.cat or torch.stack; `default` is the axis if none is named."""
    axis, is_new = int(call.setting("axis", default)), function == "stack"
    values, first = call.alike()
    if is_new:
        values, first = [call.last(laid) for laid in call.inputs], False
    rank = len(values[0].shape) + is_new
    if axis % rank == 0:
        raise call.refuse("joins the samples of batches", help=BATCH)
    texts, dim = ", ".join(map(str, values)), dimension(axis, rank, first)
    return call.gives(f"torch.{function}([{texts}], {dim})", first=first)


translates("Concatenate")(partial(joined, "cat", -1))


@translates("Dot")
def _dot(call: LayerCall) -> Laid:
    """Sum over an axis of each, sample by sample."""
    if len(call.inputs) != 2:
        raise call.refuse("needs two inputs")
    a, b = call.last(0), call.last(1)
    axes = call.config["axes"]
    one, other = (axes, axes) if isinstance(axes, int) else axes
    over = int(one) % len(a.shape), int(other) % len(b.shape)
    if 0 in over:
        raise call.refuse("multiplies samples with each other", help="use other axes")
    texts = [str(a), str(b)]
    if call.config.get("normalize"):
        texts = [
            f"F.normalize({x}, dim={d}, eps=1e-7)"
            for x, d in zip(texts, over, strict=True)
        ]
    left, right, kept = _letters(a, b, over)
    text = f'torch.einsum("{left},{right}->b{kept}", {", ".join(texts)})'
    return call.gives(text if kept else f"{text}.unsqueeze(1)")


def _letters(a: Symbol, b: Symbol, over: tuple[int, int]) -> tuple[str, str, str]:
    letters = iter("ijklmnpqrstuvw")
    left = "b" + "".join(next(letters) for _ in a.shape[1:])
    right = "b" + "".join(next(letters) for _ in b.shape[1:])
    right = right.replace(right[over[1]], left[over[0]])
    return left, right, (left[1:] + right[1:]).replace(left[over[0]], "")


# ------------------------------------------------------------------- refused


# layers that compute with a mask, and those that hand it on; the others forget it
_USE_MASKS = re.compile(
    "(Additive|MultiHead|GroupedQuery)?Attention|BatchNormalization|Bidirectional|"
    "(ConvLSTM[123]D|GRU|LSTM|(Simple)?RNN)|GlobalAveragePooling1D|Lambda|Softmax|"
    "TimeDistributed"
)
_KEEP_MASKS = re.compile(
    "Activation|Add|(Alpha|Gaussian|Spatial)?Dropout([123]D)?|Average|Concatenate|"
    "Dense|Dot|(|P|Leaky)ReLU|ELU|GaussianNoise|(Group|Layer|Unit)?Normalization|"
    "Identity|Maximum|Minimum|Multiply|Rescaling|Subtract"
)


def mask_after(call: LayerCall, output: Laid | Sequence[Laid]) -> Laid | Sequence[Laid]:
    """Return what a layer gives, with the name of the layer that masks it.

    Raises:
        GemscError: the layer computes with a mask, which gemsc does not.
    """
    kind = call.layer.kind
    given = found_in([call.arguments, call.keywords], Laid)
    masked = next((laid.masked for laid in given if laid.masked), "")
    if kind == "Embedding" and call.config.get("mask_zero"):
        masked = call.layer.name
    elif masked and _USE_MASKS.fullmatch(kind):
        raise call.refuse(
            f"leaves out steps that '{masked}' masks: masks are not supported",
            help=f"set mask_zero=False in '{masked}' if padding may count, or write "
            "the model in PyTorch",
        )
    elif not _KEEP_MASKS.fullmatch(kind):
        return output
    if not masked:
        return output
    many = [output] if isinstance(output, Laid) else output
    return [replace(laid, masked=masked) for laid in many]


@translates("Masking")
def _masking(call: LayerCall) -> Laid:
    raise call.refuse(
        "masks steps of time: masks are not supported",
        help="pad sequences so that all steps count, or write the model in PyTorch",
    )


def check_activity(call: LayerCall) -> None:
    """Refuse a layer whose output is part of the loss.

    Raises:
        GemscError: it has an activity_regularizer, or a layer or cell that it holds.
    """
    if _regularizes(call.config):
        raise call.refuse(
            "has an activity_regularizer, which is part of the loss",
            help="leave it out, return the layer's output as one more output of the "
            "model, and add its norm in your loss(output, target)",
        )


def _regularizes(config: Any) -> bool:
    if isinstance(config, list):
        return any(map(_regularizes, config))
    if not isinstance(config, Mapping):
        return False
    regularizer = config.get("activity_regularizer")
    return bool(regularizer) or any(map(_regularizes, config.values()))


@translates("ActivityRegularization")
def _activity(call: LayerCall) -> Laid:
    raise call.refuse(
        "adds its input to the loss",
        help="leave the layer out, return its input as one more output of the model, "
        "and add its norm in your loss(output, target)",
    )
