"""Small models made to measure, cut into blocks, compiled and run on threads."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from networks import mean
from ruff.__main__ import find_ruff_bin
from safetensors.torch import load_file
from threads import run_on_threads
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from gemsc.base.elementwise import OptimizerFactory
from gemsc.base.examples import Examples
from gemsc.base.grid_shape import ALONE
from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, Traced, compile, lower, trace
from gemsc.ir.program import Program
from gemsc.options import CompileOptions
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.base import Pass
from gemsc.passes.insert_comms import InsertComms
from gemsc.passes.manager import Observer, Runs
from gemsc.passes.place_stages import PlaceStages
from gemsc.runtime.checkpoint.files import export_model
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.verify.compare import Comparison, compare
from gemsc.verify.first_step import first_step
from gemsc.verify.one_process import reference_steps

T = TypeVar("T")
WIDTH = 4
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
WHOLE = (X,)
nothing_is_patched = True  # as conftest says of each test


class Net(nn.Module):
    """Four linear layers, whatever else a test gives, and the test's forward."""

    def __init__(self, forward: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for name in "abcd":
                setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.steps = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps(self, *args, **kwargs)


def trunk(count: int = 6) -> nn.Sequential:
    """Return layers, enough for a skip over them to be long."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def run_passes(
    program: Program, passes: Iterable[Pass], *, after_each: Observer | None = None
) -> Program:
    """Return the program after all passes."""
    return Runs(after_each)(program, *passes)


def blocks_of(model: nn.Module, *inputs: Any, loss: Any = mean) -> Program:
    """Return the program of a model, cut into blocks."""
    return trace(model, inputs, loss=loss, check=False).program


def cut(program: Program, stages: int, **options: Any) -> Program:
    """Return a program with blocks, cut into stages that talk to each other."""
    passes = (
        BalanceStages(num_stages=stages, **options),
        PlaceStages("linear", (tuple(range(stages)),), (ALONE,) * stages),
        InsertComms(),
    )
    return run_passes(program, passes)


def node(program: Program, name: str) -> fx.Node:
    """Return the node of a name."""
    return next(node for node in program.graph.nodes if node.name == name)


def written(
    directory: Path,
    model: nn.Module,
    inputs: Any = WHOLE,
    loss: Any = mse,
    target: Any = X,
    **options: Any,
) -> CompiledProgram:
    """Compile a model with one block a stage at least, and write its program.

    A `Net` that was compiled so before, by a test that patches nothing, is not again.
    """
    given: dict[str, Any] = {"loss": loss, "example_target": target, **options}
    key = _key_of(model, inputs, given)
    program = _compiled.get(key) if key else None
    if program is None:
        given |= {"check": False}
        program = compile(copy.deepcopy(model) if key else model, inputs, **given)
    if key:
        _compiled[key] = program
    write_directory(program.compilation, directory)
    return program


_compiled: dict[Any, CompiledProgram] = {}


def _key_of(model: nn.Module, inputs: Any, given: dict[str, Any]) -> Any:
    """Return all that a program depends on, or None if that may be more."""
    layers = list(model.modules())[1:]
    of_torch = all(type(layer).__module__.startswith("torch.nn.") for layer in layers)
    names = {*vars(nn.Module()), "steps"}
    if not nothing_is_patched or type(model) is not Net or not of_torch:
        return None
    steps, own = model.steps, vars(model).keys() - names
    is_global = isinstance(steps, FunctionType) and "<" not in steps.__qualname__
    if own or not is_global:
        return None
    if inputs is not WHOLE or given["example_target"] is not X:
        return None
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    if any(t._backward_hooks or t._post_accumulate_grad_hooks for _, t in tensors):
        return None
    if any(v for m in model.modules() for n, v in vars(m).items() if "hooks" in n):
        return None
    first: dict[int, str] = {}
    facts = [
        (first.setdefault(id(t), n), n, t.requires_grad, t.dtype, t.tolist())
        for n, t in tensors
    ]
    modes = [module.training for module in model.modules()]
    key = repr((model, modes, facts, torch.get_default_dtype(), X.tolist()))
    try:
        hash(chosen := (steps, *sorted(given.items(), key=lambda item: item[0])))
    except TypeError:
        return None
    return key, chosen


def compared(
    traced: Traced,
    model: nn.Module,
    inputs: Any = (X,),
    loss: Any = mse,
    target: Any = None,
    **options: Any,
) -> CompiledProgram:
    """Return what `compile` makes of a model that was traced; it runs a step."""
    program = lower(
        traced, CompileOptions(**options), examples=Examples.of(inputs, target)
    )
    given = {"loss": loss, "example_target": target, "phases": ()}
    facts = first_step(program.compilation, model, inputs, **given)
    return program.with_plan(**facts)


def on_ranks(
    directory: Path, ranks: int, work: Callable[[Trainer], T], **options: Any
) -> list[T]:
    """Return what `work(trainer)` gives on each rank."""
    options = {"device": torch.device("cpu"), **options}
    return run_local(
        ranks, lambda transport: work(Trainer(directory, transport, **options))
    )


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return the model of a checkpoint, as `gemsc export` gives it."""
    export_model(folder, folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


def batch_of(values: Any, micro_batches: int, size: int = len(X)) -> Any:
    """Return the example inputs as a batch, each float tensor with new numbers."""
    generator = torch.Generator().manual_seed(1)

    def grow(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != size:
            return leaf
        parts = [leaf] * micro_batches
        if leaf.is_floating_point():
            parts = [torch.randn(leaf.shape, generator=generator) for _ in parts]
        return torch.cat(parts)

    return pytree.tree_map(grow, values)


def against_one_process(
    directory: Path,
    model: nn.Module,
    inputs: Any = (X,),
    loss: Any = mse,
    target: Any = X,
    *,
    ranks: int = 2,
    micro_batches: int = 3,
    steps: int = 2,
    optimizer: OptimizerFactory | None = None,
    **options: Any,
) -> Comparison:
    """Train on threads and in one process; float64."""
    written(
        directory,
        model,
        inputs,
        loss,
        target,
        ranks=ranks,
        micro_batches=micro_batches,
        **options,
    )
    count = micro_batches * options.get("data", 1)
    batches = [batch_of((inputs, target), count)] * steps
    record = run_on_threads(directory, ranks, batches, optimizer=optimizer)
    expected = reference_steps(model, loss, batches, count, torch.float64, optimizer)
    return compare(record, expected)


def assert_formatted(folder: Path, files: dict[str, str] | None = None) -> None:
    """Let ruff look at the files of a program, or at the texts of some."""
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    paths = [str(path) for path in sorted(folder.glob("rank*.py"))]
    assert paths
    for words in (["format", "--diff"], ["check", "--select", "E,F,I"]):
        command = [find_ruff_bin(), *words, "--isolated", "--no-cache", *paths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def adding(text: str, name: str, addend: float) -> str:
    """Return a rank's file that adds to a gradient before its second update."""
    wrong = (
        "    if worker.steps.done == 1:\n"
        f'        own = worker.stages.parameters["{name}"]\n'
        f'        own.grad += float("{addend}")\n'
    )
    changed = text.replace("    worker.update()\n", f"{wrong}    worker.update()\n")
    assert changed != text
    return changed
