"""Layers that make one value of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from gemsc.importers.keras.layer import Laid, LayerCall, Translator, dimension
from gemsc.importers.sheet import Symbol


def _aligned(call: LayerCall) -> tuple[Sequence[str], bool]:
    """Return the inputs with as many axes each; new ones are behind the batch."""
    if len(call.inputs) < 2:
        raise call.refuse("needs two inputs or more")
    values, first = call.alike()
    rank = max(len(value.shape) for value in values)
    texts = [f"{v}" + ".unsqueeze(1)" * (rank - len(v.shape)) for v in values]
    return texts, first


def _joined(template: str) -> Translator:
    """Return the translator of an operation on two, used from left to right."""

    def translate(call: LayerCall) -> Laid:
        texts, first = _aligned(call)
        whole = reduce(lambda a, b: template.format(a=a, b=b), texts)
        return call.gives(whole, first=first)

    return translate


def _average(call: LayerCall) -> Laid:
    texts, first = _aligned(call)
    return call.gives(f"({' + '.join(texts)}) / {len(texts)}", first=first)


def _subtract(call: LayerCall) -> Laid:
    if len(call.inputs) != 2:
        raise call.refuse("needs two inputs")
    return _joined("{a} - {b}")(call)  # type: ignore[return-value]


def _concatenate(call: LayerCall) -> Laid:
    values, first = call.alike()
    axis = int(call.config.get("axis", -1))
    dim = dimension(axis, len(values[0].shape), first)
    return call.gives(f"torch.cat([{', '.join(map(str, values))}], {dim})", first=first)


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


MERGE_LAYERS: Mapping[str, Translator] = {
    "Add": _joined("{a} + {b}"),
    "Average": _average,
    "Concatenate": _concatenate,
    "Dot": _dot,
    "Maximum": _joined("torch.maximum({a}, {b})"),
    "Minimum": _joined("torch.minimum({a}, {b})"),
    "Multiply": _joined("{a} * {b}"),
    "Subtract": _subtract,
}
