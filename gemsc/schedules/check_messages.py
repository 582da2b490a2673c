"""The proof of messages: between stages, within a rank, and between tiles."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from gemsc.schedules.action import Action, Kind
from gemsc.schedules.proof import Posted, Proof
from gemsc.schedules.rank_step import GridCall, MessageEnd, Way

LARGEST_TAG = 32767  # MPI guarantees tags up to this one


def each_send_has_one_receive(proof: Proof) -> None:
    """The k-th message sent is the k-th received, with the same values."""
    for way in sorted(proof.sent.keys() | proof.received.keys()):
        sent, received = proof.sent.get(way, []), proof.received.get(way, [])
        for here, there in zip_longest(sent, received):
            _agree(proof, way, here, there)


def _agree(
    proof: Proof, way: Way, sent: Posted | None, received: Posted | None
) -> None:
    source, dest, _ = way
    if received is None:
        assert sent is not None
        action, message = sent
        text = f"rank {source} sends what rank {dest} does not receive, {message}"
        raise proof.wrong(action, text)
    if sent is None:
        action, message = received
        text = f"rank {dest} receives what rank {source} does not send, {message}"
        raise proof.wrong(action, text)
    (made, here), (used, there) = sent, received
    if here.values != there.values:
        wanted = ", ".join(there.values)
        text = f"rank {source} sends {here}, but rank {dest} receives {wanted}"
        raise proof.wrong(made, text)
    if made.micro_batch != used.micro_batch:
        raise proof.wrong(
            used,
            f"rank {dest} uses in another micro-batch what rank {source} sends of "
            f"micro-batch {made.micro_batch}, {here}",
        )


def tags_tell_messages_apart(proof: Proof) -> None:
    """All tags are legal, and what shares one on its way comes from one action."""
    of_tiles = {
        (rank.rank, message.peer, message.tag)
        for rank in proof.ranks
        for run in rank.runs.values()
        for call in run.calls
        for message in call.sends
    }
    for way, messages in proof.sent.items():
        action, first = messages[0]
        if not 0 <= way[2] < LARGEST_TAG:
            raise proof.wrong(action, f"not a legal tag: {first}")
        seen = set()
        for other, message in messages:
            same = replace(other, micro_batch=action.micro_batch) == action
            alone = other not in seen and way not in of_tiles
            if not same or not alone:
                raise proof.wrong(
                    other,
                    f"one tag twice between ranks {way[0]} and {way[1]}: {first}; "
                    f"{message}",
                )
            seen.add(other)


def handed_over_values_are_there(proof: Proof) -> None:
    """A value that stays on its rank is made before it is used, and not freed."""
    for way, sent in proof.sent.items():
        if way[0] != way[1]:
            continue
        place = proof.position[way[0]]
        for (made, message), (used, _) in zip(sent, proof.received[way], strict=True):
            if place[made] > place[used]:
                text = f"uses a value before {made} computes it, {message}"
                raise proof.wrong(used, f"rank {way[0]} {text}")
            end = replace(made, kind=Kind.BACKWARD)
            freed = made.kind is Kind.FORWARD and end in place
            if freed and place[end] < place[used]:
                text = f"rank {way[0]} uses a value that {end} has freed, {message}"
                raise proof.wrong(used, text)


def tiles_go_in_step(proof: Proof) -> None:
    """All tiles do the same actions, and make calls with others in one order."""
    for group in proof.groups:
        first = proof.ranks[group[0]]
        for number in group:
            rank = proof.ranks[number]
            if rank.tiles != group:
                text = f"rank {number} is a tile of ranks {group}, "
                text += f"not of {rank.tiles}"
                raise proof.wrong(rank.actions[0], text)
            for here, there in zip(rank.actions, first.actions, strict=True):
                if here != there:
                    text = f"rank {number} does {here} where the tile on rank "
                    raise proof.wrong(there, f"{text}{first.rank} does an action")
        for kind, replica, stage in first.runs if len(group) > 1 else ():
            key = kind, replica, stage
            left = {n: deque(proof.ranks[n].runs[key].calls) for n in group}
            while any(left.values()):
                _meet(proof, Action(kind, stage, 0, replica), left)


def _meet(proof: Proof, action: Action, left: Mapping[int, deque[GridCall]]) -> None:
    """Let ranks make a call that all who take part in it have come to.

    `left` are the calls of an action that each rank of the grid has not made yet.
    Ranks without something to give or to get do not take part.
    """
    for number, calls in left.items():
        ranks = calls[0].ranks if calls else ()
        if number in ranks and all(_fits(calls[0], left.get(n)) for n in ranks):
            joint = {n: left[n].popleft() for n in calls[0].ranks}
            _messages_of_tiles(proof, action, joint)
            return
    leader, first = next((n, calls[0]) for n, calls in left.items() if calls)
    peers = (n for n in first.ranks if not _fits(first, left.get(n)))
    peer = next(peers, leader)  # itself, if it is not among them
    other = next(iter(left.get(peer, ())), None)
    if peer in left and (other is None or other.method != first.method):
        text = f"rank {peer} does {other or 'nothing'} where the tile on rank "
        raise proof.wrong(action, f"{text}{leader} does {first}")
    text = f"rank {leader} does {first} together with ranks {first.ranks}, rank "
    raise proof.wrong(action, f"{text}{peer} with others")


def _messages_of_tiles(
    proof: Proof, action: Action, calls: Mapping[int, GridCall]
) -> None:
    """Make sure that what tiles send each other in one call is what they await."""
    sent: dict[Way, MessageEnd] = {}
    received: dict[Way, MessageEnd] = {}
    for number, call in calls.items():
        sent |= {(number, end.peer, end.tag): end for end in call.sends}
        received |= {(end.peer, number, end.tag): end for end in call.receives}
    for way in sorted(sent.keys() | received.keys()):
        given = ", ".join(sent[way].values) if way in sent else "nothing"
        taken = ", ".join(received[way].values) if way in received else "nothing"
        if given != taken:
            raise proof.wrong(
                action,
                f"in {next(iter(calls.values()))} rank {way[0]} sends {given} with "
                f"tag {way[2]}, and the tile on rank {way[1]} receives {taken}",
            )


def _fits(call: GridCall, others: Sequence[GridCall] | None) -> bool:
    """Whether the next call of a rank is this one, with the same ranks."""
    if not others:
        return False
    return (others[0].method, others[0].ranks) == (call.method, call.ranks)
