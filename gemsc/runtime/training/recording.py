"""Steps with the time of each call written down: for `gemsc timeline --measured`."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gemsc.plan import Plan
from gemsc.runtime.data.batches import repeated
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.worker import Worker
from gemsc.user_model import load_user_model

__all__ = ["WARM_UP_STEPS", "Recorder", "record_timed_steps"]

WARM_UP_STEPS = 3  # the first ones allocate memory and choose algorithms

# what generated files call -> what it is called in a record
COMPUTED = {"run": "forward", "backward": "backward", "weights": "weight"}
CALLS = {
    **COMPUTED,
    "receive": "wait",
    "send": "send",
    "start_reduction": "reduction",
    "finish_reductions": "reduction",
    "sum_up": "wait",
    "end": "wait",
}

# kind, stage, replica, micro-batch (-1 where there is none), begin and end
Record = tuple[str, int, int, int, int, int]


@dataclass
class Recorder:
    """Notes when a worker begins and ends what its generated file calls.

    It wraps the methods of this one worker: others pay nothing. On CUDA it waits for
    the device after each forward and backward, since calls only enqueue their work.
    """

    worker: Worker
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, kind in CALLS.items():
            wrapped = self._noted(kind, getattr(self.worker, name), name in COMPUTED)
            setattr(self.worker, name, wrapped)
        updates = self.worker.updates
        updates.apply = self._noted("update", updates.apply, False)  # type: ignore[method-assign]

    def take(self) -> list[Record]:
        """Return what was noted since the last time."""
        taken, self.records = self.records, []
        return taken

    def _noted(
        self, kind: str, call: Callable[..., Any], computed: bool
    ) -> Callable[..., Any]:
        device = self.worker.device
        clock = time.perf_counter_ns

        def noted(*arguments: Any) -> Any:
            begin = clock()
            result = call(*arguments)
            if computed and device.type == "cuda":
                torch.cuda.synchronize(device)
            end = clock()
            stage = replica = micro_batch = -1
            if computed:
                run, micro_batch = arguments[:2]
                stage, replica = run.stage, run.replica
            self.records.append((kind, stage, replica, micro_batch, begin, end))
            return result

        return noted


def record_timed_steps(
    directory: Path, transport: Transport, folder: Path, num_steps: int
) -> None:
    """Train on the example inputs; write `times{rank}.json`.

    Its `steps` hold each step's records in nanoseconds. All ranks' clocks begin when
    they leave the step's barrier: processes of one machine share a clock, so there it
    is the first rank's leaving that counts.
    """
    plan = Plan.read(directory / "plan.toml")
    user = load_user_model(plan.spec, constants=plan.constants)
    inputs = user.make_inputs()
    target = user.make_target(inputs)
    inputs, target = repeated((inputs, target), plan)
    trainer = Trainer(directory, transport, optimizer=user.optimizer)
    recorder = Recorder(trainer.worker)
    steps = []
    for _ in range(WARM_UP_STEPS + num_steps):
        transport.barrier()
        recorder.take()
        zero = time.perf_counter_ns()
        trainer.step(inputs, target)
        steps.append((zero, recorder.take()))
    clock = (platform.node(), [zero for zero, _ in steps])
    clocks: list[Any] = transport.all_gather_object(clock)
    shared = len({node for node, _ in clocks}) == 1
    result = []
    for number, (zero, records) in enumerate(steps):
        first = min(zeros[number] for _, zeros in clocks) if shared else zero
        result.append([(*r[:4], r[4] - first, r[5] - first) for r in records])
    path = folder / f"times{transport.rank}.json"
    path.write_text(json.dumps({"steps": result[WARM_UP_STEPS:]}))
