"""Measure the memory of a worker from outside: others pay nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from gemsc.runtime.memory.meter import ActivationMeter
from gemsc.runtime.worker.program import Run
from gemsc.runtime.worker.worker import Worker


def metered(worker: Worker) -> ActivationMeter:
    """Return a meter that follows all that this worker does from now on."""
    meter = ActivationMeter(worker.stages.own_tensors, lambda: _others(worker))
    take, forward, backward = worker.input, worker.run, worker.backward

    def metered_input(name: str, m: int) -> Tensor:
        return take(name, m).clone()  # as on a device: a micro-batch at a time

    def metered_run(run: Run, m: int, *inputs: Tensor) -> Any:
        with meter.forward(inputs):
            return forward(run, m, *inputs)

    def metered_backward(
        run: Run, m: int, *gradients: Tensor | None
    ) -> tuple[Tensor, ...]:
        worker.mail.release_arrived()
        meter.sample()
        # memory grows when the first backward of a step makes the gradients, and when
        # something is deferred, recomputed or brought back
        parameters = worker.stages[run].parameters()
        is_first = all(parameter.grad is None for parameter in parameters)
        meter.closely = is_first or meter.brings_back or worker.defers(run, m)
        result = backward(run, m, *gradients)
        meter.sample()
        return result

    for method in (metered_input, metered_run, metered_backward):
        setattr(worker, method.__name__.removeprefix("metered_"), method)
    return meter


def _others(worker: Worker) -> Iterator[Tensor]:
    """Yield all that the rank holds besides activations."""
    yield from worker.stages.own_tensors()
    for parameter in worker.stages.parameters.values():
        if parameter.grad is not None:
            yield parameter.grad
    if worker.updates.optimizer is not None:
        states = worker.updates.optimizer.state_dict()["state"]
        yield from (leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor))
    yield from worker.mail.buffers()
