"""Refuse functions that hold the model itself: no copy of the model has another.

Example:
    self.act = lambda x: F.dropout(x, 0.1, self.training)

In a copy of this module, which evaluates, `self` is still the one that trains.
"""

from __future__ import annotations

from types import FunctionType

import torch
from torch import nn

from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.counters import all_in, content


def reject_closures(model: nn.Module) -> None:
    """Refuse a function in a model, a hook or another, that holds a part of the model.

    Raises:
        GemscError: at the function's first line.
    """
    own = {id(module) for module in model.modules()}
    own |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, function in all_in(model):
        if not isinstance(function, FunctionType) or "state_dict" in name:
            continue
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for variable, cell in () if code.co_name == "__init__" else cells:
            value = content(cell)
            value = getattr(value, "__self__", value)  # of a method
            if isinstance(value, (nn.Module, torch.Tensor)) and id(value) in own:
                raise GemscError(
                    f"{name} is a function that holds '{variable}' of the model: in "
                    "copies of the model, on which gemsc works, it holds the original",
                    at=SourceLocation(code.co_filename, code.co_firstlineno),
                    help="make it a method of the class, as in self.method or "
                    "register_forward_hook(self.method), or give it what it needs by "
                    f"functools.partial(function, {variable}): copies follow these",
                )
