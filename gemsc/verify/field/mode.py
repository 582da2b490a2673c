"""The mode in which torch computes over a finite field, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemsc.verify.field.numbers import LONGEST, Field, NotDecidedError

__all__ = ["OverField"]

Rule = Callable[..., Any]


class OverField(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes what torch is asked for in numbers of a field.

    `zeros` counts the divisions by 0: where there are any, nothing follows. `see` is
    told of each result.
    """

    def __init__(
        self, field: Field, rules: Any, see: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see = see
        self.field = field
        self.rules = rules  # the module of that name
        self.zeros = 0
        self._exps: dict[int, tuple[StorageWeakRef, int, Tensor]] = {}
        self._logs: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let no call load torch._dynamo."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute, and tell of the result."""
        result = self._computed(func, args, kwargs or {})
        if self.see is not None:
            self.see(result)
        return result

    def _computed(  # noqa: C901
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if func.namespace in ("profiler", "prims") and not _has_numbers(args):
            return func(*args, **kwargs)
        if func.namespace != "aten":
            raise NotDecidedError(func._schema.name)
        if any(map(_is_no_number, pytree.tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if name in self.rules.DRAWS:
            return self._constants(func(*args, **kwargs))
        if name == "_local_scalar_dense" and _is_real(args[0]):
            return float(self.of(args[0]).item())
        if name in self.rules.PLAIN or func.is_view or name in self.rules.MOVES:
            return func(*args, **kwargs)
        if not _has_numbers((args, kwargs)):
            return self._constants(func(*args, **kwargs))
        base = name
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place:
            base = name[:-1]
        rule = self.rules.RULES.get(base)
        if rule is not None:
            out = kwargs.pop("out", None) if "out" in kwargs else None
            result = rule(self, *args, **kwargs)
            if in_place or out is not None:
                target: Any = args[0] if in_place else out
                self.forget(target)
                return target.copy_(result)
            return (
                result
                if base in self.rules.OWN_DTYPE
                else self._like(result, args, kwargs)
            )
        if func in decomposition_table:
            with self:
                return decomposition_table[func](*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotDecidedError(name)
        return result

    def _like(self, result: Any, args: Any, kwargs: Any) -> Any:
        """Return results in the dtype that torch gives them."""
        floats = [t for t in pytree.tree_leaves((args, kwargs)) if _is_real(t)]
        wide = [t for t in floats if t.dim()] or floats
        dtype = wide[0].dtype
        for t in wide[1:]:
            dtype = torch.promote_types(dtype, t.dtype)
        if dtype is torch.float64:
            return result
        if dtype is not torch.float32:
            raise NotDecidedError(f"numbers in {dtype}")
        return pytree.tree_map(lambda t: t.to(dtype) if _is_real(t) else t, result)

    def _constants(self, result: Any) -> Any:
        def change(leaf: Any) -> Any:
            if _is_real(leaf) and leaf.numel():
                found = self.field.of(leaf)
                if found is not leaf:
                    leaf.copy_(found)
            return leaf

        return pytree.tree_map(change, result)

    # ----------------------------------------- what rules compute with

    def of(self, value: Any) -> Any:
        """Return a tensor or a number of the program as numbers of the field."""
        if isinstance(value, Tensor):
            return self.field.of(value)
        return self.field.number(value)

    def reduced(self, t: Tensor, terms: int = 1) -> Tensor:
        """Reduce a sum of so many products, in place."""
        if terms > LONGEST:
            raise NotDecidedError(f"a sum of {terms} products")
        return self.field.reduced(t)

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
        known = self._known(given)
        if known is not None:
            place = given.size(), given.stride(), given.storage_offset()
            return known.as_strided(*place).clone()
        return self.field.apply("exp", self.of(given))

    def has_exp(self, t: Any) -> bool:
        """Whether exp of a tensor is known as something else."""
        return isinstance(t, Tensor) and self._known(t) is not None

    def is_log(self, t: Any) -> bool:
        """Whether a tensor is the logarithm of something."""
        return self.has_exp(t) and t.untyped_storage()._cdata in self._logs

    def _known(self, t: Tensor) -> Tensor | None:
        """Return exp of all that lies in a tensor's memory, if that is known."""
        known = self._exps.get(t.untyped_storage()._cdata)
        if known is None or known[1] != t._version or _is_gone(known[0]):
            return None
        return known[2]

    def remember(self, t: Tensor, exp: Tensor, *, is_log: bool = False) -> Tensor:
        """Say what exp of a tensor is; `t` has a memory of its own."""
        if len(self._exps) > 64:
            gone = [k for k, (memory, *_) in self._exps.items() if _is_gone(memory)]
            for key in gone:
                del self._exps[key]
        whole = torch.empty_strided(t.size(), t.stride(), dtype=torch.float64)
        whole.copy_(exp)
        storage = t.untyped_storage()
        memory = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._exps[storage._cdata] = memory, t._version, whole
        (self._logs.add if is_log else self._logs.discard)(storage._cdata)
        return t

    def forget(self, t: Tensor) -> None:
        """Drop what is known of a tensor that is written to."""
        self._exps.pop(t.untyped_storage()._cdata, None)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _is_no_number(leaf: Any) -> bool:
    """Whether a tensor has a shape only."""
    return isinstance(leaf, Tensor) and (leaf.is_meta or isinstance(leaf, FakeTensor))


def _has_numbers(values: Any) -> bool:
    return any(map(_is_real, pytree.tree_leaves(values)))


def _is_gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]


def is_infinite(t: Tensor) -> bool:
    """Whether a tensor has infinities."""
    return bool(t.isinf().any())
