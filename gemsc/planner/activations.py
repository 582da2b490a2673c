"""What a stage keeps of a micro-batch until its backward, and what that one needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from gemsc.ir import meta
from gemsc.ir.flow import external_inputs, flow, inner_flow, made_once, segments_of
from gemsc.ir.program import Program

Storages = Mapping[int, int]  # storage -> bytes


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one stage and one micro-batch.

    `kept` stay from the forward to the end of the backward. `transient` come on top for
    a while in the backward, at most, where blocks are recomputed or brought back;
    `first_transient` counts the gradients of parameters with them, which the first
    backward of a step makes one after the other. `moved` wait in host memory. In a
    split backward `waiting` stay from the end of its first part to that of the second.

    `working` and `first_working` are what gradients on their way add to the highest of
    these moments, or lift another one above it.
    """

    kept: int
    transient: int = 0
    first_transient: int = 0
    moved: int = 0
    waiting: int = 0
    working: int = 0
    first_working: int = 0


@dataclass(frozen=True, slots=True)
class _SavedPart:
    """A segment, or a node of none: what stays of it, what its backward needs.

    What `waits` is left by the first part of a split backward; the gradients of these
    weights come with the second one then.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    stays: Storages
    needs: Storages
    waits: Storages = field(default_factory=dict)

    def as_sent(self, sent: Storages) -> _SavedPart:
        """Return it with no more of a storage than is `sent`: of a view, the view."""

        def least(storages: Storages) -> Storages:
            return {key: min(n, sent.get(key, n)) for key, n in storages.items()}

        return replace(
            self,
            stays=least(self.stays),
            needs=least(self.needs),
            waits=least(self.waits),
        )

    @property
    def gradients(self) -> int:
        """The bytes of its parameters' gradients, as far as they come with it."""
        made = sum(meta.facts(node).trained_bytes for node in self.nodes)
        return made - self.deferred

    @property
    def deferred(self) -> int:
        """The bytes of weight gradients that wait."""
        return sum(meta.facts(n).weight_bytes for n in self.nodes) if self.waits else 0


@dataclass(frozen=True, slots=True)
class _Moment:
    """The backward of a part begins.

    Alive are `held` bytes whatever node of it runs, what of `needs` is of a node that
    is still to come, and what is `waiting`. Of later nodes there are the `gradients`.
    """

    part: _SavedPart
    held: int
    needs: Storages
    waiting: Storages
    gradients: int

    @property
    def num_bytes(self) -> int:
        """What is alive of activations."""
        return self.held + _size(self.needs) + _size(self.waiting)


def activations(program: Program, *, split: bool = False) -> list[Activations]:
    """Return what each stage keeps of a micro-batch.

    With `split`, weight gradients come in a second part of the backward.

    What an earlier stage on the same rank keeps already, longer, counts there only, and
    waits there for the weight gradients of both; but each stage has a copy of its own
    of what it reads of the batch.
    """
    placement = program.require_placement()
    row = placement.ranks[0]
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    batch = _union(dict(meta.facts(node).storages) for node in inputs)
    saved: list[Activations] = []
    held: list[Storages] = []
    stages = range(len(program.require_stages()))
    parts_of = [_parts(program, index, split=split) for index in stages]
    left = [_left_behind(parts)[0] for _, parts in parts_of]
    for index, (received, parts) in enumerate(parts_of):
        here = [other for other in stages if row[other] == row[index]]
        known = _union(held[other] for other in here if other < index)
        known = _union([known, made_once_storages(program, index)])
        later = _union(left[other] for other in here if other > index)
        ends = _ends(program, index)
        saved.append(_measure(received, parts, known, later, ends))
        stays = _union([received, *(part.stays for part in parts)])
        held.append(_without(stays, batch))
    return saved


def _measure(
    received: Storages,
    parts: Sequence[_SavedPart],
    known: Storages,
    later: Storages,
    ends: _Ends,
) -> Activations:
    """Return what is kept, and what is alive in the backward, at most.

    What `later` stages leave waiting may be kept here.
    """
    moved = [_without(p.needs, received) if p.kind == "offload" else {} for p in parts]
    everything = _without(_union([received, *(p.stays for p in parts)]), known)
    kept = _size(everything)
    begins = kept + _size(next(filter(None, reversed(moved)), {}))
    moments = list(_moments(received, parts, known, moved))
    peak = max([begins, *(m.num_bytes for m in moments)])
    first_peak = max([begins, *(m.num_bytes + m.gradients for m in moments)])
    highest, first_highest = _under_way(moments, ends)
    left = _left_behind(parts)[0]
    shared = {key: size for key, size in later.items() if key in everything}
    return Activations(
        kept,
        peak - kept,
        first_peak - kept,
        _size(_union(moved)),
        _size(_without(_union([left, shared]), known)),
        max(0, highest - peak),
        max(0, first_highest - first_peak),
    )


def _moments(
    received: Storages,
    parts: Sequence[_SavedPart],
    known: Storages,
    moved: Sequence[Storages],
) -> Iterator[_Moment]:
    """Yield what is alive when each part's backward begins, the first part first.

    Backward goes from the last part to the first; a part's storages go when its own is
    done. A recomputed part needs all that is saved in it at once. Offloaded parts are
    fetched one ahead: the last one when the backward begins, each other one when the
    offloaded part after it is needed. What is fetched is a copy, even of what stays
    because of another part.
    """
    alive = {*known, *received}
    held = _size(_without(received, known))
    to_come = sum(part.gradients for part in parts)
    ahead: Storages = {}
    left = _left_behind(parts)
    for part, copies, waiting in zip(parts, moved, left[1:], strict=True):
        held += _size(_without(part.stays, alive))
        alive.update(part.stays)
        to_come -= part.gradients
        again = _without(part.needs, alive) if part.kind == "recompute" else copies
        yield _Moment(
            part,
            held + _size(_without(ahead, again)),
            again,
            _without(waiting, alive),
            to_come,
        )
        ahead = copies or ahead


def _under_way(moments: Sequence[_Moment], ends: _Ends) -> tuple[int, int]:
    """Return what is alive at most, gradients on their way included.

    First in any backward, then in the first one of a step.
    """
    flowing = dict(ends.arriving)
    departing = highest = first_highest = 0
    for moment in reversed(moments):
        part, gradients = moment.part, moment.gradients
        uses = Counter(key for node in part.nodes for key in saved_by([node]))
        for node in reversed(part.nodes):
            facts = meta.facts(node)
            needs = {key: n for key, n in moment.needs.items() if uses[key] > 0}
            alive = moment.held + departing
            alive += _size({**needs, **flowing, **moment.waiting})
            flowing.update(facts.made)
            more = max(0, facts.backward_bytes - part.deferred)
            if node in ends.copied:
                more = max(more, _size(dict(facts.made)) + ends.copied[node])
            highest = max(highest, alive + more)
            first_highest = max(first_highest, alive + more + gradients)
            gradients += facts.trained_bytes - part.deferred
            uses.subtract(saved_by([node]).keys())
            departing += ends.departing[node]
            for key in ends.freed[node]:
                flowing.pop(key, None)
    return highest, first_highest


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where gradients enter a stage, and where they end.

    `arriving` are those of its outputs: they stay to the end of the backward, and so do
    `departing` bytes of the gradients of its inputs, which come with the backward of a
    node; `copied` are those of them that are part of something else until then. `freed`
    are the storages that end with the backward of a node.
    """

    arriving: Storages
    departing: Mapping[fx.Node, int]
    copied: Mapping[fx.Node, int]
    freed: Mapping[fx.Node, set[int]]


def _ends(program: Program, index: int) -> _Ends:
    """Return where the gradients of a stage enter and end.

    What another stage would free ends with the last node here that gets it, since what
    travels has memory of its own.
    """
    stage = flow(program, index, with_outputs=False)
    arriving: Counter[int] = Counter()
    for value in stage.gives:
        for key, _ in meta.facts(value).gradients[:1]:
            arriving[key] += meta.facts(value).output_bytes
    maker = {key: n for n in stage.nodes for key, _ in meta.facts(n).made}
    freed = {node: set(meta.facts(node).freed) - {*arriving} for node in stage.nodes}
    leaving = maker.keys() - {key for keys in freed.values() for key in keys}
    last = {key: maker[key] for key in leaving}
    alone = set(leaving)  # of an input alone
    for node in reversed(stage.nodes):
        for key, _ in meta.facts(node).gradients:
            if key in leaving:
                last[key] = node
                alone.discard(key)
    for key, node in last.items():
        freed[node].add(key)
    departing: Counter[fx.Node] = Counter()
    copied: Counter[fx.Node] = Counter()
    for value in stage.takes:
        if not meta.needs_gradient(value):
            continue
        user = next(n for n in stage.nodes if value in n.all_input_nodes)
        size = meta.facts(value).output_bytes
        departing[user] += size
        if size not in [n for key, n in meta.facts(user).made if key in alone]:
            copied[user] += size
    return _Ends(arriving, departing, copied, freed)


def made_once_storages(program: Program, index: int) -> Storages:
    """Return what a stage makes once, and has from then on."""
    stage = flow(program, index, with_outputs=False)
    given = inner_flow(stage, made_once(stage)).gives
    return _union(dict(meta.facts(node).storages) for node in given)


def _size(storages: Storages) -> int:
    return sum(storages.values())


def _left_behind(parts: Sequence[_SavedPart]) -> list[Storages]:
    """Return, for each part and the end, what waits of the parts from there on."""
    waiting: list[Storages] = [{}]
    for part in reversed(parts):
        waiting.append(_union([waiting[-1], part.waits]) if part.waits else waiting[-1])
    return waiting[::-1]


def _parts(
    program: Program, index: int, *, split: bool
) -> tuple[Storages, list[_SavedPart]]:
    """Return what a stage receives with a gradient, and its parts in order."""
    stage = flow(program, index, with_outputs=False)
    received: dict[int, int] = {}
    for node in stage.takes:
        facts = meta.facts(node)
        if meta.needs_gradient(node):
            keys = [storage for storage, _ in facts.storages]
            received.update(dict.fromkeys(keys, facts.output_bytes))
    sent = _sent(program, index)
    parts: list[_SavedPart] = []
    inside = {
        node: (segment.kind, nodes)
        for segment, nodes in segments_of(program, stage)
        for node in nodes
    }
    plain: list[fx.Node] = []
    for node in stage.nodes:
        if node not in inside:
            plain.append(node)
            continue
        kind, nodes = inside[node]
        if node is not nodes[0]:
            continue
        parts += [_plain(node, split=split) for node in plain]
        plain = []
        stays = given_to(nodes) if kind == "recompute" else {}
        parts.append(_SavedPart(kind, tuple(nodes), stays, saved_by(nodes)))
    parts += [_plain(node, split=split) for node in plain]
    return received, [part.as_sent(sent) for part in parts]


def _sent(program: Program, index: int) -> Storages:
    """Return what a stage has of the storages of which other ranks send it views."""
    stages, row = program.require_stages(), program.require_placement().ranks[0]
    here = (stage for stage in stages if row[stage.index] == row[index])
    nodes = {node for stage in here for node in stage.nodes}
    sent: Counter[int] = Counter()
    for node in flow(program, index, with_outputs=False).takes:
        storages = meta.facts(node).storages
        if len(storages) == 1 and node.op != "placeholder" and node not in nodes:
            sent[storages[0][0]] += meta.facts(node).output_bytes
    return sent


def _plain(node: fx.Node, *, split: bool) -> _SavedPart:
    saved, facts = saved_by([node]), meta.facts(node)
    waits: dict[int, int] = {}
    if split and facts.weight_bytes and facts.gradients:
        casts = dict.fromkeys(facts.casts, 0)
        waits = {**_without(saved, casts), **dict(facts.gradients)}
    return _SavedPart("plain", (node,), saved, saved, waits)


def saved_by(nodes: Iterable[fx.Node]) -> Storages:
    """Return the storages that nodes save for their backward."""
    return {key: size for node in nodes for key, size in meta.facts(node).saved}


def given_to(nodes: Sequence[fx.Node]) -> Storages:
    """Return the storages of what comes into a row of nodes."""
    return {
        key: size
        for node in external_inputs(nodes)
        for key, size in meta.facts(node).storages
    }


def _union(many: Iterable[Storages]) -> Storages:
    return {key: size for one in many for key, size in one.items()}


def _without(storages: Storages, known: Container[int]) -> Storages:
    return {key: size for key, size in storages.items() if key not in known}


def again_seconds(program: Program, index: int) -> float:
    """Return the seconds that a stage's backward needs to recompute its blocks."""
    stage = flow(program, index, with_outputs=False)
    return sum(
        seconds_again(program, index, nodes)
        for segment, nodes in segments_of(program, stage)
        if segment.kind == "recompute"
    )


def seconds_again(program: Program, index: int, nodes: Sequence[fx.Node]) -> float:
    """Return the seconds in which a block of a stage runs again.

    It does so up to the last tensor that is saved in it: an operator that saves only
    what it takes, a convolution for instance, is not run again if it comes last. On
    tiles, which have to go in step, all of it runs.
    """
    saving = [i for i, node in enumerate(nodes) if meta.facts(node).saved]
    if program.require_placement().grid(index):
        count = len(nodes)
    elif saving:
        last = nodes[saving[-1]]
        output = {storage for storage, _ in meta.facts(last).storages}
        runs = bool(output & {storage for storage, _ in meta.facts(last).saved})
        count = saving[-1] + runs
    else:
        count = 0
    return sum(meta.facts(node).forward_seconds for node in nodes[:count])
