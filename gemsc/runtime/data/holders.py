"""What the copies of a model have of a batch, brought together on one rank."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemsc.runtime.data.metrics import is_texts
from gemsc.runtime.transport.transport import LARGEST_TAG, Transport


@dataclass
class Holders:
    """The ranks that have outputs, one of each copy; the first one takes those of all.

    They are known after the first `join`.
    """

    transport: Transport
    ranks: list[int] = field(default_factory=list)

    def find(self, output: Any) -> None:
        """Learn once who has outputs; every rank calls it."""
        if not self.ranks:
            has_output = self.transport.all_gather_object(output is not None)
            self.ranks = [rank for rank, has in enumerate(has_output) if has]

    @property
    def first(self) -> int:
        """The rank that takes all."""
        return self.ranks[0]

    def join(self, value: Any) -> Any:
        """Return what all holders have of a batch on the first one, None elsewhere."""
        transport = self.transport
        if transport.rank not in self.ranks:
            return None
        if transport.rank != self.first:
            _send(transport, value, self.first)
            return None
        parts = [value, *(_receive(transport, rank) for rank in self.ranks[1:])]
        return pytree.tree_map(_join, *parts, is_leaf=is_texts)


def _join(*leaves: Any) -> Any:
    if isinstance(leaves[0], Tensor):
        return torch.cat(leaves)
    if isinstance(leaves[0], np.ndarray):
        return np.concatenate(leaves)
    is_list = is_texts(leaves[0])
    return [text for texts in leaves for text in texts] if is_list else leaves[0]


def _send(transport: Transport, value: Any, dest: int) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    for tensor in (torch.tensor([data.numel()]), data):
        transport.wait(transport.send(tensor, dest, LARGEST_TAG))


def _receive(transport: Transport, source: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    transport.wait(transport.receive(size, source, LARGEST_TAG))
    data = torch.empty(int(size), dtype=torch.uint8)
    transport.wait(transport.receive(data, source, LARGEST_TAG))
    return pickle.loads(data.numpy().data)  # of a rank of this job
