"""What each process of a group runs: it makes steps when contenders.py asks for them.

Kinds of processes:

    alone   one process, plain PyTorch, the same micro-batches
    plain   the same, with the malloc of a process that gemsc has not started
    gemsc   a compiled program under gemsc's own launcher
    torch   the same generated stages on torch.distributed.pipelining, over gloo
    shards  the model cut by torch.distributed.tensor.parallel, over gloo
    fsdp    the model on both ranks, its weights in parts by fully_shard, over gloo
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES
from jobs import LEARNING_RATE, Job, Step, join_gloo
from peak_tensors import PeakTensors
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch_fsdp import start_torch_fsdp
from torch_shards import start_torch_shards

import gemsc
from gemsc.base.dtypes import convert, converted
from gemsc.messages.message import Input, Message
from gemsc.runtime import RankProgram, Run
from gemsc.runtime.training.program_directory import load_rank_module
from gemsc.weights.load import fill
from gemsc.weights.read import read_tensors

TORCH_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def serve(connection: Connection, step: Step) -> None:
    """Make steps when asked; sleep otherwise."""
    with contextlib.suppress(EOFError):
        while (order := connection.recv()) is not None:
            kind, num_steps = order
            cpu = time.process_time()
            step()
            answer = _timed(step, num_steps) if kind == "run" else _watched(step)
            connection.send(answer | {"all_cpu": time.process_time() - cpu})


def _timed(step: Step, num_steps: int) -> dict[str, Any]:
    losses: list[float] = []
    cpu, start = time.process_time(), time.monotonic()
    for _ in range(num_steps):
        losses += step()
    end = time.monotonic()  # one clock for all processes of a machine
    return {
        "start": start,
        "end": end,
        "cpu": time.process_time() - cpu,
        "losses": losses,
    }


def _watched(step: Step) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    step()
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    with PeakTensors() as peak:
        step()
    return {"resident": int(status.split()[0]) * 1024, "tensors": peak.peak}


def start_alone(job: Job, place: Path) -> Step:
    """Train in one process, over the same micro-batches."""
    case = CASES[job.case]
    model = case.build()
    inputs, target = case.data(case.batch)
    convert(model, job.memory_format)
    inputs = converted(inputs, job.memory_format)
    forward = torch.compile(model, dynamic=False) if job.torch_compile else model
    optimizer = torch.optim.SGD(model.named_parameters(), lr=LEARNING_RATE)
    count = job.micro_batches

    def step() -> list[float]:
        total = 0.0
        parts = zip(*(tensor.chunk(count) for tensor in (*inputs, target)), strict=True)
        for *given, wanted in parts:
            loss = case.loss(forward(*given), wanted)
            (loss / count).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [total / count]

    return step


def start_gemsc(job: Job, place: Path) -> Step:
    """Train as a user's own loop does."""
    trainer = gemsc.load(
        job.directory, optimizer=lambda named: torch.optim.SGD(named, lr=LEARNING_RATE)
    )
    case = CASES[job.case]
    inputs, target = case.data(case.batch)
    return lambda: [trainer.step(inputs, target)]


class StageOnTorch(nn.Module):
    """A generated stage as torch.distributed.pipelining wants it.

    It runs the rank file's own `forward_stageN`, in the place of the worker: what that
    receives are arguments here, what it sends are results.
    """

    def __init__(self, module: ModuleType, rank: int, directory: Path) -> None:
        super().__init__()
        self.names = list(module.PROGRAM.inputs) if rank == 0 else []
        self.call = getattr(module, f"forward_stage{rank}")
        with torch.device("meta"):
            self.stage = module.PROGRAM.stages[Run(rank)]()
        weights = directory / "weights" / f"stage{rank}.safetensors"
        fill(self.stage, read_tensors(weights).__getitem__, torch.device("cpu"))

    def forward(self, *arguments: Tensor, **inputs: Tensor) -> Any:
        """Return what the next stage needs, or the loss."""
        self.given = inputs | dict(zip(self.names, arguments, strict=False))
        self.arguments = iter(arguments)
        self.results: list[Tensor] = []
        self.call(self, 0)
        results = tuple(self.results)
        del self.given, self.arguments, self.results
        return results if len(results) > 1 else results[0]

    def input(self, name: str, m: int) -> Tensor:
        """Return a tensor of the batch; see `_renamed`."""
        return self.given[name if self.names else f"given_{name}"]

    def receive(self, message: Message, m: int) -> Any:
        """Return what the message carries."""
        tensors = tuple(islice(self.arguments, len(message.values)))
        return tensors if len(tensors) > 1 else tensors[0]

    def run(self, run: Run, m: int, *inputs: Tensor) -> Any:
        """Run the stage."""
        return self.stage(*inputs)

    def send(self, message: Message, m: int, *tensors: Tensor) -> None:
        """Return these to the caller."""
        self.results += tensors

    def add_loss(self, loss: Tensor) -> None:
        """Return it to the caller."""
        self.results.append(loss)


def start_torch(job: Job, place: Path) -> Step:
    """Train the same stages with PyTorch's own pipeline."""
    rank, count = join_gloo(job, place), job.micro_batches
    module = load_rank_module(Path(job.directory), rank)
    model = StageOnTorch(module, rank, Path(job.directory))
    case = CASES[job.case]
    inputs, target = case.data(case.batch)
    program: RankProgram = module.PROGRAM
    batch = {n: _pick(item, inputs, target) for n, item in program.inputs.items()}
    first = [tensor[: tensor.shape[0] // count] for tensor in batch.values()]
    loss = torch.zeros((), requires_grad=True)
    stage = PipelineStage(
        model,
        rank,
        job.ranks,
        torch.device("cpu"),
        # given, so that it need not run the stage on uninitialised memory
        input_args=tuple(first if rank == 0 else _empty(module, dest=rank)),
        output_args=(loss,) if rank else tuple(_empty(module, source=rank)),
    )
    schedule = TORCH_SCHEDULES[job.schedule](
        stage,
        count,
        loss_fn=lambda loss, target: loss / count,
        scale_grads=False,  # as cheap as ours: the loss is divided, not each gradient
    )
    named = dict(model.stage.named_parameters())
    optimizer = torch.optim.SGD(named.items(), lr=LEARNING_RATE)

    def step() -> list[float]:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(*batch.values())
        else:
            schedule.step(
                target=target, losses=losses, return_outputs=False, **_renamed(batch)
            )
        for name in program.reductions:  # it leaves that to its user
            dist.all_reduce(named[name].grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [sum(loss.item() for loss in losses)] if losses else []

    return step


def _renamed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`target` is a parameter of schedule.step itself."""
    return {f"given_{name}": tensor for name, tensor in batch.items()}


def _pick(item: Input, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return inputs[item.path[1]] if item.path[0] == "input" else target


def _empty(module: ModuleType, **ends: int) -> list[Tensor]:
    """Return tensors like those of all messages with this source or this dest."""
    messages = (m for m in vars(module).values() if isinstance(m, Message))
    return [
        torch.empty(value.shape, dtype=value.dtype, requires_grad=value.gradient)
        for message in messages
        if all(getattr(message, end) == rank for end, rank in ends.items())
        for value in message.values
    ]


START = {
    "alone": start_alone,
    "plain": start_alone,
    "gemsc": start_gemsc,
    "torch": start_torch,
    "shards": start_torch_shards,
    "fsdp": start_torch_fsdp,
}


def main() -> None:
    """Be one process of a group."""
    kind, place, text = sys.argv[1:]
    job = Job(**json.loads(text))
    torch.set_num_threads(job.threads)
    step = START[kind](job, Path(place))
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(Path(place) / "socket"))
        serve(Connection(end.detach()), step)
    if kind in ("torch", "shards", "fsdp"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
