"""Which step is run while a program is compiled: its own, or a smaller one.

A step that would take too long is one of two micro-batches of two samples, or of one.
If that would, too, samples are smaller: a corner of each picture, the start of a text.

U-Net, 4 micro-batches of one picture of 3 x 512 x 512     617 s
       2 micro-batches                                     308 s
                                     of 3 x 128 x 128       19 s
                                     of 3 x 64 x 64          5 s
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemsc.base.examples import Examples
from gemsc.base.nests import tensor_leaves
from gemsc.base.units import show_micro_batches
from gemsc.plan import Plan

MOST_SECONDS = 30.0  # of the ranks and the model, as predicted
SOON = 10.0  # seconds for which samples are made smaller, where they can be
MOST_BYTES = 4 << 30  # of weights and activations, where nobody knows what is free
FEW_ROWS = FEW_MICRO_BATCHES = 2  # where all that a step has would be too much
BESIDE = 3  # times the activations: those of the model, and what a call takes
SMALL = 32  # sizes of a sample are not made smaller than this
MOST_COPIES = 2  # data-parallel copies do the same
_FLOPS_PER_SECOND = 2e10  # of a core, in float64: see benchmarks/checked_step.py
_BLOCK_SECONDS = 1e-3  # of a block's launches, forward and backward
_GROUPS = Path("/sys/fs/cgroup")
_LIMITS = {  # of a group of processes, in both versions of cgroups
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def fewer(plan: Plan) -> Plan:
    """Return the plan of a step of two micro-batches."""
    return replace(plan, micro_batches=min(plan.micro_batches, FEW_MICRO_BATCHES))


def smaller(
    plan: Plan, model: nn.Module, examples: Examples
) -> Iterator[tuple[Examples, str]]:
    """Yield examples of steps that can be run in place of one, and their size.

    The first that the model takes is as good as the others. There is none where the
    program's own step can be run, and where none can.
    """
    if not too_much(plan, model):
        return
    most, step = min(max(plan.micro_batch_sizes), FEW_ROWS), fewer(plan)
    count = show_micro_batches(step.micro_batches)

    def seconds(few: Examples) -> float:
        share = _share(examples, few)
        cannot = not few.are_different or too_much(step, model, share)
        return math.inf if cannot else step_seconds(step, share)

    def at_least_soon(sizes: Mapping[int, int]) -> float:
        return max(seconds(examples.few(most, sizes)), SOON)

    slow = []
    for rows in range(most, 0, -1):
        few = examples.few(rows)
        if (taken := seconds(few)) <= SOON:
            yield few, f"{count} of {rows}"
            return
        if taken < math.inf:
            slow.append((few, f"{count} of {rows}"))
    for sizes in _sizes(examples):
        short = min(_halved(sizes), key=at_least_soon)  # the largest that is soon
        for is_oblong in (False, True):  # norms refuse 1 x 1
            few = examples.few(most, short, is_oblong=is_oblong)
            if seconds(few) < math.inf:
                shapes = " and ".join(map(_shown_shape, few.inputs))
                yield few, f"{count} of {most}, of {shapes}"
    yield from slow[:1]


def _shown_shape(inputs: Any) -> str:
    """Return for example `3 x 64 x 64`: a sample of the first input."""
    _, tensor = next(iter(tensor_leaves(inputs)))
    return " x ".join(map(str, tensor.shape[1:]))


def _share(examples: Examples, few: Examples) -> float:
    """Return the part of the numbers that a smaller step has: of the shape with most.

    Where samples are smaller it is that of the inputs that are.
    """
    return max(map(_share_of_shape, examples.inputs, few.inputs))


def _share_of_shape(inputs: Any, few: Any) -> float:
    pairs = zip(tensor_leaves(inputs), tensor_leaves(few), strict=True)
    shapes = [(tensor.shape, less.shape) for (_, tensor), (_, less) in pairs]
    shorter = [(a, b) for a, b in shapes if a[1:] != b[1:]]
    ratios = (math.prod(b) / max(math.prod(a), 1) for a, b in shorter or shapes)
    return max(ratios, default=1.0)


def _sizes(examples: Examples) -> list[list[int]]:
    """Return which sizes of samples to make smaller: all that are large, or one."""
    tensors = [t for inputs in examples.inputs for _, t in tensor_leaves(inputs)]
    large = {size for t in tensors for size in t.shape[1:] if size >= 2 * SMALL}
    sizes = sorted(large, reverse=True)
    return [sizes, *([size] for size in sizes if len(sizes) > 1)] if sizes else []


def _halved(sizes: Sequence[int]) -> Iterator[dict[int, int]]:
    """Yield smaller and smaller sizes, divided by 2 as often as the sizes are."""
    last = {size: size for size in sizes}
    for halvings in range(1, max(sizes).bit_length()):
        halved = {}
        for size in sizes:
            unit = math.gcd(size, SMALL)
            least = max(size >> halvings, SMALL)
            halved[size] = -(-least // unit) * unit
        if halved != last:
            yield halved
        last = halved


def step_seconds(plan: Plan, share: float = 1.0) -> float:
    """Return how long a step takes in float64 on one core, of the ranks and the model.

    That is forward and backward, then evaluation. Micro-batches have a `share` of their
    numbers.
    """
    count = min(plan.data, MOST_COPIES) * plan.micro_batches * max(len(plan.shapes), 1)
    flops = share * sum(stage.flops for stage in plan.stages)
    blocks = sum(len(stage.blocks) for stage in plan.stages)
    return 2 * 4 * count * (flops / _FLOPS_PER_SECOND + blocks * _BLOCK_SECONDS / 4)


def too_much(
    plan: Plan, model: nn.Module, share: float = 1.0, dtype: torch.dtype | None = None
) -> str:
    """Return why a step of a program cannot be run while it is compiled, or "".

    Micro-batches have a `share` of their numbers, which are of the program's dtype if
    it is not given.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return "the model has no weights here"
    if plan.options.get("local_batchnorm"):
        return "--local-batchnorm computes something else than the model"
    if (seconds := step_seconds(plan, share)) > MOST_SECONDS:
        return f"that would take about {seconds:.0f} s"
    copies = min(plan.data, MOST_COPIES)
    weights = sum(tensor.numel() for tensor in tensors)
    wholes = max(math.prod(s.tiles) * s.branches for s in plan.stages)
    held = plan.replicas * copies * weights * wholes
    width, own_width = ((d or own_dtype(plan)).itemsize for d in (dtype, None))
    # as test_large_models.py measures; the model has its copies, too
    num_bytes = width * (3 * held + 5 * weights)
    kept = copies * share * sum(plan.activation_bytes)
    num_bytes += int(BESIDE * width / own_width * kept)
    free = free_memory()
    if num_bytes > (MOST_BYTES if free is None else free / 2):
        return f"that would take about {num_bytes / 2**30:.0f} GiB of memory"
    folder, written = tempfile.gettempdir(), 2 * width * held
    if written > shutil.disk_usage(folder).free:
        return f"that would take about {written / 2**30:.0f} GiB in {folder}"
    return ""


def own_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype in which a program trains."""
    dtype: torch.dtype = getattr(torch, plan.dtype)
    return dtype


def free_memory() -> int | None:
    """Return the bytes that this process may still take; None if Linux does not say.

    Groups of processes have limits (of a container, or a job of Slurm).
    """
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        return min([1024 * int(line.split()[1]), *_left_to_groups(groups)])
    return None


def _left_to_groups(groups: Sequence[str]) -> Iterator[int]:
    """Yield what each group that this process is in leaves it, by /proc/self/cgroup."""
    for line in groups:
        _, kind, path = line.split(":", 2)
        name = "memory" if "memory" in kind.split(",") else kind
        if name not in _LIMITS:
            continue
        limit, used, cache = _LIMITS[name]
        group = Path(path.lstrip("/"))
        for level in (group, *group.parents):
            folder = _GROUPS / name / level
            with suppress(OSError, ValueError):  # "max" is no limit
                most = int((folder / limit).read_text())
                pairs = map(
                    str.split, (folder / "memory.stat").read_text().splitlines()
                )
                given_back = int(dict(pairs).get(cache, 0))
                yield most - int((folder / used).read_text()) + given_back
