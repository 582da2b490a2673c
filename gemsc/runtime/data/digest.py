"""A digest of a sample, so that processes can compare what they have read."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


def digest(sample: Any) -> str:
    """Return a digest of dtype, shape and content of all leaves of a sample."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(sample):
        if isinstance(leaf, torch.Tensor):
            value = leaf.detach().cpu().contiguous().reshape(-1)
            found.update(f"{leaf.dtype} {tuple(leaf.shape)};".encode())
            found.update(value.view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray | np.generic):
            found.update(f"{leaf.dtype} {leaf.shape};".encode() + leaf.tobytes())
        elif isinstance(leaf, bool | int | float | complex | str | bytes):
            found.update(f"{type(leaf).__name__} {leaf!r};".encode())
        else:  # the text of other objects may hold their address
            found.update(f"{type(leaf).__name__};".encode())
    return found.hexdigest()
