"""What becomes of tensors and modules in another dtype, or another memory format.

The format is the order of the elements of images and volumes in memory. For example,
the strides of a tensor of 2 x 16 x 8 x 8 (samples, channels, rows, columns):

    contiguous_format   1024, 64, 8, 1     one channel after the other
    channels_last       1024, 1, 128, 16   all channels of a pixel side by side
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.base.nests import Path, map_tensors, tensor_leaves
from gemsc.errors import GemscError

HALF = (torch.float16, torch.bfloat16)

Autocast = tuple[str, torch.dtype]  # type of device, and what matrices multiply in


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def autocasting(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """Compute in mixed precision, or as it is written for None: `torch.autocast`."""
    if autocast is None:
        return nullcontext()
    device, dtype = autocast
    return torch.autocast(device, dtype=dtype)


def current_autocast(device: torch.device) -> Autocast | None:
    """Return what is on, for `autocasting` later."""
    kind = device.type
    is_on = torch.is_autocast_enabled(kind)
    return (kind, torch.get_autocast_dtype(kind)) if is_on else None


def lowered(tensor: Tensor) -> Tensor:
    """Return what autocast, if it is on, takes of an argument of a matrix product."""
    autocast = current_autocast(tensor.device)
    is_wide = not tensor.is_floating_point() or tensor.dtype is torch.float64
    return tensor if autocast is None or is_wide else tensor.to(autocast[1])


def is_real(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating-point or complex."""
    return dtype.is_floating_point or dtype.is_complex


def within(original: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return what a dtype becomes where the model runs in `dtype`; None: as it is.

    Half precision is its own in float32, too: a model may mix the two.
    """
    is_kept = dtype is torch.float32 and original in HALF
    if dtype is None or is_kept or not is_real(original):
        return original
    return dtype.to_complex() if original.is_complex else dtype


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of numbers: no file can hold complex128."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def other_dtype(parameters: Iterator[Tensor]) -> torch.dtype:
    """Return float64, or float32 for a model in float64.

    Raises:
        GemscError: only some of its weights are in float64, or in complex128.
    """
    dtypes = [t.dtype for t in parameters if is_real(t.dtype)]
    wide = {torch.float64, torch.complex128}
    narrow = next((dtype for dtype in dtypes if dtype not in wide), None)
    if narrow and wide & {*dtypes}:
        raise GemscError(f"its weights are in float64 and in {dtype_name(narrow)}")
    return torch.float32 if torch.float64 in dtypes else torch.float64


def model_dtype(parameters: Iterator[Tensor]) -> torch.dtype:
    """Return the dtype of the first parameter that has a floating-point one."""
    dtypes = (tensor.dtype for tensor in parameters)
    floating = (dtype for dtype in dtypes if dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())


def cast(nest: Any, dtype: torch.dtype | None) -> Any:
    """Return a nest with its floating-point and complex tensors in a dtype, if any."""

    def convert(leaf: Any) -> Any:
        return leaf.to(within(leaf.dtype, dtype)) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(convert, nest)


def whole(nest: Any) -> Any:
    """Return a nest with its tensors of half precision in float32, as NumPy wants."""
    return pytree.tree_map_only(Tensor, widened, nest)


def widened(tensor: Tensor) -> Tensor:
    """Return half precision as float32: sums must not round to it."""
    return tensor.float() if tensor.dtype in HALF else tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bits_of(one), bits_of(other))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in a row; one element may have had any stride."""
    plain = tensor.contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def nudge(module: nn.Module, seed: int, dtype: torch.dtype | None = None) -> None:
    """Change each number of the parameters by a last bit of a dtype, up or down.

    What a ReLU or a pool decides may change with it, as with sums in another order.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                last_bit = torch.finfo(dtype or parameter.dtype).eps
                signs = torch.rand(parameter.shape, generator=generator).sub_(0.5)
                parameter.mul_(1.0 + last_bit * signs.sign_().to(parameter))


def cast_module(
    module: nn.Module, dtype: torch.dtype | None, kept: Collection[str] = ()
) -> None:
    """Do what `module.to(dtype)` does, but keep complex tensors complex.

    The tensors named in `kept` stay as they are, and one under two names stays one. An
    `_apply` that is not torch's is passed by: what a module has besides parameters and
    buffers stays as well, as in a program.
    """
    named = dict([*module.named_parameters(), *module.named_buffers()])
    done = {id(named[name]): named[name] for name in kept}

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = tensor.to(within(tensor.dtype, dtype))
        return done[id(tensor)]

    for submodule in module.modules():
        method: Any = type(submodule)._apply
        is_of_torch = method.__module__.startswith("torch.")
        (method if is_of_torch else nn.Module._apply)(submodule, convert, recurse=False)


def check_modes(file: str) -> None:
    """Make sure that a file leaves torch with gradients and a dtype to train in.

    Raises:
        GemscError: it has not; the dtype is as before again.
    """
    if not torch.is_grad_enabled():
        raise GemscError(
            f"importing {file} turns gradients off, for all that follows",
            help="write `with torch.no_grad():` around what needs none",
        )
    if (dtype := torch.get_default_dtype()) in HALF:
        torch.set_default_dtype(torch.float32)
        name = dtype_name(dtype)
        raise GemscError(
            f"importing {file} makes {name} the dtype of all new tensors",
            help=f"let model() return `model.to({dtype})`, or leave it in float32 and "
            f"compile with --precision {name}",
        )


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Let torch make tensors of a dtype, if any, where none is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions


def format_of(tensor: Tensor) -> torch.memory_format:
    """Return the format of a tensor; contiguous where its sizes leave it open."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.layout is not torch.strided or tensor.is_contiguous():
        return torch.contiguous_format
    is_last = tensor.is_contiguous(memory_format=last)
    return last if is_last else torch.contiguous_format


Format = torch.memory_format | tuple[int, ...]


def lying_of(tensor: Tensor) -> Format:
    """Return the format of a tensor, or its dimensions as they lie in memory.

    Those of a transposed one are in another order than its sizes. Where it repeats its
    elements, as an expanded one does, it is plain.
    """
    form = format_of(tensor)
    if form is not torch.contiguous_format or tensor.layout is not torch.strided:
        return form
    strides = tensor.stride()
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    steps = [strides[dim] for dim in dims]
    if not all(steps) or steps == sorted(steps, reverse=True):
        return form
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def lying_order(form: Format, dims: int) -> tuple[int, ...]:
    """Return the dimensions as they lie in memory; plain where a format does not go."""
    if isinstance(form, tuple) and len(form) == dims:
        return form
    plain = tuple(range(dims))
    return (0, *plain[2:], 1) if CHANNELS_LAST.get(dims) is form else plain


def is_laid_out(tensor: Tensor) -> bool:
    """Whether a tensor has just the strides that channels_last gives to its sizes.

    Kernels go by these for a weight of 1x1, too, which lies the same either way. False
    where plain memory has the same strides.
    """
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.layout is not torch.strided:
        return False
    forms = last, torch.contiguous_format
    wanted, plain = (empty(tensor.shape, f, device="meta").stride() for f in forms)
    return tensor.stride() == wanted != plain


def empty(shape: Sequence[int], form: Format, **how: Any) -> Tensor:
    """Return `torch.empty` of a format, as plain memory where it does not go."""
    if isinstance(form, tuple):
        return torch.empty_permuted(tuple(shape), form, **how)
    if CHANNELS_LAST.get(len(shape)) is not form:
        form = torch.contiguous_format
    return torch.empty(tuple(shape), memory_format=form, **how)


def lying_as(tensor: Tensor, form: Format) -> Tensor:
    """Return a tensor of a format, a copy where it lies otherwise; any for plain."""
    order, plain = lying_order(form, tensor.dim()), tuple(range(tensor.dim()))
    if order == plain:
        return tensor
    return tensor.permute(order).contiguous().movedim(plain, order)


def to_format(tensor: Tensor) -> Tensor:
    """Return a tensor with its channels last, if it is of images or volumes."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.layout is not torch.strided or is_laid_out(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=last).copy_(tensor)


def convert(model: nn.Module, name: str) -> None:
    """Let a model's weights have the format of that name; their values stay."""
    if name == "channels_last":
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = to_format(tensor.data)


def converted(values: Any, name: str) -> Any:
    """Return a nest of tensors in the format of that name."""
    if name != "channels_last":
        return values

    def change(path: Path, tensor: Tensor) -> Tensor:
        return to_format(tensor.detach()).requires_grad_(tensor.requires_grad)

    return map_tensors(values, change)


def like_examples(values: Any, examples: Any) -> Any:
    """Return a nest of tensors in the formats that the same ones have in `examples`."""
    known = {path: lying_of(tensor) for path, tensor in tensor_leaves(examples)}

    def change(path: Path, tensor: Tensor) -> Tensor:
        return lying_as(tensor, known.get(path, torch.contiguous_format))

    return map_tensors(values, change)
