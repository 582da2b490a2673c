"""Prove a program before it is written: all is done, all messages match, none blocks.

The proof takes what every rank's file says it does, no times and no policies. It models
what a rank does with it:

    for each action:
        for each message that it needs: post its receive, if that is not posted yet;
            wait for it; post the receive of the next micro-batch
        compute; on a tile, in step with the other tiles of its grid
        send what others need, without waiting
        a backward waits until what its own forward sent has left
    all-reduce gradients as soon as they are complete, one after the other: in a
        stage's last action already, which never waits for that
    wait for these, and until what the backwards sent has left

and it supposes the worst of the network: no message moves before its receive is posted.
A rank does not really wait for what it sent; but only then is there as much memory as
was predicted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, zip_longest

from gemsc.base.parts import Part, make_whole, parts_of, sums_in_order
from gemsc.errors import InternalError
from gemsc.schedules.action import Action, Kind, Task, Timed
from gemsc.schedules.held import held_bytes
from gemsc.schedules.rank_step import (
    AllReduce,
    End,
    GridCall,
    MessageEnd,
    RankStep,
    Step,
    Way,
    events_of,
    find_cycle,
)

LARGEST_TAG = 32767  # MPI guarantees tags up to this one

KINDS = tuple(Kind)  # in the order in which a micro-batch has them

Posted = tuple[Action, MessageEnd]


def prove(
    ranks: Sequence[RankStep],
    task: Task,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    shared: Mapping[str, Sequence[int]] | None = None,
    weights: Sequence[Collection[str]] = (),
    copies: int = 1,
) -> None:
    """Prove that what the ranks do, together, is one correct step.

    Args:
        ranks: what each rank does, by rank.
        task: what is to be done; its ranks are numbers of `groups`.
        groups: the ranks of each grid of tiles; by default each rank is one alone.
        shared: the stages that hold each group of parameters, `stage2` or a tied one.
        weights: the parameters and buffers of each stage, if ranks hold parts of them.
        copies: data-parallel copies of these ranks.

    Raises:
        InternalError: the program is wrong; names stage, micro-batch and user's line.
    """
    proof = _Proof(
        ranks=tuple(ranks),
        task=task,
        groups=tuple(map(tuple, groups or [(r,) for r in range(len(ranks))])),
        shared=shared or {},
        weights=weights,
        copies=copies,
    )
    proof.each_action_once_on_its_rank()
    proof.each_backward_after_its_forward()
    proof.each_send_has_one_receive()
    proof.tags_tell_messages_apart()
    proof.tiles_go_in_step()
    proof.handed_over_values_are_there()
    proof.branches_are_on_one_tile()
    proof.parts_make_whole_weights()
    proof.each_gradient_is_reduced_once()
    proof.nothing_blocks()
    proof.sums_are_in_order()
    proof.memory_is_within_the_cap()


@dataclass(frozen=True)
class _Proof:
    """All that is to be proved, one method for each property."""

    ranks: tuple[RankStep, ...]
    task: Task
    groups: tuple[tuple[int, ...], ...]
    shared: Mapping[str, Sequence[int]]
    weights: Sequence[Collection[str]]
    copies: int

    # -- small questions ---------------------------------------------------------------

    @cached_property
    def position(self) -> list[dict[Action, int]]:
        """For each rank where each action stands in it."""
        return [{a: i for i, a in enumerate(rank.actions)} for rank in self.ranks]

    def ranks_of(self, replica: int, stage: int) -> tuple[int, ...]:
        """Return the ranks that run a stage."""
        return self.groups[self.task.placement[replica][stage]]

    def lines(self, stage: int) -> str:
        """Return the user's lines of a stage, as any of its ranks knows them."""
        for rank in self.ranks:
            for (_, _, index), run in rank.runs.items():
                if index == stage and run.lines:
                    return f"stage {stage} ({run.lines})"
        return f"stage {stage}"

    def wrong(self, action: Action, text: str) -> InternalError:
        """Return the error that names the action's stage, code and micro-batch."""
        replica = f" of replica {action.replica}" if action.replica else ""
        return InternalError(
            f"wrong program: {text}: {action}, {self.lines(action.stage)}{replica}, "
            f"micro-batch {action.micro_batch}"
        )

    def wrong_sum(self, group: str, text: str) -> InternalError:
        """Return the error that names the stages whose gradients are added up."""
        stages = ", ".join(self.lines(stage) for stage in self.stages.get(group, ()))
        held = f": {stages}, after micro-batch {self.task.micro_batches[0] - 1}"
        return InternalError(f"wrong program: {text}{held if stages else ''}")

    # -- actions -----------------------------------------------------------------------

    @cached_property
    def wanted(self) -> dict[Action, tuple[int, ...]]:
        """All actions of a step, each with its ranks."""
        found = [
            Action(kind, stage, m, replica)
            for replica, row in enumerate(self.task.placement)
            for stage in range(len(row))
            for m in range(self.task.micro_batches[replica])
            for kind in self.task.kinds[:2]
        ]
        found += [
            action for rank in self.ranks for action in sorted(rank.deferred, key=str)
        ]
        return {each: self.ranks_of(each.replica, each.stage) for each in found}

    def each_action_once_on_its_rank(self) -> None:
        """Every action of every (replica, stage, micro-batch) is on its ranks, once."""
        seen = set()
        for rank in self.ranks:
            number = rank.rank
            for action in rank.actions:
                if action not in self.wanted:
                    raise self.wrong(action, f"rank {number} has an unknown action")
                if number not in self.wanted[action]:
                    others = " and ".join(map(str, self.wanted[action]))
                    raise self.wrong(
                        action, f"rank {number} does an action of rank {others}"
                    )
                if (action, number) in seen:
                    raise self.wrong(action, f"rank {number} does an action twice")
                if action.kind is Kind.WEIGHT and action not in rank.deferred:
                    text = f"rank {number} computes weight gradients twice"
                    raise self.wrong(action, text)
                seen.add((action, number))
        for action, places in self.wanted.items():
            for number in places:
                if (action, number) not in seen:
                    raise self.wrong(action, f"rank {number} leaves out an action")

    def each_backward_after_its_forward(self) -> None:
        """On each rank the kinds of one micro-batch are in order: F, B, W."""
        for rank, position in zip(self.ranks, self.position, strict=True):
            for action in rank.actions:
                for earlier in KINDS[: KINDS.index(action.kind)]:
                    before = replace(action, kind=earlier)
                    if position[before] > position[action]:
                        text = f"rank {rank.rank} does an action before its {before}"
                        raise self.wrong(action, text)

    # -- messages ----------------------------------------------------------------------

    @cached_property
    def sent(self) -> dict[Way, list[Posted]]:
        """What is sent each way, in order; from a stage to another of its rank, too."""
        return self._messages(sends=True)

    @cached_property
    def received(self) -> dict[Way, list[Posted]]:
        """What is received each way, in order."""
        return self._messages(sends=False)

    def _messages(self, *, sends: bool) -> dict[Way, list[Posted]]:
        found: dict[Way, list[Posted]] = defaultdict(list)
        for rank in self.ranks:
            for action in rank.actions:
                run = rank.run(action)
                for message in run.sends if sends else run.receives:
                    ends = rank.rank, message.peer
                    way = (*(ends if sends else ends[::-1]), message.tag)
                    found[way].append((action, message))
        return found

    def each_send_has_one_receive(self) -> None:
        """The k-th message sent is the k-th received, with the same values."""
        for way in sorted(self.sent.keys() | self.received.keys()):
            sent, received = self.sent.get(way, []), self.received.get(way, [])
            if way[0] == way[1]:  # handed over, in any order
                sent, received = map(_by_micro_batch, (sent, received))
            for here, there in zip_longest(sent, received):
                self._agree(way, here, there)

    def _agree(self, way: Way, sent: Posted | None, received: Posted | None) -> None:
        source, dest, _ = way
        if received is None:
            assert sent is not None
            action, message = sent
            text = f"rank {source} sends what rank {dest} does not receive, {message}"
            raise self.wrong(action, text)
        if sent is None:
            action, message = received
            text = f"rank {dest} receives what rank {source} does not send, {message}"
            raise self.wrong(action, text)
        (made, here), (used, there) = sent, received
        if here.values != there.values:
            wanted = ", ".join(there.values)
            text = f"rank {source} sends {here}, but rank {dest} receives {wanted}"
            raise self.wrong(made, text)
        if made.micro_batch != used.micro_batch:
            raise self.wrong(
                used,
                f"rank {dest} uses in another micro-batch what rank {source} sends of "
                f"micro-batch {made.micro_batch}, {here}",
            )

    def tags_tell_messages_apart(self) -> None:
        """All tags are legal, and what shares one on its way comes from one action."""
        of_tiles = {
            (rank.rank, message.peer, message.tag)
            for rank in self.ranks
            for run in rank.runs.values()
            for call in run.calls
            for message in call.sends
        }
        for way, messages in self.sent.items():
            action, first = messages[0]
            if not 0 <= way[2] < LARGEST_TAG:
                raise self.wrong(action, f"not a legal tag: {first}")
            seen = set()
            for other, message in messages:
                same = replace(other, micro_batch=action.micro_batch) == action
                alone = other not in seen and way not in of_tiles
                if not same or not alone or message != first:
                    raise self.wrong(
                        other,
                        f"one tag twice between ranks {way[0]} and {way[1]}: {first}; "
                        f"{message}",
                    )
                seen.add(other)

    def handed_over_values_are_there(self) -> None:
        """A value that stays on its rank is made before it is used, and not freed."""
        for way, sent in self.sent.items():
            if way[0] != way[1]:
                continue
            place = self.position[way[0]]
            received = _by_micro_batch(self.received[way])
            pairs = zip(_by_micro_batch(sent), received, strict=True)
            for (made, message), (used, _) in pairs:
                if place[made] > place[used]:
                    text = f"uses a value before {made} computes it, {message}"
                    raise self.wrong(used, f"rank {way[0]} {text}")
                end = replace(made, kind=Kind.BACKWARD)
                freed = made.kind is Kind.FORWARD and end in place
                if freed and place[end] < place[used]:
                    text = f"rank {way[0]} uses a value that {end} has freed, {message}"
                    raise self.wrong(used, text)

    # -- tiles -------------------------------------------------------------------------

    def tiles_go_in_step(self) -> None:
        """All tiles do the same actions, and make calls with others in one order."""
        for group in self.groups:
            first = self.ranks[group[0]]
            for number in group:
                rank = self.ranks[number]
                if rank.tiles != group:
                    text = f"rank {number} is a tile of ranks {group}, "
                    text += f"not of {rank.tiles}"
                    raise self.wrong(rank.actions[0], text)
                for here, there in zip(rank.actions, first.actions, strict=True):
                    if here != there:
                        text = f"rank {number} does {here} where the tile on rank "
                        raise self.wrong(there, f"{text}{first.rank} does an action")
            for kind, replica, stage in first.runs if len(group) > 1 else ():
                key = kind, replica, stage
                left = {n: deque(self.ranks[n].runs[key].calls) for n in group}
                while any(left.values()):
                    self._meet(Action(kind, stage, 0, replica), left)

    def _meet(self, action: Action, left: Mapping[int, deque[GridCall]]) -> None:
        """Let ranks make a call that all who take part in it have come to.

        `left` are the calls of an action that each rank of the grid has not made yet.
        Ranks without something to give or to get do not take part.
        """
        for number, calls in left.items():
            ranks = calls[0].ranks if calls else ()
            if number in ranks and all(_fits(calls[0], left.get(n)) for n in ranks):
                together = {n: left[n].popleft() for n in calls[0].ranks}
                self._messages_of_tiles(action, together)
                return
        leader, first = next((n, calls[0]) for n, calls in left.items() if calls)
        peers = (n for n in first.ranks if not _fits(first, left.get(n)))
        peer = next(peers, leader)  # itself, if it is not among them
        other = next(iter(left.get(peer, ())), None)
        if peer in left and (other is None or other.method != first.method):
            text = f"rank {peer} does {other or 'nothing'} where the tile on rank "
            raise self.wrong(action, f"{text}{leader} does {first}")
        text = f"rank {leader} does {first} together with ranks {first.ranks}, rank "
        raise self.wrong(action, f"{text}{peer} with others")

    def _messages_of_tiles(self, action: Action, calls: Mapping[int, GridCall]) -> None:
        """Make sure that what tiles send each other in one call is what they await."""
        sent: dict[Way, MessageEnd] = {}
        received: dict[Way, MessageEnd] = {}
        for number, call in calls.items():
            sent |= {(number, each.peer, each.tag): each for each in call.sends}
            received |= {(each.peer, number, each.tag): each for each in call.receives}
        for way in sorted(sent.keys() | received.keys()):
            given = ", ".join(sent[way].values) if way in sent else "nothing"
            taken = ", ".join(received[way].values) if way in received else "nothing"
            if given != taken:
                raise self.wrong(
                    action,
                    f"in {next(iter(calls.values()))} rank {way[0]} sends {given} with "
                    f"tag {way[2]}, and the tile on rank {way[1]} receives {taken}",
                )

    # -- gradients ---------------------------------------------------------------------

    @cached_property
    def stages(self) -> dict[str, Sequence[int]]:
        """The stages of each group of parameters, and of each group of parts."""
        of_parts = {parts_of(group): found for group, found in self.shared.items()}
        return {**self.shared, **of_parts}

    def branches_are_on_one_tile(self) -> None:
        """All ranks of a grid say alike which one of them alone holds what.

        On tiles, one of the ranks that share a tile does.
        """
        for group in self.groups:
            first = self.ranks[group[0]]
            said = [self.ranks[number].placed for number in group]
            for place, number in enumerate(group):
                rank, is_right, wanted = self.ranks[number], True, {}
                for path, holder in first.placed.items():
                    count = len(group) // len({own.get(path) for own in said})
                    is_right &= 0 <= holder < count > 1
                    wanted[path] = place - place % count + holder
                if rank.placed != wanted or not is_right:
                    text = f"rank {number} holds branches as {rank.placed}, rank "
                    text += f"{first.rank} of its grid as {first.placed}"
                    raise self.wrong(rank.actions[0], text)

    def parts_make_whole_weights(self) -> None:
        """Each grid holds all of each weight, and all grids cut it alike."""
        cut = {name for rank in self.ranks for name in rank.parts}
        held: dict[str, set[Part | None]] = {}
        for stage, names in enumerate(self.weights):
            for replica, name in product(range(len(self.task.placement)), names):
                if name not in cut:
                    continue
                ranks = self.ranks_of(replica, stage)
                here = {self.ranks[number].parts.get(name) for number in ranks}
                parts = [part for part in here if part is not None]
                if held.setdefault(name, here) != here or not make_whole(parts):
                    text = f"ranks {ranks} hold other parts of '{name}' than all of it"
                    raise self.wrong_sum(f"stage{stage}", text)

    def holders(self, group: str) -> dict[str, dict[int, tuple[int, ...]]]:
        """Return what each rank adds up of a group, and over which ranks.

        Over all that hold the same: of what all hold as a whole over all of them, of
        parts, and of what is on one tile of each grid, over those with the same.
        """
        stages = self.shared[group]
        rows = self.task.placement if self.task.has_backward else ()
        ranks = {n for row in rows for s in stages for n in self.groups[row[s]]}
        names, is_stage = {group}, len(stages) == 1
        if is_stage:
            names = {*(self.weights[stages[0]] if self.weights else ())}
            names -= self.shared.keys()
        alike: dict[frozenset[tuple[str, Part | None]], list[int]] = defaultdict(list)
        for number in sorted(ranks):
            alike[self.ranks[number].apart(names)].append(number)
        if sum(map(len, alike)) != len({each for parts in alike for each in parts}):
            text = "ranks hold some parts of it alike, and others not"
            raise self.wrong_sum(group, f"'{group}': {text}")
        of_parts = {n: tuple(same) for cut, same in alike.items() if cut for n in same}
        whole = dict.fromkeys(ranks, tuple(sorted(ranks)))
        if is_stage:
            return {group: whole, parts_of(group): of_parts}
        return {group: of_parts or whole}

    def each_gradient_is_reduced_once(self) -> None:
        """Each rank reduces each of its groups once, after the last backward."""
        wanted: list[dict[str, tuple[int, ...]]] = [{} for _ in self.ranks]
        for group in self.shared:
            for key, holders in self.holders(group).items():
                for number, ranks in holders.items():
                    if len(ranks) * self.copies > 1:
                        wanted[number][key] = ranks
        for rank, own in zip(self.ranks, wanted, strict=True):
            for place, step in enumerate(rank.steps):
                if isinstance(step, AllReduce):
                    self._reduces(rank, step, rank.steps[place:], own)
            begun = [s.group for s in rank.steps if isinstance(s, AllReduce)]
            for group in own:
                if begun.count(group) != 1:
                    times = f"{begun.count(group)} times"
                    text = f"rank {rank.rank} all-reduces '{group}' {times}"
                    raise self.wrong_sum(group, text)
            self._ends(rank, begun)

    def _reduces(
        self,
        rank: RankStep,
        step: AllReduce,
        later: Sequence[Step],
        wanted: Mapping[str, tuple[int, ...]],
    ) -> None:
        if step.group not in wanted:
            text = f"rank {rank.rank} all-reduces an unknown '{step.group}'"
            raise self.wrong_sum(step.group, text)
        if step.ranks != wanted[step.group]:
            text = f"'{step.group}' is on ranks {wanted[step.group]}, and rank "
            text += f"{rank.rank} all-reduces it over {step.ranks}"
            raise self.wrong_sum(step.group, text)
        for action in later:
            if isinstance(action, Action) and action.stage in self.stages[step.group]:
                text = f"rank {rank.rank} starts {step} before an action"
                raise self.wrong(action, text)

    def _ends(self, rank: RankStep, begun: Sequence[str]) -> None:
        """Make sure that a step ends when all is there."""
        wanted = [End.UPDATED] if self.task.has_backward else []
        ends = [step for step in rank.steps if isinstance(step, End)]
        if begun or End.REDUCED in ends:
            wanted = [End.REDUCED, *wanted]
        if ends != wanted or [*rank.steps[len(rank.steps) - len(ends) :]] != ends:
            group = begun[0] if begun else next(iter(self.shared), "")
            text = f"rank {rank.rank} does not end its step with {' and '.join(wanted)}"
            raise self.wrong_sum(group, text)

    # -- order -------------------------------------------------------------------------

    def nothing_blocks(self) -> None:
        """The events of all ranks have an order, even if every send waits."""
        events = events_of(self.ranks, waits=self.task.has_backward)
        stuck = [event[1] for event in find_cycle(events)]
        if not stuck:
            return
        actions = [each[1] for each in stuck if isinstance(each, tuple)]
        actions = [each for each in actions if isinstance(each, Action)]
        sums = [each for each in stuck if isinstance(each, AllReduce)]
        names = dict.fromkeys(map(str, (*actions, *sums)))
        text = f"ranks wait for each other ({' <- '.join(names)})"
        if actions:
            raise self.wrong(actions[0], text)
        raise self.wrong_sum(sums[0].group, text)

    def sums_are_in_order(self) -> None:
        """Each rank starts its sums in the order in which they start within actions."""
        order = sums_in_order(range(len(self.task.stages)))
        for rank in self.ranks:
            begun = [step.group for step in rank.steps if isinstance(step, AllReduce)]
            found = [group for group in begun if group in order]
            for group, first in zip(found, sorted(found, key=order.index), strict=True):
                if group != first:
                    text = f"rank {rank.rank} all-reduces '{group}' before '{first}'"
                    raise self.wrong_sum(first, text)

    # -- memory ------------------------------------------------------------------------

    def memory_is_within_the_cap(self) -> None:
        """No rank holds more than the task allows."""
        cap = self.task.memory_cap
        if cap is None:
            return
        for rank in self.ranks:
            group = self.groups.index(rank.tiles)
            resident = self.task.resident_bytes(group)
            actions = [Timed(action, 0.0, 0.0) for action in rank.actions]
            for held in held_bytes(self.task, group, actions):
                if resident + held.total > cap:
                    text = f"rank {rank.rank} holds {resident + held.total:,} of "
                    raise self.wrong(held.action, f"{text}{cap:,} bytes")


def _fits(call: GridCall, others: Sequence[GridCall] | None) -> bool:
    """Whether the next call of a rank is this one, with the same ranks."""
    if not others:
        return False
    return (others[0].method, others[0].ranks) == (call.method, call.ranks)


def _by_micro_batch(posted: list[Posted]) -> list[Posted]:
    return sorted(posted, key=lambda each: each[0].micro_batch)
