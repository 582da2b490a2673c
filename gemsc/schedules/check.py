"""Prove a schedule before it runs: all is done, all messages match, nothing blocks.

The proof takes each rank's actions and the channels between stages, no times and no
policies. It models what the generated code does:

    for each action:
        post the receives of the messages that it needs, if they are not posted yet
        wait for them; post the next receive of their channels
        compute
        send what others need, without waiting
        a backward waits until what its own forward sent has left
    wait until what the backwards sent has left
    reduce gradients

and it supposes the worst of the network: no message moves before its receive is posted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gemsc.errors import InternalError
from gemsc.schedules.action import Action, HeadStart, Kind
from gemsc.schedules.events import Event, Events
from gemsc.schedules.messages import Channel, Reduction

__all__ = ["Channel", "Reduction", "Report", "check"]

# MPI guarantees tags up to this one.
_LARGEST_TAG = 32767

Orders = Sequence[Sequence[Action]]


@dataclass(frozen=True, slots=True)
class Report:
    """What a proof found out: for each rank the peaks, and how much there is to do.

    `peak_live` counts forwards of any stage whose backward is not yet done.
    """

    peak_bytes: tuple[int, ...]
    peak_live: tuple[int, ...]
    num_actions: int
    num_messages: int
    num_reductions: int


def check(
    orders: Orders,
    channels: Sequence[Channel],
    placement: Sequence[Sequence[int]],
    micro_batches: Sequence[int],
    *,
    receiving: Sequence[Channel] | None = None,
    saved_bytes: Sequence[int] | None = None,
    transient_bytes: Sequence[int] | None = None,
    first_transient_bytes: Sequence[int] | None = None,
    gradient_bytes: Sequence[int] | None = None,
    resident_bytes: Sequence[int] | None = None,
    waiting_bytes: Sequence[int] | None = None,
    waiting_gradient_bytes: Sequence[int] | None = None,
    head_starts: Sequence[HeadStart | None] | None = None,
    workspace_bytes: int = 0,
    memory_cap: int | None = None,
    has_backward: bool = True,
    split_backward: bool = False,
    reductions: Sequence[Reduction] = (),
    issued: Sequence[Sequence[tuple[str, int]]] | None = None,
    user_lines: Callable[[int], str] | None = None,
) -> Report:
    """Prove that each rank's actions, together, are one correct training step.

    Args:
        orders: each rank's actions, in order.
        channels: what stages send. Both ends on one rank: handed over, not sent.
        placement: `placement[replica][stage]` is a rank.
        micro_batches: their number for each replica.
        receiving: what stages receive, if that was found in another way.
        saved_bytes: for each stage, kept for each micro-batch until its backward ends.
        transient_bytes: for each stage, on top of it during the backward.
        first_transient_bytes: the same for its first backward.
        gradient_bytes: for each stage, from its first backward to the end.
        resident_bytes: for each stage, on its rank all the time.
        waiting_bytes: for each stage, kept between the parts of a split backward; by
            default all that was saved.
        waiting_gradient_bytes: for each stage, of the gradients, what its weight
            gradients make.
        head_starts: for each stage, what its last backward needs on top if it has one.
        workspace_bytes: what libraries take of each rank, all the time.
        memory_cap: the bytes that no rank may exceed.
        has_backward: False for evaluation.
        split_backward: whether weight gradients are actions of their own.
        reductions: the sums of gradients over ranks.
        issued: for each rank the groups that it reduces, in order, each with the number
            of actions before it; by default all of its groups at the end.
        user_lines: describes the user's code of a stage, for messages.

    Raises:
        InternalError: the schedule is wrong; names the stage and the micro-batch.
    """
    proof = _Proof(
        orders=tuple(map(tuple, orders)),
        channels=tuple(channels),
        receiving=tuple(channels if receiving is None else receiving),
        placement=tuple(map(tuple, placement)),
        micro_batches=tuple(micro_batches),
        kinds=_kinds(has_backward, split_backward),
        saved_bytes=tuple(saved_bytes or (0,) * len(placement[0])),
        transient_bytes=tuple(transient_bytes or (0,) * len(placement[0])),
        first_transient_bytes=tuple(first_transient_bytes or (0,) * len(placement[0])),
        gradient_bytes=tuple(gradient_bytes or (0,) * len(placement[0])),
        resident_bytes=tuple(resident_bytes or (0,) * len(placement[0])),
        waiting_bytes=tuple(waiting_bytes or saved_bytes or (0,) * len(placement[0])),
        waiting_gradients=tuple(waiting_gradient_bytes or (0,) * len(placement[0])),
        head_starts=tuple(head_starts or (None,) * len(placement[0])),
        workspace_bytes=workspace_bytes,
        reductions=tuple(reductions),
        issued=_issued(len(orders), orders, reductions, issued),
        user_lines=user_lines,
    )
    proof.each_action_once_on_its_rank()
    proof.each_backward_after_its_forward()
    proof.tags_tell_messages_apart()
    proof.each_send_has_one_receive()
    proof.messages_keep_their_order()
    proof.handed_over_values_are_there()
    proof.each_gradient_is_reduced_once()
    proof.nothing_blocks()
    return proof.report(memory_cap)


def _kinds(has_backward: bool, split_backward: bool) -> tuple[Kind, ...]:
    if not has_backward:
        return (Kind.FORWARD,)
    return tuple(Kind) if split_backward else (Kind.FORWARD, Kind.BACKWARD)


def _issued(
    num_ranks: int,
    orders: Orders,
    reductions: Sequence[Reduction],
    issued: Sequence[Sequence[tuple[str, int]]] | None,
) -> tuple[tuple[tuple[str, int], ...], ...]:
    if issued is not None:
        return tuple(map(tuple, issued))
    return tuple(
        tuple((r.group, len(orders[rank])) for r in reductions if rank in r.ranks)
        for rank in range(num_ranks)
    )


@dataclass(frozen=True)
class _Proof:
    """All that is to be proved, one method for each property."""

    orders: tuple[tuple[Action, ...], ...]
    channels: tuple[Channel, ...]
    receiving: tuple[Channel, ...]
    placement: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]
    kinds: tuple[Kind, ...]
    saved_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    first_transient_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]
    waiting_bytes: tuple[int, ...]
    waiting_gradients: tuple[int, ...]
    head_starts: tuple[HeadStart | None, ...]
    workspace_bytes: int
    reductions: tuple[Reduction, ...]
    issued: tuple[tuple[tuple[str, int], ...], ...]
    user_lines: Callable[[int], str] | None

    # -- small questions ---------------------------------------------------------------

    @cached_property
    def position(self) -> dict[Action, int]:
        """Where each action stands on its rank."""
        return {a: place for order in self.orders for place, a in enumerate(order)}

    def wrong(self, action: Action, text: str) -> InternalError:
        """Return the error that names the action's stage, micro-batch and code."""
        code = f" ({self.user_lines(action.stage)})" if self.user_lines else ""
        replica = f" of replica {action.replica}" if action.replica else ""
        return InternalError(
            f"wrong schedule: {text}: {action}, stage {action.stage}{replica}{code}, "
            f"micro-batch {action.micro_batch}"
        )

    def rank(self, replica: int, stage: int) -> int:
        """Return the rank of a stage."""
        return self.placement[replica][stage]

    def ends(self, channel: Channel) -> tuple[int, int]:
        """Return the ranks that a channel connects."""
        return (
            self.rank(channel.replica, channel.source),
            self.rank(channel.replica, channel.dest),
        )

    def travels(self, channel: Channel) -> bool:
        """Whether a channel's ends are on different ranks."""
        source, dest = self.ends(channel)
        return source != dest

    def micro_batch_order(self, kind: Kind, replica: int, stage: int) -> list[int]:
        """Return the micro-batches of one kind of action, in the order of its rank."""
        wanted = (kind, replica, stage)
        return [
            action.micro_batch
            for action in self.orders[self.rank(replica, stage)]
            if (action.kind, action.replica, action.stage) == wanted
        ]

    # -- the properties ----------------------------------------------------------------

    def each_action_once_on_its_rank(self) -> None:
        """Every action of every (replica, stage, micro-batch) is on its rank, once."""
        wanted = {
            Action(kind, stage, m, replica): rank
            for replica, ranks in enumerate(self.placement)
            for stage, rank in enumerate(ranks)
            for m in range(self.micro_batches[replica])
            for kind in self.kinds
        }
        seen: set[Action] = set()
        for rank, order in enumerate(self.orders):
            for action in order:
                if action not in wanted:
                    raise self.wrong(action, f"rank {rank} has an unknown action")
                if wanted[action] != rank:
                    raise self.wrong(
                        action, f"rank {rank} does an action of rank {wanted[action]}"
                    )
                if action in seen:
                    raise self.wrong(action, f"rank {rank} does an action twice")
                seen.add(action)
        for action, rank in wanted.items():
            if action not in seen:
                raise self.wrong(action, f"rank {rank} leaves out an action")

    def each_backward_after_its_forward(self) -> None:
        """On each rank the kinds of one micro-batch are in order: F, B, W."""
        for order in self.orders:
            for action in order:
                for earlier in self.kinds[: self.kinds.index(action.kind)]:
                    before = Action(
                        earlier, action.stage, action.micro_batch, action.replica
                    )
                    if self.position[before] > self.position[action]:
                        raise self.wrong(
                            action, f"an action stands before its {before}"
                        )

    def tags_tell_messages_apart(self) -> None:
        """No two channels from one rank to another have the same tag; all are legal."""
        used: dict[tuple[int, int, int], Channel] = {}
        for channel in self.channels:
            if not self.travels(channel):
                continue
            if not 0 <= channel.tag < _LARGEST_TAG:
                raise InternalError(f"wrong schedule: not a legal tag: {channel}")
            key = (*self.ends(channel), channel.tag)
            if key in used:
                raise InternalError(
                    f"wrong schedule: one tag twice between ranks {key[0]} and "
                    f"{key[1]}: {used[key]}; {channel}"
                )
            used[key] = channel

    def each_send_has_one_receive(self) -> None:
        """Both ends of each channel agree on peer, tag and signature."""
        sent = Counter(c for c in self.channels if self.travels(c))
        received = Counter(c for c in self.receiving if self.travels(c))
        for channel in sent - received:
            raise InternalError(
                f"wrong schedule: sent and not received: {channel} {channel.signature}"
            )
        for channel in received - sent:
            raise InternalError(
                f"wrong schedule: received and not sent: {channel} {channel.signature}"
            )

    def messages_keep_their_order(self) -> None:
        """The k-th message sent on a channel is the k-th one taken."""
        for c in self.channels:
            if not self.travels(c):
                continue
            sent = self.micro_batch_order(c.kind, c.replica, c.source)
            taken = self.micro_batch_order(c.kind, c.replica, c.dest)
            for number, (here, there) in enumerate(zip(sent, taken, strict=True)):
                if here != there:
                    raise self.wrong(
                        Action(c.kind, c.dest, there, c.replica),
                        f"message {number} of {c} is of micro-batch {here}, but is "
                        "taken for another",
                    )

    def handed_over_values_are_there(self) -> None:
        """A value that stays on its rank is made before it is used."""
        for c in self.channels:
            if self.travels(c):
                continue
            for m in range(self.micro_batches[c.replica]):
                source = Action(c.kind, c.source, m, c.replica)
                dest = Action(c.kind, c.dest, m, c.replica)
                if self.position[source] > self.position[dest]:
                    raise self.wrong(dest, f"an action before its {source}")
                end = Action(Kind.BACKWARD, c.source, m, c.replica)
                if (
                    not c.gradient
                    and self.position.get(end, self._end) < self.position[dest]
                ):
                    raise self.wrong(dest, f"what an action uses is freed by {end}")

    @property
    def _end(self) -> int:
        return 1 + max(map(len, self.orders))

    def each_gradient_is_reduced_once(self) -> None:
        """Each rank reduces each of its groups once, after the last backward."""
        groups = Counter(reduction.group for reduction in self.reductions)
        for group, number in groups.items():
            if number > 1:
                raise InternalError(f"wrong schedule: two reductions of '{group}'")
        for rank, issued in enumerate(self.issued):
            for group, _ in issued:
                if group not in groups:
                    raise InternalError(
                        f"wrong schedule: rank {rank} reduces an unknown '{group}'"
                    )
        for reduction in self.reductions:
            ranks = {self.rank(*lane) for lane in reduction.stages}
            if ranks != reduction.ranks:
                raise InternalError(
                    f"wrong schedule: '{reduction.group}' is on ranks {sorted(ranks)} "
                    f"and reduced on {sorted(reduction.ranks)}"
                )
            for rank in range(len(self.orders)):
                self._reduced_once(reduction, rank)

    def _reduced_once(self, reduction: Reduction, rank: int) -> None:
        places = [p for group, p in self.issued[rank] if group == reduction.group]
        if len(places) != (rank in reduction.ranks):
            raise InternalError(
                f"wrong schedule: rank {rank} reduces '{reduction.group}' "
                f"{len(places)} times"
            )
        lanes = {lane for lane in reduction.stages if self.rank(*lane) == rank}
        for action in self.orders[rank][places[0] :] if places else ():
            if (action.replica, action.stage) in lanes:
                raise self.wrong(
                    action, f"'{reduction.group}' is reduced before an action"
                )

    def nothing_blocks(self) -> None:
        """The events of all ranks have an order, even if every send waits."""
        events = Events()
        for rank, order in enumerate(self.orders):
            self._add_actions(events, rank, order)
        for channel in self.channels:
            if self.travels(channel):
                self._add_messages(events, channel)
        for rank, groups in enumerate(self.issued):
            self._add_reductions(events, rank, groups)
        stuck = events.find_cycle()
        if stuck:
            actions = [event[1] for event in stuck if isinstance(event[1], Action)]
            names = [str(e[1]) for e in stuck if isinstance(e[1], Action | str)]
            text = f"ranks wait for each other ({' <- '.join(dict.fromkeys(names))})"
            if actions:
                raise self.wrong(actions[0], text)
            raise InternalError(f"wrong schedule: {text}")

    def _add_actions(self, events: Events, rank: int, order: Sequence[Action]) -> None:
        previous: Event = ("begin", rank)
        for action in order:
            events.add(previous, ("wanted", action))
            events.add(("wanted", action), ("start", action))
            events.add(("start", action), ("computed", action))
            events.add(("computed", action), ("end", action))
            previous = ("end", action)
        events.add(previous, ("finish", rank))

    def _add_messages(self, events: Events, channel: Channel) -> None:
        """Each message: after its send and its receive are posted, before its use."""
        source_rank, _ = self.ends(channel)
        posted: Event | None = None
        for m in self.micro_batch_order(channel.kind, channel.replica, channel.dest):
            source = Action(channel.kind, channel.source, m, channel.replica)
            dest = Action(channel.kind, channel.dest, m, channel.replica)
            moved: Event = ("moved", (channel, m))
            events.add(("computed", source), moved)
            events.add(posted or ("wanted", dest), moved)
            events.add(moved, ("start", dest))
            posted = ("start", dest)
            backward = Action(Kind.BACKWARD, channel.source, m, channel.replica)
            if channel.gradient or Kind.BACKWARD not in self.kinds:
                events.add(moved, ("finish", source_rank))
            else:
                events.add(moved, ("end", backward))

    def _add_reductions(
        self, events: Events, rank: int, groups: Sequence[tuple[str, int]]
    ) -> None:
        previous: Event = ("begin", rank)
        for group, position in groups:
            here: Event = ("reduced", group)
            events.add(previous, here)
            order = self.orders[rank]
            if position:
                events.add(("end", order[position - 1]), here)
            if position < len(order):
                events.add(here, ("start", order[position]))
            previous = here

    # -- the figures -------------------------------------------------------------------

    def report(self, memory_cap: int | None) -> Report:
        """Return the figures; the peaks must be within the cap."""
        peaks = [self._peak(rank) for rank in range(len(self.orders))]
        for rank, (peak, _, action) in enumerate(peaks):
            if memory_cap is not None and peak > memory_cap and action is not None:
                raise self.wrong(
                    action, f"rank {rank} holds {peak:,} of {memory_cap:,} bytes"
                )
        travelling = [c for c in self.channels if self.travels(c)]
        return Report(
            peak_bytes=tuple(peak for peak, _, _ in peaks),
            peak_live=tuple(live for _, live, _ in peaks),
            num_actions=sum(map(len, self.orders)),
            num_messages=sum(self.micro_batches[c.replica] for c in travelling),
            num_reductions=len(self.reductions),
        )

    def _peak(self, rank: int) -> tuple[int, int, Action | None]:
        stages = {
            stage
            for ranks in self.placement
            for stage, where in enumerate(ranks)
            if where == rank
        }
        held = sum(self.resident_bytes[stage] for stage in stages)
        held += self.workspace_bytes
        most, most_live, live = held, 0, 0
        begun: set[tuple[Kind, int]] = set()
        posted: dict[Channel, int] = {}
        at: Action | None = None
        alive: dict[tuple[int, int, int], int] = {}
        for action in self.orders[rank]:
            key = (action.replica, action.stage, action.micro_batch)
            held -= sum(posted.values())
            posted |= self._posted(action)
            held += sum(posted.values())
            is_first = (action.kind, action.stage) not in begun
            begun.add((action.kind, action.stage))
            live += action.kind is Kind.FORWARD
            most_live = max(most_live, live)
            meanwhile, made, stays = self._bytes_of(action, is_first=is_first)
            now = held + meanwhile
            held += made + stays - alive.pop(key, 0)
            alive[key] = stays
            if max(now, held) > most or at is None:
                most, at = max(now, held, most), action
            live -= action.kind is self.kinds[-1]
        return most, most_live, at

    def _bytes_of(self, action: Action, *, is_first: bool) -> tuple[int, int, int]:
        """Return what an action needs while it runs, beyond what was there before.

        Then the gradients that it makes, and what of its micro-batch stays after it.
        """
        stage, split = action.stage, Kind.WEIGHT in self.kinds
        later = self.waiting_gradients[stage] if split else 0
        if action.kind is Kind.FORWARD:
            saved = self.saved_bytes[stage]
            return saved, 0, saved if action.kind is not self.kinds[-1] else 0
        if action.kind is Kind.WEIGHT:
            made = later if is_first else 0
            return made, made, 0
        stays = self.waiting_bytes[stage] if split else 0
        on_top, first_on_top = (
            self.transient_bytes[stage],
            self.first_transient_bytes[stage],
        )
        ahead = self.head_starts[stage]
        if ahead is not None and self._is_last(action):
            on_top, first_on_top = ahead.transient_bytes, ahead.only_transient_bytes
        if not is_first:
            return on_top, 0, stays
        return first_on_top, self.gradient_bytes[stage] - later, stays

    def _is_last(self, action: Action) -> bool:
        return action.micro_batch + 1 == self.micro_batches[action.replica]

    def _posted(self, action: Action) -> dict[Channel, int]:
        """Return the bytes of the receives that are posted once an action begins."""
        is_last = self._is_last(action)
        return {
            channel: 0 if is_last else channel.num_bytes
            for channel in self._taken[action.kind, action.replica, action.stage]
        }

    @cached_property
    def _taken(self) -> dict[tuple[Kind, int, int], list[Channel]]:
        """The channels that come from another rank, by what takes their messages."""
        taken = defaultdict(list)
        for channel in self.channels:
            if self.travels(channel):
                taken[channel.kind, channel.replica, channel.dest].append(channel)
        return taken
