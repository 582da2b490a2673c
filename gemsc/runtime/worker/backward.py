"""The backward of one stage: from the edges of its outputs to its inputs' gradients.

Where the model depends on data, a value may have no gradient in some micro-batch. The
stage that made it must know: an optimizer moves a parameter whose gradient is zero, and
not one that has none. An absent gradient travels as negative zeros. Whatever is added
to them stays what it is, and a gradient that is there has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gemsc.runtime.tiles.grid import Grid

# a private name of PyTorch's: where one has it not, the public way is taken
_ENGINE = getattr(graph, "_engine_run_backward", None)


def edge_of(tensor: Any) -> GradientEdge | None:
    """Return where gradients of a stage's output enter, without keeping the output."""
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        return get_gradient_edge(tensor)
    return None


def run_backward(
    outputs: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]
) -> None:
    """Let the gradients flow back from the outputs that have one.

    It runs in this thread, on every device: a backward sends messages and keeps what it
    knows by thread, and autograd would run it in one thread of its own for each GPU.
    It is what `torch.autograd.backward` calls; that loads symbolic shapes, and SymPy
    with them, to check what the proof has compared: half a second of a rank's start.
    """
    pairs = [
        (edge, gradient)
        for edge, gradient in zip(outputs, gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    if pairs:
        edges, flowing = zip(*pairs, strict=True)
        with torch.autograd.set_multithreading_enabled(False):
            if _ENGINE is None:
                torch.autograd.backward(edges, flowing)
                return
            _ENGINE(
                edges,
                flowing,
                False,  # the graph is not kept
                False,  # no gradients of gradients
                (),  # for all leaves
                allow_unreachable=True,
                accumulate_grad=True,
            )


def gradient_of(tensor: Tensor, *, depends_on_data: bool) -> Tensor:
    """Return the gradient of a stage's input, as it travels."""
    if tensor.grad is None:
        return torch.full_like(tensor, -0.0)
    return tensor.grad + 0.0 if depends_on_data else _owned(tensor.grad)


def is_absent(gradient: Tensor | None) -> bool:
    """Whether a gradient that came in stands for none."""
    if gradient is None:
        return True
    first = gradient[(slice(1),) * gradient.dim()]
    return all(
        part.numel() > 0 and bool(((part == 0) & _is_negative(part)).all())
        for part in (first, gradient)
    )


def _is_negative(tensor: Tensor) -> Tensor:
    return torch.signbit(tensor.real if tensor.is_complex() else tensor)


def _owned(gradient: Tensor) -> Tensor:
    """Return a gradient whose memory is in no other tensor.

    Autograd hands one memory on to several inputs of a stage where views are involved.
    What is on its way to another rank must not be a parameter's gradient, which grows
    in place with the next micro-batch.
    """
    return gradient if _storage_users(gradient) <= _ALONE else gradient.clone()


def _storage_users(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


_ALONE = _storage_users(torch.empty(1))


def present(
    gradients: tuple[Tensor | None, ...], grid: Grid | None, device: torch.device
) -> tuple[Tensor | None, ...]:
    """Return None for gradients that are absent, on all tiles of a grid."""
    counts = [float(not is_absent(gradient)) for gradient in gradients]
    if grid is not None:
        counts = grid.all_reduce(torch.tensor(counts, device=device)).tolist()
    pairs = zip(gradients, counts, strict=True)
    return tuple(gradient if count else None for gradient, count in pairs)
