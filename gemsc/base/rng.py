"""The generators of random numbers: torch's, Python's and NumPy's."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# torch has one generator for all threads, and tests run ranks as threads
generator_lock = threading.RLock()

_DRAWS = (
    *("rand", "dropout", "bernoulli", "binomial", "normal", "uniform", "exponential"),
    *("multinomial", "poisson", "cauchy", "geometric"),
)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Put the generators of torch, Python and NumPy back as they were."""
    torch_state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda._initialized else None
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators, and put them back afterwards."""
    with preserve_rng():
        seed_all(seed)
        yield


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators alone, and put those of the CPU and `device` back.

    Ranks that draw and ranks that do not would choose different batches otherwise.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def seed_of(*parts: int | str) -> int:
    """Return a seed of 64 bits that depends on all parts."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def may_draw(name: str) -> bool:
    """Whether a function or a layer of this name may draw random numbers."""
    name = name.lower()
    return "normalize" not in name and any(word in name for word in _DRAWS)
