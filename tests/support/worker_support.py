"""A worker with one stage, for tests of what it is called for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.local import LocalTransport
from gemsc.runtime.transport.streams import streams_for
from gemsc.runtime.worker.program import RankPlace, RankProgram, Run
from gemsc.runtime.worker.stages import Stages
from gemsc.runtime.worker.worker import Worker

RUN = Run(0)


def worker_of(
    transport: LocalTransport, stage: nn.Module | None = None, **options: Any
) -> Worker:
    """Return a worker with one stage; `options` are those of programs and workers."""
    place = RankPlace(transport.rank, options.pop("copy_ranks", 1))
    run = options.pop("run", RUN)
    names = {field.name for field in fields(RankProgram)}
    known = {name: options.pop(name) for name in list(options) if name in names}
    defaults = {"num_micro_batches": 1, "num_replicas": 1, "inputs": {}}
    program = RankProgram(
        **defaults | known,
        stages={},
        reductions={},
        train_step=None,
        eval_step=lambda worker: None,
    )
    device = DeviceTransport(transport, streams_for(torch.device("cpu")))
    return Worker(
        device, program, Stages({run: stage or nn.Identity()}), place, **options
    )
