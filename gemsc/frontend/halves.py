"""Ask whether a loss is a mean over samples: only then micro-batches are a batch.

loss(4 samples) = 0.61      (loss(2 of them) + loss(the other 2)) / 2 = 0.58

The gradients are compared as well: those of the hardest tenth of all pixels are others
than those of the hardest tenth of each half, where both losses are log(2) at the start.

The first samples of a dataset may all have one label, and a single sample has no other:
the loss of halves is asked again where one half has other labels.

The model, too, may mix samples, as one that returns how similar each picture of a batch
is to each text: it is run on two samples, and on each of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.base.examples import num_rows
from gemsc.base.nests import as_loss, call_loss, call_model, map_tensors, tensor_leaves
from gemsc.base.rng import torch_state
from gemsc.frontend.eager import detached
from gemsc.frontend.values import returned
from gemsc.ir.program import MIXES, MIXES_IN_TRAINING, NO_SUM

_TOLERANCE = 5e-6  # rounding is less, also where a loss computes in float32 inside
_OWN_TOLERANCE = 1e-4  # where it cannot be asked in float64
_ROUNDINGS, _MANY = 4, 16
_LABELS = 1, 0  # of one half: both are classes, and both may be parts of a mask
_NO_MEAN = "the loss is not a mean over samples"
# What is left as in evaluation: it mixes samples, or draws, as everybody knows
_KNOWN = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd


class _NotKnownError(Exception):
    """Nothing can be said of this loss."""


@dataclass(frozen=True)
class _Loss:
    """A loss and its gradients; `terms` are what is added up in it, without signs."""

    value: Tensor
    gradients: dict[Any, Tensor]
    terms: float

    def beside(self, apart: _Loss, tolerance: float, other: str) -> str:
        """Say how the mean of the halves differs from this, "" if it does not."""
        tolerance = max(tolerance, _ROUNDINGS * torch.finfo(self.value.dtype).eps)
        gradients = _distance(
            list(self.gradients.values()), list(apart.gradients.values())
        )
        noise = _MANY * max(torch.finfo(t).eps for t in (self.value.dtype, torch.float))
        if self.is_near(apart, tolerance, noise) and gradients <= tolerance:
            return ""
        whole, mean = f"{self.value:.4g}", f"{apart.value:.4g}"
        if whole != mean:
            asked = f"{whole} of example_inputs{other}"
            return f"{_NO_MEAN}: {asked}, {mean} as the mean of its halves"
        return (
            f"{_NO_MEAN}: {whole} of example_inputs{other} as of their halves, but "
            f"with gradients that differ by {gradients:.1%}"
        )

    def is_near(self, other: _Loss, tolerance: float, noise: float) -> bool:
        """Whether values are alike, or terms that cancel leave their rounding alone."""
        values = abs(float(self.value)), abs(float(other.value))
        allowed = max(tolerance * max(values), noise * max(self.terms, other.terms))
        return abs(float(self.value - other.value)) <= allowed


def loss_of_halves(
    loss: Callable[..., Any], output: Any, target: Any, size: int
) -> str:
    """Say how the loss of a micro-batch and the mean of those of its halves differ.

    "" if they do not, or where this cannot be asked: the loss draws random numbers, or
    takes something that is not one row for each of `size` samples. Of a single sample,
    the other half is the same with smaller outputs. A sum and a count are to be those
    of the halves together: a loss and its accuracy are not.
    """
    before = torch_state()
    difference = ""
    with suppress(Exception):
        difference = _no_sum(loss, _halves(output, target, size, None))
    for label in (None, *_LABELS) if target is not None else (None,):
        with suppress(Exception):  # whatever a loss says of batches of another size
            difference = difference or _with_label(loss, output, target, size, label)
    return difference if torch.equal(before, torch_state()) else ""


def _no_sum(loss: Callable[..., Any], parts: tuple[Any, Any]) -> str:
    """Say how a pair differs from the sums of those of the halves."""

    def asked(part: Any) -> Tensor:
        return as_loss(call_loss(copy.deepcopy(loss), *detached(part))).detach()

    whole = asked(_joined(*parts))
    if not whole.shape:  # no pair
        return ""
    sums = asked(parts[0]) + asked(parts[1])
    if torch.allclose(whole, sums, rtol=_OWN_TOLERANCE, equal_nan=True):
        return ""
    (total, count), (totals, counts) = whole.tolist(), sums.tolist()
    return (
        f"{NO_SUM}: {total:.4g} and {count:.4g} of example_inputs, but {totals:.4g} "
        f"and {counts:.4g} when those of its halves are added up"
    )


def _with_label(
    loss: Callable[..., Any], output: Any, target: Any, size: int, label: int | None
) -> str:
    """Say how they differ where all targets of one half are the `label`."""
    try:
        values, labels = map_tensors((output, target), _double)
        parts = _halves(values, labels, size, label)
        return _compared(_in_double(loss), parts, size, _TOLERANCE, label)
    except Exception:  # it has tensors of its own dtype
        parts = _halves(output, target, size, label)
        return _compared(loss, parts, size, _OWN_TOLERANCE, label)


def of_two_samples(
    fresh: Callable[[], nn.Module], inputs: Any, loss: Any, target: Any
) -> str:
    """Say how what a model makes of two samples and of each of them differ.

    `fresh()` returns a copy of the model, as it is before a step. BatchNorm is in eval
    mode; so is everything, where forward draws random numbers. "" if they do not
    differ, or where this cannot be asked: there is one sample, or what forward returns
    is of the whole batch and the loss a mean of it. A BatchNorm without statistics may
    not take one alone: then it is asked of two and two.
    """
    size = num_rows(inputs)

    def asked(training: bool, count: int = 1) -> str | None:
        before = torch_state()
        with suppress(Exception):  # whatever a model says of batches of another size
            outputs, targets = [], []
            for start, stop in ((0, count), (count, 2 * count), (0, 2 * count)):
                nests = detached(inputs), detached(target)
                rows, labels = _rows(*nests, size, start, stop)
                outputs.append(call_model(_still(fresh(), training), rows))
                targets.append(labels)
                if not torch.equal(before, torch_state()):
                    raise _NotKnownError
            difference = _mixed(*(returned(output).tensors for output in outputs))
            if not difference and loss is not None:
                difference = _of_each(loss, outputs, targets)
            return difference if torch.equal(before, torch_state()) else ""
        return asked(training, 2) if count == 1 and size > 3 else None

    told = asked(True) if size > 1 else ""
    if told is None:
        return asked(False) or ""
    evaluation = asked(False) if told.startswith(MIXES) else None
    if evaluation is not None and not evaluation.startswith(MIXES):
        return told.replace(MIXES, MIXES_IN_TRAINING)
    return told


def _still(model: nn.Module, training: bool) -> nn.Module:
    for module in model.modules() if training else ():
        if isinstance(module, _KNOWN):
            module.eval()
    return model if training else model.eval()


def _mixed(
    first: Sequence[Tensor], second: Sequence[Tensor], joined: Sequence[Tensor]
) -> str:
    """Say in what the rows of two samples are not those of each."""
    for *parts, whole in zip(first, second, joined, strict=True):
        sizes = enumerate(zip(whole.shape, parts[0].shape, strict=True))
        rows = [dim for dim, (both, one) in sizes if both != one]
        if len(rows) > 1 or (rows and whole.shape != torch.cat(parts, rows[0]).shape):
            return (
                f"{MIXES}: it returns {list(whole.shape)} for two, "
                f"{list(parts[0].shape)} for one"
            )
        if rows and whole.is_floating_point():
            apart = _distance([whole], [torch.cat(parts, rows[0])])
            if apart > _rounding(whole):
                return (
                    f"{MIXES}: what it returns for one differs by "
                    f"{apart:.1%} beside another"
                )
    return ""


def _of_each(loss: Any, outputs: Sequence[Any], targets: Sequence[Any]) -> str:
    """Say how the loss of two samples and the mean of those of each differ."""
    pairs = zip(outputs, targets, strict=True)
    first, second, whole = (_loss(loss, *pair) for pair in pairs)
    if torch.equal(whole.value, first.value):
        return ""  # that of the first of several, as `x[0]` of a graph
    mean = replace(first, value=(first.value + second.value) / 2)
    rounding = _rounding(whole.value)
    if whole.is_near(mean, rounding, rounding):
        return ""
    asked = f"{whole.value:.4g} of two, {mean.value:.4g} as the mean of each"
    return f"{_NO_MEAN}: {asked}"


def _rounding(tensor: Tensor) -> float:
    return max(_OWN_TOLERANCE, _MANY * torch.finfo(tensor.dtype).eps)


def _compared(
    loss: Callable[..., Any],
    parts: tuple[Any, Any],
    size: int,
    tolerance: float,
    label: int | None,
) -> str:
    joined = _loss(loss, *_joined(*parts))
    first, second = (_loss(loss, *part) for part in parts)
    swapped = _loss(loss, *_joined(*parts[::-1])).value if size == 1 else None
    if (joined.value, swapped) == (first.value, second.value):
        return ""  # that of the first of several, as `output[0]` of a graph
    gradients = {
        path: torch.cat([gradient, second.gradients[path]]) / 2
        if gradient.shape
        else (gradient + second.gradients[path]) / 2
        for path, gradient in first.gradients.items()
    }
    mean = _Loss((first.value + second.value) / 2, gradients, first.terms)
    return joined.beside(mean, tolerance, " with other targets" * (label is not None))


def _distance(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the norm of the difference, as a part of the larger norm."""

    def norm(parts: Sequence[Tensor]) -> float:
        return math.hypot(*(float(part.double().norm()) for part in parts))

    largest = max(norm(tensors), norm(others))
    apart = norm([a - b for a, b in zip(tensors, others, strict=True)])
    return apart / largest if largest else 0.0


def _halves(output: Any, target: Any, size: int, label: int | None) -> tuple[Any, Any]:
    """Return the halves of a batch; of the second, all targets are the `label`."""
    half = size // 2
    first = _rows(output, target, size, 0, max(half, 1))
    second = map_tensors(output, _smaller), target
    if half:
        second = _rows(output, target, size, half, 2 * half)
    if label is None:
        return first, second

    def labelled(path: object, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, label) if tensor.shape else tensor

    return first, (second[0], map_tensors(second[1], labelled))


def _rows(output: Any, target: Any, size: int, start: int, stop: int) -> Any:
    """Return some samples; numbers without any are those of all."""

    def cut(path: object, tensor: Tensor) -> Tensor:
        if tensor.shape and len(tensor) != size:
            raise _NotKnownError
        return tensor[start:stop] if tensor.shape else tensor

    if not any(tensor.shape for _, tensor in tensor_leaves(output)):
        raise _NotKnownError
    return map_tensors((output, target), cut)


def _loss(loss: Callable[..., Any], output: Any, target: Any) -> _Loss:
    """Return the loss, and what it gives the outputs as gradients.

    Those of outputs that train nothing, such as a mask, are no gradients of the step.
    """
    leaves: dict[Any, Tensor] = {}
    trains = {path: t.requires_grad for path, t in tensor_leaves(output)}

    def asked(path: object, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.is_floating_point() or tensor.is_complex():
            leaves[path] = tensor.requires_grad_()
            return tensor.clone()  # which the loss may write to
        return tensor

    with torch.enable_grad():
        output = map_tensors(output, asked)
        value = as_loss(call_loss(copy.deepcopy(loss), output, target))  # it may count
        if value.shape or not value.isfinite():
            raise _NotKnownError
        gradients = torch.autograd.grad(
            value, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
    pairs = zip(leaves.values(), gradients, strict=True)
    terms = sum(float((leaf.detach() * grad).abs().sum()) for leaf, grad in pairs)
    named = dict(zip(leaves, gradients, strict=True))
    if any(trains.values()):
        named = {path: grad for path, grad in named.items() if trains[path]}
    return _Loss(value.detach(), named, terms)


def _in_double(loss: Any) -> Any:
    return copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss


def _double(path: object, tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _smaller(path: object, tensor: Tensor) -> Tensor:
    return tensor / 2 if tensor.is_floating_point() and tensor.shape else tensor


def _joined(first: Any, second: Any) -> Any:
    others = dict(tensor_leaves(second))

    def join(path: Any, tensor: Tensor) -> Tensor:
        return torch.cat([tensor, others[path]]) if tensor.shape else tensor

    return map_tensors(first, join)
