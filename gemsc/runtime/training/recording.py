"""Steps on the example inputs that are timed: each call of them, or all together.

The former is for `gemsc timeline --measured`, the latter for `gemsc profile`.
"""

from __future__ import annotations

import json
import platform
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gemsc.plan import Plan
from gemsc.runtime.data.batches import repeated
from gemsc.runtime.process.device import peak_bytes
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.streams import Moment, Streams
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.worker import Worker
from gemsc.user_model import load_user_model

WARM_UP_STEPS = 3  # the first ones allocate memory and choose algorithms
ROUNDS = 5

# what generated files call -> what it is called in a record
COMPUTED = {"run": "forward", "backward": "backward", "weights": "weight"}
ON_DEVICE = {*COMPUTED.values(), "update"}
CALLS = {
    **COMPUTED,
    "receive": "wait",
    "send": "send",
    "start_reduction": "reduction",
    "gather_weights": "gather",
    "finish_reductions": "reduction",
    "sum_up": "wait",
    "end": "wait",
}

# kind, stage, replica, micro-batch (-1 where there is none), begin and end
Record = tuple[str, int, int, int, int, int]


@dataclass
class Recorder:
    """Notes when a worker begins and ends what its generated file calls.

    It wraps the methods of this one worker: others pay nothing. What a device computes
    has the times of the device, which are read after the step: calls only enqueue it,
    and nothing waits for it that would not without the recorder.
    """

    worker: Worker
    _noted: list[tuple[str, int, int, int, Moment, Moment]] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        for name, kind in CALLS.items():
            wrapped = self._noting(kind, getattr(self.worker, name), name in COMPUTED)
            setattr(self.worker, name, wrapped)
        updates = self.worker.updates
        updates.apply = self._noting("update", updates.apply)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forget what was noted; to be called before each step."""
        self._noted = []
        self.worker.transport.streams.start_clock()

    def take(self) -> list[Record]:
        """Wait for the device; return what was noted since `begin`, in order of time.

        No two overlap: of what the host does, only that is told which it does while the
        device has nothing to compute.
        """
        records: list[Record] = [(*n[:4], n[4](), n[5]()) for n in self._noted]
        busy = [(r[4], r[5]) for r in records if r[0] in ON_DEVICE]
        disjoint: list[Record] = []
        for record in records:
            is_host = record[0] not in ON_DEVICE
            disjoint += _outside(record, busy) if is_host else [record]
        return sorted(disjoint, key=lambda record: record[4])

    def _noting(
        self, kind: str, call: Callable[..., Any], is_action: bool = False
    ) -> Callable[..., Any]:
        streams = self.worker.transport.streams
        moment = streams.moment if kind in ON_DEVICE else Streams().moment

        def noting(*arguments: Any, **named: Any) -> Any:
            begin = moment()
            result = call(*arguments, **named)
            end = moment()
            stage = replica = micro_batch = -1
            if is_action:
                run, micro_batch = arguments[:2]
                stage, replica = run.stage, run.replica
            self._noted.append((kind, stage, replica, micro_batch, begin, end))
            return result

        return noting


def _outside(record: Record, busy: Sequence[tuple[int, int]]) -> Iterator[Record]:
    """Yield the parts of a record between spans, which are given in order of time."""
    what, begin, end = record[:4], record[4], record[5]
    first = bisect_right(busy, begin, key=lambda span: span[1])
    for start, stop in busy[first:]:
        if start >= end:
            break
        if begin < start:
            yield (*what, begin, start)
        begin = stop
    if begin < end:
        yield (*what, begin, end)


def record_timed_steps(
    directory: Path,
    transport: Transport,
    folder: Path,
    num_steps: int,
    device: torch.device | None,
) -> None:
    """Train on the example inputs; write `times{rank}.json`.

    `device` is this rank's; None leaves the choice (see `choose_device`).

    Its `steps` hold each step's records in nanoseconds. All ranks' clocks begin when
    they leave the step's barrier: processes of one machine share a clock, so there it
    is the first rank's leaving that counts.
    """
    trainer, batch = _prepared(directory, transport, device)
    recorder = Recorder(trainer.worker)
    steps = []
    for _ in range(WARM_UP_STEPS + num_steps):
        recorder.begin()
        transport.barrier()
        zero = time.perf_counter_ns()
        trainer.step(*batch)
        steps.append((zero, recorder.take()))
    clock = (platform.node(), [zero for zero, _ in steps])
    clocks = transport.all_gather_object(clock)
    shared = len({node for node, _ in clocks}) == 1
    result = []
    for number, (zero, records) in enumerate(steps):
        first = min(zeros[number] for _, zeros in clocks) if shared else zero
        result.append([(*r[:4], r[4] - first, r[5] - first) for r in records])
    path = folder / f"times{transport.rank}.json"
    path.write_text(json.dumps({"steps": result[WARM_UP_STEPS:]}))


def time_steps(
    directory: Path,
    transport: Transport,
    folder: Path,
    num_steps: int,
    device: torch.device | None,
) -> None:
    """Train on the example inputs as any run does; write `load{rank}.json`.

    It holds the seconds of each round of steps and the CPU time in all, the peak memory
    in bytes, and the share of its time that a GPU was in use, where that can be asked.
    """
    trainer, batch = _prepared(directory, transport, device)
    device = trainer.device
    for _ in range(WARM_UP_STEPS):
        trainer.step(*batch)
    _wait(device)
    transport.barrier()
    seconds, busy = [], time.process_time()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(num_steps):
            trainer.step(*batch)
        _wait(device)
        transport.barrier()
        seconds.append(time.perf_counter() - began)
    load = {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - busy,
        "peak_bytes": peak_bytes(device),
        "gpu_used": _gpu_used(device),
    }
    (folder / f"load{transport.rank}.json").write_text(json.dumps(load))


def _prepared(
    directory: Path, transport: Transport, device: torch.device | None
) -> tuple[Trainer, tuple[Any, Any]]:
    """Return what trains, and a batch of the example inputs."""
    plan = Plan.read(directory / "plan.toml")
    user = load_user_model(plan.spec, constants=plan.constants)
    inputs = user.make_inputs(plan.first_shape)
    batch = repeated((inputs, user.make_target(inputs)), plan)
    how = {"optimizer": user.optimizer, "phases": user.make_phases()}
    return Trainer(directory, transport, device=device, **how), batch


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpu_used(device: torch.device) -> float | None:
    """Return the share of the last moments in which a GPU ran kernels: needs NVML."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ImportError, RuntimeError):
        return None
