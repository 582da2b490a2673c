"""What the modes of the field share: names of operators, and notes on memories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeGuard, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gemsc.base.dtypes import is_real

__all__ = ["NotesOnMemory", "Rule", "Rules", "holds_numbers", "name_and_place"]

Rule = Callable[..., Any]

T = TypeVar("T")
_FEW = 64  # notes: to look for those of memory that is gone is not worth it


class NotesOnMemory(Generic[T]):
    """What is known of all that lies in the memory of tensors, while they live.

    Threads may share it.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[StorageWeakRef, T]] = {}
        self._many = _FEW

    def of(self, t: Tensor) -> T | None:
        """Return what is known of a tensor's memory."""
        found = self._notes.get(t.untyped_storage()._cdata)
        return None if found is None or _is_gone(found[0]) else found[1]

    def enter(self, t: Tensor, note: T) -> None:
        """Say what is known of a tensor's memory from now on."""
        if len(self._notes) > self._many:
            for key, (memory, _) in list(self._notes.items()):
                if _is_gone(memory):
                    self._notes.pop(key, None)
            self._many = max(_FEW, 2 * len(self._notes))
        storage = t.untyped_storage()
        memory = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._notes[storage._cdata] = memory, note

    def forget(self, t: Tensor) -> None:
        """Drop what is known of a tensor that is written to."""
        self._notes.pop(t.untyped_storage()._cdata, None)


class Rules(dict[str, Rule]):
    """What some operators compute, by their names without overloads."""

    def of(self, *names: str) -> Callable[[Rule], Rule]:
        """Enter a function as the rule of these operators."""

        def enter(function: Rule) -> Rule:
            self.update(dict.fromkeys(names, function))
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


def _is_gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]
