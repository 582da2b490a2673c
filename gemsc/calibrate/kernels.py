"""Measure this machine: time operators of many shapes, and fit what they take."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.base.rng import seeded
from gemsc.calibrate.samples import FAMILIES, AtenCall, Draw
from gemsc.costs.hardware import Device
from gemsc.costs.operators import work_of
from gemsc.costs.profile import Progress, clock_of
from gemsc.ir.operators.work import Work

SWEEPS = 2  # over all operators
CHUNK_BYTES = 2**28  # operators measured in turn; together far more than any cache
Array = npt.NDArray[np.float64]
ROUNDS = 25
NEGLIGIBLE = 1e-3  # what no sample owes a larger part of its time to is left out
OUTLIER = 0.3  # beyond this error, in log seconds, a sample pulls no harder


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    share: of the samples of each family; rounds: how often a sweep times each; largest:
    operations of the largest; seconds: a limit, of which each family has its part.
    """

    share: float = 1.0
    rounds: int = 2
    largest: float = 1.5e9
    seconds: float = 120.0


QUICK = Effort(share=0.15, rounds=1, largest=3e7, seconds=5.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One operator, as described and as timed."""

    work: Work
    seconds: float


def calibrate(
    effort: Effort,
    *,
    device: str = "cpu",
    progress: Progress = lambda name, share: None,
) -> Device:
    """Return what this machine does with its present number of threads.

    `progress(what, share)` is told what comes next, and the share of all that is done.
    """
    with seeded(0), torch.no_grad():
        samples = measure_operators(effort, device=device, progress=progress)
        progress("peaks", 0.95)
        peaks = _peaks(device, 256 if effort.rounds <= QUICK.rounds else 1024)
        bandwidth = _bandwidth(device)
        progress("overheads", 0.98)
        forward, backward = _overheads(device)
    workspace = _workspace() if device != "cpu" else 0
    progress("fit", 0.99)
    return Device(
        name=_name(device),
        memory_bytes=_memory(device),
        memory_bandwidth=rounded(bandwidth),
        peak_flops={dtype: rounded(peak) for dtype, peak in peaks.items()},
        forward_overhead=rounded(forward),
        backward_overhead=rounded(backward),
        workspace_bytes=workspace,
        asynchronous=device != "cpu",
        fit=fit_all(samples),
    )


def fit_all(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Return the coefficients of each kind; "other" is all that only moves data."""
    by_kind: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_kind[sample.work.kind].append(sample)
        if sample.work.kind.startswith(("pointwise", "copy")):
            by_kind["other"].append(sample)
    return {
        kind: fit_seconds([s.work.features for s in group], [s.seconds for s in group])
        for kind, group in sorted(by_kind.items())
    }


def measure_operators(
    effort: Effort,
    *,
    device: str = "cpu",
    progress: Progress = lambda name, share: None,
) -> list[Sample]:
    """Time all families twice, each until its samples or its seconds are used up.

    What slows the machine for a minute then meets half of the times of an operator, and
    never all those of a family.
    """
    timed: dict[tuple[str, int], tuple[Work, list[float]]] = {}
    weights = [count for _, _, count in FAMILIES]
    for sweep in range(SWEEPS):
        for index, (name, source, count) in enumerate(FAMILIES):
            done = sweep + sum(weights[:index]) / sum(weights)
            progress(name, 0.95 * done / SWEEPS)
            seconds = effort.seconds * count / sum(weights) / SWEEPS
            calls = _measure(name, source, count, effort, seconds, device)
            for number, (work, times) in enumerate(calls):
                timed.setdefault((name, number), (work, []))[1].extend(times)
    return [Sample(work, lower_quartile(times)) for work, times in timed.values()]


def _measure(
    name: str,
    source: Callable[[Draw], Iterator[AtenCall]],
    count: int,
    effort: Effort,
    seconds: float,
    device: str,
) -> Iterator[tuple[Work, list[float]]]:
    """Yield the operators of a family, always the same ones, with their times."""
    draw = Draw(random.Random(name), effort.largest, device)
    ends = time.perf_counter() + seconds
    for chunk in _chunks(draw, source, max(4, round(effort.share * count))):
        yield from _time_in_turn(chunk, effort.rounds, device)
        if time.perf_counter() > ends:
            break


def _chunks(
    draw: Draw, source: Callable[[Draw], Iterator[AtenCall]], count: int
) -> Iterator[list[AtenCall]]:
    """Yield calls in lists that are small enough to be kept all at once."""
    calls: list[AtenCall] = []
    for _ in range(count):
        calls += source(draw)
        leaves = pytree.tree_leaves([call.args for call in calls])
        if sum(t.nbytes for t in leaves if isinstance(t, Tensor)) > CHUNK_BYTES:
            yield calls
            calls = []
    if calls:
        yield calls


def _time_in_turn(
    calls: list[AtenCall], rounds: int, device: str
) -> Iterator[tuple[Work, list[float]]]:
    """Time each call once a round, after all the others.

    So its weights are cold, as in a model; its input is warm, as if the operator before
    had just written it.
    """
    works = [_describe(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, times, strict=True):
            for tensor in call.warm:
                tensor.mul_(1.0)
            seconds.append(_seconds(call.run, device))
    return zip(works, times, strict=True)


def _describe(call: AtenCall) -> Work:
    _, (work,) = work_of(call.operator, call.args, {}, call.run())
    return work


def _seconds(run: Callable[[], object], device: str) -> float:
    if device != "cpu":
        return _seconds_between_events(run)
    clock = clock_of(device)
    started = clock()
    run()
    return clock() - started


def _seconds_between_events(run: Callable[[], object]) -> float:
    """Return the time between two events, before and after what `run` starts."""
    cuda: Any = torch.cuda  # its events have no types
    before, after = (cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def rounded(value: float) -> float:
    """Return the number to four digits: a measurement has no more."""
    return float(f"{value:.4g}")


def lower_quartile(times: list[float]) -> float:
    """Return what a quarter is below: others who use the machine only add to it."""
    return sorted(times)[len(times) // 4]


def _peaks(device: str, size: int) -> dict[str, float]:
    """Return the operations per second of large square products, by dtype."""
    peaks = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        torch.mm(a, b)
        product = partial(torch.mm, a, b)
        times = [_seconds(product, device) for _ in range(5)]
        peaks[str(dtype).removeprefix("torch.")] = 2.0 * size**3 / min(times)
    return peaks


def _bandwidth(device: str) -> float:
    """Return the bytes per second of a large copy, read and written."""
    source = torch.randn(2**24, device=device)
    dest = torch.empty_like(source)
    dest.copy_(source)
    times = [_seconds(lambda: dest.copy_(source), device) for _ in range(5)]
    return 2.0 * source.nbytes / min(times)


def _overheads(device: str) -> tuple[float, float]:
    """Return what layers in Python and autograd add to an operator's own call.

    A chain of small activations, each a module, against the same operators alone.
    """
    length = 100
    x = torch.randn(8, device=device, requires_grad=True)
    gradient = torch.ones_like(x)
    chain = nn.Sequential(*[nn.ReLU() for _ in range(length)])
    relu, mask = torch.ops.aten.relu.default, torch.ops.aten.threshold_backward.default
    outputs: list[Tensor] = []
    rounds: list[list[float]] = []
    for _ in range(9):
        with torch.enable_grad():
            forward = _seconds(lambda: outputs.append(chain(x)), device)
            run = partial(torch.autograd.backward, outputs, gradient)
            backward = _seconds(run, device)
            outputs.clear()
        alone = _seconds(lambda: [relu(x) for _ in range(length)], device)
        alone_back = _seconds(
            lambda: [mask(gradient, x, 0) for _ in range(length)], device
        )
        rounds.append([forward - alone, backward - alone_back])
    extra = [statistics.median(column) / length for column in zip(*rounds, strict=True)]
    return max(0.0, extra[0]), max(0.0, extra[1])


def _workspace() -> int:
    """Return the bytes of a GPU that a process takes before it has any tensor.

    CUDA's context, and what cuBLAS and cuDNN keep after a product and a convolution.
    The GPU has to be this process' own.
    """
    x = torch.randn(1, 64, 64, 64, device="cuda")
    torch.mm(x[0, 0], x[0, 0])
    nn.functional.conv2d(x, torch.randn(64, 64, 3, 3, device="cuda"))
    del x
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return outside + torch.cuda.memory_allocated()


def _name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    model = "CPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            lines = [line for line in info if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    except OSError:
        pass
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}"


def _memory(device: str) -> int:
    """Return the bytes of a GPU; on a CPU, of one core's part of the memory."""
    if device != "cpu":
        index = torch.cuda.current_device()
        return torch.cuda.get_device_properties(index).total_memory
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole // (os.cpu_count() or 1)


def fit_seconds(
    features: Sequence[dict[str, float]], seconds: Sequence[float]
) -> dict[str, float]:
    """Return a coefficient for each feature that takes time.

    The model is t = sum of c_i x_i with c_i >= 0, so that predictions are positive and
    grow with every feature. It minimises the error of log t (a small operator counts as
    much as a large one) by Gauss-Newton: around the current prediction p,
    log(t') = log p + (t' - p) / p, which makes each round a non-negative least squares
    problem with rows x / p and right sides 1 + log(t / p). Samples whose error is
    beyond `OUTLIER` count less (Huber 1964).
    """
    names = sorted({name for row in features for name in row})
    rows = np.array([[row.get(name, 0.0) for name in names] for row in features])
    times = np.asarray(seconds, dtype=np.float64)
    used = np.flatnonzero(rows.max(axis=0) > 0)
    scale = rows[:, used].max(axis=0)
    rows = rows[:, used] / scale
    coefs = least_squares(rows / times[:, None], np.ones(len(times)))
    for _ in range(ROUNDS):
        predicted = np.maximum(rows @ coefs, 1e-3 * times)
        error = np.log(times / predicted)
        weight = np.sqrt(np.minimum(1.0, OUTLIER / np.maximum(np.abs(error), 1e-12)))
        step = least_squares(
            rows * (weight / predicted)[:, None], weight * (1.0 + error)
        )
        coefs = 0.5 * (coefs + step)
    shares = (rows * coefs / (rows @ coefs)[:, None]).max(axis=0)
    coefs[shares < NEGLIGIBLE] = 0.0
    pairs = zip(used, coefs / scale, strict=True)
    return {names[index]: float(f"{value:.5g}") for index, value in pairs if value > 0}


def least_squares(matrix: Array, right: Array) -> Array:
    """Return x >= 0 that minimises |matrix x - right| (Lawson and Hanson 1974, 23.3).

    Variables enter the free set one by one, the one whose gradient promises most first;
    a step that would make a free one negative stops where the first becomes zero.
    """
    num = matrix.shape[1]
    x = np.zeros(num)
    free = np.zeros(num, dtype=bool)
    tolerance = 1e-12 * float(np.abs(matrix.T @ right).max(initial=1e-300))
    for _ in range(3 * num):
        gradient = matrix.T @ (right - matrix @ x)
        if free.all() or gradient[~free].max() <= tolerance:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            trial = np.zeros(num)
            trial[free] = np.linalg.lstsq(matrix[:, free], right, rcond=None)[0]
            bad = free & (trial <= 0)
            if not bad.any():
                break
            ratio = x[bad] / np.maximum(x[bad] - trial[bad], 1e-300)
            x = x + float(ratio.min()) * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = trial
    return x
