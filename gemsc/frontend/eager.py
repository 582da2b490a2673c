"""Run the user's model as it is, on a copy: copies, modes and failures."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from gemsc.errors import GemscError
from gemsc.frontend.user_code import failing_line


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


def deep_copy(objects: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a deep copy of a tuple of modules, functions and others.

    Raises:
        GemscError: names the attribute that cannot be copied.
    """
    try:
        return copy.deepcopy(objects, memo)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for path, module, attribute, value in _attributes(objects):
            try:
                copy.deepcopy(value)
            except Exception as its_own:
                what, help_text = _problem(path, module, attribute, value, its_own)
                raise GemscError(
                    f"the model cannot be copied: {what}", help=help_text
                ) from its_own
        raise GemscError(
            f"the model cannot be copied: {text}",
            help="gemsc works on copies: keep locks, files and generators out of "
            "modules",
        ) from error


def _attributes(objects: Any) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield all attributes of modules: path, module, name, value."""
    for owner in (each for each in objects if isinstance(each, nn.Module)):
        for path, module in owner.named_modules():
            own = {k: v for k, v in vars(module).items() if k != "_modules"}
            held = (own.pop("_parameters", {}), own.pop("_buffers", {}), own)
            for attribute, value in (item for each in held for item in each.items()):
                yield path, module, attribute, value


def _problem(
    path: str, module: nn.Module, attribute: str, value: Any, error: Exception
) -> tuple[str, str]:
    """Return what is wrong with an attribute, and what helps."""
    name = f"{path}.{attribute}".lstrip(".")
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        what = f"'{name}' is a {type(value).__name__}: {type(error).__name__}: {error}"
        return what, (
            "gemsc works on copies: keep locks, files and generators out of modules, "
            "or give their class a __deepcopy__"
        )
    what = f"'{name}' is a tensor that was computed with gradients"
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == attribute:
            return f"{what}, by the old torch.nn.utils.weight_norm", (
                "use torch.nn.utils.parametrizations.weight_norm"
            )
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == attribute:
            return f"{what}, by torch.nn.utils.prune", (
                f'for layer = model.get_submodule("{path}"), '
                f'torch.nn.utils.prune.remove(layer, "{attribute}") ends the pruning; '
                f"layer.{attribute} = layer.{attribute}.detach() goes on with it: each "
                "forward applies the mask again"
            )
    return what, "compute it in forward, or keep it with .detach()"
