"""Whether the state of an optimizer or scheduler that was read is one of its kind.

`load_state_dict` takes nearly anything, and the next step then fails on it, or goes
another way. So the values are compared with those that are there, and torch's own
optimizers make a step with what they have loaded, on tensors without memory.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn


def check_alike(part: Any, now: Any, saved: Any, *, is_same: bool) -> None:
    """Make sure that saved values are of the kinds that an optimizer or scheduler has.

    Where the layout of the ranks `is_same`, lists are as long as they are now. What is
    None, or not there, may become anything else.

    Raises:
        ValueError: a value is not, or it would stand in the place of a method.
    """
    if now is None:
        return
    pairs: Iterable[tuple[Any, Any]] = ()
    match now:
        case _ if _is_number(now):
            is_alike = _is_number(saved)
        case Tensor():
            is_alike = isinstance(saved, Tensor) and saved.shape == now.shape
        case Counter():
            is_alike = isinstance(saved, Counter)
            is_alike = is_alike and all(map(_is_number, (*saved, *saved.values())))
        case Mapping():
            is_alike = isinstance(saved, Mapping)
            is_alike = is_alike and not any(
                key not in now and _is_own(part, key) for key in saved
            )
            pairs = [(now.get(key), saved[key]) for key in saved] if is_alike else ()
        case list() | tuple():
            is_alike = isinstance(saved, list | tuple)
            is_alike = is_alike and not (is_same and len(now) != len(saved))
            pairs = zip(now, saved if is_alike else (), strict=False)
        case _:
            is_alike = isinstance(saved, type(now))
    if not is_alike:
        raise ValueError(f"{saved!r:.200} in place of {now!r:.200}")
    for each, theirs in pairs:
        check_alike(part, each, theirs, is_same=is_same)


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def _is_own(part: Any, key: Any) -> bool:
    return key == "optimizer" or callable(getattr(part, str(key), None))


def check_step(optimizer: Any) -> None:
    """Make one step with the state of an optimizer of torch's, without its tensors.

    Nothing is said of one that cannot even begin like this.

    Raises:
        Exception: the step fails.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    try:
        _trial(optimizer, {})
    except Exception:
        return
    _trial(optimizer, optimizer.state)


def _trial(optimizer: Any, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
    trial = copy.copy(optimizer)  # as pickle copies it: without hooks
    trial.state, trial.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        blanks = []
        for parameter in group["params"]:
            blank = nn.Parameter(torch.empty_like(parameter, device="meta"))
            blank.grad = torch.empty_like(blank)
            blanks.append(blank)
            trial.state[blank] = {
                key: _blank(key, value, parameter)
                for key, value in states.get(parameter, {}).items()
            }
        trial.param_groups.append({**group, "params": blanks})
    trial.step()


def _blank(key: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    is_number = key == "step" or value.shape != parameter.shape
    return value.detach().clone() if is_number else value.to("meta")
