"""Compare N ranks with one process: loss, every gradient, every buffer."""

from __future__ import annotations

import copy
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.cores import num_cores
from gemsc.dropout import dropout_off
from gemsc.dtypes import as_real, cast, cast_module, default_dtype
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.recomputed import checkpoints_off
from gemsc.runtime.data import Batches, repeated
from gemsc.runtime.launch import launch
from gemsc.runtime.program_directory import check_program
from gemsc.runtime.trainer import OptimizerFactory, as_structure
from gemsc.runtime.weights import read_tensors
from gemsc.user_model import UserModel, load_user_model

__all__ = [
    "ALLOWED",
    "TOLERANCE",
    "Comparison",
    "StepRecord",
    "compare",
    "initial_model",
    "read_record",
    "reference_steps",
    "user_model_of",
    "verify_program",
]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# A gradient that is zero but for rounding (a bias before BatchNorm) has no relative
# error worth the name: errors are taken relative to at least this share of the largest.
NEGLIGIBLE = 1e-3
NUDGES = 6  # other roundings of one process that are tried
ALLOWED = (
    2.0  # both runs round: they may be so much further apart than rounding carries
)


@dataclass(frozen=True)
class StepRecord:
    """Losses of some steps, gradients of the first, tensors after the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    activation_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """The worst relative errors; each with the name of the tensor that has it.

    `equal` counts the tensors that are bit for bit equal, of `total`.
    `activation_bytes` is the measured peak of each rank. `rounding` is how far rounding
    alone carries one process, where that was looked at: from itself in float64, or from
    itself with weights changed in their last bit. Sums in another order cannot be
    expected to be closer.
    """

    loss: float
    gradient: tuple[float, str]
    parameter: tuple[float, str]
    buffer: tuple[float, str]
    equal: int
    total: int
    activation_bytes: tuple[int, ...] = ()
    rounding: float = 0.0

    @property
    def worst(self) -> float:
        """The worst of all."""
        return max(self.loss, self.gradient[0], self.parameter[0], self.buffer[0])


def reference_steps(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batches: list[tuple[Any, Any]],
    num_micro_batches: int,
    dtype: torch.dtype,
    optimizer: OptimizerFactory | None = None,
) -> StepRecord:
    """Train a copy of the user's model in this process, over the same micro-batches.

    Each batch is cut into micro-batches in dimension 0; the loss of the step is the
    mean of theirs. Activation checkpoints are off, as they are in programs.
    """
    model = copy.deepcopy(model)
    cast_module(model, dtype)
    if not model.training:
        model.train()
    loss = copy.deepcopy(loss)
    if isinstance(loss, nn.Module):
        cast_module(loss, dtype)
    pairs = [(n, p) for n, p in model.named_parameters()]
    update = (optimizer or _default_optimizer)(pairs)
    losses, gradients = [], {}
    for step, (input, target) in enumerate(batches):
        total = 0.0
        leaves = [t for t in pytree.tree_leaves(input) if isinstance(t, Tensor)]
        batch = next((t.shape[0] for t in leaves if t.dim()), 1)
        for m in range(num_micro_batches):
            part = (m, num_micro_batches, batch)
            given = _micro_batch(cast(input, dtype), *part)
            wanted = _micro_batch(cast(target, dtype), *part)
            with checkpoints_off(), default_dtype(dtype):
                by_name = isinstance(given, Mapping)
                output = model(**given) if by_name else model(*given)
                value = loss(output, wanted)
            torch.autograd.backward(value / num_micro_batches)
            total += float(value.detach().double())
        losses.append(total / num_micro_batches)
        if step == 0:
            present = {n: p.grad for n, p in pairs if p.grad is not None}
            gradients = {n: as_real(g).clone() for n, g in present.items()}
        update.step()
        update.zero_grad(set_to_none=True)
    state = dict([*model.named_parameters(), *model.named_buffers()])
    state = {n: as_real(t.detach()) for n, t in state.items()}
    return StepRecord(losses, gradients, state)


def read_record(folder: Path, num_ranks: int) -> StepRecord:
    """Join what the ranks wrote (gemsc.runtime.verification)."""
    record = StepRecord([], {}, {})
    for rank in range(num_ranks):
        record.losses[:] = json.loads((folder / f"losses{rank}.json").read_text())
        gradients = read_tensors(folder / f"gradients{rank}.safetensors")
        record.gradients.update(gradients)
        record.state.update(read_tensors(folder / f"state{rank}.safetensors"))
        peak = json.loads((folder / f"memory{rank}.json").read_text())
        record.activation_bytes.append(peak[0])
        record.peak_bytes.append(peak[1])
    return record


def compare(actual: StepRecord, expected: StepRecord) -> Comparison:
    """Return the worst errors of what N ranks did against what one process did."""
    pairs = zip(actual.losses, expected.losses, strict=True)
    loss = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
    parameters = {n for n, t in expected.state.items() if n in expected.gradients}
    others = {n for n in expected.state if n not in parameters}
    known = {n: t for n, t in actual.state.items()}
    equal = total = 0
    for mine, theirs in (
        (actual.gradients, expected.gradients),
        (known, expected.state),
    ):
        for name, tensor in theirs.items():
            total += 1
            equal += name in mine and torch.equal(mine[name], tensor)
    return Comparison(
        loss,
        _worst(actual.gradients, expected.gradients, set(expected.gradients)),
        _worst(known, expected.state, parameters),
        _worst(known, expected.state, others),
        equal,
        total,
        tuple(actual.activation_bytes),
    )


def _worst(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], names: set[str]
) -> tuple[float, str]:
    largest = max((_size(expected[name]) for name in names), default=0.0)
    worst = (0.0, "")
    for name in sorted(names):
        if name not in actual or actual[name].shape != expected[name].shape:
            return float("inf"), name
        difference = _size(actual[name].double() - expected[name].double())
        scale = max(_size(expected[name]), NEGLIGIBLE * largest)
        error = difference / scale if difference else 0.0
        if error > worst[0] or difference != difference:
            worst = (error if error == error else float("inf"), name)
    return worst


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _default_optimizer(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pairs, lr=0.01)


def _micro_batch(value: Any, m: int, count: int, batch: int) -> Any:
    """Return a part of every tensor that has the batch in dimension 0."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        size = batch // count
        return leaf[m * size : (m + 1) * size]

    return pytree.tree_map(cut, value)


def verify_program(
    directory: Path, *, dtype: torch.dtype, num_steps: int = 2, seed: int = 0
) -> Comparison:
    """Run a program under mpirun and the user's model here, on the same batches.

    Both start from the program's weights, with dropout off. A float32 run that is
    further off than the tolerance is also compared with what rounding alone does.

    Raises:
        GemscError: the program is stale, has no source or no loss, or a rank fails.
    """
    plan = Plan.read(directory / "plan.toml")
    check_program(directory, plan.ranks)
    user = user_model_of(directory, plan)
    model = initial_model(user, directory)
    batches = _batches(user, plan, num_steps, seed)
    with tempfile.TemporaryDirectory(prefix="gemsc-verify-") as name:
        folder = Path(name)
        torch.save(batches, folder / "batches.pt")
        words = ["--verify-into", name, "--dtype", str(dtype).removeprefix("torch.")]
        code = launch(plan.ranks, [sys.executable, str(directory), *words])
        if code != 0:
            raise GemscError(
                f"the ranks ended with exit code {code} in {dtype}",
                help="see the report above",
            )
        actual = read_record(folder, plan.ranks)
    expected = _one_process(user, model, batches, plan, dtype)
    found = compare(actual, expected)
    if found.worst > TOLERANCE[dtype] and dtype is not torch.float64:
        exact = _one_process(user, model, batches, plan, torch.float64)
        rounding = compare(expected, exact).worst
        for number in range(NUDGES):
            if found.worst <= ALLOWED * rounding:
                break
            nudged = _nudged(model, number)
            other = _one_process(user, nudged, batches, plan, dtype)
            rounding = max(rounding, compare(other, expected).worst)
        found = replace(found, rounding=rounding)
    return found


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    """Return the model with float32 weights that differ in their last bit.

    What a ReLU or a pool decides may change with it, as with sums in another order.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    last_bit = torch.finfo(torch.float32).eps
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.rand(parameter.shape, generator=generator).sub_(0.5).sign_()
            parameter.mul_(1.0 + last_bit * signs.to(parameter.dtype))
    return model


def _one_process(
    user: UserModel,
    model: nn.Module,
    batches: list[tuple[Any, Any]],
    plan: Plan,
    dtype: torch.dtype,
) -> StepRecord:
    """Train in this process, with the threads of one rank and dropout off."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_cores() // plan.ranks))
    try:
        with dropout_off():
            return reference_steps(
                model,
                user.make_loss(),
                batches,
                plan.data * plan.micro_batches,
                dtype,
                user.optimizer,
            )
    finally:
        torch.set_num_threads(threads)


def user_model_of(directory: Path, plan: Plan) -> UserModel:
    """Return what a program was compiled from.

    Raises:
        GemscError: it is in no file, or has no loss.
    """
    if not plan.spec:
        raise GemscError(
            f"{directory} was compiled from Python: its model is in no file",
            help="compile it from a file with model() to verify it",
        )
    user = load_user_model(plan.spec)
    if user.loss is None:
        raise GemscError(
            f"{user.path} has no loss(), so there are no gradients to compare",
            help="add loss(output, target) and compile again",
        )
    return user


def initial_model(user: UserModel, directory: Path) -> nn.Module:
    """Return the user's model with the weights that a program starts from."""
    model = user.make_model()
    own = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for path in sorted((directory / "weights").glob("*.safetensors")):
            for name, tensor in read_tensors(path).items():
                if name in own:
                    own[name].copy_(tensor)
    return model


def _batches(
    user: UserModel, plan: Plan, num_steps: int, seed: int
) -> list[tuple[Any, Any]]:
    """Return batches of the dataset, or the example inputs again and again."""
    inputs = user.make_inputs()
    target = user.make_target(inputs)
    if user.dataset is not None:
        data = user.make_dataset(seed=seed)
        batches = Batches(data, plan.batch_size, seed=seed, shuffle=True)
        if len(batches) >= num_steps:
            pairs = [b.data for b in itertools.islice(batches.epoch(0), num_steps)]
            return [(as_structure(input), target) for input, target in pairs]
    return [repeated((inputs, target), plan)] * num_steps
