"""Compare N ranks with one process: loss, every gradient, every buffer."""

from __future__ import annotations

import copy
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.base.draws import same_draws
from gemsc.base.dtypes import as_real, cast, cast_module, default_dtype
from gemsc.base.memory_format import convert, converted, like_examples
from gemsc.base.nests import on_device
from gemsc.base.plain_forward import plain_forward
from gemsc.base.process import num_cores
from gemsc.errors import GemscError
from gemsc.launch.launch import launch
from gemsc.plan import Plan
from gemsc.runtime.data.batches import Batches, repeated
from gemsc.runtime.process.device import exact_arithmetic, require_gpu
from gemsc.runtime.training.program_directory import check_dtype, check_program
from gemsc.runtime.training.trainer import OptimizerFactory, as_structure
from gemsc.user_model import UserModel, load_user_model
from gemsc.verify.low_precision import LowPrecision, WatchPrecision
from gemsc.verify.precision import FULL, Precision
from gemsc.verify.record import StepRecord, read_record
from gemsc.weights.keras_model import as_module
from gemsc.weights.read import read_tensors

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# A gradient that is zero but for rounding (a bias before BatchNorm) has no relative
# error worth the name: errors are taken relative to at least this share of the largest.
NEGLIGIBLE = 1e-3
LARGEST_BUFFER = 1.0  # at most: a mask of huge numbers hides no error in another buffer
NUDGES = 6  # other roundings of one process that are tried
ALLOWED = 2.0  # both runs round: they may be so much further apart than one is
# What is further off is never called exact, however much rounding alone would explain.
LIMIT = {torch.float64: 1e-6, torch.float32: 0.1}


@dataclass(frozen=True)
class Comparison:
    """The worst relative errors; each with the name of the tensor that has it.

    `equal` counts the tensors that are bit for bit equal, of `total`.
    `activation_bytes` is the measured peak of each rank. `errors` has the error of each
    tensor by itself ("gradient of conv.weight"), `rounding` how far rounding alone
    changes it in one process, where that was measured: compared with itself in float64,
    or with weights changed in their last bit. Sums in a different order cannot be
    expected to be closer. What the ranks of a grid hold as a whole, but not with the
    same bits, has an infinite error ("copies of conv.weight"). `last_bit` is that of
    the precision in which the ranks of a grid add up, where it is less than the dtype.
    `inside` is what the model itself computes in, where that is less.
    """

    loss: float
    gradient: tuple[float, str]
    parameter: tuple[float, str]
    buffer: tuple[float, str]
    equal: int
    total: int
    activation_bytes: tuple[int, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, float] = field(default_factory=dict)
    last_bit: float = 0.0
    inside: LowPrecision | None = None

    def limit(self, dtype: torch.dtype) -> float:
        """Return how far off a tensor may be at most, whatever rounding explains."""
        narrow = torch.float32 if self.inside is not None else dtype
        return max(LIMIT[dtype], LIMIT[narrow])

    def allowed(self, name: str, dtype: torch.dtype) -> float:
        """Return how far a tensor may be off if nothing but rounding differs."""
        least = max(TOLERANCE[dtype], self.last_bit)
        return max(least, ALLOWED * self.rounding.get(name, 0.0))

    def judge(self, dtype: torch.dtype) -> tuple[str, str]:
        """Return "exact", "wrong" or "undecided", and the tensor that it is about.

        Each tensor may be off by twice what rounding alone does to it. Where that is
        more than `LIMIT`, and the tensor is as far off, nothing is decided.
        """
        found: dict[str, str] = {}
        for name, error in self.errors.items():
            allowed = self.allowed(name, dtype)
            if not error <= min(allowed, self.limit(dtype)):
                kind = "undecided" if allowed > self.limit(dtype) else "wrong"
                found.setdefault(kind, name)
        for kind in ("wrong", "undecided"):
            if kind in found:
                return kind, found[kind]
        return "exact", max(self.errors, key=lambda name: self.errors[name])

    def with_rounding(self, errors: Mapping[str, float]) -> Comparison:
        """Return the comparison with what one more rounding of one process changes."""
        known = self.rounding
        rounding = {n: max(e, known.get(n, 0.0)) for n, e in errors.items()}
        return replace(self, rounding=rounding)

    @property
    def worst(self) -> float:
        """The worst of all."""
        parts = self.gradient, self.parameter, self.buffer
        worst = max(self.loss, *(error for error, _ in parts))
        return max(worst, *self.errors.values())


def reference_steps(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batches: list[tuple[Any, Any]],
    num_micro_batches: int,
    dtype: torch.dtype,
    optimizer: OptimizerFactory | None = None,
    precision: Precision = FULL,
    device: torch.device = CPU,
) -> StepRecord:
    """Train a copy of the user's model in this process, over the same micro-batches.

    Each batch is cut into micro-batches in dimension 0; the loss of the step is the
    mean of theirs. Activation checkpoints are off, as they are in programs.
    """
    model = copy.deepcopy(model)
    cast_module(model, dtype)
    model.to(device)
    if not model.training:
        model.train()
    loss = copy.deepcopy(loss)
    if isinstance(loss, nn.Module):
        cast_module(loss, dtype)
        loss.to(device)
    pairs = [(n, p) for n, p in model.named_parameters()]
    update = (optimizer or _default_optimizer)(pairs)
    scaler = precision.scaler(device)
    losses, gradients = [], {}
    for step, (input, target) in enumerate(batches):
        total = 0.0
        leaves = [t for t in pytree.tree_leaves(input) if isinstance(t, Tensor)]
        batch = next((t.shape[0] for t in leaves if t.dim()), 1)
        for m in range(num_micro_batches):
            part = (m, num_micro_batches, batch)
            given, wanted = (
                on_device(micro_batch_of(cast(each, dtype), *part), device)
                for each in (input, target)
            )
            with plain_forward(), default_dtype(dtype), precision.autocast(device):
                by_name = isinstance(given, Mapping)
                output = model(**given) if by_name else model(*given)
                value = loss(output, wanted)
            torch.autograd.backward(scaler.scale(value / num_micro_batches))
            total += float(value.detach().double())
        losses.append(total / num_micro_batches)
        scaler.unscale_(update)
        if step == 0:
            present = {n: p.grad for n, p in pairs if p.grad is not None}
            gradients = {n: as_real(g).cpu().clone() for n, g in present.items()}
        scaler.step(update)
        scaler.update()
        update.zero_grad(set_to_none=True)
    state = dict([*model.named_parameters(), *model.named_buffers()])
    state = {n: as_real(t.detach()).cpu() for n, t in state.items()}
    return StepRecord(losses, gradients, state)


def compare(
    actual: StepRecord, expected: StepRecord, *, may_overflow: bool = False
) -> Comparison:
    """Return the largest errors of N ranks, compared with one process.

    What is NaN in both is wrong, unless it `may_overflow`: in float16 a scale of the
    loss may be too large, for both.
    """
    pairs = zip(actual.losses, expected.losses, strict=True)
    loss = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
    loss = loss if loss == loss else float("inf")
    parameters = {n for n, t in expected.state.items() if n in expected.gradients}
    known = actual.state
    groups = {
        "gradient of ": (actual.gradients, expected.gradients, expected.gradients),
        "parameter ": (known, expected.state, parameters),
        "buffer ": (known, expected.state, expected.state.keys() - parameters),
        "evaluation's ": (actual.outputs, expected.outputs, expected.outputs),
    }
    errors, equal = {"loss": loss}, 0
    worst: dict[str, tuple[float, str]] = {}
    for kind, (mine, theirs, names) in groups.items():
        most = LARGEST_BUFFER if kind in ("buffer ", "evaluation's ") else math.inf
        found = _errors(mine, theirs, names, most, may_overflow)
        worst[kind] = max(((e, n) for n, e in found.items() if e), default=(0.0, ""))
        errors |= {f"{kind}{name}": error for name, error in found.items()}
        equal += sum(n in mine and torch.equal(mine[n], theirs[n]) for n in names)
    errors |= {f"copies of {name}": math.inf for name in sorted(actual.unequal)}
    return Comparison(
        loss,
        worst["gradient of "],
        worst["parameter "],
        worst["buffer "],
        equal,
        total=sum(len(names) for *_, names in groups.values()),
        activation_bytes=tuple(actual.activation_bytes),
        errors=errors,
    )


def _errors(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    names: Iterable[str],
    most: float,
    may_overflow: bool,
) -> dict[str, float]:
    """Return the relative error of each tensor, infinite where it is not there.

    What counts as the largest of them is `most` at most.
    """
    names = sorted(names)
    largest = max((_size(expected[name]) for name in names), default=0.0)
    least = NEGLIGIBLE * min(largest, most)
    errors = {}
    for name in names:
        error = float("inf")
        if name in actual and actual[name].shape == expected[name].shape:
            difference = _difference(actual[name], expected[name], may_overflow)
            scale = max(_size(expected[name]), least, sys.float_info.min)
            error = difference / scale
        errors[name] = error if error == error else float("inf")
    return errors


def _difference(mine: Tensor, theirs: Tensor, may_overflow: bool) -> float:
    """Return the largest difference; infinities may be equal, and NaN if allowed."""
    mine, theirs = mine.double(), theirs.double()
    same = mine == theirs
    if may_overflow:
        same |= mine.isnan() & theirs.isnan()
    difference = (mine - theirs).masked_fill(same, 0.0)
    return float(difference.abs().max()) if difference.numel() else 0.0


def _size(tensor: Tensor) -> float:
    """Return the largest absolute value, infinities left aside."""
    finite = tensor[tensor.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def _default_optimizer(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pairs, lr=0.01)


def micro_batch_of(value: Any, m: int, count: int, batch: int) -> Any:
    """Return a part of every tensor that has the batch in dimension 0."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        size = batch // count
        return leaf[m * size : (m + 1) * size]

    return pytree.tree_map(cut, value)


def verify_compiled(
    directory: str | Path,
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Tensor],
    example_target: Any = None,
    dtype: torch.dtype = torch.float64,
    num_steps: int = 2,
    device: torch.device = CPU,
) -> Comparison:
    """Compare a program that was compiled from Python with its model.

    Takes what `gemsc.compile` took and does what `gemsc verify` does, with plain SGD.

    Raises:
        GemscError: they differ, or the program cannot run.
    """
    user = UserModel(
        path=Path(directory),
        module=sys.modules["__main__"],
        name="model",
        model=copy.deepcopy(as_module(model)),
        example_inputs=example_inputs,
        loss=loss,
        example_target=example_target,
    )
    found = verify_program(
        Path(directory), dtype=dtype, num_steps=num_steps, user=user, device=device
    )
    kind, name = found.judge(dtype)
    if kind != "exact":
        raise GemscError(
            f"{directory} is {kind} in {dtype}: {name} is off by "
            f"{found.errors[name]:.1e}, rounding alone by "
            f"{found.rounding.get(name, 0.0):.1e}",
            help="compile again; if it persists, report it with the model",
        )
    return found


def verify_program(
    directory: Path,
    *,
    dtype: torch.dtype,
    num_steps: int = 2,
    seed: int = 0,
    user: UserModel | None = None,
    device: torch.device = CPU,
) -> Comparison:
    """Run a program under mpirun and the user's model here, on the same batches.

    Both start from the program's weights, draw the same random numbers and compute on
    the same kind of `device`: see `exact_arithmetic`. A run that is further off than
    the tolerance is also compared with what rounding alone does.
    `user` is the model of a program that was not compiled from a file.

    Raises:
        GemscError: the program is stale, has no source or no loss, a rank fails, or a
            GPU is wanted where there is none.
    """
    if device.type == "cuda":
        require_gpu()
    with exact_arithmetic(device):
        return _verify(directory, dtype, num_steps, seed, user, device)


def _verify(
    directory: Path,
    dtype: torch.dtype,
    num_steps: int,
    seed: int,
    user: UserModel | None,
    device: torch.device,
) -> Comparison:
    plan = Plan.read(directory / "plan.toml")
    check_program(directory, plan.ranks)
    check_dtype(plan, dtype)
    user = user or user_model_of(directory, plan)
    model = initial_model(user, directory)
    batches = _batches(user, plan, num_steps, seed)
    expected = _one_process(user, model, batches, plan, dtype, device)
    overflow = Precision.of(plan, dtype).dtype is torch.float16
    ranks = _ranks(directory, plan, batches, dtype, device)
    found = compare(ranks, expected, may_overflow=overflow)
    found = replace(found, last_bit=_last_bit(plan, dtype))
    if found.judge(dtype)[0] == "exact":
        return found
    inside = _inside(user, model, batches, plan, dtype, device)
    if inside is not None:
        last_bit = max(found.last_bit, inside.last_bit)
        found = replace(found, last_bit=last_bit, inside=inside)
    for other in _other_roundings(user, model, batches, plan, dtype, device, inside):
        once = compare(other, expected, may_overflow=overflow)
        found = found.with_rounding(once.errors)
        if found.judge(dtype)[0] == "exact":
            return found
    if plan.torch_compile and dtype is torch.float32 and not plan.only_dtype:
        lost = _lost_by_kernels(user, model, batches, plan, directory, device)
        rounding = {n: max(e, lost.get(n, 0.0)) for n, e in found.rounding.items()}
        found = replace(found, rounding=rounding)
    return found


def _lost_by_kernels(
    user: UserModel,
    model: nn.Module,
    batches: list[tuple[Any, Any]],
    plan: Plan,
    directory: Path,
    device: torch.device,
) -> dict[str, float]:
    """Return what other kernels, which sum in another order, lose in float32.

    It is what they lose in float64, in units of the last bit. Nothing, if the ranks are
    not exact there.
    """
    wide, single = torch.float64, torch.float32
    expected = _one_process(user, model, batches, plan, wide, device)
    found = compare(_ranks(directory, plan, batches, wide, device), expected)
    if found.judge(wide)[0] != "exact":
        return {}
    bits = torch.finfo(single).eps / torch.finfo(wide).eps
    return {name: bits * error for name, error in found.errors.items()}


def _last_bit(plan: Plan, dtype: torch.dtype) -> float:
    """Return how far off other roundings of the ranks alone may be.

    In half precision it is the last bit, where ranks of a grid add up and where
    `torch.compile` fuses operations.
    """
    lower = Precision.of(plan, dtype).dtype
    is_added = any(stage.grid.size > 1 for stage in plan.stages)
    if lower is not None and (is_added or plan.torch_compile):
        return torch.finfo(lower).eps
    return 0.0


def _ranks(
    directory: Path,
    plan: Plan,
    batches: list[tuple[Any, Any]],
    dtype: torch.dtype,
    device: torch.device,
) -> StepRecord:
    """Train in the ranks, under mpirun."""
    with tempfile.TemporaryDirectory(prefix="gemsc-verify-") as name:
        folder = Path(name)
        torch.save(batches, folder / "batches.pt")
        words = ["--verify-into", name, "--device", device.type]
        words += ["--dtype", str(dtype).removeprefix("torch.")]
        code = launch(plan.ranks, [sys.executable, str(directory), *words])
        if code != 0:
            raise GemscError(
                f"the ranks ended with exit code {code} in {dtype}",
                help="see the report above",
            )
        return read_record(folder, plan.ranks)


def _other_roundings(
    user: UserModel,
    model: nn.Module,
    batches: list[tuple[Any, Any]],
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    inside: LowPrecision | None,
) -> Iterator[StepRecord]:
    """Yield what one process does where it rounds otherwise."""
    lower = Precision.of(plan, dtype).dtype if inside is None else inside.dtype
    if dtype is not torch.float64 and not plan.only_dtype:
        yield _one_process(user, model, batches, plan, torch.float64, device)
    for number in range(NUDGES):
        changed = nudged(model, number, dtype, lower)
        yield _one_process(user, changed, batches, plan, dtype, device)


def nudged(
    model: nn.Module, seed: int, dtype: torch.dtype, lower: torch.dtype | None = None
) -> nn.Module:
    """Return the model in a dtype, with weights that differ in their last bit.

    What a ReLU or a pool decides may change with it, as with sums in another order. The
    bit is that of the `lower` precision, where products are computed in one.
    """
    model = copy.deepcopy(model)
    cast_module(model, dtype)
    last_bit = torch.finfo(lower or dtype).eps
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.rand(parameter.shape, generator=generator).sub_(0.5).sign_()
            parameter.mul_(1.0 + last_bit * signs.to(dtype))
    return model


def _inside(
    user: UserModel,
    model: nn.Module,
    batches: list[tuple[Any, Any]],
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
) -> LowPrecision | None:
    """Return what a model computes in where it is run in float64, if that is less."""
    watch = WatchPrecision(dtype)
    if dtype is torch.float64:
        # what cannot be watched is judged as if it were in float64 all through
        with suppress(GemscError, NotImplementedError), watch:
            _one_process(user, model, batches[:1], plan, dtype, device)
    return watch.found


def _one_process(
    user: UserModel,
    model: nn.Module,
    batches: list[tuple[Any, Any]],
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
) -> StepRecord:
    """Train in this process, with the threads of one rank and the same draws."""
    try:
        with threads_of_a_rank(plan), same_draws():
            return reference_steps(
                model,
                user.make_loss(),
                batches,
                plan.data * plan.micro_batches,
                dtype,
                user.optimizer,
                Precision.of(plan, dtype),
                device,
            )
    except (RuntimeError, TypeError) as error:
        text = " ".join(str(error).split())
        raise GemscError(
            f"the model itself does not run in {dtype}: {text}",
            help="take dtypes from tensors (x.dtype), or verify in another --dtype",
        ) from error


@contextmanager
def threads_of_a_rank(plan: Plan) -> Iterator[None]:
    """Let torch use as many threads as one of the ranks on this machine."""
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:  # else the ranks have it, too
        torch.set_num_threads(max(1, num_cores() // plan.ranks))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def user_model_of(directory: Path, plan: Plan) -> UserModel:
    """Return what a program was compiled from.

    Raises:
        GemscError: it was not compiled from a file, or has no loss.
    """
    if not plan.spec:
        raise GemscError(
            f"{directory} was compiled from Python: its model is not in a file",
            help="call gemsc.verify_compiled(directory, model, example_inputs, "
            "loss=...) in the script that compiles it",
        )
    user = load_user_model(plan.spec, constants=plan.constants)
    if user.loss is None:
        raise GemscError(
            f"{user.path} has no loss(), so there are no gradients to compare",
            help="add loss(output, target) and compile again",
        )
    return user


def initial_model(user: UserModel, directory: Path) -> nn.Module:
    """Return the user's model with the weights that a program starts from."""
    model = user.make_model()
    plan = Plan.read(directory / "plan.toml")
    folder = directory / plan.weights
    own = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for path in sorted(folder.glob("*.safetensors")):
            for name, tensor in read_tensors(path).items():
                if name in own:
                    own[name].copy_(tensor)
    convert(model, plan.memory_format)
    return model


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor without what a package adds to it, which no file keeps."""
    return tensor.as_subclass(Tensor)


def _batches(
    user: UserModel, plan: Plan, num_steps: int, seed: int
) -> list[tuple[Any, Any]]:
    """Return batches of the dataset, or the example inputs again and again."""
    inputs = converted(user.make_inputs(), plan.memory_format)
    target = user.make_target(inputs)
    if user.dataset is not None:
        data = user.make_dataset(seed=seed)
        batches = Batches(data, plan.batch_size, seed=seed, shuffle=True)
        if len(batches) >= num_steps:
            first = itertools.islice(batches.epoch(0), num_steps)
            pairs = [pytree.tree_map_only(Tensor, _plain, b.data) for b in first]
            return [
                (like_examples(as_structure(input), inputs), target)
                for input, target in pairs
            ]
    return [repeated((inputs, target), plan)] * num_steps
