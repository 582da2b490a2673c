"""Models on the meta device: buffers that no file has, and memory to stand on.

A table of positions or frequencies is no parameter, and in no file of weights. Made
under `torch.device("meta")` it has no values. So the user's function is called again,
where what it asks for on the meta device is made on the CPU, and parameters are dropped
as soon as a module has them: one at a time is in memory, which nobody has written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gemsc.base.dtypes import same_bits
from gemsc.base.nests import saved_named
from gemsc.errors import GemscError
from gemsc.weights.load import blank, put, stage_tensors, swap


def is_on_meta(model: nn.Module) -> bool:
    """Whether some parameters or buffers of a model have no data."""
    return any(tensor.is_meta for tensor in stage_tensors(model).values())


def give_buffers(model: nn.Module, make: Callable[[int], nn.Module]) -> None:
    """Give what no parameter is, on the meta device, the values that it would have.

    `make(seed)` makes the model once more. What it draws stays without values, as does
    what it computes from parameters.
    """
    missing = [name for name, _ in _without_values(model)]
    if not missing:
        return
    first, second = (_on_cpu(make, seed) for seed in (0, 1))
    both = first.keys() & second.keys()
    values = {
        n: first[n] for n in missing if n in both and same_bits(first[n], second[n])
    }
    put(model, {n: t for n, t in values.items() if n in dict(model.named_buffers())})
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            full = f"{path}.{name}".lstrip(".")
            if isinstance(value, Tensor) and full in values:
                vars(module)[name] = values[full]


def check_buffers(model: nn.Module) -> None:
    """Make sure that nothing is without values that no file of weights will have.

    Raises:
        GemscError: a buffer that is not persistent is, or another tensor.
    """
    persistent = saved_named(model)
    for name, is_buffer in _without_values(model):
        if name in persistent:
            continue
        kind = "buffer" if is_buffer else "tensor"
        raise GemscError(
            f"the model's {kind} '{name}' has no data: it is on the meta device, no "
            "file of weights has it, and it is drawn at random or computed from "
            "parameters",
            help="make it with device='cpu', or register it with persistent=True; "
            "accelerate's init_empty_weights() leaves buffers as they are",
        )


@contextmanager
def standing(model: nn.Module) -> Iterator[None]:
    """Give a model memory for what is on the meta device, which nobody writes to."""
    old = {name: t for name, t in stage_tensors(model).items() if t.is_meta}
    if not old:
        yield
        return
    blank(model)
    now = stage_tensors(model)
    try:
        yield
    finally:
        swap(model, {id(now[name]): tensor for name, tensor in old.items()})


def _without_values(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield what is on the meta device and no parameter, and if it is a buffer."""
    for name, tensor in model.named_buffers():
        if tensor.is_meta:
            yield name, True
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                yield f"{path}.{name}".lstrip("."), False


def _on_cpu(make: Callable[[int], nn.Module], seed: int) -> Mapping[str, Tensor]:
    """Return the buffers and other tensors of a model that is made on the CPU."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, value: Any) -> None:
        register(module, name, value)
        if value is not None:
            dropped = nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)
            dropped.__dict__.update(value.__dict__)
            module._parameters[name] = dropped

    with patch.object(nn.Module, "register_parameter", registered), _OnCpu():
        model = make(seed)
    tensors = dict(model.named_buffers())
    for path, module in model.named_modules():
        attributes = {n: t for n, t in vars(module).items() if isinstance(t, Tensor)}
        tensors |= {f"{path}.{name}".lstrip("."): t for name, t in attributes.items()}
    return {name: t.detach() for name, t in tensors.items() if not t.is_meta}


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what a `torch.device("meta")` inside asks for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            kwargs = kwargs | {"device": torch.device("cpu")}
        return func(*args, **kwargs)
