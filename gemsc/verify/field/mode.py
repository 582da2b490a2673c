"""The mode in which torch computes over a finite field, forward and backward."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import is_real
from gemsc.base.rng import QuietMode
from gemsc.runtime.tiles.saving import is_freed
from gemsc.verify.field.numbers import LONGEST, SMALL, Field, NotDecidedError

Rule = Callable[..., Any]

T = TypeVar("T")
_FEW = 64  # notes: to look for those of memory that is gone is not worth it


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Operators by what is done with them, where that is not a rule.

# random numbers: constants, the same on both sides
DRAWS = names(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli_ uniform_ "
    "normal_ exponential_ random_"
)
# new memory
UNWRITTEN = names(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided"
)
# what looks at numbers without changing them, or makes none
PLAIN = names(
    "_local_scalar_dense isfinite isinf isnan is_same_size size stride is_nonzero "
    "record_stream _has_compatible_shallow_copy_type is_pinned _pin_memory equal "
    "nonzero _foreach_copy_ _foreach_zero_ _assert_async "
    # by 1: it looks for infinities
    "_amp_foreach_non_finite_check_and_unscale_"
)
# what moves numbers and gives a memory of its own to nothing but what it is given
CARRIES = names(
    "clone cat stack index index_select gather flip roll repeat repeat_interleave "
    "masked_select take take_along_dim expand_copy view_copy slice_copy"
)
# what only moves numbers
MOVES = CARRIES | names(
    "zero_ zeros_like ones_like new_zeros new_ones zeros ones select_backward "
    "slice_backward slice_scatter select_scatter as_strided_scatter diagonal_scatter "
    "unfold replication_pad1d replication_pad2d replication_pad3d reflection_pad1d "
    "reflection_pad2d reflection_pad3d tril triu tril_ triu_ upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d unbind_copy "
    "max_unpool2d im2col pixel_shuffle pixel_unshuffle channel_shuffle embedding "
    "split_with_sizes_copy narrow_copy diag_embed rot90 masked_scatter masked_scatter_ "
    "_unsafe_index block_diag _reshape_alias unsafe_split native_channel_shuffle "
    "unsafe_chunk unsafe_split_with_sizes index_copy index_copy_"
)
# what says itself in which dtype its result is
OWN_DTYPE = names("_to_copy full_like new_full")

# what each other operation of torch is over a finite field; what has no rule is what
# torch's decompositions compose it of: norms of layers, `addmm`
RULES: dict[str, Rule] = {}


class NotesOnMemory(Generic[T]):
    """What is known of all that lies in the memory of tensors, while they live.

    Threads may share it.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[StorageWeakRef, T]] = {}
        self._many = _FEW

    def of(self, t: Tensor) -> T | None:
        """Return what is known of a tensor's memory."""
        entry = self._notes.get(t.untyped_storage()._cdata)
        return None if entry is None or is_freed(entry[0]) else entry[1]

    def enter(self, t: Tensor, note: T) -> None:
        """Say what is known of a tensor's memory from now on."""
        if len(self._notes) > self._many:
            for key, (memory, _) in list(self._notes.items()):
                if is_freed(memory):
                    self._notes.pop(key, None)
            self._many = max(_FEW, 2 * len(self._notes))
        storage = t.untyped_storage()
        memory = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._notes[storage._cdata] = memory, note

    def forget(self, t: Tensor) -> None:
        """Drop what is known of a tensor that is written to."""
        self._notes.pop(t.untyped_storage()._cdata, None)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function as the rule of these operators, named without overloads."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def name_and_place(func: Any) -> tuple[str, bool]:
    """Return the name of an ATen operator, `add` of `add_`, and if it is in place."""
    name = func._schema.name.removeprefix("aten::")
    in_place = name.endswith("_") and not name.endswith("__")
    return name[:-1] if in_place else name, in_place


def holds_numbers(leaf: Any) -> TypeGuard[Tensor]:
    """Whether something is a tensor of numbers that are no integers."""
    return isinstance(leaf, Tensor) and is_real(leaf.dtype)


_unwritten = itertools.count(1)  # what is in new memory: never twice the same


@dataclass(frozen=True)
class _Known:
    """What exp of all that lies in some memory is."""

    exp: Tensor
    is_log: bool


class Exps(NotesOnMemory[_Known]):
    """What exp of some tensors is; ranks that are threads share it."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[bytes, _Known] = {}  # by what was copied

    def follow(self, target: Tensor, source: Tensor) -> None:
        """Know the same of a copy of bytes: of all of a memory, to wait, or back."""
        known = self.of(source)
        if known is not None and _is_whole(source):
            self._bytes[_digest(source)] = known
        elif self._bytes and _is_whole(target):
            known = self._bytes.get(_digest(source))
            if known is not None:
                self.enter(target, known)


class OverField(QuietMode):  # type: ignore[no-untyped-call]
    """Computes what torch is asked for in numbers of a field.

    `zeros` of `divisions` are by 0: what they hide is not compared. `see` is told of
    each result.
    """

    def __init__(
        self,
        field: Field,
        see: Callable[[Any], None] | None = None,
        exps: Exps | None = None,
    ) -> None:
        super().__init__()
        self.see = see
        self.field = field
        self.zeros = self.divisions = 0
        self._exps = Exps() if exps is None else exps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute, and tell of the result."""
        result = self._computed(func, args, kwargs or {})
        if self.see is not None:
            self.see(result)
        return result

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: C901
        name = func._schema.name.removeprefix("aten::")
        if func.namespace in ("profiler", "prims") and not _has_numbers(args):
            return func(*args, **kwargs)
        if func.namespace != "aten":
            raise NotDecidedError(func._schema.name)
        if any(map(_is_no_number, pytree.tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if name in UNWRITTEN:
            return self._filled(func(*args, **kwargs))
        if name in DRAWS:
            return self._constants(self._plain(func, args, kwargs))
        if name == "_local_scalar_dense" and holds_numbers(args[0]):
            return float(self.of(args[0]).item())
        if name in MOVES:
            return self._moved(name, func, args, kwargs)
        if func.is_view or torch.Tag.inplace_view in func.tags or name == "set_":
            return func(*args, **kwargs)
        if name in PLAIN:
            return self._plain(func, args, kwargs)
        if name.startswith("_foreach_") and name_and_place(func)[1]:
            return self._for_each(name.removeprefix("_foreach_"), *args)
        if name == "copy_" and args[0].dtype is args[1].dtype is torch.uint8:
            self._plain(func, args, kwargs)
            self._exps.follow(*args[:2])
            return args[0]
        if not _has_numbers((args, kwargs)):
            return self._constants(func(*args, **kwargs))
        base, in_place = name_and_place(func)
        if (compute := RULES.get(base)) is not None:
            target: Any = args[0] if in_place else kwargs.pop("out", None)
            result = compute(self, *args, **kwargs)
            if target is not None:
                return self._write(target, result)
            return result if base in OWN_DTYPE else self._like(result, args, kwargs)
        if func in decomposition_table:
            with self:
                return decomposition_table[func](*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotDecidedError(name)
        return result

    def _for_each(self, method: str, tensors: Any, *args: Any) -> None:
        """Change each of some tensors, all with the same numbers."""
        if any(isinstance(arg, list | tuple) for arg in args):
            raise NotDecidedError(f"_foreach_{method}")
        with self:
            for tensor in tensors:
                getattr(tensor, method)(*args)

    def _like(self, result: Any, args: Any, kwargs: Any) -> Any:
        """Return results in the dtype that torch gives them."""
        floats = [t for t in pytree.tree_leaves((args, kwargs)) if holds_numbers(t)]
        wide = [t for t in floats if t.dim()] or floats
        dtype = wide[0].dtype
        for t in wide[1:]:
            dtype = torch.promote_types(dtype, t.dtype)
        if dtype is torch.float64:
            return result
        if dtype is not torch.float32:
            raise NotDecidedError(f"numbers in {dtype}")
        return pytree.tree_map(
            lambda t: self.carry(t, t.to(dtype)) if holds_numbers(t) else t, result
        )

    def _filled(self, result: Any) -> Any:
        """Return new memory: what reads it before it is written computes nothing."""
        if holds_numbers(result):
            number = self.field.apply("new", torch.tensor(next(_unwritten) % SMALL))
            result.fill_(number)
        return result

    def _constants(self, result: Any) -> Any:
        def change(leaf: Any) -> Any:
            if holds_numbers(leaf) and leaf.numel():
                numbers = self.field.of(leaf)
                if numbers is not leaf:
                    leaf.copy_(numbers)
            return leaf

        return pytree.tree_map(change, result)

    # ----------------------------------------- what rules compute with

    def of(self, value: Any) -> Any:
        """Return a tensor or a number of the program as numbers of the field."""
        if isinstance(value, Tensor):
            return self.field.of(value)
        return self.field.number(value)

    def scalar(self, value: Any) -> float:
        """Return a number of the program as one of the field, or an infinity."""
        is_infinite = isinstance(value, float) and math.isinf(value)
        return value if is_infinite else self.field.number(value)

    def reduced(self, t: Tensor) -> Tensor:
        """Reduce a sum, which may have infinities."""
        infinite = t.isinf()
        if not bool(infinite.any()):
            return self.field.reduced(t)
        return torch.where(
            infinite, t, self.field.reduced(t.masked_fill(infinite, 0.0))
        )

    def mul(self, a: Any, b: Any) -> Tensor:
        """Return the product of two tensors of numbers of the field."""
        return self.field.reduced(a * b)

    def add(self, a: Any, b: Any) -> Tensor:
        """Return the sum."""
        return self.field.reduced(a + b)

    def inverse(self, t: Any) -> Any:
        """Return 1 / t."""
        if not isinstance(t, Tensor):
            t = torch.tensor(t, dtype=torch.float64)
        self.zeros += int((t == 0).sum())
        self.divisions += t.numel()
        return self.field.inverse(t)

    def sum(self, t: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
        """Return a sum."""
        if dims is None or (isinstance(dims, list | tuple) and not dims):
            dims = list(range(t.dim()))
        if t.dim() == 0:
            return t.clone()
        return self.field.reduced(t.sum(dims, keepdim=keepdim))

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a matrix product, added up in parts if it is long."""
        size = a.shape[-1]
        if size <= LONGEST:
            return self.field.reduced(a @ b)
        parts = zip(
            torch.split(a, LONGEST, -1), torch.split(b, LONGEST, -2), strict=True
        )
        total = sum(self.field.reduced(x @ y) for x, y in parts)
        assert isinstance(total, Tensor)
        return self.field.reduced(total)

    # ------------------------------------- exp(a - b) = exp(a) / exp(b)

    def exp(self, given: Tensor) -> Tensor:
        """Return exp of a tensor, which may be known as a quotient or an argument."""
        known = self._exps.of(given)
        if known is not None:
            place = given.size(), given.stride(), given.storage_offset()
            return known.exp.as_strided(*place).clone()
        return self.field.apply("exp", self.of(given))

    def has_exp(self, t: Any) -> bool:
        """Whether exp of a tensor is known as something else."""
        return isinstance(t, Tensor) and self._exps.of(t) is not None

    def is_log(self, t: Any) -> bool:
        """Whether a tensor is the logarithm of something."""
        known = self._exps.of(t) if isinstance(t, Tensor) else None
        return known is not None and known.is_log

    def remember(self, t: Tensor, exp: Tensor, *, is_log: bool = False) -> Tensor:
        """Say what exp of a tensor is; `t` has a memory of its own."""
        whole = torch.empty_strided(t.size(), t.stride(), dtype=torch.float64)
        self._exps.enter(t, _Known(whole.copy_(exp), is_log))
        return t

    def carry(self, source: Tensor, result: Tensor) -> Tensor:
        """Return a copy of a tensor, of which the same is known."""
        if result is not source and self.has_exp(source):
            self.remember(result, self.exp(source), is_log=self.is_log(source))
        return result

    def _moved(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Move numbers, and what exp of them is."""
        result = self._plain(func, args, kwargs)
        moved = [t for t in pytree.tree_leaves((args, kwargs)) if holds_numbers(t)]
        if name in CARRIES and any(map(self.has_exp, moved)):
            exps = pytree.tree_map_only(holds_numbers, self.exp, args)
            is_log = all(map(self.is_log, moved))
            self.remember(result, func(*exps, **kwargs), is_log=is_log)
        return result

    def _write(self, target: Tensor, result: Tensor) -> Tensor:
        """Put a result where it belongs, with what exp of it is if it fills that."""
        target.copy_(result)
        self._exps.forget(target)
        if _is_whole(target) and target.shape == result.shape:
            return self.carry(result, target)
        return target

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let torch compute; forget what was known of what it writes to."""
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                for t in pytree.tree_leaves(value) if argument.is_write else ():
                    self._exps.forget(t)
        return result


def _is_no_number(leaf: Any) -> bool:
    """Whether a tensor has a shape only."""
    return isinstance(leaf, Tensor) and (leaf.is_meta or isinstance(leaf, FakeTensor))


def _has_numbers(values: Any) -> bool:
    return any(map(holds_numbers, pytree.tree_leaves(values)))


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor is all that lies in its memory."""
    return t.nbytes == t.untyped_storage().nbytes()


def _digest(t: Tensor) -> bytes:
    return hashlib.blake2b(t.contiguous().numpy().data).digest()
