"""Compare N ranks with one process: loss, every gradient, every buffer."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import (
    cast_module,
    convert,
    converted,
    like_examples,
    nudge,
)
from gemsc.base.plain_forward import with_threads
from gemsc.base.process import num_cores
from gemsc.base.rng import same_draws
from gemsc.base.visible import forgetting
from gemsc.errors import GemscError
from gemsc.launch.launch import launch
from gemsc.plan import Plan
from gemsc.runtime.data.batches import Batch, repeated
from gemsc.runtime.data.shapes import all_numbers
from gemsc.runtime.data.stream_batches import batches_of
from gemsc.runtime.process.device import exact_arithmetic, require_gpu
from gemsc.runtime.training.datasets import shape_classes
from gemsc.runtime.training.program_directory import check_dtype, check_program
from gemsc.runtime.training.starting import first_weights
from gemsc.runtime.training.step_report import as_structure
from gemsc.runtime.training.verification import NEAR_ZERO
from gemsc.user_model import UserModel, load_user_model
from gemsc.verify.compare import (
    Comparison,
    StepRecord,
    compare,
    near_zero,
    nearer,
    noisy,
    read_record,
)
from gemsc.verify.one_process import CPU, reference_steps
from gemsc.verify.precision import LowPrecision, Precision, WatchPrecision
from gemsc.weights.keras_model import as_module
from gemsc.weights.load import blank, put, stage_tensors

NUDGES = 6  # other roundings of one process that are tried


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
    diff = verify_program(
        Path(directory), dtype=dtype, num_steps=num_steps, user=user, device=device
    )
    kind, name = diff.judge(dtype)
    if kind != "exact":
        raise GemscError(
            f"{directory} is {kind} in {dtype}: {name} is off by "
            f"{diff.errors[name]:.1e}, rounding alone by "
            f"{diff.rounding.get(name, 0.0):.1e}",
            help="compile again; if it persists, report it with the model",
        )
    return diff


def verify_program(
    directory: Path,
    *,
    dtype: torch.dtype,
    num_steps: int = 2,
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
        plan = Plan.read(directory / "plan.toml")
        check_program(directory, plan.ranks)
        check_dtype(plan, dtype)
        user = user or user_model_of(directory, plan)
        model, batches = (
            initial_model(user, directory),
            _batches(user, plan, num_steps),
        )
        return _verify(_Subject(directory, plan, user, model, batches, dtype, device))


@dataclass(frozen=True)
class _Subject:
    """A program, its model, and what both compute on."""

    directory: Path
    plan: Plan
    user: UserModel
    model: nn.Module
    batches: list[tuple[Any, Any]]
    dtype: torch.dtype
    device: torch.device
    near_zero: float = 0.0

    @property
    def precision(self) -> Precision:
        """What both compute in."""
        return Precision.of(self.plan, self.dtype)

    def in_one_process(self) -> StepRecord:
        """Train in this process, with the threads of one rank and the same draws."""
        # made before draws are the same: it may draw its weights, as the ranks' were
        loss, phases = self.user.make_loss(), self.user.make_phases()
        tables = forgetting(self.model, loss, *(phase.loss for phase in phases))
        try:
            with threads_of_a_rank(self.plan), same_draws(), tables:
                return reference_steps(
                    self.model,
                    loss,
                    self.batches,
                    self.plan.data * self.plan.micro_batches,
                    self.dtype,
                    self.user.optimizer,
                    self.precision,
                    self.device,
                    phases,
                    self.near_zero,
                )
        except (RuntimeError, TypeError) as error:
            text = " ".join(str(error).split())
            raise GemscError(
                f"the model itself does not run in {self.dtype}: {text}",
                help="take dtypes from tensors (x.dtype), or verify in another --dtype",
            ) from error


def _verify(subject: _Subject) -> Comparison:
    """Compare ranks with one process; where they differ, with what rounding does."""
    plan, dtype = subject.plan, subject.dtype
    overflow = subject.precision.dtype is torch.float16
    last_bit = _last_bit(subject)
    compared = partial(compare, may_overflow=overflow, last_bit=last_bit)
    expected, actual = subject.in_one_process(), _ranks(subject)
    diff = compared(actual, expected)
    if diff.judge(dtype)[0] == "exact":
        return diff
    if diff.is_about(names := noisy(expected, dtype), dtype):
        quiet = replace(subject, near_zero=near_zero(expected, dtype))
        both = _ranks(quiet), quiet.in_one_process()
        states = nearer((actual.state, expected.state), (both[0].state, both[1].state))
        pairs = zip(both, states, strict=True)
        again = compared(*(replace(record, state=state) for record, state in pairs))
        diff = diff.with_updates_of(again, names)
        if diff.judge(dtype)[0] == "exact":
            return diff
    inside = _inside(subject)
    if inside is not None:
        diff = diff.with_inside(inside, actual, expected)
    for other in _other_roundings(subject, inside):
        once = compare(other, expected, may_overflow=overflow, last_bit=diff.last_bit)
        diff = diff.with_rounding(once.errors)
        if diff.judge(dtype)[0] == "exact":
            return diff
    if plan.torch_compile and dtype is torch.float32 and not plan.only_dtype:
        diff = diff.with_rounding(_lost_by_kernels(subject))
    is_full = subject.precision.dtype is None and inside is None
    return diff.with_gates() if is_full and dtype is torch.float32 else diff


def _lost_by_kernels(subject: _Subject) -> dict[str, float]:
    """Return what other kernels, which sum in another order, lose in float32.

    It is what they lose in float64, in units of the last bit. Nothing, if the ranks are
    not exact there.
    """
    wide = replace(subject, dtype=torch.float64)
    diff = compare(_ranks(wide), wide.in_one_process())
    if diff.judge(wide.dtype)[0] != "exact":
        return {}
    bits = torch.finfo(subject.dtype).eps / torch.finfo(wide.dtype).eps
    return {name: bits * error for name, error in diff.errors.items()}


def _last_bit(subject: _Subject) -> float:
    """Return how far off other roundings of the ranks alone may be.

    In half precision it is the last bit, where ranks of a grid add up and where
    `torch.compile` fuses operations.
    """
    plan, lower = subject.plan, subject.precision.dtype
    is_added = any(stage.grid.size > 1 for stage in plan.stages)
    if lower is not None and (is_added or plan.torch_compile):
        return torch.finfo(lower).eps
    return 0.0


def _ranks(subject: _Subject) -> StepRecord:
    """Train in the ranks, under mpirun."""
    num_ranks, dtype = subject.plan.ranks, str(subject.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="gemsc-verify-") as name:
        folder = Path(name)
        torch.save(subject.batches, folder / "batches.pt")
        if subject.near_zero:
            (folder / NEAR_ZERO).write_text(repr(subject.near_zero))
        words = ["--verify-into", name, "--device", subject.device.type]
        command = [sys.executable, str(subject.directory), *words, "--dtype", dtype]
        code = launch(num_ranks, command)
        if code != 0:
            raise GemscError(
                f"the ranks ended with exit code {code} in {subject.dtype}",
                help="see the report above",
            )
        return read_record(folder, num_ranks)


def _other_roundings(
    subject: _Subject, inside: LowPrecision | None
) -> Iterator[StepRecord]:
    """Yield what one process does where it rounds otherwise."""
    lower = subject.precision.dtype if inside is None else inside.dtype
    kind = subject.precision.casts_to(subject.dtype)
    if subject.dtype is not torch.float64 and not subject.plan.only_dtype:
        yield replace(subject, dtype=torch.float64).in_one_process()
    for number in range(NUDGES):
        changed = nudged(subject.model, number, kind, lower)
        yield replace(subject, model=changed).in_one_process()


def nudged(
    model: nn.Module,
    seed: int,
    dtype: torch.dtype | None,
    lower: torch.dtype | None = None,
) -> nn.Module:
    """Return the model in a dtype, or as it is, with weights off by their last bit.

    The bit is that of the `lower` precision, where products are computed in one.
    """
    model = copy.deepcopy(model)
    cast_module(model, dtype)
    nudge(model, seed, lower or dtype)
    return model


def _inside(subject: _Subject) -> LowPrecision | None:
    """Return what a model computes in inside, if that is less than its dtype."""
    watch = WatchPrecision(subject.dtype)
    if subject.precision.dtype is None:
        # what cannot be watched is judged as if it were in its dtype all through
        with suppress(GemscError, NotImplementedError), watch:
            replace(subject, batches=subject.batches[:1]).in_one_process()
    return watch.lowest


def threads_of_a_rank(plan: Plan) -> AbstractContextManager[None]:
    """Let torch use as many threads as one of the ranks on this machine."""
    if "OMP_NUM_THREADS" in os.environ:  # the ranks have it, too
        return nullcontext()
    return with_threads(max(1, num_cores() // plan.ranks))


_loaded: dict[tuple[object, ...], UserModel] = {}


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
    path = Path(plan.spec.partition(".py:")[0]).with_suffix(".py")
    text = path.read_bytes() if path.is_file() else b""
    given = (plan.spec, text, *plan.constants.items())
    try:
        user = _loaded[given] = load_user_model(plan.spec, constants=plan.constants)
    except GemscError:  # it registers a name, as gin does, which works but once
        if given not in _loaded:
            raise
        user = _loaded[given]
    if user.loss is None and user.phases is None:
        raise GemscError(
            f"{user.path} has no loss(), so there are no gradients to compare",
            help="add loss(output, target) and compile again",
        )
    return user


def initial_model(user: UserModel, directory: Path) -> nn.Module:
    """Return the user's model with the weights that a program starts from."""
    model = user.make_unfilled()
    plan = Plan.read(directory / "plan.toml")
    first = first_weights(directory, plan)
    tensors = stage_tensors(model)
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for stage in range(len(plan.stages)):
            for name in first.table(stage).keys() & tensors.keys() - values.keys():
                if tensors[name].is_meta:
                    values[name] = first.read(stage, name)
                else:
                    tensors[name].copy_(first.read(stage, name))
    put(model, values)
    blank(model)  # what no stage has
    convert(model, plan.memory_format)
    return model


def _batches(user: UserModel, plan: Plan, num_steps: int) -> list[tuple[Any, Any]]:
    """Return batches of the dataset, or the example inputs again and again.

    Where they have several shapes, each has one batch at least, if need be of examples.
    """
    shapes = [converted(inputs, plan.memory_format) for inputs in user.make_shapes()]
    targets = user.make_targets(shapes)
    examples = [repeated(pair, plan) for pair in zip(shapes, targets, strict=True)]
    batches = _of_dataset(user, plan, num_steps) if user.dataset is not None else []
    pairs = [
        (like_examples(as_structure(b.data[0]), shapes[b.shape]), b.data[1])
        for b in batches
    ]
    if not plan.shapes:
        return pairs if len(pairs) == num_steps else examples * num_steps
    there = {batch.shape for batch in batches}
    pairs += [pair for number, pair in enumerate(examples) if number not in there]
    return pairs + examples[:1] * (num_steps - len(pairs))


def _of_dataset(user: UserModel, plan: Plan, num_steps: int) -> list[Batch]:
    """Return the first batches of an epoch, and the first one of each shape."""
    data, classes = user.make_dataset(), shape_classes(plan, user, "dataset")
    numbers = all_numbers(classes, data, 0)
    how: dict[str, Any] = {"shapes": classes, "numbers": numbers}
    batches = batches_of(data, plan.batch_sizes, seed=0, shuffle=True, **how)
    taken = [*itertools.islice(batches.epoch(0), num_steps)]
    there = {batch.shape for batch in taken}
    for i, row in enumerate(batches.rows(0) if plan.shapes else ()):
        if row.shape not in there:
            there.add(row.shape)
            taken.append(next(batches.epoch(0, i)))
    # without what a package adds to tensors, which no file keeps
    return [replace(batch, data=_plain(batch.data)) for batch in taken]


def _plain(nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.as_subclass(Tensor), nest)
