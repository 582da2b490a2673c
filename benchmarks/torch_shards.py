"""The GPT of the benchmarks, cut by torch.distributed.tensor.parallel.

It is cut where gemsc cuts it: heads, hidden features and words, with the residual
stream whole on every rank. What that takes by hand: a plan of module names, the rows of
the fused layer of queries, keys and values in another order, the number of heads of a
rank, the tied weight tied again, and the loss in the context of `loss_parallel`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from cases import CASES
from gpt import Gpt
from jobs import LEARNING_RATE, Job, Step, join_gloo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

__all__ = ["start_torch_shards"]


def start_torch_shards(job: Job, place: Path) -> Step:
    """Train the GPT over all ranks as shards."""
    join_gloo(job, place)
    case = CASES[job.case]
    model = case.build()
    assert isinstance(model, Gpt)
    cut(model, job.ranks)
    inputs, target = case.data(case.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    count = job.micro_batches

    def step() -> list[float]:
        total = 0.0
        parts = zip(*(tensor.chunk(count) for tensor in (*inputs, target)), strict=True)
        with loss_parallel():
            for *given, wanted in parts:
                loss = case.loss(model(*given), wanted)
                (loss / count).backward()
                whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
                total += whole.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [total / count]

    return step


def cut(model: Gpt, ranks: int) -> None:
    """Give this process its shard of the model, in place."""
    plan: dict[str, ParallelStyle] = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index, block in enumerate(model.blocks):
        block.heads //= ranks
        block.qkv.weight = nn.Parameter(_by_ranks(block.qkv.weight, ranks))
        block.qkv.bias = nn.Parameter(_by_ranks(block.qkv.bias, ranks))
        for name in ("qkv", "up"):
            plan[f"blocks.{index}.{name}"] = ColwiseParallel()
        for name in ("out", "down"):
            plan[f"blocks.{index}.{name}"] = RowwiseParallel()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, plan)
    model.head.weight = model.words.weight


def _by_ranks(fused: Tensor, ranks: int) -> Tensor:
    """Return rows by rank, then query, key and value: dimension 0 is cut in order."""
    rows = fused.detach().unflatten(0, (3, ranks, -1))
    return rows.transpose(0, 1).flatten(0, 2).contiguous()
