"""Worker: what a rank has (stages, batch), and what its generated file calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from gemsc.base.rng import seed_of, torch_seeded
from gemsc.messages.exchange import Exchange
from gemsc.messages.grid_message import GridMessage
from gemsc.messages.message import Input, Message, Tiles
from gemsc.runtime.data.batch import BatchShape
from gemsc.runtime.data.tiled import Window
from gemsc.runtime.memory.meter import ActivationMeter
from gemsc.runtime.memory.offload import OffloadedRun, Store, store_for
from gemsc.runtime.process.progress import Status
from gemsc.runtime.tiles.grid import Grid
from gemsc.runtime.tiles.saving import saved_in_parts
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.mailbox import Mailbox
from gemsc.runtime.transport.transport import Group
from gemsc.runtime.worker.backward import edge_of, gradient_of, is_absent, run_backward
from gemsc.runtime.worker.clip import clip_gradients
from gemsc.runtime.worker.deferral import Deferred
from gemsc.runtime.worker.reduction import GradientSums, RunningStatistics
from gemsc.runtime.worker.stages import Stages

__all__ = ["Worker", "replica_of", "stage_of"]


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]
    offloaded: OffloadedRun
    deferred: Deferred | None


@dataclass
class Worker:
    """One rank at work: a step at a time, with what its generated file asks for."""

    transport: DeviceTransport
    stages: Stages
    inputs: Mapping[str, Input]
    num_micro_batches: int  # of each replica
    num_replicas: int = 1
    num_copies: int = 1
    copy_ranks: int = 1  # that share one copy of the model
    reductions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    accumulate: int = 1  # steps whose gradients are added up before an update
    clip_norm: float | None = None
    seed: int = 0
    float_dtype: torch.dtype | None = None
    status: Status = field(default_factory=Status)
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None  # of the learning rate: one step after each update
    before_update: Callable[[], None] | None = None
    meter: ActivationMeter | None = None
    steps_done: int = 0
    tiles: Tiles | None = None  # the grid that this rank is a tile of
    # the micro-batches of a stage whose weight gradients come later: `weights`
    deferred: Mapping[str, Collection[int]] = field(default_factory=dict)
    depends_on_data: bool = False  # whether some gradients may be absent

    def __post_init__(self) -> None:
        self._batch: dict[str, Tensor] = {}
        self._in_flight: dict[tuple[str, int], _InFlight] = {}
        self._deferred: dict[tuple[str, int], Deferred] = {}
        self._losses: list[Tensor] = []
        self._results: list[tuple[Tensor | None, Any]] = []
        self._training = True
        self._mail = Mailbox(
            self.transport, self.first_rank, self.float_dtype, apart=self._defers
        )
        self._shape = BatchShape(
            self.inputs,
            self.copy_micro_batches,
            self.num_copies,
            self.copy,
            self.float_dtype,
        )
        self._sums = GradientSums(self.transport)
        self._summed: dict[str, list[nn.Parameter]] = {}
        self._statistics = self._running_statistics()
        self._grids: dict[str, Grid] = {}  # by stage, where it is split
        self.grid = self._make_grid()
        self._groups = {key: self._make_group(key) for key in sorted(self.reductions)}

    @property
    def copy(self) -> int:
        """Which of the data-parallel copies this rank belongs to."""
        return self.transport.host.rank // self.copy_ranks

    @property
    def first_rank(self) -> int:
        """The first rank of this copy of the model."""
        return self.copy * self.copy_ranks

    @property
    def copy_micro_batches(self) -> int:
        """The micro-batches of one copy in one step, over all replicas."""
        return self.num_micro_batches * self.num_replicas

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.transport.streams.device

    @property
    def rank(self) -> int:
        """The number of this rank among those of its copy of the model."""
        return self.transport.host.rank - self.first_rank

    @property
    def tile(self) -> int:
        """The tile that this rank computes, 0 if its stages are not split."""
        return self.tiles.tile if self.tiles is not None else 0

    @property
    def num_tiles(self) -> int:
        """The tiles of this rank's stages."""
        return len(self.tiles.ranks) if self.tiles is not None else 1

    # ------------------------------------------------------- one step

    def bind_batch(
        self, sources: Mapping[str, Any], window: Window | None = None
    ) -> dict[str, Tensor]:
        """Return what this rank takes of a batch (see `BatchShape.bind`)."""
        return self._shape.bind(sources, window)

    def begin(self, batch: dict[str, Tensor], *, training: bool) -> None:
        """Take this step's batch (see `bind_batch`)."""
        self._batch = batch
        self._training = training
        self._losses.clear()
        self._results.clear()
        self.status.step = self.steps_done
        self._mail.begin(
            self.num_micro_batches if training else self.copy_micro_batches,
            training=training,
        )
        if training:
            for statistics in self._statistics.values():
                statistics.remember()

    def end(self) -> None:
        """Wait until all that this rank sent has arrived."""
        self._mail.finish()
        self._batch = {}
        self.status.idle()
        if self._training:
            self.steps_done += 1

    def loss_sum(self) -> Tensor:
        """Return the sum of this step's losses on this rank, as a float64 scalar.

        All tiles of a grid have the same losses: they are those of its first one.
        """
        if not self._losses or self.tile > 0:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(self._losses).sum(dtype=torch.float64).cpu()

    @property
    def results(self) -> list[tuple[Tensor | None, Any]]:
        """(loss, output) of each micro-batch of an evaluation step."""
        return self._results

    # ------------------------------------- what generated files call

    def input(self, name: str, m: int) -> Tensor:
        """Return a micro-batch's part of a tensor of this copy's batch."""
        tensor = self._shape.part(self._batch, name, m)
        if self.meter is not None:  # as on a device: a micro-batch at a time
            tensor = tensor.clone()
        return tensor.to(self.device, non_blocking=True)

    def receive(self, message: Message | GridMessage, m: int) -> Any:
        """Return the message's value (a tuple if it has several), waiting politely."""
        return _single(self._mail.receive(message, m))

    def send(self, message: Message | GridMessage, m: int, *tensors: Tensor) -> None:
        """Start to send; never blocks."""
        self._mail.send(message, m, *tensors)

    def run(self, stage: str, m: int, *inputs: Tensor) -> Any:
        """Run a stage forward and keep what its backward needs."""
        self.status.enter("forward", stage, m)
        self._mail.let_go()
        module = self.stages[stage]
        staying = tuple(tensor for tensor in inputs if tensor.requires_grad)
        offloaded = OffloadedRun(lambda: self._store, module, staying)
        defers = m in self.deferred.get(stage, ())
        deferred = Deferred(self._follow) if defers else None
        with ExitStack() as around:
            for context in self._contexts(stage, m, inputs, deferred):
                around.enter_context(context)
            around.enter_context(offloaded)
            result = module(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        self._in_flight[stage, m] = _InFlight(
            staying,
            tuple(edge_of(tensor) for tensor in outputs),
            offloaded,
            deferred,
        )
        return result

    def backward(
        self, stage: str, m: int, *gradients: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run a stage backward; return the gradients of its inputs.

        Those of convolutions' and linear layers' weights wait for `weights` where they
        are `deferred`. `gradients` belong to the stage's outputs, in order;
        None where none flows back.
        """
        self.status.enter("backward", stage, m)
        self._mail.let_go()  # what the forward sent has arrived
        kept = self._in_flight.pop((stage, m))
        if self.meter is not None:
            self.meter.sample()
            self.meter.closely = kept.deferred is not None or self._grows(stage)
        kept.offloaded.prefetch()
        if self.depends_on_data:
            gradients = self._present(stage, gradients)
        run_backward(kept.outputs, gradients)
        result = tuple(
            gradient_of(tensor, depends_on_data=self.depends_on_data)
            for tensor in kept.inputs
        )
        if kept.deferred is not None:
            self._deferred[stage, m] = kept.deferred
        if self.meter is not None:
            del kept
            self.meter.sample()
        return result

    def _present(
        self, stage: str, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return None for gradients that are absent, on all tiles of a grid."""
        counts = [float(not is_absent(gradient)) for gradient in gradients]
        if stage_of(stage) in self._grids:
            grid = self._grids[stage_of(stage)]
            counts = grid.add_up(torch.tensor(counts, device=self.device)).tolist()
        pairs = zip(gradients, counts, strict=True)
        return tuple(gradient if count else None for gradient, count in pairs)

    def _defers(self, m: int) -> bool:
        return any(m in numbers for numbers in self.deferred.values())

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are kept, if anybody counts."""
        if self.meter is not None:
            self.meter.follow(tensors)

    def weights(self, stage: str, m: int) -> None:
        """Add up the weight gradients that a stage's backward deferred."""
        deferred = self._deferred.pop((stage, m))
        self.status.enter("weight gradients", stage, m)
        self._mail.let_go()
        deferred.compute()
        if self.meter is not None:
            self.meter.sample()
        deferred.let_go()

    def _grows(self, stage: str) -> bool:
        """Whether memory may grow while a stage's backward frees activations.

        The first backward of a step makes the gradients; what was recomputed or moved
        comes back.
        """
        module = self.stages[stage]
        made = any(parameter.grad is not None for parameter in module.parameters())
        return not made or (self.meter is not None and self.meter.brings_back)

    @property
    def loss_gradient(self) -> Tensor:
        """What each micro-batch's loss weighs here in the mean over the batch."""
        count = self.copy_micro_batches * self.num_copies * self.accumulate
        count *= self.num_tiles  # each has the whole loss; their gradients add up
        return torch.full_like(self._losses[-1], 1.0 / count)

    def add_loss(self, loss: Tensor) -> None:
        """Book the loss of a micro-batch."""
        self._losses.append(loss.detach())

    def evaluate(self, stage: str, m: int, *inputs: Tensor) -> Any:
        """Run a stage in evaluation mode, without gradients."""
        self.status.enter("evaluation", stage, m)
        with torch.no_grad():
            return self.stages[stage](*inputs)

    def evaluate_apart(self, stage: str, m: int, *inputs: Tensor) -> Any:
        """Run a stage whose evaluation differs from its training in more than modes."""
        self.status.enter("evaluation", stage, m)
        with torch.no_grad():
            return self.stages[stage].forward_eval(*inputs)  # type: ignore[operator]

    def gather(self, tensor: Tensor, exchange: Exchange) -> Tensor:
        """Return all of a value of which each tile has a part, in evaluation."""
        assert self.grid is not None
        return self.grid.collect(tensor, exchange)

    def add_result(self, m: int, loss: Tensor | None, output: Any) -> None:
        """Keep what the model returned for a micro-batch; a grid's first tile does."""
        if self.tile == 0:
            self._results.append((loss, output))

    def start_reduction(self, stage: str) -> None:
        """Start to add up a stage's gradients over the ranks that hold it.

        Called after the stage's last backward; what follows hides the communication.
        """
        if self._is_update:
            if stage not in self._summed:
                self._summed[stage] = self._stage_parameters(stage)
            parameters = self._summed[stage]
            self._sums.start(
                self._groups[stage], parameters, counted=self.depends_on_data
            )

    def finish_reductions(self) -> None:
        """Add up tied parameters' gradients and statistics; wait for all sums."""
        self.status.enter("gradient reduction")
        named = self.stages.parameters if self._is_update else {}
        for name, group in self._groups.items():
            if name in named:
                parameter = named[name]
                if parameter.grad is None and not self.depends_on_data:
                    parameter.grad = torch.zeros_like(parameter)
                self._sums.start(group, [parameter], counted=self.depends_on_data)
        waits = [
            request
            for key, statistics in self._statistics.items()
            for request in statistics.start(self.transport, self._groups.get(key))
        ]
        self._sums.finish()
        self.transport.wait(*waits)
        for statistics in self._statistics.values():
            statistics.finish()

    def update(self) -> None:
        """Let the optimizer make its step and drop the gradients."""
        if not self._is_update:
            return
        self.status.enter("optimizer step")
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        if self.before_update is not None:
            self.before_update()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for parameter in self.stages.parameters.values():
            parameter.grad = None

    # -------------------------------------------------------- helpers

    @cached_property
    def _store(self) -> Store:
        """Where offloaded activations wait."""
        return store_for(self.transport.streams)

    @property
    def _is_update(self) -> bool:
        """Whether this step ends with an update (see `accumulate`)."""
        return (self.steps_done + 1) % self.accumulate == 0

    def _make_grid(self) -> Grid | None:
        """Give each stage of a tile a grid to talk through; return one for the rest."""
        if self.tiles is None:
            return None
        ranks = tuple(self.first_rank + rank for rank in self.tiles.ranks)
        for key, stage in self.stages.items():
            grid = Grid(self.transport, ranks, self.tiles.tile)
            grid = self._grids.setdefault(stage_of(key), grid)
            stage.grid = grid  # type: ignore[assignment]
        return Grid(self.transport, ranks, self.tiles.tile)

    def _make_group(self, key: str) -> Group:
        members = tuple(
            copy * self.copy_ranks + rank
            for copy in range(self.num_copies)
            for rank in self.reductions[key]
        )
        return self.transport.host.group(members, key)

    def _stage_parameters(self, stage: str) -> list[nn.Parameter]:
        """Return a stage's parameters, less the tied ones: those have their own sum."""
        named = next(m for key, m in self.stages.items() if stage_of(key) == stage)
        return [p for n, p in named.named_parameters() if n not in self._groups]

    def _running_statistics(self) -> dict[str, RunningStatistics]:
        num_runs = self.num_replicas * self.num_copies
        if num_runs == 1:
            return {}
        runs: dict[str, dict[int, nn.Module]] = {}
        for key, module in self.stages.items():
            run = self.copy * self.num_replicas + replica_of(key)
            runs.setdefault(stage_of(key), {})[run] = module
        counts = self.tile == 0
        return {
            key: RunningStatistics(r, num_runs, counts=counts)
            for key, r in runs.items()
        }

    def _clip(self, limit: float) -> None:
        """Scale all gradients so that their norm over all ranks is at most `limit`."""
        own: dict[str, nn.Parameter] = {}  # each counts once
        for key, module in self.stages.items():
            for name, parameter in module.named_parameters():
                members = self.reductions.get(name) or self.reductions.get(
                    stage_of(key), (self.rank,)
                )
                if min(members) == self.rank:
                    own.setdefault(name, parameter)
        ranks = tuple(range(self.first_rank, self.first_rank + self.copy_ranks))
        clip_gradients(
            limit,
            own.values(),
            self.stages.parameters.values(),
            self.transport,
            self.transport.host.group(ranks, "norm"),
        )

    def _contexts(
        self, stage: str, m: int, inputs: tuple[Tensor, ...], deferred: Deferred | None
    ) -> Iterator[AbstractContextManager[Any]]:
        """Yield what a stage's forward runs within."""
        if deferred is not None:
            yield deferred.forward()
        if stage in self._drawing:
            # by what is computed and not by where
            run = self.copy * self.num_replicas + replica_of(stage)
            number = run * self.num_micro_batches + m
            name = stage_of(stage)
            seed = seed_of(self.seed, self.steps_done, name, number)
            yield torch_seeded(seed, self.device)
        meter = self.meter
        if meter is not None:
            yield meter.forward(inputs)
        if self.tiles is not None:  # keep halos as what other tiles sent, no copies
            yield saved_in_parts(*((meter.follow, meter.take) if meter else ()))

    @cached_property
    def _drawing(self) -> set[str]:
        """The stages that draw random numbers."""
        stages = self.stages.items()
        return {key for key, s in stages if getattr(s, "draws_random_numbers", False)}

    def own_tensors(self) -> Iterator[Tensor]:
        """Yield the parameters and buffers of all stages, those of replicas too."""
        for stage in self.stages.values():
            yield from stage.parameters()
            yield from stage.buffers()

    def other_tensors(self) -> Iterator[Tensor]:
        """Yield all that this rank holds besides activations: for the meter."""
        yield from self.own_tensors()
        for parameter in self.stages.parameters.values():
            if parameter.grad is not None:
                yield parameter.grad
        if self.optimizer is not None:
            states = self.optimizer.state_dict()["state"]
            yield from (t for t in tree_leaves(states) if isinstance(t, Tensor))
        yield from self._mail.buffers()


def stage_of(key: str) -> str:
    """Return `stage2` for the run `stage2_mirrored`."""
    return key.split("_")[0]


def replica_of(key: str) -> int:
    """Return the replica of a run: 1 for `stage2_mirrored`, 0 for `stage2`."""
    suffix = key.partition("_")[2]
    if suffix.startswith("replica"):
        return int(suffix.removeprefix("replica"))
    return 1 if suffix else 0


def _single(tensors: tuple[Tensor, ...]) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors
