"""Train and evaluate a model in this process, over the micro-batches of a program."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import (
    as_real,
    cast,
    cast_module,
    default_dtype,
)
from gemsc.base.elementwise import OptimizerFactory
from gemsc.base.examples import num_rows
from gemsc.base.nests import (
    Mean,
    as_loss,
    call_loss,
    call_model,
    on_device,
    tensor_leaves,
    unbound,
)
from gemsc.base.phase import Phase
from gemsc.base.plain_forward import enter_training, plain_forward
from gemsc.ir.holder import LOSS
from gemsc.plan import Plan
from gemsc.runtime.training.step_report import concatenated
from gemsc.runtime.training.verification import without_noise
from gemsc.verify.compare import (
    StepRecord,
)
from gemsc.verify.precision import FULL, Precision

CPU = torch.device("cpu")


def reference_steps(
    model: nn.Module,
    loss: Callable[..., Tensor] | None,
    batches: list[tuple[Any, Any]],
    num_micro_batches: int,
    dtype: torch.dtype,
    optimizer: OptimizerFactory | None = None,
    precision: Precision = FULL,
    device: torch.device = CPU,
    phases: Sequence[Phase] = (),
    near_zero: float = 0.0,
) -> StepRecord:
    """Train a copy of the user's model in this process, over the same micro-batches.

    Each batch is cut into micro-batches in dimension 0; the loss of the step is the
    mean of theirs. Activation checkpoints are off, as they are in programs. A step may
    have several `phases`. What is `near_zero` in a gradient is zero for the optimizer.
    """
    model, loss = copy.deepcopy((model, loss))
    kind = precision.casts_to(dtype)
    # the default is also that of what the optimizer makes
    with default_dtype(kind):
        updates = plain_updates(
            model, loss, optimizer, phases, dtype, precision, device
        )
        kept = {name for name, _ in model.named_buffers()}  # forward may make others
        losses, terms, gradients = list[float](), list[float](), dict[str, Tensor]()
        for step, (input, target) in enumerate(batches):
            leaves = [t for t in pytree.tree_leaves(input) if isinstance(t, Tensor)]
            batch = next((t.shape[0] for t in leaves if t.dim()), 1)
            for update in updates:
                if not update.phase.is_due(step):
                    continue
                with update.training():
                    for m in range(num_micro_batches):
                        part = (m, num_micro_batches, batch)
                        given, wanted = (
                            on_device(micro_batch_of(cast(nest, kind), *part), device)
                            for nest in (input, target)
                        )
                        with plain_forward(), precision.autocast(device):
                            value = as_loss(update.phase.call(model, given, wanted))
                        update.backward(value, num_micro_batches)
                losses.append(update.mean.value)
                terms.append(update.mean.divisor)
                update.end_sums()
                if step == 0:
                    gradients |= update.gradients()
                update.apply(near_zero)
    buffers = [pair for pair in model.named_buffers() if pair[0] in kept]
    state = dict([*model.named_parameters(), *buffers])
    state = {n: as_real(t.detach()).cpu() for n, t in state.items()}
    return StepRecord(losses, gradients, state, terms=terms)


@dataclass
class PlainUpdate:
    """One of the updates of a step, of a model in this process.

    `mean` is the loss of the last step, `terms` what losses with a count were added up
    of since the last update.
    """

    model: nn.Module
    phase: Phase
    pairs: list[tuple[str, nn.Parameter]]
    optimizer: torch.optim.Optimizer
    scaler: Any
    scheduler: Any = None
    mean: Mean = field(default_factory=Mean)
    terms: float = 0.0

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let what it trains have gradients, and nothing else."""
        before = [(p, p.requires_grad) for p in self.model.parameters()]
        trained = {id(parameter) for _, parameter in self.pairs}
        for parameter, trains in before:
            parameter.requires_grad_(trains and id(parameter) in trained)
        self.mean = Mean()
        try:
            yield
        finally:
            for parameter, trains in before:
                parameter.requires_grad_(trains)
        self.terms += self.mean.count

    def backward(self, value: Tensor, num_micro_batches: int) -> None:
        """Add the gradients of a micro-batch's loss."""
        root = self.mean.add(value) / (1 if value.dim() else num_micro_batches)
        if root.requires_grad:  # not where all weights are frozen
            torch.autograd.backward(self.scaler.scale(root))

    def end_sums(self) -> None:
        """Make of what was added up the gradients of the mean."""
        self.scaler.unscale_(self.optimizer)
        if self.terms:
            divide_gradients((p for _, p in self.pairs), self.terms)
        self.terms = 0.0

    def gradients(self) -> dict[str, Tensor]:
        """Return copies of the model's gradients, by the parameters' names."""
        named = self.model.named_parameters()
        present = {n: p.grad for n, p in named if p.grad is not None}
        return {n: as_real(g).cpu().clone() for n, g in present.items()}

    def clip(self, norm: float | None) -> None:
        """Bound the norm of all gradients."""
        if norm is not None:
            nn.utils.clip_grad_norm_([p for _, p in self.pairs], norm)

    def apply(self, near_zero: float = 0.0) -> None:
        """Make the update and drop the gradients; what is `near_zero` in one is 0."""
        parameters = [parameter for _, parameter in self.pairs]
        if near_zero:
            without_noise((parameter.grad for parameter in parameters), near_zero)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        by_updates = not isinstance(self.scheduler, NoneType | ReduceLROnPlateau)
        if by_updates and self.scaler.get_scale() >= before:
            self.scheduler.step()
        for parameter in parameters:
            parameter.grad = None


def plain_updates(
    model: nn.Module,
    loss: Callable[..., Tensor] | None,
    optimizer: OptimizerFactory | None,
    phases: Sequence[Phase],
    dtype: torch.dtype,
    precision: Precision,
    device: torch.device,
    scheduler: Callable[..., Any] | None = None,
) -> list[PlainUpdate]:
    """Return the updates of a step; without phases there is one, of all parameters.

    The model and its loss are changed: they compute in this dtype, on this device.
    """
    for module in (model, loss):
        if isinstance(module, nn.Module):
            cast_module(module, precision.casts_to(dtype))
            module.to(device)
    enter_training(model)

    def whole(model: nn.Module, given: Any, wanted: Any) -> Any:
        assert loss is not None
        return call_loss(loss, call_model(model, given), wanted)

    updates = []
    for phase in phases or [OnePhase("", whole, (), optimizer, scheduler)]:
        named, trained = model.named_parameters(), phase.trained(model)
        pairs = [(n, p) for n, p in named if not phases or id(p) in trained]
        if not phases and isinstance(loss, nn.Module):
            known = {id(p) for _, p in pairs}  # a loss may hold the model
            of_loss = loss.named_parameters(prefix=LOSS)
            pairs += [(name, p) for name, p in of_loss if id(p) not in known]
        make = phase.optimizer or partial(torch.optim.SGD, lr=0.01)
        made = make(pairs)
        paced = phase.scheduler(made) if phase.scheduler is not None else None
        scaler = precision.scaler(device)
        updates.append(PlainUpdate(model, phase, pairs, made, scaler, paced))
    return updates


class OnePhase(Phase):
    """The only update of a step, whose loss takes outputs."""

    def call(self, model: nn.Module, inputs: Any, target: Any) -> Any:
        """Return what the loss gives."""
        return self.loss(model, inputs, target)


def divide_gradients(parameters: Iterable[nn.Parameter], terms: float) -> None:
    """Make of the gradients of a sum those of the mean of so many terms."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= terms


def micro_batch_of(value: Any, m: int, count: int, batch: int) -> Any:
    """Return a part of every tensor that has the batch in dimension 0."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        size = batch // count
        return leaf[m * size : (m + 1) * size]

    return pytree.tree_map(cut, value)


def evaluated(
    model: nn.Module,
    state: Mapping[str, Tensor],
    batches: Sequence[Any],
    plan: Plan,
    dtype: torch.dtype,
    precision: Precision,
    gradients: bool = False,
) -> list[list[Any]]:
    """Return what a model gives for each micro-batch in evaluation, after a step.

    That is done batch by batch, as what changes in one is there in the next. With
    `gradients` these are on, as they are while it is traced.
    """
    model, kind = copy.deepcopy(model), precision.casts_to(dtype)
    cast_module(model, kind)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name, tensor in state.items():
            as_real(tensors[name]).copy_(tensor)
    model.eval()
    outputs: list[list[Any]] = []
    count = plan.data * plan.micro_batches
    learns = torch.set_grad_enabled
    with learns(gradients), plain_forward(), default_dtype(kind):
        for inputs in cast(batches, kind):
            outputs.append([])
            for m in range(count):
                part = micro_batch_of(inputs, m, count, num_rows(inputs))
                with precision.autocast(CPU):
                    given = call_model(model, part)
                    outputs[-1].append(unbound(given, model.buffers()))
    return outputs


def held_out(
    loss: Callable[..., Any],
    outputs: Sequence[Any],
    batch: tuple[Any, Any],
    plan: Plan,
    dtype: torch.dtype,
    precision: Precision,
) -> Mean:
    """Return the loss in evaluation of what a model gives for each micro-batch."""
    loss, kind = copy.deepcopy(loss), precision.casts_to(dtype)
    if isinstance(loss, nn.Module):
        cast_module(loss.eval(), kind)
    mean, count, target = Mean(), plan.data * plan.micro_batches, cast(batch[1], kind)
    with torch.no_grad(), plain_forward(), default_dtype(kind):
        for m, output in enumerate(outputs):
            part = micro_batch_of(target, m, count, num_rows(batch[0]))
            with precision.autocast(CPU):
                mean.add(as_loss(call_loss(loss, output, part)))
    return mean


def named_outputs(outputs: list[Any], plan: Plan) -> dict[str, Tensor]:
    """Return what evaluation gives, all parts joined, under names for people."""
    named = [
        {
            f"output {'.'.join(map(str, path))}".strip(): tensor.detach()
            for path, tensor in tensor_leaves(part)
        }
        for part in outputs
    ]
    joined: dict[str, Tensor] = concatenated(named, plan.sample_dims)
    return joined
