"""The proof that no ranks wait for each other, with tags and without.

Where messages have no tags, what a rank begins is one chain: messages, sums, and what
tiles exchange in an action, forward or backward. `_Chain` begins all of it as a rank
does, in the order that its file gives (see `gemsc/messages/turns.py`). If the
chains of all ranks together have no cycle, each message being one event of two chains,
then there is always one that is first in all its chains: it can happen, even where a
rank runs only one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import pairwise

from gemsc.base.parts import sums_in_order
from gemsc.errors import InternalError
from gemsc.messages.turns import Turns
from gemsc.schedules.action import Action
from gemsc.schedules.proof import Proof
from gemsc.schedules.rank_step import (
    AllReduce,
    Event,
    Events,
    RankStep,
    Turn,
    Way,
    events_of,
    find_cycle,
)

_ALL = "all"  # what a rank begins is one chain


def nothing_blocks(proof: Proof) -> None:
    """The events of all ranks have an order, even if every send waits."""
    events = events_of(proof.ranks)
    stuck = [event[1] for event in find_cycle(events)]
    if not stuck:
        return
    actions = [subject[1] for subject in stuck if isinstance(subject, tuple)]
    actions = [action for action in actions if isinstance(action, Action)]
    sums = [subject for subject in stuck if isinstance(subject, AllReduce)]
    names = dict.fromkeys(map(str, (*actions, *sums)))
    text = f"ranks wait for each other ({' <- '.join(names)})"
    if actions:
        raise proof.wrong(actions[0], text)
    raise proof.wrong_sum(sums[0].group, text)


def one_after_the_other(proof: Proof) -> None:
    """All ranks can begin what they do together in their order, one at a time.

    From one rank to another messages are received as they are sent, and the chains of
    all ranks have no cycle.
    """
    chains = [_Chain(proof, rank).events() for rank in proof.ranks]
    _first_in_first_out(proof, chains)
    events: Events = {event: [] for chain in chains for event in chain}
    for chain in chains:
        for before, after in pairwise(chain):
            events[after].append(before)
    if stuck := find_cycle(events):
        names = " <- ".join(map(_title, stuck))
        text = f"without tags ranks wait for each other ({names})"
        raise _wrong(proof, stuck[0], text)


def _first_in_first_out(proof: Proof, chains: Sequence[Sequence[Event]]) -> None:
    """The k-th message from one rank to another is sent as its k-th receive begins."""
    ends: dict[tuple[int, int], tuple[list[Event], list[Event]]] = {}
    for rank, chain in zip(proof.ranks, chains, strict=True):
        for event in chain:
            if event[0] == "moved":
                source, dest, _ = _way(event)
                both = ends.setdefault((source, dest), ([], []))
                both[rank.rank == dest].append(event)
    for (source, dest), both in ends.items():
        for sent, received in zip(*both, strict=True):
            if sent != received:
                text = f"rank {source} sends {_title(sent)} where rank {dest} receives "
                text += _title(received)
                raise _wrong(proof, sent, text)


class _Chain:
    """What one rank begins in a step, each thing in its turn."""

    def __init__(self, proof: Proof, rank: RankStep) -> None:
        self.proof = proof
        self.rank = rank
        self.turns = Turns(lambda entry: _ALL)
        self.turns.begin(part for turn in rank.order for part in _parts(rank, turn))
        self.begun: list[Event] = []
        self.count: Counter[Hashable] = Counter()  # of what has begun
        self.expected: Counter[Way] = Counter()
        self.taken: Counter[Way] = Counter()
        self.total = Counter(
            (message.peer, rank.rank, message.tag)
            for action in rank.actions
            for message in rank.run(action).receives
        )

    def events(self) -> list[Event]:
        """Return what begins, in order.

        Raises:
            InternalError: the rank needs something whose turn does not come.
        """
        sums = sums_in_order(range(len(self.proof.task.stages)))
        for step in self.rank.steps:
            if isinstance(step, Action):
                self._act(step)
            elif isinstance(step, AllReduce) and step.group in sums:
                self._offer(step.group, ("summed", step))
            else:
                self._end()
                if isinstance(step, AllReduce):
                    self.begun.append(("summed", step))
        self._end()
        return self.begun

    def _act(self, action: Action) -> None:
        number, run = self.rank.rank, self.rank.run(action)
        for message in run.receives:
            if message.peer != number:
                self._receive(action, (message.peer, number, message.tag))
        if len(self.rank.tiles) > 1:
            lane = action.replica, action.stage
            if self.turns.next(_ALL) != lane:
                raise self._too_early(action, "what its tiles exchange")
            self._offer(lane, ("together", (self.rank.tiles, action)))
        for message in run.sends:
            if message.peer != number:
                self._offer((number, message.peer, message.tag))

    def _receive(self, action: Action, way: Way) -> None:
        """Wait for a message; post the receive of the next one."""
        self._expect(way)
        if self.count[way] == self.taken[way]:
            raise self._too_early(action, f"a message of rank {way[0]}, tag {way[2]}")
        self.taken[way] += 1
        if self.taken[way] < self.total[way]:
            self._expect(way)

    def _expect(self, way: Way) -> None:
        if self.expected[way] == self.taken[way]:
            self.expected[way] += 1
            self._offer(way)

    def _offer(self, what: Hashable, event: Event | None = None) -> None:
        """Begin something now, or when its turn comes; without an event a message."""
        self.turns.offer(what, partial(self._begin, what, event))

    def _begin(self, what: Hashable, event: Event | None) -> None:
        self.begun.append(event or ("moved", (what, self.count[what])))
        self.count[what] += 1

    def _too_early(self, action: Action, what: str) -> InternalError:
        turn = self.turns.next(_ALL) or "nothing"
        text = f"rank {self.rank.rank} needs {what}, when it is the turn of {turn}"
        return self.proof.wrong(action, text)

    def _end(self) -> None:
        if self.turns.next(_ALL) is not None:
            what = "the end of its step"
            raise self._too_early(self.rank.actions[-1], what)


def _parts(rank: RankStep, turn: Turn) -> list[Hashable]:
    """Return what begins in a turn: a message between grids is one to each rank."""
    sends = [(rank.rank, message.peer, message.tag) for message in turn.sends]
    receives = [(message.peer, rank.rank, message.tag) for message in turn.receives]
    return [*sends, *receives, *([] if turn.collective is None else [turn.collective])]


def _way(event: Event) -> Way:
    _, what = event
    assert isinstance(what, tuple)
    way: Way = what[0]
    return way


def _wrong(proof: Proof, event: Event, text: str) -> InternalError:
    """Return the error that names the action of an event."""
    _, what = event
    if isinstance(what, AllReduce):
        return proof.wrong_sum(what.group, text)
    assert isinstance(what, tuple)
    place, which = what
    if isinstance(which, Action):
        return proof.wrong(which, text)
    return proof.wrong(proof.sent[place][which][0], text)


def _title(event: Event) -> str:
    name, what = event
    if name == "summed":
        return str(what)
    assert isinstance(what, tuple)
    place, which = what
    if name == "together":
        return f"{which} of ranks {place}"
    return f"tag {place[2]} of micro-batch {which} from rank {place[0]} to {place[1]}"
