"""What follows the backwards of a step: all-reduces, clipping, the optimizer's step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gemsc.base.elementwise import OptimizerFactory, check_elementwise, updated_whole
from gemsc.base.parts import sums_in_order
from gemsc.base.rng import generator_lock, seed_of, torch_seeded
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.transport import Group
from gemsc.runtime.worker.departures import Departures, leaving_early
from gemsc.runtime.worker.finite import LossScale, all_finite
from gemsc.runtime.worker.optimizer import optimizer_of, scheduler_of
from gemsc.runtime.worker.own_rows import OwnRows, mirrored_of
from gemsc.runtime.worker.program import RankPlace, RankProgram, Run
from gemsc.runtime.worker.rates import check_rates
from gemsc.runtime.worker.reduction import (
    GradientSums,
    RunningStatistics,
    tracking,
)
from gemsc.runtime.worker.sharded import GradientParts, WeightParts
from gemsc.runtime.worker.stages import Stages
from gemsc.runtime.worker.steps import Steps


class Updates:
    """The updates of a rank's parameters, together with the ranks that share them.

    `parameters` are what this rank updates: all that it holds, or its rows of what
    other ranks hold, too. `scheduler` makes a step after each of the optimizer's,
    or is stepped with a figure of the evaluations (ReduceLROnPlateau);
    `own_rows` has the rows of what it holds with others. `before` is called once the
    gradients are complete. `scaler` is there where the program computes in float16.
    """

    def __init__(
        self,
        transport: DeviceTransport,
        program: RankProgram,
        stages: Stages,
        place: RankPlace,
        steps: Steps,
        clip_norm: float | None = None,
        *,
        is_scaled: bool = False,
        trained: Collection[str] | None = None,
    ) -> None:
        """Prepare the all-reduces; `clip_norm` bounds the norm of all gradients.

        If it `is_scaled`, the loss is multiplied by a factor before each backward. Of
        the parameters, it updates those that are `trained`; all, if that is None.
        """
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None
        self.count = 0  # of the updates since the start
        self.before: Callable[[], None] | None = None
        self.norm: float | None = None  # of the last gradients, before clipping
        self.terms = 0.0  # of losses with a count, since the last update
        self.is_spoilt = False  # the update that comes, perhaps by a step before it
        self._transport = transport
        self._program = program
        self._stages = stages
        self._place = place
        self._steps = steps
        self._clip_norm = clip_norm
        self._groups = {
            key: transport.group(place.everywhere(ranks), key)
            for key, ranks in sorted(program.reductions.items())
        }
        self._summed: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)
        for run, stage in stages.items():
            for name, parameter in stage.named_parameters():
                if trained is None or name in trained:
                    self._summed[program.sum_of(run, name)][name] = parameter
        self._norm_group = None
        if clip_norm is not None:
            self._norm_group = transport.group(self._ranks_of_norm(), "norm")
        self.own_rows = OwnRows(transport)
        stages_alone = self._sums_of_stages()
        self._at_once = (
            stages_alone if program.shard in ("gradients", "weights") else []
        )
        if program.shard != "off":
            self._share_out(stages_alone if program.whole_stages else ())
        stages.read_rest()
        self.parts = GradientParts(transport, self.own_rows)
        self.weight_parts: WeightParts | None = None
        if program.whole_stages:
            kept = {key: self.own_rows.kept[key] for key in stages_alone}
            self.weight_parts = WeightParts(transport, kept, program.whole_stages)
        self._trained = {
            name: parameter
            for name, parameter in stages.parameters.items()
            if trained is None or name in trained
        }
        self.parameters = self.own_rows.parameters(self._trained)
        self._sums = GradientSums(transport)
        self._departures = {
            key: Departures(
                self._summed[key],
                partial(self.parts.start, key)
                if program.shard != "off"
                else partial(self._sums.start, group),
            )
            for key, group in self._groups.items()
        }
        self._to_start: list[str] = []  # sums of this step, in order
        self._to_come: Counter[str] = Counter()  # actions with gradients, by stage
        self._statistics = self._running_statistics()
        self.scaler = LossScale() if is_scaled else None

    def make_optimizer(
        self,
        optimizer: OptimizerFactory | None,
        scheduler: Callable[[Optimizer], Any] | None,
    ) -> None:
        """Make the optimizer of what this rank updates, by default SGD; see `Trainer`.

        A rank has none if the user's takes other ranks' parameters only.

        Raises:
            GemscError: the optimizer looks at whole tensors, and the rank has parts; or
                it takes no parameters of any rank; or nothing steps its rates.
        """
        if self._program.train_step is None:
            return
        make = optimizer or partial(torch.optim.SGD, lr=0.01)
        updated, parts = self.parameters, self._program.parts
        held = self._stages.parameters
        whole = {n: (parts[n] if n in parts else held[n]).shape for n in updated}
        self.optimizer, kinds = optimizer_of(updated, make, self._transport.host, whole)
        if self.optimizer is None:
            return
        if parts:  # it may be another one than at compile time
            check_elementwise(updated_whole(self.parameters, make), parts)
        if scheduler is not None:
            check_rates(updated, kinds, make, scheduler)
            self.scheduler = scheduler_of(self.optimizer, scheduler)

    def use(self, program: RankProgram) -> None:
        """Let the next steps be those of another graph, with the same sums."""
        self._program = program

    def begin(self) -> None:
        """Remember what running statistics were before the step."""
        self.own_rows.check_trained()
        for statistics in self._statistics.values():
            statistics.remember()
        program = self._program
        keys = self._sums_of_stages()
        self._to_start = [key for key in keys if key not in self._at_once]
        self._to_come.clear()
        if self.weight_parts is not None:
            self.weight_parts.begin(run.stage for run in program.gather_turns)
        for run in program.stages:
            deferred = len(program.deferred.get(run, ()))
            self._to_come[run.stage_name] += program.num_micro_batches + deferred

    def adding(self, run: Run) -> AbstractContextManager[None]:
        """Return what an action that computes gradients runs in.

        In a stage's last one sums start as soon as gradients are complete, unless those
        that come before, in the order of all ranks, have not been started; on a
        transport without tags not before the action is over, when their turn comes.
        """
        stage = run.stage_name
        self._to_come[stage] -= 1
        if self._to_come[stage] or not self._steps.is_update or self._are_counted:
            return nullcontext()
        if self._transport.has_lanes:
            return nullcontext()
        in_order = sums_in_order([run.stage])
        keys = [k for k in in_order if k in self._groups and k not in self._at_once]
        if not keys or self._to_start[: len(keys)] != keys:
            return nullcontext()
        sums = [self._departures[key] for key in keys]
        return leaving_early(sums, self._transport.progress)

    def start_reduction(self, key: str) -> None:
        """Start the all-reduces of a stage's gradients, less those of tied parameters.

        `key` is that of `RankProgram.reductions`, of whole parameters or of parts.
        Called after the stage's last backward, in which some may have started; what
        follows hides the communication.
        """
        if self._steps.is_update and key not in self._at_once:
            self._start(key, counts=self._are_counted)

    def scatter(self, run: Run) -> None:
        """Start to add up what a backward made, where gradients are kept in parts."""
        for key in sums_in_order([run.stage]):
            if key in self._at_once:
                self.parts.scatter(key, counted=self._are_counted)

    def settle(self) -> None:
        """Wait for what `scatter` started."""
        if self._at_once:
            self.parts.settle()

    def gather_weights(self, run: Run) -> None:
        """Make a stage's weights whole, where they are in parts."""
        if self.weight_parts is not None:
            self.weight_parts.gather(run.stage)

    def forget_whole_weights(self) -> None:
        """Gather weights anew before they are used: their rows have changed."""
        if self.weight_parts is not None:
            self.weight_parts.free()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Make all weights of this rank whole for a while; all ranks do."""
        if self.weight_parts is None:
            yield
            return
        with self.weight_parts.whole({run.stage for run in self._program.stages}):
            yield

    def finish_reductions(self) -> None:
        """All-reduce tied parameters' gradients and statistics; wait for all sums."""
        named = self._stages.parameters if self._steps.is_update else {}
        for name in self._groups:
            if name in named:  # perhaps not all its stages, or none, have gradients
                self._start(name, counts=True)
        num_runs = self._steps.count / self._program.num_micro_batches
        waits = [
            request
            for key, statistics in self._statistics.items()
            for request in statistics.start(
                self._transport, self._groups.get(key), num_runs
            )
        ]
        self._sums.finish()
        self.parts.finish(is_update=self._steps.is_update)
        self._transport.wait(*waits)
        for statistics in self._statistics.values():
            statistics.finish()

    def is_finite(self) -> bool:
        """Whether all gradients of this rank are finite; they are not scaled any more.

        Called once before `apply` or `leave_out`.
        """
        factor = 1.0 if self.scaler is None else 1.0 / self.scaler.factor
        return all_finite(self.parameters.values(), factor)

    def apply(self, terms: float | None, seed: int) -> None:
        """Let the optimizer make its step, drop the gradients, share what is new.

        The gradients are those of a sum of so many `terms`; None: they are of a mean.
        What it draws depends on `seed`, the step, and what is updated, not by whom.
        """
        if terms is not None and (gradients := _gradients(self.parameters.values())):
            torch._foreach_div_(gradients, terms)
        if self._clip_norm is not None:
            self.norm = self._clip(self._clip_norm)
        if self.before is not None:
            self.before()
        if self.optimizer is not None:
            seed = seed_of(seed, self._steps.done, "update", self._what)
            with generator_lock, torch_seeded(seed, self._transport.streams.device):
                self.optimizer.step()
        if self.scheduler is not None and not isinstance(
            self.scheduler, ReduceLROnPlateau
        ):
            self.scheduler.step()
        self.drop_gradients()
        stay = self._at_once if self.weight_parts is not None else ()
        self.own_rows.rejoin(without=stay)
        self.forget_whole_weights()
        self.own_rows.gather(torch.Tensor.detach, without=stay)
        self.count += 1

    def leave_out(self) -> None:
        """Drop the gradients, with no step of the optimizer; all ranks do."""
        if self.before is not None:
            self.before()
        self.norm = None
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget what steps have added up for an update."""
        self.own_rows.drop_gradients()
        for parameter in self._trained.values():  # other phases' ones may wait
            parameter.grad = None
        self.is_spoilt, self.terms = False, 0.0

    @property
    def weights_in_parts(self) -> Mapping[str, nn.Parameter]:
        """Return the rows of weights that this rank has, where it keeps no more."""
        return {} if self.weight_parts is None else self.weight_parts.row_params

    @property
    def gradients_in_parts(self) -> Mapping[str, tuple[str, nn.Parameter]]:
        """Return the rows of this rank, and of which sum, that keep gradients alone."""
        sums = {key: self.own_rows.kept[key].row_params for key in self._at_once}
        named = [(key, *pair) for key, parts in sums.items() for pair in parts.items()]
        return {n: (key, p) for key, n, p in named if p.requires_grad}

    def gather_gradients(self) -> None:
        """Give all ranks the complete gradients; all call this, in `before`."""
        self.parts.whole()
        self.own_rows.gather(lambda parameter: parameter.grad)

    def _share_out(self, copied: Collection[str]) -> None:
        """Find the rows of this rank; those of some sums get memory of their own.

        Of these no more is read.
        """
        program, stages = self._program, self._stages
        for key in (*copied, *(key for key in self._groups if key not in copied)):
            named, take, mirrored = self._summed[key], None, None
            if key in copied:  # frozen ones are in the sums of all their stages
                shared = stages.in_several
                named = {n: p for n, p in named.items() if n not in shared}
                take = stages.rows
            else:
                stages.read_rest()
            if key in self._at_once:
                mirrored = mirrored_of(program, self._place, self._transport, key)
            whole = program.updated_whole
            self.own_rows.share(key, self._groups[key], named, whole, take, mirrored)

    @cached_property
    def _what(self) -> str:
        """What this rank updates, in words."""
        return repr([(name, self.own_rows.rows.get(name)) for name in self.parameters])

    def _sums_of_stages(self) -> list[str]:
        """Return the keys of sums of whole stages, and of their parts, in order."""
        keys = sums_in_order({run.stage for run in self._program.stages})
        return [key for key in keys if key in self._groups]

    @property
    def _are_counted(self) -> bool:
        """Whether a rank may lack gradients in this step that others have."""
        is_partial = self._steps.count < self._steps.num_micro_batches
        program = self._program
        return program.depends_on_data or program.branches or is_partial

    def _start(self, key: str, *, counts: bool) -> None:
        if counts and key in self.own_rows.sums:
            self.parts.count(key)
        elif counts:
            self._sums.count(self._groups[key], self._summed[key])
        self._departures[key].finish()
        if key in self._to_start:
            self._to_start.remove(key)

    def _running_statistics(self) -> dict[str, RunningStatistics]:
        num_replicas = self._program.num_replicas
        num_runs = num_replicas * self._place.num_copies
        if num_runs == 1:
            return {}
        runs: dict[str, dict[int, list[_NormBase]]] = defaultdict(dict)
        for run, module in self._stages.items():
            number = self._place.number_of(run, num_replicas)
            for name, layer in tracking(module):
                key = self._program.sum_of(run, f"{name}.running_mean")
                runs[key].setdefault(number, []).append(layer)
        return {
            key: RunningStatistics(layers, counts=self._counts(key))
            for key, layers in sorted(runs.items())  # on all ranks in one order
        }

    def _counts(self, key: str) -> bool:
        """Whether this rank is the first of its grid among those that share a sum."""
        tiles, rank = self._program.tiles, self._place.rank
        holders = self._program.reductions.get(key, ())
        grid = tiles.ranks if tiles is not None else ()
        return next((member for member in grid if member in holders), rank) == rank

    def _clip(self, limit: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most `limit`."""
        counted = self.parameters
        if self._program.shard == "off":
            counted = {}  # each part of each counts once
            for key, parameters in self._summed.items():
                if self._program.is_first(key, self._place.rank):
                    counted |= parameters
        assert self._norm_group is not None
        return clip_gradients(
            limit,
            counted.values(),
            self.parameters.values(),
            self._transport,
            self._norm_group,
        )

    def _ranks_of_norm(self) -> tuple[int, ...]:
        """Return the ranks that together hold each gradient once."""
        if self._program.shard != "off":
            return tuple(range(self._transport.host.size))
        first = self._place.first_rank
        return tuple(range(first, first + self._place.copy_ranks))


EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_


def clip_gradients(
    limit: float,
    counted: Collection[nn.Parameter],
    everything: Collection[nn.Parameter],
    transport: DeviceTransport,
    group: Group,
) -> float:
    """Scale `everything` so that its norm over the group's ranks is at most `limit`.

    Returns what it was before. `counted` are the parameters that this rank counts: each
    one is in `counted` of one rank.
    """
    device = transport.streams.device
    square = torch.zeros((), dtype=torch.float64, device=device)
    gradients = _gradients(counted)
    if gradients:
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64)
        square = torch.stack(norms).square().sum()
    transport.wait(transport.all_reduce(group, square))
    norm = float(square.sqrt())
    scale = limit / (norm + EPSILON)
    scaled = _gradients(everything)
    if scaled and not scale >= 1.0:  # a NaN makes all of them NaN, as in torch
        torch._foreach_mul_(scaled, scale)
    return norm


def _gradients(parameters: Collection[nn.Parameter]) -> list[Tensor]:
    """Return the numbers of all gradients, in their memory."""
    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    return [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
