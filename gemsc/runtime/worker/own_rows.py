"""Which rows of the parameters that ranks hold together this rank keeps and updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemsc.base.boxes import Interval
from gemsc.base.nests import storage_of
from gemsc.base.parts import rows_of
from gemsc.errors import GemscError
from gemsc.messages.rows import Rows, in_pairs, rows_of_holders
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.transport import Group
from gemsc.runtime.worker.program import RankPlace, RankProgram
from gemsc.runtime.worker.reduction import Bucket, buckets, gather_rows, shares


@dataclass(frozen=True)
class ShardedSum:
    """Parameters that a group of ranks holds, and this rank's rows of each.

    `rows` are those of all ranks of the group, `mine` this rank's. `row_params` has
    these as parameters, which keep the gradients. With weights in parts they have
    memory of their own, and there is no other between actions.
    """

    group: Group
    parameters: Mapping[str, nn.Parameter]
    rows: Mapping[str, Rows]
    mine: Mapping[str, Interval]
    row_params: Mapping[str, nn.Parameter]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the rows, where there are any."""
        return {n: p.grad for n, p in self.row_params.items() if p.grad is not None}


@dataclass(frozen=True)
class Mirrored:
    """The ranks that hold a stage of mirrored replicas, by what they do.

    Those that are `alike` run it in one replica, and so all in one order; this rank's
    `pair` runs it in both. `holders` are all of them, pair after pair.
    """

    alike: Group
    pair: Group
    holders: tuple[int, ...]


def mirrored_of(
    program: RankProgram, place: RankPlace, transport: DeviceTransport, key: str
) -> Mirrored | None:
    """Return how the holders of a sum are in pairs, if replicas are mirrored.

    All holders call this, in the same order of their sums.
    """
    alike, others = program.alike_and_others(key, place.rank)
    if not others:
        return None
    pairs = [tuple(sorted(pair)) for pair in zip(alike, others, strict=True)]
    pair = place.in_copy(pairs[alike.index(place.rank)])
    return Mirrored(
        transport.group(place.everywhere(alike), f"{key} alike"),
        transport.group(pair, f"{key} pair"),
        place.everywhere(rank for pair in pairs for rank in pair),
    )


class OwnRows:
    """The rows of this rank of the parameters that it holds with others.

    By the keys of sums: `sums` has those that it updates, of what all holders add up;
    `kept` those that it keeps between actions, of what those add up that run alike, and
    of frozen parameters where these have memory of their own. They are the same but for
    mirrored replicas: there two ranks keep the same, each updates a half of it, and
    `pairs` has these. `rows` are those that are updated, `kept_rows` those kept, by
    name.
    """

    def __init__(self, transport: DeviceTransport) -> None:
        self.sums: dict[str, ShardedSum] = {}
        self.kept: dict[str, ShardedSum] = {}
        self.pairs: dict[str, ShardedSum] = {}
        self.rows: dict[str, Interval] = {}
        self.kept_rows: dict[str, Interval] = {}
        self._transport = transport

    def share(
        self,
        key: str,
        group: Group,
        parameters: Mapping[str, nn.Parameter],
        whole: Collection[str],
        take: Callable[[str, Interval], Tensor] | None = None,
        mirrored: Mirrored | None = None,
    ) -> None:
        """Share out what the ranks of a group hold; what is `whole` goes to one.

        `take(name, rows)` gives the rows in memory of their own, those of frozen
        parameters, too; without it they are in that of the whole.
        """
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        held = parameters if take is not None else trained
        shapes = {name: parameter.shape for name, parameter in held.items()}
        holders = group.ranks if mirrored is None else mirrored.holders
        by_holder = rows_of_holders(shapes, len(holders), whole)
        alike, kept = group, by_holder
        if mirrored is not None:
            alike = mirrored.alike
            kept = {name: in_pairs(rows) for name, rows in by_holder.items()}
        member = alike.ranks.index(self._transport.host.rank)
        parts: dict[str, nn.Parameter] = {}
        for name, parameter in held.items():
            self.kept_rows[name] = kept[name][member]
            if take is None:
                part = rows_of(parameter.detach(), kept[name][member])
            else:
                part = take(name, kept[name][member])
            parts[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        self.kept[key] = ShardedSum(alike, held, kept, self.kept_rows, parts)
        self.rows |= {name: kept[name][member] for name in held}
        parts = {name: parts[name] for name in trained}
        if mirrored is not None:
            parts = self._halves(key, mirrored, by_holder, parts)
        places = [holders.index(rank) for rank in group.ranks]
        of_all = {n: tuple(by_holder[n][place] for place in places) for n in trained}
        self.sums[key] = ShardedSum(group, trained, of_all, self.rows, parts)

    def _halves(
        self,
        key: str,
        mirrored: Mirrored,
        by_holder: Mapping[str, Rows],
        kept: Mapping[str, nn.Parameter],
    ) -> dict[str, nn.Parameter]:
        """Share out what a pair keeps; return the rows of this rank."""
        number = mirrored.holders.index(self._transport.host.rank)
        first = number - number % 2
        rows, halves = dict[str, Rows](), dict[str, nn.Parameter]()
        for name, parameter in kept.items():
            begin = by_holder[name][first][0]
            of_pair = by_holder[name][first : first + 2]
            rows[name] = tuple((start - begin, stop - begin) for start, stop in of_pair)
            part = rows_of(parameter.detach(), rows[name][number - first])
            halves[name] = nn.Parameter(part)
            self.rows[name] = by_holder[name][number]
        mine = {name: pair[number - first] for name, pair in rows.items()}
        self.pairs[key] = ShardedSum(mirrored.pair, kept, rows, mine, halves)
        return halves

    def parameters(self, held: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return what this rank updates of the parameters that it holds."""
        everything = [*self.kept.values(), *self.sums.values()]
        parts = {n: p for shared in everything for n, p in shared.row_params.items()}
        updated = {**held, **parts}
        return {n: p for n, p in updated.items() if p.numel() or n not in parts}

    def check_trained(self) -> None:
        """Make sure that nobody froze rows, of which alone an optimizer knows.

        Raises:
            GemscError: somebody did, or gave them a hook, of which backwards know not.
        """
        for shared in self.sums.values():
            for name, part in shared.row_params.items():
                if part._backward_hooks or part._post_accumulate_grad_hooks:
                    what, help = "a hook on", "use optimizer.register_step_pre_hook()"
                elif shared.parameters[name].requires_grad > part.requires_grad:
                    what = "requires_grad of"
                    help = f'call trainer.freeze("{name}") on all ranks'
                else:
                    continue
                raise GemscError(
                    f"{what} '{name}' has no effect: this rank has only some rows of "
                    "it in its optimizer",
                    help=help,
                )

    @torch.no_grad()
    def rejoin(self, without: Collection[str] = ()) -> None:
        """Put rows back into the whole of which they are: `p.data = ...` moves them.

        What is kept under the keys in `without` has memory of its own.
        """
        kept = (shared for key, shared in self.kept.items() if key not in without)
        for shared in (*self.pairs.values(), *kept):
            for name, part in shared.row_params.items():
                whole = shared.parameters[name].detach()
                if storage_of(part) != storage_of(whole):
                    part.data = rows_of(whole, shared.mine[name]).copy_(part)

    def drop_gradients(self) -> None:
        """Take the gradients from the rows."""
        for shared in (*self.kept.values(), *self.sums.values()):
            for part in shared.row_params.values():
                part.grad = None

    def gather(
        self,
        of: Callable[[nn.Parameter], Tensor | None],
        without: Collection[str] = (),
    ) -> None:
        """Bring together all ranks' rows of a tensor of each shared parameter.

        Of what is shared under the keys in `without` pairs bring their halves together.
        """
        waiting: deque[Bucket] = deque()
        for key, shared in self.sums.items():
            if key in without and key not in self.pairs:
                continue
            to_gather = shared if key not in without else self.pairs[key]
            for bucket in self._gathered(to_gather, of):
                waiting.append(bucket)
                if len(waiting) > 1:  # two at most are in memory
                    waiting.popleft().finish(self._transport)
        for bucket in waiting:
            bucket.finish(self._transport)

    def _gathered(
        self, shared: ShardedSum, of: Callable[[nn.Parameter], Tensor | None]
    ) -> Iterator[Bucket]:
        all_pairs = [(of(p), shared.rows[n]) for n, p in shared.parameters.items()]
        pairs = [(tensor, rows) for tensor, rows in all_pairs if tensor is not None]
        for numbers in buckets([tensor for tensor, _ in pairs]):
            by_rank = shares(*zip(*(pairs[n] for n in numbers), strict=True))
            mine = by_rank[shared.group.ranks.index(self._transport.host.rank)]
            yield gather_rows(self._transport, shared.group, mine, by_rank)
