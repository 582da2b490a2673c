"""Run what was written before it is called right: one step of the ranks, on threads.

The ranks' files train and evaluate one batch in float64, as threads of this process,
and so does the user's model. Outputs, loss, the gradient of each parameter, and every
parameter and buffer after the step must be equal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    ExitStack,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import cast, default_dtype, lying_as, lying_of
from gemsc.base.examples import Examples, num_rows
from gemsc.base.nests import Mean
from gemsc.base.phase import Phase
from gemsc.base.plain_forward import with_threads
from gemsc.base.rng import preserve_rng, same_draws
from gemsc.base.visible import forgetting
from gemsc.codegen.package import write_directory
from gemsc.compilation import Compilation
from gemsc.errors import GemscError, InternalError, say_note, warn
from gemsc.ir import meta
from gemsc.ir.invariants import sources
from gemsc.plan import WITHOUT_KERNELS, Plan
from gemsc.runtime.data.batches import repeated
from gemsc.runtime.data.metrics import Metrics
from gemsc.runtime.training.step_report import concatenated
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import recorded
from gemsc.runtime.transport.local import look_up_operators, run_local
from gemsc.runtime.transport.transport import Transport
from gemsc.verify.compare import (
    TOLERANCE,
    Comparison,
    StepRecord,
    compare,
    read_record,
)
from gemsc.verify.figures import no_means
from gemsc.verify.one_process import (
    evaluated,
    held_out,
    named_outputs,
    reference_steps,
)
from gemsc.verify.precision import Precision, WatchPrecision
from gemsc.verify.step_size import MOST_COPIES, own_dtype, too_much
from gemsc.verify.steps import NUDGES, nudged

FLAT = 1e-12  # of the loss: smaller gradients are rounding
TIMEOUT = 120.0  # seconds in which nothing moves
QUICK = 1.0  # seconds: metrics that take longer are called once
T = TypeVar("T")

_NOTHING = StepRecord([0.0], {}, {})


@with_threads(1)  # ranks share a core; with more, each of them has some that wait
def first_step(
    compilation: Compilation,
    model: nn.Module,
    example_inputs: Any,
    loss: Callable[..., Any] | None = None,
    example_target: Any = None,
    phases: Sequence[Phase] = (),
    metrics: Any = None,
) -> dict[str, str]:
    """Compare one step of a program with the model; return what the plan says of it.

    That is `unchecked`, why it was not, "" if it was, and `only_dtype` if the model
    fails in float64. Stages run as they are, without torch.compile. Where batches have
    several shapes, one of each is compared, one after the other. Nothing changes in the
    model or the generators of random numbers. If `metrics` fails for what the ranks
    give in evaluation, a warning says so.

    Raises:
        InternalError: the program computes something else, or does not run.
    """
    if reason := too_much(compilation.plan, model):
        return {"unchecked": reason}
    plan = _with_few_copies(compilation.plan)
    examples = Examples.of(example_inputs, example_target)
    pairs = zip(examples.inputs, examples.targets, strict=True)
    batches = [repeated(pair, plan) for pair in pairs]
    # whatever the optimizers are: they might hide what gradients are
    plain = [replace(phase, optimizer=None, scheduler=None) for phase in phases]
    plan_dtype, reason = own_dtype(plan), ""
    wide_is_much = too_much(plan, model, dtype=torch.float64)
    wide = () if plan.only_dtype or wide_is_much else (torch.float64,)
    for dtype in dict.fromkeys((*wide, plan_dtype)):
        if dtype not in TOLERANCE:
            reason = reason or wide_is_much or f"nothing is compared in {dtype}"
            continue
        seen = replace(plan, only_dtype=plan.only_dtype or reason)
        step = _Step(seen, model, loss, batches, dtype, plain, metrics)
        try:
            with forgetting(model, loss, *(phase.loss for phase in plain)):
                fields = {"unchecked": _one_compared(compilation, step)}
        except _DoesNotRunError as error:
            reason = reason or str(error)
        else:
            if plan.torch_compile and not fields["unchecked"]:
                fields = {"unchecked": WITHOUT_KERNELS}
            return {**fields, "only_dtype": reason} if reason else fields
    return {"unchecked": reason}


def _one_compared(compilation: Compilation, step: _Step) -> str:
    """Run batches of other numbers, or else of the examples; return as `_compared`."""
    other = replace(step, batches=[different(b, step.plan) for b in step.batches])
    # numbers that mean something to each other may be refused by the model
    with suppress(_DoesNotRunError):
        if not _compared(compilation, other):
            return ""
    return _compared(compilation, step)


class _DoesNotRunError(Exception):
    """The model itself fails in a dtype, or for some inputs."""


@dataclass(frozen=True)
class _Step:
    """Steps of a model, one for each batch, for its ranks and for one process."""

    plan: Plan
    model: nn.Module
    loss: Callable[..., Any] | None
    batches: list[tuple[Any, Any]]
    dtype: torch.dtype
    phases: Sequence[Phase] = ()
    metrics: Any = None

    @property
    def kind(self) -> torch.dtype | None:
        """What all becomes; None where it stays as it was compiled."""
        return Precision.of(self.plan, self.dtype).casts_to(self.dtype)

    def in_one_process(self) -> StepRecord:
        """Return what one process computes, in training and in evaluation."""
        plan, dtype = self.plan, self.dtype
        precision, record = Precision.of(plan, dtype), _NOTHING
        with same_draws():
            if self.loss is not None or self.phases:
                count = plan.data * plan.micro_batches
                step = self.model, self.loss, self.batches, count, dtype
                record = reference_steps(*step, precision=precision, phases=self.phases)
        return replace(record, outputs=self.evaluated(record.state))

    def evaluated(self, state: Mapping[str, Tensor], **how: bool) -> dict[str, Tensor]:
        """Return outputs and loss of one process after a step, in evaluation."""
        plan, dtype = self.plan, self.dtype
        given = [inputs for inputs, _ in self.batches]
        precision = Precision.of(plan, dtype)
        with same_draws():
            outputs = evaluated(self.model, state, given, plan, dtype, precision, **how)
            losses = list(map(self._held_out, outputs, self.batches))
        return self._named(outputs, losses)

    def _held_out(self, outputs: list[Any], batch: tuple[Any, Any]) -> Mean | None:
        """Return the loss in evaluation; None if it fails, or no two calls agree."""
        if self.loss is None or self.phases or _has_state(self.loss):
            return None
        plan, dtype = self.plan, self.dtype
        how = self.loss, outputs, batch, plan, dtype, Precision.of(plan, dtype)
        with suppress(Exception):  # whatever a loss says of what evaluation gives
            first, second = held_out(*how), held_out(*how)
            if math.isfinite(first.value) and first.sums == second.sums:
                return first
        return None

    def _named(
        self, outputs: list[list[Any]], losses: Sequence[Mean | None]
    ) -> dict[str, Tensor]:
        """Return outputs and losses of all batches, under names for people."""
        names = [f" of shape {shape.name}" for shape in self.plan.shapes] or [""]
        named = {
            f"{name}{of_shape}": tensor
            for of_shape, parts in zip(names, outputs, strict=True)
            for name, tensor in named_outputs(parts, self.plan).items()
        }
        known = zip(names, losses, strict=True)
        return named | {
            f"loss{of_shape}": torch.tensor(mean.value, dtype=torch.float64)
            for of_shape, mean in known
            if mean is not None
        }

    def on_ranks(
        self, directory: Path
    ) -> tuple[Exception | None, StepRecord, list[list[Any]]]:
        """Return what stopped the ranks of a program, and what they compute.

        Last is what they give for each batch in evaluation, in parts.
        """

        def train(transport: Transport) -> Any:
            with same_draws():
                trainer = Trainer(
                    *(directory, transport),
                    dtype=self.dtype,
                    device=torch.device("cpu"),
                    phases=self.phases,
                    on_nonfinite="warn",
                )
                if trainer.program.train_step is not None or self.phases:
                    recorded(trainer, directory, self.batches, measure=False)
                return [trainer.evaluate(*batch) for batch in self.batches]

        try:
            # two threads cannot compile at once
            with torch.compiler.set_stance("force_eager"):
                of_ranks = on_threads(self.plan.ranks, train, self.kind)
        except (GemscError, InternalError) as error:
            return error, _NOTHING, []
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            message = f"the program that was written does not run: {text}"
            failure = InternalError(message)
            failure.__cause__ = error
            return failure, _NOTHING, []
        of_batches = list(zip(*of_ranks, strict=True))
        # those of data-parallel copies, in order
        parts = [[e.output for e in b if e.output is not None] for b in of_batches]
        outputs = self._named(parts, [b[0].mean for b in of_batches])
        trains = (directory / "losses0.json").exists()
        record = read_record(directory, self.plan.ranks) if trains else _NOTHING
        return None, replace(record, outputs=outputs), parts

    def try_metrics(self, parts: list[Any]) -> None:
        """Warn if `metrics` fails for what the ranks give for the first batch.

        And say which figures are no means over samples.
        """
        output = concatenated(parts, self.plan.sample_dims)
        inputs, target = self.batches[0]
        if target is None:  # there is no example; a dataset has some
            return
        try:
            with preserve_rng():
                output = cast(output, getattr(torch, self.plan.dtype))
                size, start = num_rows(inputs), time.monotonic()
                metrics, dims = Metrics(self.metrics), self.plan.sample_dims
                metrics.add(output, target, size)
                note, scored, is_of_all = "", (output, target), False
                if time.monotonic() - start < QUICK:
                    note = no_means(self.metrics, scored, size, dims)
                    is_of_all = metrics.takes_of_all(output, target, dims)
        except GemscError as error:
            text = f"tried on the examples, {error.message}: evaluations would end so"
            warn(text, at=error.at, help=error.help or "")
            return
        if is_of_all:
            sizes = " or ".join(map(str, self.plan.batch_sizes))
            say_note(
                "metrics take what the model computes of a whole micro-batch: the "
                f"length of eval_dataset must be a multiple of {sizes}"
            )
        if note:
            say_note(
                f"metrics: {note}. Evaluations give the mean over their batches, "
                "which is not that of all samples together: for this, give an object "
                "with update, compute and reset (docs/models.md)"
            )


def _compared(compilation: Compilation, step: _Step) -> str:
    """Run both on a batch; return why they cannot be compared, "" if they are equal."""
    dtype = step.dtype
    look_up_operators()
    with ExitStack() as stack:
        stack.enter_context(preserve_rng())
        stack.enter_context(default_dtype(step.kind))  # of all threads, until both end
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gemsc-check-")))
        write_directory(replace(compilation, plan=step.plan), folder)
        beside = stack.enter_context(ThreadPoolExecutor(1))
        model_runs = beside.submit(step.in_one_process)
        failure, actual, parts = step.on_ranks(folder)
        try:
            expected = model_runs.result()
        except (GemscError, InternalError):
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            reason = f"the model itself does not run in {dtype}: {text}"
            raise _DoesNotRunError(reason) from error
    if not all(map(math.isfinite, expected.losses)):
        return "the loss of example_inputs is not finite"
    if failure is not None:
        raise failure
    diff = compare(actual, expected)
    if diff.judge(dtype)[0] == "wrong":
        diff = _with_roundings(diff, (actual, expected), step)
    kind, wrong = diff.judge(dtype)
    if kind == "exact":
        if _is_flat(expected):
            return "the gradients of example_inputs are all 0"
        step.try_metrics(parts[0])
        return ""
    if kind == "undecided":
        moved = diff.turned or wrong
        return f"rounding alone changes {moved} by {diff.rounding[moved]:.0e}"
    traced = replace(expected, outputs=step.evaluated(expected.state, gradients=True))
    if compare(actual, traced).judge(dtype)[0] == "exact":
        raise GemscError(
            "in evaluation, the model computes something else with gradients enabled: "
            "its forward uses torch.is_grad_enabled(), or a tensor's .requires_grad",
            help="use self.training instead",
        )
    raise InternalError(_what_is_wrong(compilation, diff, wrong, dtype))


def _is_flat(record: StepRecord) -> bool:
    """Whether gradients say nothing: a contrast of one sample is 0, whatever it is."""
    least = FLAT * abs(record.losses[0])
    flat = [t.abs().max() <= least for t in record.gradients.values() if t.numel()]
    return bool(flat) and all(flat)


def _what_is_wrong(
    compilation: Compilation, diff: Comparison, name: str, dtype: torch.dtype
) -> str:
    """Return which tensor is wrong, by how much, and the line that takes it."""
    node = sources(compilation.program).get(f"'{name.rpartition(' ')[2]}'")
    at = meta.location(node) if node is not None else None
    what = f"{at}: wrong program: {name}" if at else f"wrong program: {name}"
    if name.startswith("copies of "):
        return f"{what} on several ranks differ after one step"
    error, allowed = diff.errors[name], diff.allowed(name, dtype)
    if math.isinf(error):
        return f"{what} is missing, of another shape, or not finite"
    return (
        f"{what} is off by {error:.1e} from what the model computes in one process "
        f"(allowed: {allowed:.0e})"
    )


def _with_few_copies(plan: Plan) -> Plan:
    """Return the plan with two data-parallel copies at most, on a CPU of any size."""
    copies = min(plan.data, MOST_COPIES)
    options = {k: v for k, v in plan.options.items() if k != "device_memory"}
    ranks = plan.copy_ranks * copies
    return replace(plan, ranks=ranks, data=copies, options=options)


def different(batch: tuple[Any, Any], plan: Plan) -> tuple[Any, Any]:
    """Return the batch with other inputs in each micro-batch: none stands for another.

    Numbers come a little nearer to 0, those of each input by another factor, but for 0,
    1 and infinity, which masks have. Integers are drawn from those that stand there.
    """
    size, count = num_rows(batch[0]), plan.data * plan.micro_batches
    generator = torch.Generator().manual_seed(0)
    inputs, target = batch
    leaves, structure = pytree.tree_flatten(inputs)

    def change(leaf: Any, share: float) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != size:
            return leaf
        parts = enumerate(torch.chunk(leaf, count))
        others = [other(part, (m + share) / count) for m, part in parts]
        return lying_as(torch.cat(others), lying_of(leaf))

    def other(leaf: Tensor, place: float) -> Tensor:
        if leaf.is_floating_point():
            fixed = (leaf == 0) | (leaf == 1) | leaf.isinf()
            return torch.where(fixed, leaf, leaf * (1 - place / 8))
        if leaf.dtype is torch.bool or leaf.is_complex():
            return leaf
        places = torch.randint(leaf.numel(), leaf.shape, generator=generator)
        return leaf.flatten()[places]

    changed = [change(leaf, i / len(leaves)) for i, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(changed, structure), target


def _has_state(loss: Any) -> bool:
    """Whether a step may change a loss, or its copy in another dtype."""
    if not isinstance(loss, nn.Module):
        return False
    trains = any(parameter.requires_grad for parameter in loss.parameters())
    return trains or any(True for _ in loss.buffers())


def _with_roundings(
    diff: Comparison, records: tuple[StepRecord, StepRecord], step: _Step
) -> Comparison:
    """Return the comparison with what other roundings of one process change."""
    dtype, (_, expected) = step.dtype, records
    watch = WatchPrecision(dtype)
    with suppress(NotImplementedError), watch:
        step.in_one_process()
    lower = Precision.of(step.plan, dtype).dtype
    if watch.lowest is not None:
        lower, diff = watch.lowest.dtype, diff.with_inside(watch.lowest, *records)
    for number in range(NUDGES):
        if diff.judge(dtype)[0] != "wrong":
            break
        changed = replace(step, model=nudged(step.model, number, step.kind, lower))
        other = changed.in_one_process()
        once = compare(other, expected, last_bit=diff.last_bit)
        diff = diff.with_rounding(once.errors)
    is_full = lower is None and dtype is torch.float32
    return diff.with_gates() if is_full else diff


def on_threads(
    num_ranks: int, work: Callable[[Transport], T], dtype: torch.dtype | None
) -> list[T]:
    """Return what `work(transport)` gives on each rank, with this default dtype.

    The ranks are threads of this process, without MPI.
    """
    with default_dtype(dtype):  # all threads have it
        return run_local(num_ranks, work, timeout=TIMEOUT)
