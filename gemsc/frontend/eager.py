"""Run the user's model as it is, on a copy: modes and failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import nn

from gemsc.errors import GemscError
from gemsc.frontend.user_code import failing_line

__all__ = ["failures", "in_mode", "set_training"]


def in_mode(training: bool) -> str:
    """Return how the model runs, in words: many fail in evaluation only."""
    return "in eager mode" if training else "in evaluation mode (model.eval())"


def set_training(model: nn.Module, loss: Any, training: bool) -> None:
    """Set the mode of a model and a loss; layers that the user froze stay frozen."""
    if not training:
        model.eval()
    elif not model.training:
        model.train()
    if isinstance(loss, nn.Module):
        loss.train(training)


@contextmanager
def failures(what: str, boundary: CodeType, help: str = "") -> Iterator[None]:
    """Report an exception at the user's line below the frame of `boundary`.

    Raises:
        GemscError: in place of what the user's code raised.
    """
    try:
        yield
    except GemscError:
        raise
    except Exception as error:
        at = failing_line(error.__traceback__, boundary)
        text = " ".join(str(error).split())
        message = f"{what}: {type(error).__name__}: {text}"
        raise GemscError(message, at=at, help=help) from error
