"""Gradients and weights in parts: between actions each rank keeps its own rows of them.

With --shard gradients and --shard weights (ZeRO, stages 2 and 3):

    before an action    all-gather: the stage's weights are whole on each rank
    the action          forward, backward or weight gradients; meanwhile what the
                        next one uses is gathered, where two stages may be whole
    after a backward    reduce-scatter: each rank adds up the sums of its rows
    before another      the weights of the stage used longest ago go
    update              the optimizer has the rank's rows as its parameters

Ranks that hold the same stage run the same actions in the same order, so they begin
these collectives in one order. Of mirrored replicas that is so within each: rows are
shared out among its ranks, and at the end of a step each adds its sums to those of the
rank that has the same rows in the other replica. What stages of several ranks share
stays whole.

Source: Rajbhandari and others, ZeRO: Memory optimizations toward training trillion
parameter models, 2020.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from gemsc.base.parts import rows_of, sums_in_order
from gemsc.errors import InternalError
from gemsc.messages.rows import ALONE_BYTES
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.waiting import Request
from gemsc.runtime.worker.own_rows import OwnRows, ShardedSum
from gemsc.runtime.worker.reduction import (
    buckets,
    flat,
    gather_rows,
    shares,
)


@dataclass(frozen=True)
class _Scattered:
    """Sums on their way: this rank's rows of them, one tensor after the other."""

    names: Sequence[str]
    sums: Tensor
    request: Request
    terms: Tensor  # until it is done


class GradientParts:
    """Sums of gradients of which each rank gets its rows, and keeps no others."""

    def __init__(self, transport: DeviceTransport, rows: OwnRows) -> None:
        self._transport = transport
        self._rows = rows
        self._sums = rows.kept
        self._on_way: list[tuple[ShardedSum, _Scattered]] = []
        self._seen: dict[str, set[str]] = defaultdict(set)  # gradients of this rank
        self._counted: dict[str, None] = {}  # keys of which other ranks have others

    def count(self, key: str) -> None:
        """Give zeros to add for gradients that others may have; note which are here.

        A parameter ends without a gradient if no rank has one: see `finish`.
        """
        self._counted[key] = None
        self._note(key)
        for parameter in self._sums[key].parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def scatter(self, key: str, *, counted: bool) -> None:
        """Start to add up what a backward has made of a sum's gradients."""
        if counted:
            self.count(key)
        else:
            self._note(key)
        named = self._sums[key].parameters.items()
        present = {n: p for n, p in named if p.grad is not None}
        names = [*present]
        for numbers in buckets([*present.values()]):
            self.start(key, {names[n]: present[names[n]] for n in numbers})

    def start(self, key: str, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start to add up these parameters' gradients in one bucket; they go."""
        shared = self._sums[key]
        present = {n: p for n, p in parameters.items() if p.grad is not None}
        terms = [cast("Tensor", parameter.grad) for parameter in present.values()]
        for parameter in present.values():
            parameter.grad = None
        self._on_way.append((shared, self._start(shared, [*present], terms)))

    def _start(
        self, shared: ShardedSum, names: Sequence[str], terms: list[Tensor]
    ) -> _Scattered:
        member = shared.group.ranks.index(self._transport.host.rank)
        by_rank = shares(terms, [shared.rows[name] for name in names])
        sizes = [sum(part.numel() for part in parts) for parts in by_rank]
        if len(terms) == 1 and terms[0].is_contiguous():
            packed = terms[0].view(-1)
        else:
            packed = flat([part for parts in by_rank for part in parts])
        by_rank.clear()
        terms.clear()  # they are in memory once
        sums = torch.split(packed, sizes)[member]
        request = self._transport.reduce_scatter(shared.group, packed, sizes, sums)
        return _Scattered(names, sums, request, packed)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what is on its way, and add it to this rank's rows."""
        self._transport.wait(*(bucket.request for _, bucket in self._on_way))
        for shared, bucket in self._on_way:
            rows = [shared.row_params[name] for name in bucket.names]
            parts = torch.split(bucket.sums, [parameter.numel() for parameter in rows])
            for parameter, part in zip(rows, parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                    parameter.grad.copy_(part.view_as(parameter))
                else:
                    parameter.grad += part.view_as(parameter)
        self._on_way.clear()

    def finish(self, *, is_update: bool) -> None:
        """End a step's sums: what no rank has had a gradient of ends without."""
        self.settle()
        device = self._transport.streams.device
        for key in sorted(self._counted):
            shared, seen = self._sums[key], self._seen[key]
            names = [n for n, p in shared.parameters.items() if p.requires_grad]
            counts = torch.tensor([float(n in seen) for n in names], device=device)
            everyone = self._rows.sums[key].group
            self._transport.wait(self._transport.all_reduce(everyone, counts))
            for name, count in zip(names, counts.tolist(), strict=True):
                if not count:
                    shared.row_params[name].grad = None
        self._counted.clear()
        if is_update:
            self._seen.clear()
            self._add_mirrored()

    def _add_mirrored(self) -> None:
        """Add up what both ranks of a pair keep; each gets the half that it updates."""
        for key in sorted(self._rows.pairs):
            pair, kept = self._rows.pairs[key], self._sums[key]
            terms = kept.gradients
            for name in terms:
                kept.row_params[name].grad = None
            for numbers in buckets([*terms.values()]):
                names = [[*terms][number] for number in numbers]
                tensors = [terms[name] for name in names]
                self._on_way.append((pair, self._start(pair, names, tensors)))
        self.settle()

    def take(self, key: str, name: str) -> Tensor:
        """Return the gradient of this rank's rows, zeros, for what a checkpoint has."""
        self._seen[key].add(name)
        part = self._sums[key].row_params[name]
        part.grad = torch.zeros_like(part)
        return part.grad

    def is_first(self, key: str) -> bool:
        """Whether no rank before this one keeps the same rows: see `OwnRows.pairs`."""
        pair = self._rows.pairs.get(key)
        return pair is None or pair.group.ranks[0] == self._transport.host.rank

    def _note(self, key: str) -> None:
        named = self._sums[key].parameters.items()
        self._seen[key] |= {n for n, p in named if p.grad is not None}

    def whole(self) -> None:
        """Give the parameters the rows of gradients that this rank has, and zeros."""
        for shared in self._rows.sums.values():
            for name, parameter in shared.parameters.items():
                if (gradient := shared.row_params[name].grad) is not None:
                    parameter.grad = torch.zeros_like(parameter)
                    rows_of(parameter.grad, shared.mine[name]).copy_(gradient)


class WeightParts:
    """The weights of sharded stages: rows, and whole for the actions that use them.

    Those of `most` stages at most are whole at a time. Where it is known what the next
    action uses, that is on its way while one computes.
    """

    def __init__(
        self,
        transport: DeviceTransport,
        sums: Mapping[str, ShardedSum],
        most: int,
    ) -> None:
        self._transport = transport
        self._sums = sums
        self._most = most
        self._to_come: deque[int] = deque()  # stages, action after action
        # stages, the one used longest ago first, with what waits for their weights
        self._whole: dict[int, deque[Callable[[], None]]] = {}
        self.row_params = {n: p for s in sums.values() for n, p in s.row_params.items()}
        self._sizes: dict[str, int] = {}  # in bytes, of what has memory of its own
        for shared in sums.values():
            for name, parameter in shared.parameters.items():
                self._sizes[name] = _give_up(parameter)

    def begin(self, to_come: Iterable[int]) -> None:
        """Expect a step whose actions use these stages, in this order."""
        self._to_come = deque(to_come)

    def gather(self, stage: int) -> None:
        """Make the weights of a stage whole, if they are not; all its ranks do."""
        if self._to_come and (turn := self._to_come.popleft()) != stage:
            raise InternalError(f"stage {stage} is used where stage {turn} would be")
        self._begin(stage)
        waiting = self._whole[stage]
        while waiting:
            waiting.popleft()()
        if self._to_come:
            self._begin(self._to_come[0], ahead=True)

    def _begin(self, stage: int, *, ahead: bool = False) -> None:
        """Start to gather a stage that is not whole; all of it at once, if `ahead`."""
        if stage in self._whole:
            self._whole[stage] = self._whole.pop(stage)
            return
        while len(self._whole) >= self._most:
            self._free(next(iter(self._whole)))
        waiting = self._whole[stage] = deque()
        for key in sums_in_order([stage]):
            for start in self._starts(self._sums[key]) if key in self._sums else ():
                waiting.append(start())
                if len(waiting) > 1 and not ahead:
                    waiting.popleft()()

    def free(self) -> None:
        """Keep the rows alone, of all stages."""
        for stage in [*self._whole]:
            self._free(stage)

    @contextmanager
    def whole(self, stages: Collection[int]) -> Iterator[None]:
        """Make all weights whole for a while, to be read."""
        most, self._most = self._most, len(stages)
        try:
            for stage in sorted(stages):
                self.gather(stage)
            yield
        finally:
            self._most = most
            self.free()

    def _free(self, stage: int) -> None:
        del self._whole[stage]
        for key in sums_in_order([stage]):
            if key in self._sums:
                for parameter in self._sums[key].parameters.values():
                    _give_up(parameter)

    def _starts(self, shared: ShardedSum) -> Iterator[Callable[[], Callable[[], None]]]:
        """Yield what starts to fill the memory of parameters, bucket by bucket."""
        names = [*shared.parameters]
        for name in names:
            storage = shared.parameters[name].untyped_storage()
            storage.resize_(self._sizes[name])
        tensors = [shared.parameters[name].data for name in names]  # no new version
        for numbers in weight_buckets(tensors):
            inside = [names[number] for number in numbers]
            into = [tensors[number] for number in numbers]
            yield partial(self._start, shared, inside, into)

    def _start(
        self, shared: ShardedSum, names: Sequence[str], into: list[Tensor]
    ) -> Callable[[], None]:
        """Start to gather some tensors; return what waits for them."""
        by_rank = shares(into, [shared.rows[name] for name in names])
        mine = [shared.row_params[name].data for name in names]
        if len(into) == 1 and into[0].is_contiguous():  # where it belongs, at once
            sizes = [sum(part.numel() for part in parts) for parts in by_rank]
            values = into[0].view(-1)
            gather = self._transport.all_gather
            request = gather(shared.group, mine[0].reshape(-1), sizes, values)
            return partial(self._transport.wait, request)
        bucket = gather_rows(self._transport, shared.group, mine, by_rank)
        return partial(bucket.finish, self._transport)


def weight_buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the numbers of tensors: large ones are alone, and need no other memory."""
    large = [n for n, tensor in enumerate(tensors) if tensor.nbytes >= ALONE_BYTES]
    small = [n for n, tensor in enumerate(tensors) if tensor.nbytes < ALONE_BYTES]
    packed = buckets([tensors[number] for number in small])
    return [*([n] for n in large), *([small[n] for n in bucket] for bucket in packed)]


def _give_up(parameter: nn.Parameter) -> int:
    """Give up the memory of a parameter; return its bytes, to be had again.

    Its storage stays, for what a forward has saved of it; unless it has more in it, or
    NumPy has seen it, as in what is written to files, and it cannot change its size.
    """
    storage = parameter.untyped_storage()
    if storage.nbytes() != parameter.nbytes or not storage.resizable():
        parameter.data = torch.empty_like(parameter)
        storage = parameter.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    return size
