"""Speed: a generated stage against the model that it came from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

from .lines import Line, Place, judged
from .subjects import SUBJECTS, Sample, Subject, compiled, sgd

__all__ = ["Turns", "precision", "speed", "turns"]

Step = Callable[[], object]
TURNS, STEPS = 7, 10
SLOWEST = 1.02
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Turns:
    """Seconds of a step of two contenders, who had their turns in pairs.

    `host` are those in which the first one's Python was busy.
    """

    first: list[float]
    second: list[float]
    host: list[float]

    @property
    def ratio(self) -> float:
        """The median of first over second."""
        pairs = zip(self.first, self.second, strict=True)
        return statistics.median(one / other for one, other in pairs)


def turns(place: Place, first: Step, second: Step, steps: int = STEPS) -> Turns:
    """Let two contenders make steps in turn; the first ones do not count."""
    count, steps = (3, 2) if place.is_tiny else (TURNS, steps)
    for step in (first, second) * 2:
        step()
    times: tuple[list[float], list[float]] = [], []
    host: list[float] = []
    for _ in range(count):
        for step, step_times in zip((first, second), times, strict=True):
            seconds, busy = _timed(place, step, steps)
            step_times.append(seconds)
            if step is first:
                host.append(busy)
    return Turns(*times, host)


def _timed(place: Place, step: Step, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and those of the host, by events on a GPU."""
    place.synchronize()
    started = time.perf_counter()
    if not place.has_gpu:
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - started) / steps
        return seconds, seconds
    cuda: Any = torch.cuda
    before, after = (cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(steps):
        step()
    after.record()
    busy = (time.perf_counter() - started) / steps
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / steps, busy


def batch(subject: Subject, place: Place) -> Sample:
    """Return a batch as a loader gives it: for a GPU in pinned memory."""
    inputs, target = subject.data(place, MICRO_BATCHES)
    if not place.has_gpu:
        return inputs, target
    return tuple(tensor.pin_memory() for tensor in inputs), target.pin_memory()


def eager(
    subject: Subject, place: Place, autocast: torch.dtype | None = None
) -> Callable[[], float]:
    """Return a step of the model as its author would write it."""
    model = subject.build(place).to(place.device)
    optimizer = sgd(model.named_parameters())
    inputs, target = batch(subject, place)

    def step() -> float:
        total = 0.0
        sent = [t.to(place.device, non_blocking=True) for t in (*inputs, target)]
        parts = zip(*(tensor.chunk(MICRO_BATCHES) for tensor in sent), strict=True)
        losses = []
        for *given, wanted in parts:
            with torch.autocast(
                place.device.type, dtype=autocast, enabled=autocast is not None
            ):
                loss = subject.loss(model(*given), wanted)
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = float(sum(losses))
        return total / MICRO_BATCHES

    return step


def speed(name: str, place: Place) -> Iterator[Line]:
    """Train a program of one rank and the model itself, in turn."""
    subject = SUBJECTS[name]
    folder = place.scratch / "program"
    compiled(subject, place, folder, ranks=1, micro_batches=MICRO_BATCHES)
    inputs, target = batch(subject, place)

    def train(transport: Transport) -> Turns:
        trainer = Trainer(folder, transport, optimizer=sgd, device=place.device)
        return turns(place, lambda: trainer.step(inputs, target), eager(subject, place))

    (times,) = run_local(1, train, timeout=600)
    ours, theirs, host = map(statistics.median, (times.first, times.second, times.host))
    yield judged(
        name,
        times.ratio <= SLOWEST or place.is_tiny,
        f"{times.ratio:.3f} of eager ({1e3 * ours:.2f} and {1e3 * theirs:.2f} ms a "
        f"step, the host {1e3 * host:.2f})",
        f"{SLOWEST}" if not place.is_tiny else "none in this size",
        ratio=times.ratio,
        ours=times.first,
        eager=times.second,
        host=times.host,
    )


def precision(place: Place) -> Iterator[Line]:
    """Compare --precision bfloat16 with eager autocast, and with float32."""
    subject = SUBJECTS["encoder"]
    inputs, target = batch(subject, place)
    kinds = ("float32", "bfloat16")
    for kind in kinds:
        folder = place.scratch / kind
        choices = {"ranks": 1, "micro_batches": MICRO_BATCHES, "precision": kind}
        compiled(subject, place, folder, **choices)

    def train(transport: Transport) -> tuple[float, float, float]:
        steps = []
        for kind in kinds:
            trainer = Trainer(
                place.scratch / kind, transport, optimizer=sgd, device=place.device
            )
            steps.append(lambda trainer=trainer: trainer.step(inputs, target))
        full, mixed = steps
        other = eager(subject, place, torch.bfloat16)
        error = abs(mixed() - (loss := other())) / loss
        return error, turns(place, mixed, other).ratio, turns(place, mixed, full).ratio

    ((error, ratio, gain),) = run_local(1, train, timeout=600)
    yield judged(
        "bfloat16",
        error <= 1e-2 and (ratio <= SLOWEST or place.is_tiny),
        f"{ratio:.3f} of eager autocast, {gain:.2f} of float32, loss differs by "
        f"{error:.1e}",
        f"{SLOWEST} of eager, loss 1e-2",
        error=error,
        ratio=ratio,
        gain=gain,
    )
