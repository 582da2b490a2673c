"""Activation checkpoints off: what is in them runs once, in the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

__all__ = ["checkpoints_off"]


@contextmanager
def checkpoints_off(seen: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let torch.utils.checkpoint run what it is given and keep what autograd saves.

    PyTorch runs it again in the backward; layers with running statistics update them
    then a second time. `seen` is called at each checkpoint.
    """

    def reentrant(function: Callable[..., Any], _: bool, *inputs: Any) -> Any:
        seen()
        learns = any(t.requires_grad for t in inputs if isinstance(t, torch.Tensor))
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            return function(*inputs)

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        seen()
        yield

    name = "_checkpoint_without_reentrant_generator"
    before = getattr(checkpoint, name)
    changed: Any = checkpoint.CheckpointFunction
    changed.apply = reentrant
    setattr(checkpoint, name, around)
    try:
        yield
    finally:
        setattr(checkpoint, name, before)
        del changed.apply
