"""Worker: what a rank has (stages, link, batch) and what its generated file calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from gemsc.errors import GemscError
from gemsc.runtime.exchange import Exchange
from gemsc.runtime.grid import Grid
from gemsc.runtime.grid_message import GridMessage
from gemsc.runtime.link import Incoming, Link
from gemsc.runtime.memory import ActivationMeter
from gemsc.runtime.message import Input, Message, Tiles
from gemsc.runtime.offload import OffloadedRun, Store, store_for
from gemsc.runtime.progress import Status
from gemsc.runtime.reduction import GradientSums, RunningStatistics
from gemsc.runtime.tile_saving import saved_in_parts
from gemsc.runtime.tiled_data import Window
from gemsc.runtime.transport import Group, Request

__all__ = ["Worker", "replica_of", "stage_of"]


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]
    offloaded: OffloadedRun


@dataclass
class Worker:
    """One rank at work.

    Sends never block; each receive is posted when the one before it was taken.
    """

    link: Link
    stages: dict[str, nn.Module]
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

    def __post_init__(self) -> None:
        self._batch: dict[str, Tensor] = {}
        self._in_flight: dict[tuple[str, int], _InFlight] = {}
        self._local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._posted: dict[Message, Incoming] = {}
        self._sends: list[Request] = []
        self._losses: list[Tensor] = []
        self._results: list[tuple[Tensor | None, Any]] = []
        self._training = True
        self._num_expected = self.num_micro_batches
        self._sums = GradientSums(self.link)
        self._statistics = self._running_statistics()
        self._grids: dict[str, Grid] = {}  # by stage, where it is split
        self.grid = self._make_grid()
        self._groups = {key: self._make_group(key) for key in sorted(self.reductions)}

    @property
    def copy(self) -> int:
        """Which of the data-parallel copies this rank belongs to."""
        return self.link.transport.rank // self.copy_ranks

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
        return self.link.streams.device

    @property
    def rank(self) -> int:
        """The number of this rank among those of its copy of the model."""
        return self.link.transport.rank - self.first_rank

    @property
    def tile(self) -> int:
        """The tile that this rank computes, 0 if its stages are not split."""
        return self.tiles.tile if self.tiles is not None else 0

    @property
    def num_tiles(self) -> int:
        """The tiles of this rank's stages."""
        return len(self.tiles.ranks) if self.tiles is not None else 1

    # ------------------------------------------------------- one step

    def begin(self, batch: dict[str, Tensor], *, training: bool) -> None:
        """Take this step's batch (see `bind_batch`)."""
        self._batch = batch
        self._training = training
        self._losses.clear()
        self._results.clear()
        self.status.step = self.steps_done
        self._num_expected = (
            self.num_micro_batches if training else self.copy_micro_batches
        )
        if training:
            for statistics in self._statistics.values():
                statistics.remember()

    def end(self) -> None:
        """Wait until all that this rank sent has arrived."""
        self.link.wait(*self._sends)
        self._sends.clear()
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
        tensor, size = self._batch[name], self.inputs[name].shape
        if self.inputs[name].batched:
            tensor = tensor[m * size[0] : (m + 1) * size[0]]
        if self.meter is not None:  # as on a device: a micro-batch at a time
            tensor = tensor.clone()
        return tensor.to(self.device, non_blocking=True)

    def receive(self, message: Message | GridMessage, m: int) -> Any:
        """Return the message's value (a tuple if it has several), waiting politely."""
        if message.is_local:
            return _single(self._local.pop((message.tag, m)))
        if isinstance(message, GridMessage):
            tensors = self._take_parts(message, m)
        else:
            tensors = self._take(message, m)
        if self._training and not message.is_gradient:
            for tensor, gradient in zip(tensors, message.gradients, strict=True):
                tensor.requires_grad_(gradient)
        return _single(tuple(tensors))

    def send(self, message: Message | GridMessage, m: int, *tensors: Tensor) -> None:
        """Start to send; never blocks."""
        if message.is_local:
            follows = self._training and not message.is_gradient
            self._local[message.tag, m] = tuple(
                tensor.detach().requires_grad_(gradient and follows)
                for tensor, gradient in zip(tensors, message.gradients, strict=True)
            )
            return
        self._let_go()
        if isinstance(message, GridMessage):
            for part in message.parts:
                if part.source == self.rank:
                    self._start_send(part.message, message.cut(part, tensors))
        else:
            self._start_send(message, tensors)

    def run(self, stage: str, m: int, *inputs: Tensor) -> Any:
        """Run a stage forward and keep what its backward needs."""
        self.status.enter("forward", stage, m)
        self._let_go()
        module = self.stages[stage]
        measured = self.meter.forward(inputs) if self.meter else nullcontext()
        staying = tuple(tensor for tensor in inputs if tensor.requires_grad)
        offloaded = OffloadedRun(lambda: self._store, module, staying)
        with (
            self._random_numbers(module, stage, m),
            measured,
            offloaded.forward(),
            self._saving(module),
        ):
            result = module(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        self._in_flight[stage, m] = _InFlight(
            staying,
            tuple(_edge(tensor) for tensor in outputs),
            offloaded,
        )
        return result

    def backward(
        self, stage: str, m: int, *gradients: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run a stage backward; return the gradients of its inputs.

        `gradients` belong to the stage's outputs, in order; None where none flows back.
        """
        self.status.enter("backward", stage, m)
        kept = self._in_flight.pop((stage, m))
        if self.meter is not None:
            self.meter.sample()
            self.meter.closely = self._grows_in_backward(stage)
        kept.offloaded.prefetch()
        _run_backward(kept.outputs, gradients)
        result = tuple(
            _own(tensor.grad) if tensor.grad is not None else torch.zeros_like(tensor)
            for tensor in kept.inputs
        )
        if self.meter is not None:
            del kept
            self.meter.sample()
        return result

    def _grows_in_backward(self, stage: str) -> bool:
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
            self._sums.start(self._groups[stage], self._stage_parameters(stage))

    def finish_reductions(self) -> None:
        """Add up tied parameters' gradients and statistics; wait for all sums."""
        self.status.enter("gradient reduction")
        named = self.named_parameters() if self._is_update else {}
        for name, group in self._groups.items():
            if name in named:
                parameter = named[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._sums.start(group, [parameter])
        waits = [
            request
            for key, statistics in self._statistics.items()
            for request in statistics.start(self.link, self._groups.get(key))
        ]
        self._sums.finish()
        self.link.wait(*waits)
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
        for parameter in self.named_parameters().values():
            parameter.grad = None

    # -------------------------------------------------------- helpers

    @cached_property
    def _store(self) -> Store:
        """Where offloaded activations wait."""
        return store_for(self.link.streams)

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
            grid = Grid(self.link, ranks, self.tiles.tile)
            grid = self._grids.setdefault(stage_of(key), grid)
            stage.grid = grid  # type: ignore[assignment]
        return Grid(self.link, ranks, self.tiles.tile, stands=False)

    def _make_group(self, key: str) -> Group:
        members = tuple(
            copy * self.copy_ranks + rank
            for copy in range(self.num_copies)
            for rank in self.reductions[key]
        )
        return self.link.transport.group(members, key)

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
        named = self.named_parameters()
        square = torch.zeros((), dtype=torch.float64)
        for key, module in self.stages.items():
            for name, parameter in module.named_parameters():
                members = self.reductions.get(name) or self.reductions.get(
                    stage_of(key), (self.rank,)
                )
                if min(members) == self.rank and name in named:
                    named.pop(name)  # each parameter counts once
                    if parameter.grad is not None:
                        square += parameter.grad.double().square().sum().cpu()
        ranks = tuple(range(self.first_rank, self.first_rank + self.copy_ranks))
        self.link.wait(self.link.transport.group(ranks, "norm").all_reduce(square))
        scale = limit / (float(square.sqrt()) + 1e-6)
        if scale < 1.0:
            for parameter in self.named_parameters().values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    @contextmanager
    def _random_numbers(self, module: nn.Module, stage: str, m: int) -> Iterator[None]:
        """Seed a stage that draws; the user's own random numbers stay as they are.

        Ranks that draw and ranks that do not would choose different batches otherwise.
        """
        if not getattr(module, "draws_random_numbers", False):
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self._seed_of(stage, m))
            yield

    def _saving(self, module: nn.Module) -> AbstractContextManager[None]:
        """Let a stage on tiles keep halos as what other tiles sent, and no copies."""
        if not hasattr(module, "grid"):
            return nullcontext()
        return saved_in_parts(self.meter.follow if self.meter else None)

    def _seed_of(self, stage: str, m: int) -> int:
        """Return a seed that depends on what is computed and not on where."""
        run = self.copy * self.num_replicas + replica_of(stage)
        number = run * self.num_micro_batches + m
        return _mix(self.seed, self.steps_done, stage_of(stage), number)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters under the user's names."""
        return {
            name: parameter
            for stage in self.stages.values()
            for name, parameter in stage.named_parameters()
        }

    def own_tensors(self) -> Iterator[Tensor]:
        """Yield the parameters and buffers of all stages, those of replicas too."""
        for stage in self.stages.values():
            yield from stage.parameters()
            yield from stage.buffers()

    def other_tensors(self) -> Iterator[Tensor]:
        """Yield all that this rank holds besides activations: for the meter."""
        yield from self.own_tensors()
        for parameter in self.named_parameters().values():
            if parameter.grad is not None:
                yield parameter.grad
        if self.optimizer is not None:
            states = self.optimizer.state_dict()["state"]
            yield from (t for t in tree_leaves(states) if isinstance(t, Tensor))
        yield from (incoming.buffer for incoming in self._posted.values())
        for grid in self._grids.values():
            yield from grid.buffers

    def bind_batch(
        self, sources: Mapping[str, Any], window: Window | None = None
    ) -> dict[str, Tensor]:
        """Pick this rank's tensors out of a batch, check them and keep their boxes.

        `sources` holds "input" and "target" as the user gave them. They hold whole
        pictures, or the `window` of them.

        Raises:
            GemscError: a tensor is missing, or its shape or dtype does not fit.
        """
        return {
            name: self._check_input(item, _pick(sources, item), window)
            for name, item in self.inputs.items()
        }

    def _check_input(
        self, item: Input, tensor: Tensor, window: Window | None
    ) -> Tensor:
        shape, count = item.shape, self.num_copies * self.copy_micro_batches
        if window is not None:
            shape = window.shape_of(shape)
        whole, size = shape, 0
        if item.batched:
            whole = (count * shape[0], *shape[1:])
            size = self.copy_micro_batches * shape[0]
        if tuple(tensor.shape) not in (whole, (size, *shape[1:])):
            of = f": {count} micro-batches of {list(shape)}" if item.batched else ""
            raise GemscError(
                f"{item.name} has shape {list(tensor.shape)}, this program takes "
                f"{list(whole)}{of}",
                help="give such batches, or compile again with another --micro-batches "
                "or other example_inputs()",
            )
        dtype = self._dtype(item.dtype)
        if tensor.dtype != dtype and not (
            tensor.is_floating_point() and dtype.is_floating_point
        ):
            raise GemscError(
                f"{item.name} has dtype {tensor.dtype}, this program takes {dtype}",
                help="convert it, or compile again with such example_inputs()",
            )
        if item.batched and tuple(tensor.shape) == whole and self.num_copies > 1:
            tensor = tensor[self.copy * size : (self.copy + 1) * size]
        return _cut(tensor, item, window).to(dtype)

    def _let_go(self) -> None:
        """Give the library a turn; drop the tensors whose sends are done."""
        self._sends = [request for request in self._sends if not request.done()]

    def _start_send(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        """Start to send the values of a message, packed if they are several."""
        dest = message.dest + self.first_rank
        self._sends.append(self.link.send(message.pack(tensors), dest, message.tag))

    def _take(self, message: Message, m: int) -> list[Tensor]:
        """Wait for a message and post the receive of the next one."""
        if message not in self._posted:
            self._post(message)
        buffer = self._posted.pop(message).take()
        if m + 1 < self._num_expected:
            self._post(message)
        return message.unpack(buffer, self._dtypes(message))

    def _take_parts(self, message: GridMessage, m: int) -> list[Tensor]:
        """Wait for what each rank of another grid sends, and put it together."""
        parts = [part for part in message.parts if part.dest == self.rank]
        for part in parts:
            if part.message not in self._posted:
                self._post(part.message)
        received = [(part, self._take(part.message, m)) for part in parts]
        dtypes = [self._dtype(value.dtype) for value in message.given]
        return message.join(self.rank, received, dtypes, self.device)

    def _post(self, message: Message) -> None:
        """Post the receive of a message's next micro-batch."""
        shape, dtype = message.buffer(self._dtypes(message))
        source = message.source + self.first_rank
        self._posted[message] = self.link.receive(shape, dtype, source, message.tag)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.float_dtype is not None and dtype.is_floating_point:
            return self.float_dtype
        return dtype

    def _dtypes(self, message: Message) -> tuple[torch.dtype, ...]:
        return tuple(self._dtype(value.dtype) for value in message.values)


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


def _edge(tensor: Any) -> GradientEdge | None:
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        return get_gradient_edge(tensor)
    return None


def _run_backward(
    outputs: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]
) -> None:
    """Let the gradients flow back from the outputs that have one."""
    pairs = [
        (edge, gradient)
        for edge, gradient in zip(outputs, gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    if pairs:
        edges, flowing = zip(*pairs, strict=True)
        torch.autograd.backward(edges, flowing)


def _storage_users(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def _own(gradient: Tensor) -> Tensor:
    """Return a gradient whose memory is in no other tensor.

    Autograd hands one memory on to several inputs of a stage where views are involved.
    What is on its way to another rank must not be a parameter's gradient, which grows
    in place with the next micro-batch.
    """
    return gradient if _storage_users(gradient) <= _OWNED else gradient.clone()


_OWNED = _storage_users(torch.empty(1))


def _mix(seed: int, step: int, stage: str, m: int) -> int:
    """Return a seed of 63 bits for one stage, step and micro-batch (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in f"{seed}/{step}/{stage}/{m}".encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value >> 1


def _cut(tensor: Tensor, item: Input, window: Window | None) -> Tensor:
    """Return this rank's box of an input, in memory of its own."""
    if not item.box:
        return tensor
    box = window.inside(item.box, item.shape) if window is not None else item.box
    first = 1 if item.batched else 0
    slices = [slice(None)] * first + [slice(*interval) for interval in box[first:]]
    part = tensor[tuple(slices)]
    return part if part.shape == tensor.shape else part.clone()


def _pick(sources: Mapping[str, Any], item: Input) -> Tensor:
    value: Any = sources
    for part in item.path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            raise GemscError(
                f"the batch has no {item.name}",
                help="give it the structure of example_inputs() and of the target",
            ) from None
    try:
        return value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError):
        raise GemscError(
            f"{item.name} is of type {type(value).__name__}, which is no tensor",
            help="give a tensor, or numbers that make one",
        ) from None
