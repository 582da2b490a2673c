"""Random numbers: the generators, and draws that do not depend on their order."""

from __future__ import annotations

import gc
import hashlib
import random
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gemsc.base.dtypes import is_real, within

SEEDED = "gemsc seeds torch's generators for each step, stage and micro-batch"
# torch has one generator for all threads, and tests run ranks as threads
generator_lock = threading.RLock()

_DRAWS = (
    *("rand", "dropout", "bernoulli", "binomial", "normal", "uniform", "exponential"),
    *("multinomial", "poisson", "cauchy", "geometric"),
)


def torch_state() -> Tensor:
    """Return the state of torch's generator for the CPU; no garbage is collected.

    torch locks the generator while it makes the tensor. A collection then may let
    another thread run, which waits for the generator and lets no other one run: ranks
    that are threads would wait for each other for ever.
    """
    with generator_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return torch.get_rng_state()
        finally:
            if collects:
                gc.enable()


@contextmanager
def fork_torch(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Put torch's generators for the CPU and some GPUs back as they were."""
    devices = list(devices)
    before = torch_state()
    states = [torch.cuda.get_rng_state(device) for device in devices]
    try:
        yield
    finally:
        torch.set_rng_state(before)
        for device, state in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Put the generators of torch, Python and NumPy back as they were."""
    before = torch_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda._initialized else None
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_torch(seed: int) -> None:
    """Seed torch's generators for the CPU and for GPUs, if there are any.

    `torch.manual_seed` prints the whole stack into a text for each kind of device that
    torch knows and this machine has not: a millisecond, for each sample that is read.
    """
    torch.default_generator.manual_seed(seed)
    if _has_gpu() and not torch.cuda._is_in_bad_fork():
        torch.cuda.manual_seed_all(seed)


_has_gpu = cache(torch.cuda.is_available)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators, and put them back afterwards."""
    with preserve_rng():
        seed_all(seed)
        yield


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators alone, and put those of the CPU and `device` back.

    Ranks that draw and ranks that do not would choose different batches otherwise.
    """
    with fork_torch([device] if device.type == "cuda" else []):
        seed_torch(seed)
        yield


def seed_of(*parts: int | str) -> int:
    """Return a seed of 64 bits that depends on all parts."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def may_draw(name: str) -> bool:
    """Whether a function or a layer of this name may draw random numbers."""
    name = name.lower()
    return "normalize" not in name and any(word in name for word in _DRAWS)


_UNTAGGED = ("random_", "binomial", "_sample_dirichlet")
_here = threading.local()


@contextmanager
def same_draws() -> Iterator[None]:
    """Let what torch draws in this thread depend on how much is asked for alone.

    Then it does not matter which rank draws, when, and how often: two draws of as many
    elements give the same numbers, however these are arranged. Numbers are drawn in
    float64 and rounded to the dtype that is asked for, so that runs in two dtypes are
    comparable, and in the order of indices, whatever the memory format.
    """
    before = ExitStack()
    with generator_lock:
        before.enter_context(preserve_rng())
    _here.alike = True
    try:
        with _SameDraws():
            yield
    finally:
        _here.alike = False
        with generator_lock:  # another thread may be about to draw
            before.close()


def are_draws_same() -> bool:
    """Whether this thread is in `same_draws`: parts must be those of whole draws."""
    return getattr(_here, "alike", False)


def outside_draws() -> AbstractContextManager[None]:
    """Leave `same_draws`, for what draws nothing: `torch.compile` takes no mode."""
    context: AbstractContextManager[None] = _disable_current_modes()
    return context if are_draws_same() else nullcontext()


class QuietMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that lets no call load torch._dynamo: it traces nothing within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _SameDraws(QuietMode):  # type: ignore[no-untyped-call]
    """Draws as `same_draws` says; `torch.compile` traces only `outside_draws`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tagged = torch.Tag.nondeterministic_seeded in func.tags
        if not (tagged or name in _UNTAGGED) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        with generator_lock:
            seed_torch(_seed(args, kwargs))
            return _drawn(func, name, args, kwargs)


def _drawn(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Draw in double precision and round."""
    if "attention" in name:  # it computes more than it draws
        return func(*args, **kwargs)
    if name.endswith("_"):
        wide = _widened(args[0], copy=True)
        func(wide, *map(_widened, args[1:]), **kwargs)
        return args[0].copy_(wide)
    given = kwargs
    if kwargs.get("dtype") is not None:
        given = kwargs | {"dtype": within(kwargs["dtype"], torch.float64)}
    elif not _tensors(args) and name in ("rand", "randn", "normal"):
        given = kwargs | {"dtype": torch.float64}
    wide = pytree.tree_map(_widened, args)
    result = func(*wide, **given)
    for argument, plain, other in zip(func._schema.arguments, args, wide, strict=False):
        if argument.is_write and plain is not other:  # the noise of rrelu, for instance
            plain.copy_(other)
    return pytree.tree_map(lambda leaf: _narrowed(leaf, args, kwargs), result)


def _seed(args: Any, kwargs: dict[str, Any]) -> int:
    """Return a number for the sizes among the arguments."""
    sizes = [
        leaf.numel() if isinstance(leaf, Tensor) else leaf
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor) or type(leaf) is int
    ]
    return zlib.crc32(repr(sizes).encode())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _widened(value: Any, *, copy: bool = False) -> Any:
    """Return a tensor in double precision, in the order of its indices."""
    if not isinstance(value, Tensor):
        return value
    dtype = within(value.dtype, torch.float64)
    wide = value.to(dtype, copy=copy, memory_format=torch.contiguous_format)
    return wide.contiguous()  # `to` leaves what is transposed, and has the dtype


def _narrowed(leaf: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a result in the dtype and the memory format that it would have had."""
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = leaf.dtype
    given = _tensors(args)
    if is_real(dtype):
        like = given[0].dtype if given else torch.get_default_dtype()
        dtype = kwargs.get("dtype") or within(dtype, like)
    if not given or given[0].shape != leaf.shape or kwargs.get("memory_format"):
        return leaf.to(dtype)
    return torch.empty_like(given[0], dtype=dtype).copy_(leaf)
