"""Refuse functions that hold the model itself: no copy of the model has another.

Example:
    self.act = lambda x: F.dropout(x, 0.1, self.training)

In a copy of this module, which evaluates, `self` is still the one that trains. So is a
global `model` to which a loss refers.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from gemsc.base.nests import stored_attributes
from gemsc.base.plain_forward import all_in, content
from gemsc.errors import GemscError, SourceLocation

_OF_COMPILE = str(Path(torch.__file__).with_name("_dynamo"))
_HELP = (
    "make it a method of the class, as in self.method or "
    "register_forward_hook(self.method), or give it what it needs by "
    "functools.partial(function, {0}): copies follow these"
)
HELP_OF_LOSS = (
    "let the model return what the loss needs of it; what all weights add to the loss "
    "can be the optimizer's weight_decay"
)


def reject_closures(model: nn.Module, loss: Any) -> None:
    """Refuse a function in a model, a hook or another, that holds a part of the model.

    Or the loss, or a method, that refers to it by a global variable.

    Raises:
        GemscError: at the function's first line.
    """
    part_ids = {id(module) for module in model.modules()}
    part_ids |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    functions = [(*pair, _HELP) for pair in all_in(model)]
    functions += [(*pair, HELP_OF_LOSS) for pair in all_in(loss)]
    anew = {id(made) for made in (*_made_anew(model), *_made_anew(loss))}
    for name, member, help_text in functions:
        function = stored_attributes(member).get("_torchdynamo_orig_callable", member)
        if not isinstance(function, FunctionType) or "state_dict" in name:
            continue
        code = function.__code__
        if code.co_filename.startswith(_OF_COMPILE) or id(member) in anew:
            continue
        if function.__name__ == "__init__":  # forward does not call it
            continue
        is_called = name.partition(".")[0] == "self"
        for variable, value in chain(_held(function), _named(function, is_called)):
            if isinstance(value, (nn.Module, torch.Tensor)) and id(value) in part_ids:
                shown = "the loss" if name == "self" else name
                raise GemscError(
                    f"{shown} refers to the model, or a part of it, by the variable "
                    f"'{variable}': in a copy, on which gemsc works, it is the same",
                    at=SourceLocation(code.co_filename, code.co_firstlineno),
                    help=help_text.format(variable),
                )


def _made_anew(owner: Any) -> Iterator[Any]:
    """Yield what modules leave out of their state: each copy makes its own.

    A metric of torchmetrics does so with its `update`.
    """
    modules: Iterable[Any] = owner.modules() if isinstance(owner, nn.Module) else ()
    for module in modules:
        state: Any = None
        with suppress(Exception):  # a parametrized module has none
            state = module.__getstate__()
        if isinstance(state, dict):
            yield from (v for k, v in vars(module).items() if k not in state)


def _held(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables around a function."""
    cells = function.__closure__ or ()
    for variable, cell in zip(function.__code__.co_freevars, cells, strict=True):
        value = content(cell)
        yield variable, getattr(value, "__self__", value)  # of a method


def _named(function: FunctionType, is_called: bool) -> Iterator[tuple[str, Any]]:
    """Yield the global variables that a function names, and functions within it."""
    codes: list[CodeType] = [function.__code__] if is_called else []
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                yield step.argval, function.__globals__.get(step.argval)
