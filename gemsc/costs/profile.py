"""Measured seconds of a model's blocks, forward and backward, on this machine."""

from __future__ import annotations

import copy
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import convert, converted
from gemsc.base.nests import normalize_inputs, on_device, tensor_leaves
from gemsc.base.rng import seeded
from gemsc.ir import meta
from gemsc.ir.holder import hold
from gemsc.ir.interpret import run_nodes
from gemsc.ir.program import Block, Program

Values = dict[fx.Node, Any]
Progress = Callable[[str, float], None]
PATIENCE = 3  # times as many runs at most, until memory stops growing


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Median seconds of one group of nodes."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class _TimedRun:
    """One run of a group: its seconds, the pages it was first to use, its values."""

    forward: float
    backward: float
    new_pages: int
    values: Values


def time_nodes(
    program: Program,
    groups: Sequence[Block | Any],
    inputs: Any,
    target: Any = None,
    *,
    rounds: int = 5,
    device: torch.device | None = None,
    memory_format: str = "as-given",
    progress: Progress = lambda name, share: None,
) -> list[BlockTimes]:
    """Run each block (or stage) of a program some times, one after the other.

    Layers, parameters and buffers are copies, on the `device`; None is that of the
    user's; weights and inputs have the `memory_format` of that name. What forward makes
    on a device that it names is made there, too. The random
    generators are put back. What a block takes from earlier ones is what they computed
    from the example inputs; gradients of what it gives are random. Gradients of
    parameters are added up, as in a step of several micro-batches. The first run of
    each is not counted, nor are those that wait for new memory from the system, which
    the steps of a training soon have all of.
    """
    holder = nn.Module()
    hold(holder, program.module)
    module = copy.deepcopy(holder).train(program.loss is not None)
    if device is not None:
        module.to(device)
        inputs, target = on_device((inputs, target), device)
    convert(module, memory_format)
    inputs = converted(normalize_inputs(inputs), memory_format)
    for path in program.frozen:
        module.get_submodule(path).eval()
    values = _feed(program, module, inputs, target)
    times = []
    with seeded(0), torch.enable_grad(), _Made(device):
        for index, group in enumerate(groups):
            progress(getattr(group, "name", f"stage {index}"), index / len(groups))
            runs = _steady(partial(_run, group.nodes, values, module), rounds)
            values |= runs[0].values
            times.append(
                BlockTimes(
                    statistics.median(run.forward for run in runs),
                    statistics.median(run.backward for run in runs),
                )
            )
    return times


class _Made(TorchFunctionMode):
    """Lets calls that name a device name another one; None leaves them as they are."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        if self._device is not None:
            named = torch.device
            given = pytree.tree_map_only(named, lambda _: self._device, given)
        return func(*given[0], **given[1])


def _steady(run: Callable[[], _TimedRun], rounds: int) -> list[_TimedRun]:
    """Return as many runs, the first one apart, that had no new pages, or fewest."""
    run()
    runs: list[_TimedRun] = []
    steady = 0
    while steady < rounds and len(runs) < PATIENCE * rounds:
        runs.append(run())
        steady += not runs[-1].new_pages
    return sorted(runs, key=lambda timed: timed.new_pages)[:rounds]


def _feed(program: Program, module: nn.Module, inputs: Any, target: Any) -> Values:
    """Return the values of placeholders and of what is read from the module."""
    given = dict(tensor_leaves({"input": normalize_inputs(inputs), "target": target}))
    names = {item.name: given[item.path] for item in program.inputs}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    values: Values = {node: names[node.name].detach() for node in placeholders}
    constants = [node for node in program.graph.nodes if node.op == "get_attr"]
    run_nodes(constants, values, module)
    return values


def _run(nodes: Iterable[fx.Node], known: Values, module: nn.Module) -> _TimedRun:
    """Run nodes forward and backward, once; the values are detached."""
    pages = _pages_used()
    block = list(nodes)
    inside = set(block)
    taken = {n for node in block for n in node.all_input_nodes if n not in inside}
    values = {node: _leaf(node, known[node]) for node in taken}
    clock = clock_of(_device_of(values))
    started = clock()
    run_nodes(block, values, module)
    forward = clock() - started
    given = [node for node in block if any(user not in inside for user in node.users)]
    ends = [
        tensor
        for node in given
        for tensor in pytree.tree_leaves(values[node])
        if isinstance(tensor, Tensor) and tensor.requires_grad
    ]
    if not (ends and any(meta.needs_gradient(node) for node in block)):
        return _TimedRun(forward, 0.0, _pages_used() - pages, _detached(given, values))
    gradients = [torch.randn_like(tensor) for tensor in ends]
    detached = _detached(given, values)
    started = clock()
    torch.autograd.backward(ends, gradients)
    backward = clock() - started
    return _TimedRun(forward, backward, _pages_used() - pages, detached)


def _pages_used() -> int:
    """Return how many pages of memory this process has been first to use."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _leaf(node: fx.Node, value: Any) -> Any:
    """Return what a stage receives: a tensor of its own whose gradient is sent back."""
    if node.op in ("get_attr", "placeholder"):
        return value
    wanted = meta.needs_gradient(node)

    def fresh(leaf: Tensor) -> Tensor:
        floats = leaf.is_floating_point() or leaf.is_complex()
        return leaf.detach().requires_grad_(wanted and floats)

    return pytree.tree_map_only(Tensor, fresh, value)


def _detached(nodes: Iterable[fx.Node], values: Values) -> Values:
    detach = partial(pytree.tree_map_only, Tensor, Tensor.detach)
    return {node: detach(values[node]) for node in nodes}


def _device_of(values: Values) -> str:
    leaves = pytree.tree_leaves(list(values.values()))
    on_gpu = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
    return "cuda" if on_gpu else "cpu"


def clock_of(device: str) -> Callable[[], float]:
    """Return a function that gives seconds, with little of what other processes take.

    With one thread on a CPU, that of the CPU time of this thread: it stands still while
    others have the core. Where several threads work, that of the wall; so on a GPU,
    where it waits until all is done that was started.
    """
    if device != "cpu":
        return _seconds_on_gpu
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _seconds_on_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
