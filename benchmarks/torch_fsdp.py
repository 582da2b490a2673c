"""The GPT of the benchmarks under torch's fully_shard (FSDP2), over gloo."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from cases import CASES
from gpt import Gpt
from jobs import LEARNING_RATE, Job, Step, join_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

__all__ = ["start_torch_fsdp"]


def start_torch_fsdp(job: Job, place: Path) -> Step:
    """Train the GPT with its weights in parts: each block is gathered by itself."""
    rank = join_gloo(job, place)
    case, count = CASES[job.case], job.micro_batches
    model = case.build()
    assert isinstance(model, Gpt)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    for module in (model.words, model.head, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, target = case.data(case.batch)
    everything = (*inputs, target)
    chunks = [tensor.chunk(count * job.ranks) for tensor in everything]
    parts = list(zip(*chunks, strict=True))[rank * count : (rank + 1) * count]

    def step() -> list[float]:
        total = torch.zeros(())
        for *given, wanted in parts:
            loss = case.loss(model(*given), wanted)
            (loss / count).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return [total.item() / count / job.ranks]

    return step
