r"""The sum of a number over all ranks, by messages between neighbours in a tree.

            0             each rank waits for its children's sums, adds its own,
          /   \           sends that to its parent and waits for the total,
         1     2          which comes back the same way
        / \   /
       3   4 5

A rank can sleep until such a message comes; while it waits for an all-reduce of the
library it must give it turns again and again. The order of addition is fixed: all
ranks get the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemsc.runtime.transport.link import Link
from gemsc.runtime.transport.transport import LARGEST_TAG

__all__ = ["total"]

TAG = LARGEST_TAG


def total(link: Link, value: Tensor) -> Tensor:
    """Return the sum of a CPU tensor over all ranks; all ask for it together.

    What the link has deferred starts meanwhile: other ranks may wait for it.
    """
    transport = link.transport
    rank, parent = transport.rank, (transport.rank - 1) // 2
    first = 2 * rank + 1
    children = range(first, min(first + 2, transport.size))
    parts = [torch.empty_like(value) for _ in children]
    link.wait(
        *(transport.receive(p, c, TAG) for p, c in zip(parts, children, strict=True))
    )
    result = torch.stack([value, *parts]).sum(0)
    if rank:
        up, result = transport.send(result, parent, TAG), torch.empty_like(value)
        link.wait(transport.receive(result, parent, TAG), up)
    link.wait(*(transport.send(result, child, TAG) for child in children))
    return result
