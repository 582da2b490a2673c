"""Sums over the ranks that hold the same stage: gradients and running statistics.

Gradients travel in buckets. With --shard-optimizer (ZeRO, stage 1), each rank updates
its own rows of what several ranks hold:

    sums of gradients   reduce-scatter: each rank gets the sums of its rows
    update              the optimizer has the rank's rows as its parameters
    afterwards          all-gather: each rank gets the other ranks' rows

Source: Rajbhandari and others, ZeRO: Memory optimizations toward training trillion
parameter models, 2020.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gemsc.base.parts import rows_of
from gemsc.messages.rows import Rows
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.transport import Group
from gemsc.runtime.transport.waiting import Request

BUCKET_BYTES = 8 * 2**20


@dataclass(slots=True)
class Bucket:
    """What some tensors become: their values lie in `values` once `request` is done."""

    tensors: list[Tensor]
    values: Tensor
    request: Request

    def finish(self, transport: DeviceTransport) -> None:
        """Wait for the values, and put them into the tensors."""
        transport.wait(self.request)
        sizes = [tensor.numel() for tensor in self.tensors]
        pairs = zip(torch.split(self.values, sizes), self.tensors, strict=True)
        parts = [part.view_as(tensor) for part, tensor in pairs]
        torch._foreach_copy_(self.tensors, parts)


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the numbers of tensors of one dtype up to the size of a bucket."""
    by_dtype: dict[torch.dtype, list[list[int]]] = defaultdict(lambda: [[]])
    room: dict[torch.dtype, int] = defaultdict(lambda: BUCKET_BYTES)  # in the last one
    for number, tensor in enumerate(tensors):
        of_dtype, dtype = by_dtype[tensor.dtype], tensor.dtype
        if of_dtype[-1] and tensor.nbytes > room[dtype]:
            of_dtype.append([])
            room[dtype] = BUCKET_BYTES
        of_dtype[-1].append(number)
        room[dtype] -= tensor.nbytes
    return [bucket for of_dtype in by_dtype.values() for bucket in of_dtype]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts_like(tensors: Sequence[Tensor], values: Tensor) -> list[Tensor]:
    """Return parts of a flat tensor as views of the shapes and formats of these."""
    parts, start = [], 0
    for tensor in tensors:
        part = values[start : start + tensor.numel()]
        if _is_dense(tensor):
            part = values.as_strided(tensor.size(), tensor.stride(), start)
        parts.append(part.view_as(tensor))
        start += tensor.numel()
    return parts


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def shares(tensors: Sequence[Tensor], rows: Sequence[Rows]) -> list[list[Tensor]]:
    """Return, for each rank, its rows of all tensors, as views."""
    pairs = [*zip(tensors, rows, strict=True)]
    return [
        [rows_of(tensor, of_ranks[rank]) for tensor, of_ranks in pairs]
        for rank in range(len(rows[0]))
    ]


def gather_rows(
    transport: DeviceTransport,
    group: Group,
    mine: Sequence[Tensor],
    by_rank: Sequence[Sequence[Tensor]],
) -> Bucket:
    """Start to bring all ranks' rows together; `mine` are those this rank gives."""
    sizes = [sum(tensor.numel() for tensor in rows) for rows in by_rank]
    given = flat(mine)
    whole = given.new_empty(sum(sizes))
    request = transport.all_gather(group, given, sizes, whole)
    return Bucket([tensor for rows in by_rank for tensor in rows], whole, request)


class GradientSums:
    """Sums of gradients in flight.

    Gradients travel packed in buckets, and are parts of these from then on: they are
    in memory once, and need no copy of their sum. Sums are started in a stage's last
    backward, or after it, and waited for before the optimizer's step.
    """

    def __init__(self, transport: DeviceTransport) -> None:
        self._transport = transport
        self._requests: list[Request] = []
        self._counted: list[tuple[list[nn.Parameter], Tensor]] = []

    def count(self, group: Group, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start to count how many ranks have a gradient, for each parameter.

        Where data came by on some ranks only, the others have none: here they get
        zeros to add. A parameter ends without if no rank has one.
        """
        trained = [p for p in parameters.values() if p.requires_grad]
        if not trained:
            return
        present = [float(parameter.grad is not None) for parameter in trained]
        counts = torch.tensor(present, device=trained[0].device)
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._counted.append((trained, counts))
        self._requests.append(self._transport.all_reduce(group, counts))

    def start(self, group: Group, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start to add up these parameters' gradients over a group, in one bucket."""
        present = [p for p in parameters.values() if p.grad is not None]
        gradients = [cast("Tensor", parameter.grad) for parameter in present]
        sums = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
        parts = parts_like(present, sums)
        torch._foreach_copy_(parts, gradients)
        for parameter, part in zip(present, parts, strict=True):
            parameter.grad = part
        self._requests.append(self._transport.all_reduce(group, sums))

    def finish(self) -> None:
        """Wait for all sums and put them into the gradients."""
        self._transport.wait(*self._requests)
        for parameters, counts in self._counted:
            for parameter, count in zip(parameters, counts.tolist(), strict=True):
                parameter.grad = parameter.grad if count else None
        self._requests.clear()
        self._counted.clear()


@dataclass(eq=False)
class RunningStatistics:
    """Running statistics of some layers, where several runs share the micro-batches.

    Each run sees its own micro-batches only. One process would see all of them, one run
    after the other. An exponential average is linear in what it sees, so the runs'
    averages r_0 ... r_{J-1}, all begun at r, join into exactly that one:

        d^J r + sum over j of d^(J-1-j) (r_j - d r),   d = (1 - momentum)^updates

    Where the last runs see less, J is the sum of their shares: of 4 micro-batches each,
    the first 6 make 1.5 runs, and no run has a negative number of runs after it.
    Without momentum (cumulative average) the sums of what was seen are added.

    Of ranks that see the same run, as the tiles of a grid do, only one `counts`.
    """

    _layers: Mapping[int, Sequence[_NormBase]]  # of each run here, by its number
    counts: bool = True
    _num_runs: float = field(default=0.0, init=False)
    _before: list[dict[str, Tensor]] = field(default_factory=list, init=False)
    _sum: Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def remember(self) -> None:
        """Keep the state before the step's first micro-batch."""
        layers = next(iter(self._layers.values()))
        self._before = [
            {name: tensor.clone() for name, tensor in _statistics(layer).items()}
            for layer in layers
        ]

    def start(
        self, transport: DeviceTransport, group: Group | None, num_runs: float
    ) -> tuple[Request, ...]:
        """Start to add up what each run has seen; `finish` once the sum is done."""
        self._num_runs = num_runs
        parts: list[Tensor] = []
        for index, before in enumerate(self._before):
            shares = [
                self._share(layers[index], before, run)
                for run, layers in self._layers.items()
            ]
            parts += [
                torch.stack(tensors).sum(0).reshape(-1)
                for tensors in zip(*shares, strict=True)
            ]
        if not parts:
            return ()
        self._sum = torch.cat(parts)
        if not self.counts:
            self._sum.zero_()
        return (transport.all_reduce(group, self._sum),) if group is not None else ()

    def _share(
        self, layer: _NormBase, before: dict[str, Tensor], run: int
    ) -> list[Tensor]:
        """Return what one run adds to mean, variance and count."""
        after = {name: t.double() for name, t in _statistics(layer).items()}
        old = {name: t.double() for name, t in before.items()}
        updates = after["num_batches_tracked"] - old["num_batches_tracked"]
        result = []
        for name in ("running_mean", "running_var"):
            if layer.momentum is None:
                new_sum = after[name] * after["num_batches_tracked"]
                share = new_sum - old[name] * old["num_batches_tracked"]
            else:
                decay = (1.0 - layer.momentum) ** updates
                later = decay ** max(self._num_runs - 1 - run, 0)
                share = later * (after[name] - decay * old[name])
            result.append(share)
        return [*result, updates.reshape(())]

    def finish(self) -> None:
        """Make the statistics of all runs those of one process."""
        flat, start = self._sum, 0
        for index, before in enumerate(self._before):
            old = {name: t.double() for name, t in before.items()}
            size = old["running_mean"].numel()
            sums = flat[start : start + size], flat[start + size : start + 2 * size]
            updates = flat[start + 2 * size]
            start += 2 * size + 1
            count = old["num_batches_tracked"] + updates
            for layers in self._layers.values():
                layer = layers[index]
                values = _statistics(layer)
                for name, total in zip(
                    ("running_mean", "running_var"), sums, strict=True
                ):
                    if layer.momentum is None:  # where nothing was seen yet, old ones
                        more = (total - old[name] * updates) / count.clamp(min=1)
                        values[name].copy_(old[name] + more)
                    else:
                        decay = (1.0 - layer.momentum) ** updates
                        values[name].copy_(decay * old[name] + total)
                values["num_batches_tracked"].copy_(count)


def tracking(module: nn.Module) -> Iterator[tuple[str, _NormBase]]:
    """Yield the layers that update running statistics as they train, with their names.

    Layers without a count of batches do not: their statistics are constants.
    """
    for name, layer in module.named_modules():
        if (
            isinstance(layer, _NormBase)
            and layer.training
            and layer.running_mean is not None
            and layer.num_batches_tracked is not None
        ):
            yield name, layer


def _statistics(layer: _NormBase) -> dict[str, Tensor]:
    names = ("running_mean", "running_var", "num_batches_tracked")
    return {name: cast("Tensor", getattr(layer, name)) for name in names}
