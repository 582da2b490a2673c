"""Try a user's optimizer factory before anything is written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from gemsc.errors import GemscError
from gemsc.frontend.eager import failures


def check_optimizer(
    parameters: Mapping[str, nn.Parameter],
    factory: Callable[[Iterable[tuple[str, nn.Parameter]]], Any],
) -> None:
    """Make an optimizer of the parameters that are trained, and drop it.

    Raises:
        GemscError: that fails, at which of the user's lines; or nothing can step.
    """
    trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
    help = (
        "it gets (name, parameter) pairs, as torch.optim's classes take them; "
        "pick out parameters with `for name, p in pairs`"
    )
    with failures("optimizer() fails", check_optimizer.__code__, help):
        made = factory(trained) if trained else None
    step = getattr(made, "step", None)
    if trained and not callable(step):
        raise GemscError(
            f"optimizer() returns {type(made).__name__}, which cannot step",
            help="return one torch.optim.Optimizer of all the parameters that it gets",
        )
    if callable(step) and _needs_closure(step):
        raise GemscError(
            f"{type(made).__name__} computes the loss several times in a step, and "
            "needs a closure for it: ranks compute it once",
            help="return an optimizer whose step() needs no argument",
        )


def _needs_closure(step: Callable[..., Any]) -> bool:
    try:
        given = inspect.signature(step).parameters.values()
    except ValueError:  # it is not written in Python
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind in kinds for p in given)
