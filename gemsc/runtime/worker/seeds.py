"""Random numbers that depend on what is computed and not on where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(
    device: torch.device, seed: int, step: int, stage: str, number: int
) -> Iterator[None]:
    """Seed what is drawn inside; the user's own random numbers stay as they are.

    `number` is that of the micro-batch among all of a step. Ranks that draw and ranks
    that do not would choose different batches if the state were not put back.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_mix(seed, step, stage, number))
        yield


def _mix(seed: int, step: int, stage: str, number: int) -> int:
    """Return a seed of 63 bits for one stage, step and micro-batch (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in f"{seed}/{step}/{stage}/{number}".encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value >> 1
