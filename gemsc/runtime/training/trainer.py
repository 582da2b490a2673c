"""Trainer: one rank of a program, for the generated main loop and for users' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemsc.base.elementwise import OptimizerFactory
from gemsc.base.nests import Mean
from gemsc.base.phase import Phase
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.checkpoint.folder import Retention
from gemsc.runtime.checkpoint.read import resume
from gemsc.runtime.checkpoint.states import load_states, saved_states, tensors_of
from gemsc.runtime.checkpoint.write import PendingSave, save
from gemsc.runtime.data.shapes import shape_of_batch
from gemsc.runtime.data.tiled import Window
from gemsc.runtime.process.device import cap_memory, choose_device
from gemsc.runtime.process.stop import Requests, StopSignal
from gemsc.runtime.training.program_directory import check_dtype, check_planned_phases
from gemsc.runtime.training.starting import RankFiles, check_choices, first_weights
from gemsc.runtime.training.step_report import (
    Evaluation,
    StepReport,
    as_structure,
    concatenated,
)
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.streams import Streams, streams_for
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.program import RankPlace
from gemsc.runtime.worker.stages import Freezing
from gemsc.runtime.worker.worker import Worker

SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


class Trainer:
    """One rank of a compiled program: it trains, evaluates, saves and resumes."""

    def __init__(
        self,
        directory: Path,
        transport: Transport,
        *,
        optimizer: OptimizerFactory | None = None,
        phases: Sequence[Phase] | None = (),
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        scheduler: SchedulerFactory | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        on_nonfinite: str = "stop",
        streams: Streams | None = None,
        callbacks: Iterable[Any] = (),
    ) -> None:
        """Load this rank's module and its weights.

        `optimizer` gets (name, parameter) pairs of this rank; the default is SGD with a
        learning rate of 0.01. `scheduler` gets the optimizer and gives what steps the
        learning rate after each update. A program whose steps have several `phases`
        takes those that it was compiled with, or None to evaluate only. Gradients of
        `accumulate` steps are averaged for one update; `clip_norm` bounds their norm
        over all ranks. `dtype` runs the program in another floating-point type. A loss
        or gradient that is not finite raises on all ranks, before the update;
        `on_nonfinite="skip"` leaves that update out, "warn" makes it. `streams` are
        those of the device, if they are not the usual ones. `callbacks` follow the
        training (see `Callback`).
        """
        self.directory = directory
        self.transport = transport
        streams = streams or streams_for(choose_device(transport, device))
        transport.try_device(streams)
        self.device = streams.device
        self.callbacks: list[Any] = []  # each a Callback, which knows the trainer
        self.epoch = 0
        self.dropped: set[str] = set()  # callbacks of a checkpoint that are not here
        self._has_started = False
        self._last_phase = ""  # of those that the last step did
        self._saving = PendingSave()
        self.plan = plan = Plan.read(directory / "plan.toml")
        check_dtype(plan, dtype)
        dtype = None if plan.only_dtype else dtype  # all stays as it is
        check_choices(accumulate, clip_norm, on_nonfinite)
        cap_memory(self.device, plan.rank_memory)
        place = RankPlace(
            transport.rank, plan.copy_ranks, transport.size // plan.copy_ranks
        )
        self._first = first_weights(directory, plan)
        self._has_weights = self._first.are_there
        self._files = RankFiles(directory, place.rank, self._first, self.device, dtype)
        self.program, self.stages = self._files.load()
        self.worker = Worker(
            DeviceTransport(transport, streams),
            self.program,
            self.stages,
            place,
            accumulate=accumulate,
            clip_norm=clip_norm,
            on_nonfinite=on_nonfinite,
            seed=seed,
            float_dtype=dtype,
        )
        in_parts = self.worker.updates.gradients_in_parts
        self._freezing = Freezing(self.program, self.stages, transport, in_parts)
        self.worker.updates.make_optimizer(optimizer, scheduler)
        if phases is not None:
            has_optimizer = bool(optimizer or scheduler)
            check_planned_phases(plan, phases, accumulate, has_optimizer=has_optimizer)
        self.phases = tuple(phases or ())
        for phase in self.phases:
            self._add_phase(phase)
        for shape in plan.shapes:
            if shape.variant:
                self._add_shape(shape.variant)
        self.add_callbacks(callbacks)

    def _add_phase(self, phase: Phase) -> None:
        program, stages = self._files.load(phase.name, self.stages)
        trained = stages.share(self.stages)
        added = self.worker.add(phase.name, program, stages, trained=trained)
        added.updates.make_optimizer(phase.optimizer, phase.scheduler)

    def _add_shape(self, name: str) -> None:
        program, stages = self._files.load(name, self.stages)
        stages.share(self.stages)
        self.worker.add(name, program, stages, updates=self.worker.updates)

    def step(
        self,
        input: Any,
        target: Any = None,
        *,
        window: Window | None = None,
        micro_batches: int | None = None,
        shape: int | None = None,
    ) -> float:
        """Train on one batch; return its mean loss, the same on every rank.

        Every rank passes the same batch, or None for what it does not use. `input` is a
        tensor, a tuple or a dict like `example_inputs()`, `target` what the loss
        takes. The batch holds all micro-batches, one after the other, in dimension 0.
        Where images are split over ranks, it may hold only this rank's `window`.
        The first `micro_batches` of them count, by default all: what follows only fills
        up the batch. Of a program with several shapes, `shape` is the number of the
        batch's one in `example_inputs()`; without it, all ranks need the whole batch.

        Raises:
            GemscError: the batch does not fit the program.
            NotFiniteError: a loss or a gradient is not finite: see `on_nonfinite`.
                Weights and optimizer are what they were before the step, or before this
                one of its phases.
        """
        if self.program.train_step is None and not self.phases:
            raise GemscError(
                "this program cannot train: it was compiled without a loss",
                help="add loss(output, target) to the model's file and compile again",
            )
        self._saving.check()
        self.start()
        start = time.perf_counter()
        worker, steps, losses = self.worker, self.worker.steps, dict[str, float]()
        sources = {"input": as_structure(input), "target": target}
        shape = shape_of_batch(self.plan, sources, shape)
        self.tell("on_batch", "step", sources, window)
        worker.problem = None
        due = [p.name for p in self.phases if p.is_due(self.step_number)]
        due = due or [self.plan.variant_of(shape)]
        for name in due:
            worker.use(name)
            self._begin(sources, window, training=True, count=micro_batches)
            assert worker.program.train_step is not None
            worker.program.train_step(worker)
            losses[name] = steps.mean.value
            worker.end(counts=name == due[-1])
        worker.use("")
        self._last_phase = due[-1] if self.phases else ""
        report = StepReport(
            step=steps.done,
            loss=[*losses.values()][-1],
            samples=steps.count * self.plan.micro_batch_sizes[shape],
            seconds=time.perf_counter() - start,
            losses=losses if self.phases else {},
            problem=worker.problem,
            shape=shape,
        )
        self.tell("on_step", report)
        return report.loss

    def evaluate(
        self,
        input: Any,
        target: Any = None,
        *,
        window: Window | None = None,
        shape: int | None = None,
        samples: int | None = None,
    ) -> Evaluation:
        """Run a batch in evaluation mode; see `step`. The first `samples` count."""
        steps = self.worker.steps
        sources = {"input": as_structure(input), "target": target}
        shape = shape_of_batch(self.plan, sources, shape)
        self.tell("on_batch", "evaluation", sources, window)
        self.worker.use(self.plan.variant_of(shape))
        count = samples and -(-samples // self.plan.micro_batch_sizes[shape])
        self._begin(sources, window, training=False, count=count)
        self.worker.program.eval_step(self.worker)
        mean = None
        self.worker.status.enter("sum of the losses")
        if self.program.train_step is not None:
            mean = Mean(*self.worker.sum_up(*steps.own_mean().sums))
        elif self.phases:
            self.worker.sum_up()  # what a rank asks all for
        self.worker.end()
        self.worker.use("")
        output = concatenated([o for _, o in steps.results], self.plan.sample_dims)
        return Evaluation(mean, output, self.worker.precision)

    def _begin(
        self,
        sources: Mapping[str, Any],
        window: Window | None,
        *,
        training: bool,
        count: int | None = None,
    ) -> None:
        if not self._has_weights:
            raise self._first.nowhere()
        batch = self.worker.steps.shape.bind(sources, window)
        self.worker.begin(batch, training=training, count=count)
        self.worker.stages.set_mode(training=training)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers under the user's names.

        Where the rank has a part of a tensor (`program.parts`), it is that part; what
        another rank of its stage alone holds (`program.placed`) is not there.
        Those of the loss, and constants, are left out: the user's model has none.
        Where weights are kept in parts they are gathered first: all ranks call this.
        """
        updates = self.worker.updates
        if updates.weight_parts is None:
            return self.stages.state_dict()
        with updates.whole_weights():
            return {n: t.clone() for n, t in self.stages.state_dict().items()}

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's parameters; None if it updates none.

        Where a step has several phases, it is that of the last one, on all ranks alike.
        """
        optimizer: torch.optim.Optimizer | None = self._last_updates.optimizer
        return optimizer

    @property
    def scheduler(self) -> Any:
        """What steps the learning rate after each update; None without one."""
        return self._last_updates.scheduler

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the last gradients before clipping; None without `clip_norm`.

        Of several phases in a step it is that of the last one that the step did; None
        if its update was left out.
        """
        return self.worker.variants.updates[self._last_phase].norm

    @property
    def _last_updates(self) -> Any:
        return [*self.worker.variants.updates.values()][-1]

    @property
    def step_number(self) -> int:
        """How many steps are done since the first start."""
        return self.worker.steps.done

    # ------------------------------------------------------------- callbacks

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Let more callbacks follow the training; `resume` comes after this."""
        for callback in callbacks:
            self.callbacks.append(callback)
            callback.on_load(self)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of all callbacks, in order."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    def start(self) -> None:
        """Tell the callbacks that training starts, once; `step` calls it, too."""
        if not self._has_started:
            self._has_started = True
            self.tell("on_start")

    # ------------------------------------- what one rank asks for and all do

    @property
    def requests(self) -> Requests:
        """What this rank asks all for; see `Requests`."""
        return self.worker.requests

    def agree(self) -> None:
        """Let all ranks know between two steps what one has asked for."""
        asked = self.transport.all_gather_object(self.requests.numbers())
        self.requests.agree([sum(numbers) for numbers in zip(*asked, strict=True)])

    def stop(self, reason: str) -> None:
        """Ask `gemsc run` to end as it does after the last epoch, and say why.

        One rank may call it, or all. The request travels with the losses: within an
        epoch, one more step is made. In your own loop, ask `is_stopping` after a step.
        """
        self.requests.ask("stop", reason)

    @property
    def is_stopping(self) -> bool:
        """Whether all ranks know that one has called `stop`, or was sent a signal."""
        return self.is_leaving or self.requests.agreed("stop")

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks know that one was sent SIGTERM or SIGUSR1.

        Then save, and leave with exit code 75: who starts jobs may start it again.
        """
        StopSignal.check()
        is_agreed = self.requests.agreed("leave")
        if is_agreed:
            StopSignal.answer()
        return is_agreed

    def leave_on_signals(self) -> None:
        """Let SIGTERM and SIGUSR1 set `is_leaving` after the step, on all ranks."""
        StopSignal.catch(partial(self.requests.ask, "leave"))

    def freeze(self, *paths: str) -> None:
        """Do not train what is under these paths of the model; all ranks call this.

        Call it between two steps. The state of the optimizer stays as it is.

        Raises:
            GemscError: the model has no such path, or its steps have phases.
        """
        self._check_no_phases()
        self._freezing.change(paths, trains=False)

    def unfreeze(self, *paths: str) -> None:
        """Train what is under these paths again; all ranks call this.

        Raises:
            GemscError: the model has no such path, it was compiled as frozen, or its
                steps have phases.
        """
        self._check_no_phases()
        self._freezing.change(paths, trains=True)

    def _check_no_phases(self) -> None:
        if self.phases:
            raise GemscError(
                "parameters cannot be frozen in a program with phases",
                help="leave them out of train= in the phases, and compile again",
            )

    # ----------------------------------------------------------- checkpoints

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int = 3,
        best: bool = False,
        early: bool = False,
        background: bool = False,
    ) -> None:
        """Write a checkpoint; all ranks call this after the same step.

        It is a folder in `directory`, `step-000120`, that any layout of the same model
        can `resume` from, on any number of ranks. The `keep` newest ones stay, and the
        `best`; an `early` one until the next. `extra` (numbers, texts, lists, dicts of
        rank 0) comes back from `resume`. In the `background`, threads write a copy of
        the state: `finish_saving` waits for them. `gemsc export` makes one plain file.

        Raises:
            GemscError: it cannot be written, on any rank; older ones stay as they are.
        """
        self.finish_saving()
        directory = Path(directory)
        states = saved_states(self.callbacks)
        self.worker.use("")  # whatever a step that failed has left
        self.worker.status.enter("checkpoint")
        self._saving = save(
            self.worker,
            directory,
            extra={"own": dict(extra or {}), "frozen": sorted(self._freezing.names)},
            callbacks=states,
            tensors=tensors_of(self.callbacks),
            kept=Retention(keep, best, early),
            background=background,
        )
        self.worker.status.idle()
        if not background:
            self.tell("on_save", directory)

    def finish_saving(self) -> None:
        """Return once the last checkpoint is complete; all ranks call this.

        Raises:
            GemscError: it could not be written, on any rank.
        """
        pending, self._saving = self._saving, PendingSave()
        if pending.folder is None:
            return
        self.worker.status.enter("checkpoint")
        for theirs in self.transport.all_gather_object(pending.wait()):
            if isinstance(theirs, GemscError):
                raise theirs
        self.worker.status.idle()
        self.tell("on_save", pending.folder)

    def resume(self, directory: str | Path) -> dict[str, Any]:
        """Continue from what `save` wrote; return its `extra`.

        Generators of random numbers, too, go on where they were. From a safetensors
        file, or a folder with a `model.safetensors`, the weights alone are taken.

        Raises:
            GemscError: there is no checkpoint of this program, or a damaged one;
                nothing was changed.
        """
        self.worker.status.enter("resume")
        saved = resume(self.worker, Path(directory), tensors_of(self.callbacks))
        self._has_weights = True
        self._freezing.set(saved.get("frozen", ()))
        self.dropped = load_states(self.callbacks, saved.get("callbacks", {}))
        self.worker.status.idle()
        extra: dict[str, Any] = saved.get("own", {})
        return extra
