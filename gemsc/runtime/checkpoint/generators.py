"""The states of the generators of random numbers: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators of this process, `device`'s among them."""
    version, words, gauss = random.getstate()
    kind, numbers, *rest = cast("tuple[Any, ...]", np.random.get_state())
    states = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.from_numpy(numbers.astype(np.int64)), *rest],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def check_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Make sure that `set_generators` takes states; NumPy would take nearly any.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: it does not.
    """
    torch.Generator().set_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.Generator(device).set_state(states["cuda"])
    random.Random().setstate(_python(states))
    gauss = states["python"][2]
    _, numbers, place, has_gauss, number = states["numpy"]
    in_order = (
        numbers.shape == (624,),
        type(place) is int and 0 <= place <= 624,
        has_gauss in (0, 1),
        int(numbers.min()) >= 0 and int(numbers.max()) < 2**32,
        isinstance(number, float),
        gauss is None or isinstance(gauss, float),
    )
    if not all(in_order):
        raise ValueError("a generator of random numbers has no such state")
    np.random.RandomState().set_state(_numpy(states))


def set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators of this process into these states."""
    torch.set_rng_state(states["torch"])
    random.setstate(_python(states))
    np.random.set_state(_numpy(states))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _python(states: Mapping[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = states["python"]
    return version, tuple(words.tolist()), gauss


def _numpy(states: Mapping[str, Any]) -> tuple[Any, ...]:
    kind, numbers, *rest = states["numpy"]
    return kind, numbers.numpy().astype(np.uint32), *rest
