"""What a checkpoint holds of callbacks: their states, each by a name, and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def saved_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the states of those that have any, by their names."""
    states = {n: callback.state_dict() for n, callback in _named(callbacks).items()}
    return {name: state for name, state in states.items() if state}


def load_states(callbacks: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Give each callback the state that was saved under its name, if there is one."""
    for name, callback in _named(callbacks).items():
        if (state := states.get(name)) is not None:
            callback.load_state_dict(state)


def tensors_of(callbacks: Sequence[Any]) -> dict[str, Mapping[str, Tensor]]:
    """Return what they keep of each parameter, by its kind."""
    return {
        kind: named
        for callback in callbacks
        for kind, named in callback.tensors().items()
    }


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    """The callbacks, each with a name of its own."""
    kinds = [type(callback).__name__ for callback in callbacks]
    numbers = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
    names = [f"{k} {n}" if n else k for k, n in zip(kinds, numbers, strict=True)]
    return dict(zip(names, callbacks, strict=True))
