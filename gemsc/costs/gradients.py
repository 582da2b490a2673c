"""What a backward makes: gradients on their way from one layer to the next.

    backward of    c            b            a
    makes          gradient     gradient     gradient
                   of b         of a         of its input
    frees                       gradient     gradient
                                of b         of a

A gradient lives from the backward of the last layer that uses a value to that of the
layer that computed it; longer if it is handed on as it is, as an addition does, or if
it is a part of a larger one, as after a concatenation.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from gemsc.base.nests import dense_leaves, storage_of


@dataclass(slots=True)
class MadeBytes:
    """What the backward of one node does to the memory of gradients.

    It holds at most `most` bytes more than when it began. `made` are storages (number
    -> bytes) that it leaves to others, `freed` the numbers of those that end with it.
    """

    most: int = 0
    made: dict[int, int] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Storage:
    number: int
    num_bytes: int
    maker: Hashable
    reference: weakref.ref[Any] | None = None


class GradientFlow:
    """Follows every storage that a backward makes, until it is freed.

    `by_node` says what each node does; `running` is the node whose backward runs.
    Storages have numbers below zero: their addresses are used again.
    """

    def __init__(self) -> None:
        self.by_node: dict[Hashable, MadeBytes] = defaultdict(MadeBytes)
        self._running: Hashable = None
        self._more = 0  # bytes than when the backward of the running node began
        self._alive: dict[int, _Storage] = {}
        self._numbers = count(-1, -1)

    def run(self, node: Hashable) -> None:
        """Say that the backward of a node runs."""
        if node is not self._running:
            self._running, self._more = node, 0

    def see(self, given: Any, result: Any) -> None:
        """Look at what an operator gave; views of what it was given are nothing new."""
        new = (t for t in dense_leaves(result) if storage_of(t) not in self._alive)
        made = {storage_of(t): t for t in new}
        if made:
            for tensor in dense_leaves(given):
                made.pop(storage_of(tensor), None)
        for tensor in made.values():
            self.storage(tensor)

    def storage(self, tensor: Tensor) -> tuple[int, int]:
        """Return the number of a tensor's storage, and its bytes."""
        memory, key = tensor.untyped_storage(), storage_of(tensor)
        if key in self._alive:
            return self._alive[key].number, self._alive[key].num_bytes
        storage = _Storage(next(self._numbers), memory.nbytes(), self._running)
        self._alive[key] = storage
        storage.reference = weakref.ref(memory, lambda _: self._free(key))
        self._more += storage.num_bytes
        here = self.by_node[self._running]
        here.most = max(here.most, self._more)
        return storage.number, storage.num_bytes

    def _free(self, key: int) -> None:
        gone = self._alive.pop(key)
        self._more -= gone.num_bytes
        if gone.maker is not self._running:
            self.by_node[gone.maker].made[gone.number] = gone.num_bytes
            self.by_node[self._running].freed.append(gone.number)
