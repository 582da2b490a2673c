"""Initial weights of a model on the meta device, one module at a time.

Each module that has parameters or buffers of its own is given memory for them, and the
user's `init(module)`, under a seed that depends on its path alone. So a rank that needs
some modules makes these, and they are what any other number of ranks would make.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.base.dtypes import default_dtype
from gemsc.base.nests import as_kind
from gemsc.base.rng import outside_draws, seed_of, seeded
from gemsc.errors import GemscError


@dataclass
class Initialized:
    """The tensors that `init(module)` gives to a model; the last module's are kept.

    They are the same whatever modes are on, and whatever the default dtype is now.
    """

    model: nn.Module
    init: Callable[[nn.Module], object]
    dtype: torch.dtype = torch.float32
    _last: tuple[str, dict[str, Tensor]] = field(default=("", {}), repr=False)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the model, by its first name.

        Raises:
            GemscError: init fails, or leaves it without values.
        """
        path, _, attribute = name.rpartition(".")
        if self._last[0] != path or not self._last[1]:
            self._last = "", {}
            self._last = path, self._made(path)
        return self._last[1][attribute]

    def _made(self, path: str) -> dict[str, Tensor]:
        module: Any = copy.copy(self.model.get_submodule(path))
        both = [module._parameters, module._buffers]
        both = [{name: _unset(t) for name, t in slots.items()} for slots in both]
        module._parameters, module._buffers = both
        with (
            outside_draws(),
            seeded(seed_of("init", path)),
            default_dtype(self.dtype),
            torch.no_grad(),
        ):
            self.init(module)
        set_ = {n: t for slots in both for n, t in slots.items() if t is not None}
        tensors = {name: tensor.detach() for name, tensor in set_.items()}
        what = f"init() of {path or 'the model'} ({type(module).__name__})"
        for name, tensor in tensors.items():
            if _is_unset(tensor):
                raise GemscError(
                    f"{what} does not initialize '{name}'",
                    help="let it set all parameters and buffers of the module, as "
                    "module.reset_parameters() does for layers of torch.nn",
                )
        return tensors


def _unset(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor in memory that is known not to be set."""
    if tensor is None or not tensor.is_meta:
        return tensor
    blank = torch.empty(tensor.shape, dtype=tensor.dtype)
    blank.fill_(_mark(tensor.dtype))
    return as_kind(blank, tensor)


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _is_unset(tensor: Tensor) -> bool:
    """Whether an element still has the mark."""
    if tensor.dtype is torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == _mark(tensor.dtype)).any())
