"""Simulate training on machines that are not there: thousands of ranks, no weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemsc.compilation import Traced
from gemsc.compiler import (
    find_largest,
    schedule_stages,
    settled_options,
    trace,
    trace_all,
)
from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.passes.manager import Runs
from gemsc.plan import Plan
from gemsc.planner.ending import held_gradients, start_early
from gemsc.planner.predict import micro_batch_size
from gemsc.schedules import SCHEDULES, Task, Timeline
from gemsc.simulate.scaling import Point, Simulator
from gemsc.user_model import UserModel, load_user_model
from gemsc.weights.load import blank

LARGE = 2**16  # elements
_ATEN = torch.ops.aten
# what gives every element of a tensor a value that does not matter here
_FILLING = "normal uniform random bernoulli fill zero erfinv mul add clamp copy"
_IN_PLACE = frozenset(getattr(_ATEN, f"{name}_") for name in _FILLING.split())
_FRESH = frozenset({_ATEN.randn, _ATEN.rand, _ATEN.ones, _ATEN.zeros, _ATEN.full})
_OPTIONS = ("dtype", "device", "layout", "pin_memory")


@dataclass(frozen=True)
class Simulation:
    """A model on a machine, for growing numbers of copies.

    `points` are in the order of their copies; efficiencies compare with the first.
    `task` and `timeline` are what one copy does in a step of the last point.
    """

    name: str
    options: CompileOptions
    hardware: Hardware
    task: Task
    timeline: Timeline
    points: tuple[Point, ...]

    @property
    def last(self) -> Point:
        """The largest simulation."""
        return self.points[-1]

    @property
    def efficiency(self) -> float:
        """The throughput of a copy in the last point, as a share of the first."""
        return self.last.efficiency(self.points[0])

    @property
    def fits(self) -> bool:
        """Whether the peak-memory rank stays below the device's memory."""
        return max(self.timeline.peak_bytes) <= self.hardware.device.memory_bytes


def simulate(
    traced: Traced,
    options: CompileOptions,
    copies: Sequence[int] = (),
    *,
    machine: Hardware | None = None,
    defers: bool = True,
) -> Simulation:
    """Play one step of each number of copies, by default 1, 2, 4, ... `options.data`.

    `traced` was traced for the device of the machine, by default that of
    `options.hardware`. Without `defers` every backward
    is whole, as in systems that compute input and weight gradients at once, and with
    `torch_compile`.

    Raises:
        GemscError: the options do not fit the model or each other.
    """
    run = Runs()
    _, options = settled_options(traced, options, run)
    hardware = machine or read_hardware(options.hardware)
    done = schedule_stages(traced, options, run, hardware=hardware)
    program, task = done.program, done.task
    simulator = Simulator(
        task=task,
        policy=SCHEDULES[options.schedule].policy,
        hardware=hardware,
        gradients=held_gradients(done.tiles[0], task),
        samples=micro_batch_size(program) * sum(task.micro_batches),
        shares_update=options.shard != "off",
        groups=program.require_placement().groups,
        defers=defers and not options.torch_compile,
        sums_early=start_early(done.tiles[0]),
    )
    counts = sorted({*(copies or powers_of_two(options.data)), options.data})
    points = tuple(simulator.point(count) for count in counts)
    timeline = simulator.timeline(counts[-1])
    return Simulation(program.name, options, hardware, task, timeline, points)


def trace_unfilled(
    user: UserModel,
    hardware: Hardware,
    frontend: str = "record",
    precision: str = "float32",
) -> Traced:
    """Trace how a user's model trains, without memory for its weights.

    Of several phases, it is the one that costs most. Its evaluation is left out: the
    result can be simulated, not compiled.
    """
    with Unfilled():  # type: ignore[no-untyped-call]
        model, inputs = user.make_unfilled(), user.make_inputs()
        target = user.make_target(inputs)
    blank(model)  # what is on the meta device
    traced_as = partial(
        trace,
        frontend=frontend,
        precision=precision,
        check=False,
        evaluates=False,
        hardware=hardware,
    )
    graphs = trace_all(
        traced_as,
        model,
        inputs,
        loss=user.make_loss() if user.loss is not None else None,
        example_target=target,
        phases=user.make_phases(),
    )
    return graphs[find_largest(graphs)]


def read_program(directory: Path) -> tuple[UserModel, CompileOptions]:
    """Return the model and options that a program directory was compiled from.

    The stages keep their blocks.

    Raises:
        GemscError: it is no program, or was compiled from Python.
    """
    plan = Plan.read(directory / "plan.toml")
    if not plan.spec:
        raise GemscError(
            f"{directory} was compiled from Python: its model is not in a file",
            help="give the file that defines the model: gemsc simulate model.py",
        )
    blocks = tuple(len(stage.blocks) for stage in plan.stages)
    given = plan.choices | {"ranks": plan.ranks, "data": plan.data, "per_device": 1}
    given |= {"balance": "explicit", "blocks": blocks, "cuts": ()}
    user = load_user_model(plan.spec, constants=plan.constants)
    return user, CompileOptions(**given)


def read_counts(text: str, last: int) -> tuple[int, ...]:
    """Read `1,4,16`; 1, 2, 4, ... `last` where it is empty.

    Raises:
        GemscError: it is not a list of numbers.
    """
    if not text.strip():
        return powers_of_two(last)
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise GemscError(
            f"--curve {text} is not a list of numbers", help="write --curve 1,2,4,8"
        )
    return counts


def powers_of_two(last: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `last`, which is among them."""
    powers = (2**power for power in range(last.bit_length()))
    return tuple(sorted({*powers, last}))


class Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves large tensors that are made inside as they are: they take no memory.

    The operating system gives memory to a process page by page, when a page is first
    written. So a model of any size can be made, looked at and traced on fake tensors,
    as long as nothing fills its weights. Small tensors get their values as always: a
    model may compute with them while it is made.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        packet, kwargs = func._overloadpacket, kwargs or {}
        if packet in _IN_PLACE and args[0].numel() >= LARGE:
            return args[0]
        if packet in _FRESH and math.prod(args[0]) >= LARGE:
            options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
            return torch.empty(args[0], **options)
        return func(*args, **kwargs)
