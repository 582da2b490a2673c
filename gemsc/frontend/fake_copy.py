"""A copy of the user's model on fake tensors, and the way back to the real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from gemsc.base.dtypes import within
from gemsc.base.nests import Path, all_named, as_kind, reject_lazy, tensor_leaves
from gemsc.errors import GemscError
from gemsc.frontend.eager import deep_copy
from gemsc.ir.fake import fake_state
from gemsc.ir.holder import LOSS
from gemsc.ir.layers import as_of_torch, layer_source

_MOST_NUMBERS = 64  # of a buffer that forward may ask for them


@dataclass(frozen=True)
class FakeCopy:
    """The copy and what its objects are called in the user's model.

    All dictionaries are keyed by `id`, of the copy's objects and of the real ones:
    a loss function may hold on to the real ones.
    """

    model: nn.Module
    loss: Any
    tensors: dict[int, str] = field(default_factory=dict)
    modules: dict[int, str] = field(default_factory=dict)
    leaves: dict[int, str] = field(default_factory=dict)
    constants: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    held: dict[int, list[int]] = field(default_factory=dict)

    def holds_its_own(self, module: nn.Module) -> bool:
        """Whether a module holds the parameters and buffers with which it was copied.

        `torch.func.functional_call` lends it others, and so may forward.
        """
        return self.held[id(module)] == list(map(id, _held(module)))


def copy_on_fakes(
    model: nn.Module,
    loss: Any,
    fake: FakeTensorMode,
    dtype: torch.dtype | None = None,
) -> FakeCopy:
    """Return a deep copy whose parameters, buffers and other tensors are fake.

    With a `dtype`, parameters and buffers are of it, as after `model.to(dtype)`.
    """
    memo: dict[int, Any] = {}
    for module in (model, loss):
        if isinstance(module, nn.Module):
            is_same = dtype is None
            memo |= (
                fake_state(module, fake) if is_same else _in_dtype(module, fake, dtype)
            )
    with fake, FakeCopyMode(fake):
        model_copy, loss_copy = deep_copy((model, loss), memo)
    result = FakeCopy(model_copy, loss_copy, kept=[memo, model, loss])
    result.kept.extend(memo.get(id(memo), []))
    _name_modules(result, model, model_copy, "")
    if isinstance(loss, nn.Module):
        _name_modules(result, loss, loss_copy, LOSS)
    _name_constants(result, memo)
    _give_numbers(model, model_copy, fake)
    return result


def _give_numbers(real: nn.Module, copied: Any, fake: FakeTensorMode) -> None:
    """Give small buffers of whole numbers their values, which forward may ask for.

    PyTorch computes on with such values, and forgets them where one is written to.
    """
    buffers = dict(copied.named_buffers(remove_duplicate=False))
    for name, tensor in real.named_buffers(remove_duplicate=False):
        number, dtype = buffers[name], tensor.dtype
        is_small = 0 < tensor.numel() <= _MOST_NUMBERS
        if is_small and not (dtype.is_floating_point or dtype.is_complex):
            number.constant, number.of_buffer = tensor.detach().clone(), True
            fake.fake_tensor_converter.add_constant_storage_mapping(number)


def in_one_memory(
    fake: FakeTensorMode,
    compute: Callable[..., Any],
    func: Any,
    types: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Call `compute`; a view of a known number is known, and in the number's memory.

    PyTorch gives it memory of its own: what is written there would be lost.
    """
    number: Any = args[0] if args else None
    known = getattr(number, "constant", None)
    if known is None or not getattr(func, "is_view", False):
        return compute(func, types, args, kwargs)
    number.constant = None
    try:
        result = compute(func, types, args, kwargs)
        with no_dispatch():
            constants = func(known, *args[1:], **kwargs)
    finally:
        number.constant = known
    pairs = zip(tensor_leaves(result), tensor_leaves(constants), strict=True)
    for (_, view), (_, constant) in pairs:
        view.constant = constant
        fake.fake_tensor_converter.add_constant_storage_mapping(view)
    return result


def _in_dtype(
    module: nn.Module, fake: FakeTensorMode, dtype: torch.dtype | None
) -> dict[int, Any]:
    """Return a fake for the `id` of each tensor that `module.to(dtype)` changes."""
    return {
        id(tensor): as_kind(fake_input(tensor, fake, (), dtype), tensor)
        for tensor in (*module.parameters(), *module.buffers())
        if within(tensor.dtype, dtype) != tensor.dtype
    }


def _name_modules(
    result: FakeCopy, real: nn.Module, copied: nn.Module, prefix: str
) -> None:
    copies = dict(copied.named_modules(prefix=prefix, remove_duplicate=False))
    for path, module in real.named_modules(prefix=prefix, remove_duplicate=False):
        is_leaf = path != "" and layer_source(as_of_torch(module)) is not None
        names = result.leaves if is_leaf else result.modules
        for holder in (module, copies[path]):
            names.setdefault(id(holder), path)
            result.held.setdefault(id(holder), list(map(id, _held(holder))))
    for owner in (real, copied):
        for name, tensor in all_named(owner, prefix):
            result.tensors.setdefault(id(tensor), name)


def _held(module: nn.Module, *, recurse: bool = True) -> list[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _name_constants(result: FakeCopy, memo: dict[int, Any]) -> None:
    """Find the tensors that are neither parameters nor buffers."""
    names = {}
    for module in (result.model, result.loss):
        if isinstance(module, nn.Module):
            names.update(_attribute_names(module))
    for real in memo.get(id(memo), []):
        copied = memo.get(id(real))
        if isinstance(real, torch.Tensor) and id(copied) not in result.tensors:
            name = names.get(id(copied), "constant")
            result.constants.setdefault(id(copied), (name, real))


def _attribute_names(module: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for owner in module.modules():
        plain = {k: v for k, v in vars(owner).items() if not k.startswith("_")}
        for path, tensor in tensor_leaves(plain):
            names.setdefault(id(tensor), "_".join(map(str, path)))
    return names


def reject_unsupported(model: nn.Module) -> None:
    """Refuse what cannot be carried into a program, before anything is traced.

    Raises:
        GemscError: names the first such module or parameter.
    """
    if torch.is_inference_mode_enabled():
        raise GemscError(
            "nothing can be compiled within torch.inference_mode()",
            help="call gemsc.compile outside of it",
        )
    for path, module in model.named_modules():
        if any("\ud800" <= letter <= "\udfff" for letter in path):
            raise GemscError(
                f"the module name {path!a} cannot be written as UTF-8",
                help="give the module a name of ordinary letters",
            )
        problem = _problem(module)
        if problem:
            what, help_text = problem
            raise GemscError(f"{path or 'the model'} {what}", help=help_text)
    reject_lazy(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise GemscError(
                f"the model's '{name}' has no data: it is on the meta device",
                help='name its weights in the model\'s file: weights = "...", or call '
                "gemsc.load_weights(model, path); gemsc plan needs none",
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise GemscError(
                f"parameter {name} has a gradient hook, which gemsc does not support",
                help="change gradients in a torch.autograd.Function or the optimizer",
            )


_Test = Callable[[nn.Module], object]
_REFUSED: tuple[tuple[_Test, str, str], ...] = (
    (
        lambda m: isinstance(m, torch.jit.ScriptModule),
        "is a TorchScript module",
        "return the module that was scripted",
    ),
    (
        lambda m: isinstance(m, (nn.DataParallel, nn.parallel.DistributedDataParallel)),
        "is wrapped in data parallelism",
        "return the wrapped model; gemsc has its own: --data",
    ),
    (
        lambda m: m._backward_hooks or m._backward_pre_hooks,
        "has a backward hook, which gemsc does not support",
        "change gradients in a torch.autograd.Function",
    ),
    (
        lambda m: any(t.layout is not torch.strided for t in _held(m, recurse=False)),
        "has a sparse parameter or buffer",
        "keep a dense one and make it sparse in forward, with to_sparse()",
    ),
)


def _problem(module: nn.Module) -> tuple[str, str] | None:
    for test, what, help_text in _REFUSED:
        if test(module):
            return what, help_text
    return None


def fake_input(
    tensor: torch.Tensor,
    fake: FakeTensorMode,
    path: Path,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a fake tensor of the same shape, strides and device.

    Floating-point and complex ones are of `dtype`, if it is given.
    """
    if tensor.layout is not torch.strided:
        where = ".".join(map(str, path))
        raise GemscError(
            f"{where} is a {str(tensor.layout).removeprefix('torch.')} tensor",
            help="use dense tensors, and make them sparse in forward",
        )
    with fake:
        copied = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=within(tensor.dtype, dtype),
            device=tensor.device,
        )
    return copied.requires_grad_(tensor.requires_grad)
