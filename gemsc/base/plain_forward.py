"""A forward as a program runs it: no checkpoints, no fast paths, few threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._fuser import optimized_execution
from torch.jit._state import _python_cu
from torch.nn.modules import transformer
from torch.utils import checkpoint

# what `checkpoint` enters around the forward, as this version of torch names it
_WITHOUT_REENTRANCE = [
    name
    for name in vars(checkpoint)
    if name.startswith("_checkpoint_without_reentrant_generator")
]


@contextmanager
def plain_forward(seen: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let torch.utils.checkpoint run what it is given and keep what autograd saves.

    PyTorch runs it again in the backward; layers with running statistics update them
    then a second time. `seen` is called at each checkpoint.

    Let torch.nn's transformers compute the same in evaluation as in training: their
    fast path gives zeros in place of padding. And let them look at no mask, only at
    what is said of it, to know whether it is the causal one.

    Let functions and modules that torch.compile has made run as they are written.
    """

    def reentrant(function: Callable[..., Any], _: bool, *inputs: Any) -> Any:
        seen()
        learns = any(t.requires_grad for t in inputs if isinstance(t, torch.Tensor))
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            return function(*inputs)

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        seen()
        yield

    def told(mask: object, is_causal: bool | None = None, *_: object) -> bool:
        return is_causal is True

    mend_torch()
    changed: Any = checkpoint.CheckpointFunction
    changed.apply = reentrant
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            patched(checkpoint, **dict.fromkeys(_WITHOUT_REENTRANCE, around)),
            patched(transformer, _detect_is_causal_mask=told),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        del changed.apply


@contextmanager
def plain_scripts() -> Iterator[None]:
    """Let scripts of torch.jit run the same each time: those that ran are optimized."""
    scripts: Any = _python_cu
    for script in scripts.get_functions():
        script._debug_flush_compilation_cache()
    with optimized_execution(False):
        yield


def own_checkpoint(function: type, args: Sequence[Any]) -> Callable[[], Any] | None:
    """Return what a checkpoint in the user's own code runs, None if it is none.

    `CheckpointFunction.apply(run, keeps, *inputs)` is a copy of torch's, as language
    models have it; `(run, count, *tensors)` is that of diffusion models: `run` takes
    so many of the tensors, the others are the weights in it.
    """
    match function.__name__, *args[:2]:
        case "CheckpointFunction", run, bool() if callable(run):
            return partial(run, *args[2:])
        case "CheckpointFunction", run, int(count) if callable(run):
            return partial(run, *args[2 : 2 + count])
    return None


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Let a class, a module or an object have these attributes for a while."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


_instance_norm = torch.instance_norm


def mend_torch() -> None:
    """Let torch.instance_norm give right gradients, from now on in this process.

    Of a single sample they are wrong where the gradient that comes to it is in
    `channels_last` (torch 2.13 on a CPU), and large pictures and volumes come one at a
    time. Made contiguous, it is the same numbers.
    """
    torch.instance_norm = _mended_instance_norm


@wraps(_instance_norm)
def _mended_instance_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result = _instance_norm(input, *args, **kwargs)
    compiles = torch.compiler.is_compiling()
    if input.shape[0] == 1 and result.requires_grad and not compiles:
        with torch._C.DisableTorchFunction():
            result.register_hook(_contiguous)  # type: ignore[no-untyped-call]
    return result


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient in order; none comes to what only another rank uses."""
    return None if gradient is None else gradient.contiguous()


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads here, and in threads of Python that start here.

    In small work more than one only wait for each other, and keep a core busy with it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def enter_training(model: nn.Module) -> None:
    """Put a model into training, as a loop does; layers that are frozen stay so.

    A class with a `train` of its own may freeze others there, such as its norms.
    """
    if not model.training:
        model.train()
    for module in [*model.modules()]:
        if module.training and type(module).train is not nn.Module.train:
            module.train()
