"""Try a user's optimizer factory before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from gemsc.frontend.eager import failures

__all__ = ["check_optimizer"]


def check_optimizer(
    parameters: Mapping[str, nn.Parameter],
    factory: Callable[[Iterable[tuple[str, nn.Parameter]]], Any],
) -> None:
    """Make an optimizer of the parameters that are trained, and drop it.

    Raises:
        GemscError: that fails; says at which of the user's lines.
    """
    trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
    help = (
        "it gets (name, parameter) pairs, as torch.optim's classes take them; "
        "pick out parameters with `for name, p in pairs`"
    )
    with failures("optimizer() fails", check_optimizer.__code__, help):
        if trained:
            factory(trained)
