"""What was read is run once beside another implementation of the same file."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from gemsc.errors import GemscError
from gemsc.importers.network import ImportedNetwork
from gemsc.importers.weight import Array

WITHIN = 1e-3  # of the largest output; in float32 they differ by 1e-6


def compared(network: ImportedNetwork) -> str:
    """Return a note on how far the network is from what the file gives.

    Raises:
        GemscError: so far that it is another network.
    """
    if network.reference is None:
        return ""
    inputs = [_example(value.tensor) for value in network.model.inputs]
    try:
        wanted = network.reference([value.numpy() for value in inputs])
    except GemscError:
        raise
    except Exception as why:  # of the other implementation: no error of the file
        reason = str(why).split("\n")[0][:200]
        return f"not compared with the file's own definition: {reason}"
    try:
        root = network.model.root
        empty = root.state_dict()
        state = {name: network.tensor(name, value) for name, value in empty.items()}
        with torch.no_grad(), torch.device("cpu"):
            found = functional_call(root, state, tuple(inputs), tie_weights=False)
    except (RuntimeError, IndexError, ValueError, TypeError) as why:
        reason = str(why).split("\n")[0][:200]
        raise GemscError(
            f"{network.model.file} cannot be run as it was read: {reason}",
            help="please report this file; --no-check writes the network anyway",
        ) from why
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    far = max(
        (distance(o, w) for o, w in zip(outputs, wanted, strict=True)), default=0.0
    )
    if not far <= WITHIN:
        raise GemscError(
            f"{network.model.file} gives different numbers than the network that was "
            f"read from it: they differ by {far:.1e} of the largest",
            help="please report this file; --no-check writes the network anyway",
        )
    return f"compared with the file's own definition: within {far:.0e}"


def _example(like: Tensor) -> Tensor:
    if like.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        numbers = torch.rand(like.shape, generator=generator, device="cpu")
        return numbers.to(like.dtype)
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def distance(found: Tensor, wanted: Array | Tensor) -> float:
    """Return how far values are from others, in parts of the largest; NaN is NaN."""
    ours, theirs = found.double().numpy(), np.asarray(wanted, np.float64)
    if ours.shape != theirs.shape:
        return float("inf")
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    if same.all():
        return 0.0
    scale = max(float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)), 1e-30)
    far = np.where(same, 0.0, np.abs(ours - theirs)) / scale
    return float("inf") if np.isnan(far).any() else float(far.max())
