"""Worker: one rank at work, as its generated file sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gemsc.base.dtypes import Autocast, autocasting, lying_as
from gemsc.base.nests import Mean
from gemsc.base.rng import are_draws_same, seed_of, torch_seeded
from gemsc.errors import InternalError
from gemsc.messages.exchange import Exchange
from gemsc.messages.grid_message import GridMessage
from gemsc.messages.message import Message
from gemsc.runtime.memory.meter import active_meter, saved_in_parts
from gemsc.runtime.memory.offload import OffloadedRun, Store, store_for
from gemsc.runtime.process.status import Status
from gemsc.runtime.process.stop import Requests
from gemsc.runtime.tiles.grid import Grid
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.mailbox import Mailbox
from gemsc.runtime.worker.anomaly import AnomalyDetection
from gemsc.runtime.worker.backward import edge_of, gradient_of, present, run_backward
from gemsc.runtime.worker.deferral import Deferred
from gemsc.runtime.worker.finite import NotFiniteError, Problem, not_finite
from gemsc.runtime.worker.missed_changes import MissedChanges
from gemsc.runtime.worker.program import RankPlace, RankProgram, Run
from gemsc.runtime.worker.stages import Stages, keep_contents, without_trace
from gemsc.runtime.worker.steps import Steps
from gemsc.runtime.worker.updates import Updates
from gemsc.runtime.worker.variants import Variant, Variants, grids_of


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]
    offloaded: OffloadedRun
    deferred: Deferred | None
    anomalies: AnomalyDetection | None


class Worker:
    """What a generated file calls: messages, stages forward and backward, the update.

    `steps` has what belongs to the step of the moment, `updates` what follows its last
    backward. Where the program has several graphs, `use` says which one is run.
    """

    program: RankProgram
    stages: Stages
    updates: Updates
    grid: Grid | None
    _missed: MissedChanges  # of the step of the moment

    def __init__(
        self,
        transport: DeviceTransport,
        program: RankProgram,
        stages: Stages,
        place: RankPlace,
        *,
        seed: int = 0,
        float_dtype: torch.dtype | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        on_nonfinite: str = "stop",
    ) -> None:
        """Prepare a rank.

        Gradients of `accumulate` steps are averaged for one update; `clip_norm` bounds
        their norm over all ranks. The program runs in `float_dtype`, if it is given.
        `on_nonfinite` is "stop", "skip" or "warn" (see `finite.py`).
        """
        self.transport = transport
        self.place = place
        self.float_dtype = float_dtype
        self.status = Status.of(place.world_rank)
        self.requests = Requests()
        self.steps = Steps(
            program, place, accumulate=accumulate, float_dtype=float_dtype
        )
        lower = None if float_dtype is torch.float64 else program.precision
        self.precision = lower
        self._autocast: Autocast | None = (self.device.type, lower) if lower else None
        self._clip_norm = clip_norm
        self.detects_anomalies = False  # in each operation: many times as slow
        self.problem: Problem | None = None  # the first of the last step
        self._on_nonfinite = on_nonfinite
        self._give_back: list[Callable[[], None]] = []  # what forward changed
        everyone = tuple(range(transport.host.size))
        self._everyone = transport.host.group(everyone, "losses")
        self.number = 0  # of the micro-batch that ran last, over all replicas
        self.seed = seed
        self._in_flight: dict[tuple[Run, int], _InFlight] = {}
        self._deferred: dict[tuple[Run, int], Deferred] = {}
        is_mixed = self._autocast is not None
        self.mail = Mailbox(
            transport,
            place.first_rank,
            None if is_mixed else float_dtype,  # as compiled
            apart=self._defers,
            casts=is_mixed,
        )
        self.variants = Variants()
        self.add("", program, stages)
        self.use("")

    def add(
        self,
        name: str,
        program: RankProgram,
        stages: Stages,
        *,
        updates: Updates | None = None,
        trained: frozenset[str] | None = None,
    ) -> Variant:
        """Add a graph, on all ranks, for `use`; without `updates` it has its own."""
        if updates is None:
            is_half = program.precision is torch.float16
            args = self.transport, program, stages, self.place, self.steps
            is_scaled = is_half and self._autocast is not None
            updates = Updates(
                *args, self._clip_norm, is_scaled=is_scaled, trained=trained
            )
        forwards = stages.compiled() if program.torch_compile else stages
        shape = self.steps.shape_of(program.inputs)
        grids, grid = grids_of(self.transport, self.place, program, stages)
        self.variants[name] = variant = Variant(
            program, stages, updates, forwards, shape, grids, grid, trained
        )
        return variant

    def use(self, name: str) -> None:
        """Run another graph from now on; between two steps."""
        variant = self.variants[name]
        self.variant = name
        self.program, self.stages = variant.program, variant.stages
        self.updates, self._forwards = variant.updates, variant.forwards
        self._grids, self.grid = variant.grids, variant.grid
        self.steps.shape = variant.shape
        self.updates.use(variant.program)
        if variant.trained is not None:
            for key, parameter in variant.stages.parameters.items():
                parameter.requires_grad_(key in variant.trained)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.transport.streams.device

    def begin(
        self, batch: dict[str, Tensor], *, training: bool, count: int | None = None
    ) -> None:
        """Begin a step with this rank's part of a batch (see `Steps`)."""
        self.steps.begin(batch, training=training, count=count)
        self.status.step = self.steps.done
        program = self.program
        count = program.num_micro_batches if training else program.copy_micro_batches
        order = program.train_turns if training else program.eval_turns
        self.mail.begin(count, order, training=training)
        if training:
            self.updates.begin()
        self._missed = MissedChanges(self.stages, self.steps, self._autocast)
        if training and self._on_nonfinite == "skip":
            self._give_back = [keep_contents(stage) for stage in self.stages.values()]

    def end(self, *, counts: bool = True) -> None:
        """Wait until all that this rank sent has arrived; a step `counts` once."""
        self.status.enter("the end of the step")
        self.mail.finish()
        self._missed.finish(self.updates.whole_weights)
        self.steps.end(counts=counts)
        self.status.idle()

    # ------------------------------------- what generated files call

    def gather_weights(self, run: Run) -> None:
        """Make the weights of a stage whole, of which each rank keeps its rows."""
        self.status.enter("all-gather of the weights", run)
        self.updates.settle()
        self.updates.gather_weights(run)

    def input(self, name: str, m: int) -> Tensor:
        """Return a micro-batch's part of a tensor of this copy's batch."""
        part = self.steps.input(name, m, self.transport.streams)
        return lying_as(part, self.program.inputs[name].memory_format)

    def receive(self, message: Message | GridMessage, m: int) -> Any:
        """Return the message's value (a tuple if it has several), waiting politely."""
        if not message.is_local:
            self.status.enter("receive", message, m)
        tensors = self.mail.receive(message, m)
        return tensors[0] if len(tensors) == 1 else tensors

    def send(self, message: Message | GridMessage, m: int, *tensors: Tensor) -> None:
        """Start to send; never blocks."""
        self.mail.send(message, m, *tensors)

    def run(self, run: Run, m: int, *inputs: Tensor) -> Any:
        """Run a stage forward and keep what its backward needs."""
        self._begin("forward", run, m)
        counts = self.number < self.steps.count
        self.mail.release_arrived()
        stage = self.stages[run]
        self._missed.before(run, self.number)
        staying = tuple(tensor for tensor in inputs if tensor.requires_grad)
        offloaded = OffloadedRun(lambda: self._store, stage, staying)
        deferred = None
        if counts and self.defers(run, m):
            deferred = Deferred(f"{run}, micro-batch {m}")
        anomalies = None
        if self.detects_anomalies:
            scaled = self.updates.scaler is not None
            anomalies = AnomalyDetection(stage, backward=not scaled)
        with ExitStack() as around, anomalies or nullcontext():
            for context in self._contexts(run, deferred):
                around.enter_context(context)
            around.enter_context(offloaded)
            if not counts:
                around.enter_context(without_trace(stage))
            forward = stage if anomalies else self._forwards[run]
            result = forward(*inputs)
        if anomalies is not None:
            anomalies.check(result)
        given = () if result is None else (result,)  # nothing, where a phase has none
        outputs = result if isinstance(result, tuple) else given
        edges = tuple(edge_of(output) if counts else None for output in outputs)
        self._in_flight[run, m] = _InFlight(
            staying, edges, offloaded, deferred, anomalies
        )
        return result

    def backward(
        self, run: Run, m: int, *gradients: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run a stage backward; return the gradients of its inputs.

        Those of convolutions' and linear layers' weights wait for `weights` where they
        are deferred. `gradients` belong to the stage's outputs, in order; None where
        none flows back.
        """
        self._begin("backward", run, m)
        self.mail.release_arrived()  # what the forward sent has arrived
        kept = self._in_flight.pop((run, m))
        kept.offloaded.prefetch()
        depends_on_data = self.program.depends_on_data
        if depends_on_data:
            grid = self._grids.get(run.stage)
            gradients = present(gradients, grid, self.device)
        with self.updates.adding(run), self._drawing(run, "backward"):
            run_backward(kept.outputs, gradients)
        if kept.anomalies is not None:
            kept.anomalies.check_gradients()
        if kept.deferred is not None:
            flowing = zip(kept.outputs, gradients, strict=True)
            roots = [edge for edge, g in flowing if edge is not None and g is not None]
            kept.deferred.end_backward(roots, self.stages.parameters)
            self._deferred[run, m] = kept.deferred
        self.updates.scatter(run)
        return tuple(
            gradient_of(tensor, depends_on_data=depends_on_data)
            for tensor in kept.inputs
        )

    def weights(self, run: Run, m: int) -> None:
        """Add up the weight gradients that a stage's backward deferred."""
        self._begin("weight gradients", run, m)
        self.mail.release_arrived()
        with self.updates.adding(run):
            if self.number < self.steps.count:
                self._deferred.pop((run, m)).compute()
        self.updates.scatter(run)

    @property
    def loss_gradient(self) -> Tensor:
        """What each micro-batch's loss weighs here in the mean over the batch."""
        scaler = self.updates.scaler
        weight = self.steps.loss_gradient()
        return weight if scaler is None else weight * scaler.factor

    def add_loss(self, loss: Tensor) -> None:
        """Book the loss of the micro-batch that ran last."""
        self.steps.add_loss(loss, self.number)

    def evaluate(self, run: Run, m: int, *inputs: Tensor) -> Any:
        """Run a stage in evaluation mode, without gradients."""
        self._begin("evaluation", run, m)
        return self._evaluate(run, self._forwards[run], *inputs)

    def evaluate_apart(self, run: Run, m: int, *inputs: Tensor) -> Any:
        """Run a stage whose evaluation differs from its training in more than modes."""
        self._begin("evaluation", run, m)
        return self._evaluate(run, self.stages[run].forward_eval, *inputs)

    def gather(self, tensor: Tensor, exchange: Exchange) -> Tensor:
        """Return all of a value of which each tile has a part, in evaluation."""
        assert self.grid is not None
        return self.grid.collect(tensor, exchange)

    def add_result(self, m: int, loss: Tensor | None, output: Any) -> None:
        """Keep what the model returned for a micro-batch."""
        self.steps.add_result(loss, output)

    def start_reduction(self, key: str) -> None:
        """Add up a stage's gradients, or its parts', over who holds them.

        Those that were complete have been started in the stage's last backward.
        """
        self.mail.when(key, partial(self.updates.start_reduction, key))

    def finish_reductions(self) -> None:
        """Add up tied parameters' gradients and statistics; wait for all sums."""
        self.status.enter("gradient reduction")
        self.mail.end_order()
        self._missed.finish(self.updates.whole_weights)
        self.updates.finish_reductions()

    def update(self) -> None:
        """Let the optimizer make its step and drop the gradients, if it is time.

        Raises:
            NotFiniteError: a loss or a gradient is not finite; on all ranks.
            InternalError: weight gradients still wait.
        """
        for deferred in self._deferred.values():
            raise InternalError(f"{deferred.where}: the weight gradients still wait")
        self._look_for_problem()
        if not self.steps.is_update:
            return
        updates = self.updates
        if updates.is_spoilt:
            updates.leave_out()
        else:
            self.status.enter("optimizer step")
            terms = updates.terms if self.steps.mean.counted else None
            updates.apply(terms, self.seed)

    def sum_up(self, *numbers: float) -> list[float]:
        """Return the sums of some numbers over all ranks.

        What this rank asks all for goes with them.
        """
        shared = self.requests.beside(numbers, training=self.steps.is_training)
        sums = torch.tensor(shared, dtype=torch.float64)
        self.transport.wait(self._everyone.all_reduce(sums))
        totals = self.requests.take(sums.tolist(), self.transport.host.size)
        return totals[: len(numbers)]

    # -------------------------------------------------------- helpers

    def _begin(self, what: str, run: Run, m: int) -> None:
        """Begin an action, of all tiles where the rank has one."""
        self.number = self._number_of(run, m)
        self.status.enter(what, run, m)
        self.updates.settle()
        if self.grid is not None:
            self.mail.act(run)

    def _evaluate(self, run: Run, forward: Any, *inputs: Tensor) -> Any:
        self._missed.before(run, self.number)
        drawing = self._drawing(run, "evaluation", self.steps.evaluated)
        is_filling = self.number >= self.steps.count
        leaves = without_trace(self.stages[run]) if is_filling else nullcontext()
        with torch.no_grad(), autocasting(self._autocast), drawing, leaves:
            return forward(*inputs)

    def _look_for_problem(self) -> None:
        """Add up the losses; find out whether they and all gradients are finite."""
        steps, scaler = self.steps, self.updates.scaler
        was_spoilt = self.updates.is_spoilt  # by the gradients of a step before it
        is_wrong = steps.is_update and not self.updates.is_finite()
        self.status.enter("sum of the losses")
        *sums, num_wrong = self.sum_up(*steps.own_mean().sums, is_wrong)
        steps.mean = Mean(*sums)
        self.updates.terms += steps.mean.count
        is_finite = math.isfinite(steps.mean.value + steps.mean.count)
        if scaler is not None and steps.is_update and is_finite:
            self.updates.is_spoilt |= bool(num_wrong)
            terms = self.updates.terms
            num_wrong *= not scaler.take(is_overflow=bool(num_wrong), terms=terms)
        if is_finite and (was_spoilt or not num_wrong):
            return
        problem = self._problem(is_wrong=is_wrong)
        self.problem = self.problem or problem
        if self._on_nonfinite == "stop":
            self.updates.leave_out()
            self.steps.waiting = 0
            self.mail.finish()
            raise NotFiniteError(problem)
        if self._on_nonfinite == "skip":
            self.updates.is_spoilt = True
            for give_back in self._give_back:
                give_back()

    def _problem(self, *, is_wrong: bool) -> Problem:
        """Return what is not finite on any rank; here, it `is_wrong` with gradients."""
        counted = {m: x for m, x in self.steps.losses.items() if m < self.steps.count}
        sums = {m: float(loss.sum()) for m, loss in counted.items()}
        losses = {m: loss for m, loss in sums.items() if not math.isfinite(loss)}
        names = not_finite(self.updates.parameters) if is_wrong else []
        everyone = self.transport.host.all_gather_object((losses, names))
        phase = "" if self.variants[self.variant].trained is None else self.variant
        return Problem.of_ranks(self.steps.done + 1, everyone, phase)

    def _number_of(self, run: Run, m: int) -> int:
        """Return the number of a micro-batch over all replicas."""
        replica = self.place.number_of(run, self.program.num_replicas)
        return replica * self.program.num_micro_batches + m

    def defers(self, run: Run, m: int) -> bool:
        """Whether a backward leaves the weight gradients for `weights`."""
        return m in self.program.deferred.get(run, ())

    def _defers(self, m: int) -> bool:
        return any(m in numbers for numbers in self.program.deferred.values())

    @cached_property
    def _store(self) -> Store:
        """Where offloaded activations wait."""
        return store_for(self.transport.streams)

    def _drawing(self, run: Run, *when: int | str) -> AbstractContextManager[None]:
        """Seed what a stage draws: by what is computed and not by where."""
        if run not in self.stages.drawing or are_draws_same():
            return nullcontext()
        parts = *when, *filter(None, [self.variant]), run.stage_name, self.number
        seed = seed_of(self.seed, self.steps.done, *parts)
        return torch_seeded(seed, self.device)

    def _contexts(
        self, run: Run, deferred: Deferred | None
    ) -> Iterator[AbstractContextManager[Any]]:
        """Yield what a stage's forward runs within."""
        yield autocasting(self._autocast)
        if deferred is not None:
            yield deferred.forward()
        yield self._drawing(run)
        if self._grids:  # keep halos as what other tiles sent, no copies
            yield saved_in_parts(active_meter())
