"""Optimizer state in parts: of what several ranks hold, each updates its own rows.

    sums of gradients   reduce-scatter: each rank gets the sums of its rows
    update              the optimizer has the rank's rows as its parameters
    afterwards          all-gather: each rank gets the other ranks' rows

Source: Rajbhandari and others, ZeRO: Memory optimizations toward training trillion
parameter models, 2020 (stage 1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor, nn

from gemsc.base.boxes import Interval
from gemsc.messages.rows import Rows, rows_of_holders
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.transport import Group
from gemsc.runtime.worker.buckets import Bucket, buckets, flat, rows_of, shares


class OwnRows:
    """The rows that this rank updates of the parameters that it holds with others.

    `rows` has those of all holders of a parameter, `own` this rank's, by name.
    """

    def __init__(self, transport: DeviceTransport) -> None:
        self.rows: dict[str, Rows] = {}
        self.own: dict[str, Interval] = {}
        self._transport = transport
        self._shared: list[tuple[Group, dict[str, nn.Parameter]]] = []
        self._views: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}

    def share(
        self,
        group: Group,
        parameters: Mapping[str, nn.Parameter],
        whole: Collection[str],
    ) -> None:
        """Share out what the ranks of a group hold; what is `whole` goes to one."""
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        shapes = {name: parameter.shape for name, parameter in trained.items()}
        self.rows |= rows_of_holders(shapes, len(group.ranks), whole)
        self._shared.append((group, trained))
        member = group.ranks.index(self._transport.host.rank)
        for name, parameter in trained.items():
            start, stop = self.own[name] = self.rows[name][member]
            if stop - start < self.rows[name][-1][1]:
                view = rows_of(parameter.detach(), (start, stop))
                self._views[name] = nn.Parameter(view), parameter

    def parameters(self, held: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return what this rank updates of the parameters that it holds.

        Rows are parameters that have the memory of the held one.
        """
        own = {**held} | {name: view for name, (view, _) in self._views.items()}
        return {name: p for name, p in own.items() if p.numel() or held[name] is p}

    def take_gradients(self) -> None:
        """Give the rows the gradients that the held parameters have for them."""
        for name, (view, parameter) in self._views.items():
            gradient = parameter.grad
            view.grad = None if gradient is None else rows_of(gradient, self.own[name])

    def drop_gradients(self) -> None:
        """Take the gradients from the rows."""
        for view, _ in self._views.values():
            view.grad = None

    def gather(self, of: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Bring together all ranks' rows of a tensor of each shared parameter."""
        waiting: list[Bucket] = []
        for group, named in self._shared:
            found = [(of(p), self.rows[name]) for name, p in named.items()]
            pairs = [(tensor, rows) for tensor, rows in found if tensor is not None]
            for numbers in buckets([tensor for tensor, _ in pairs]):
                by_rank = shares(*zip(*(pairs[n] for n in numbers), strict=True))
                waiting.append(self._start(group, by_rank))
        self._transport.wait(*(bucket.request for bucket in waiting))
        for bucket in waiting:
            bucket.unpack()

    def _start(self, group: Group, by_rank: list[list[Tensor]]) -> Bucket:
        sizes = [sum(tensor.numel() for tensor in own) for own in by_rank]
        own = flat(by_rank[group.ranks.index(self._transport.host.rank)])
        whole = own.new_empty(sum(sizes))
        request = self._transport.all_gather(group, own, sizes, whole)
        return Bucket([tensor for own in by_rank for tensor in own], whole, request)
