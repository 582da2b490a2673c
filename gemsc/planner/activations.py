"""What a stage keeps of a micro-batch from its forward to its backward, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from gemsc.ir import meta
from gemsc.ir.flow import external_inputs, flow, segments_of
from gemsc.ir.program import Program

__all__ = [
    "Activations",
    "activations",
    "again_seconds",
    "seconds_again",
    "waiting_gradient_bytes",
]

Storages = Mapping[int, int]  # storage -> bytes


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one stage and one micro-batch.

    `kept` stay from the forward to the end of the backward. `transient` come on top for
    a while in the backward, at most, where blocks are recomputed or brought back;
    `first_transient` counts the gradients of parameters with them, which the first
    backward of a step makes one after the other. `moved` wait in host memory. In a
    split backward `waiting` stay from the end of its first part to that of the second.
    """

    kept: int
    transient: int = 0
    first_transient: int = 0
    moved: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _SavedPart:
    """A segment, or a node of none: what stays of it, what its backward needs.

    `gradients` are the bytes of its parameters. What `waits` is left by the first part
    of a split backward; the gradients come with the second one then.
    """

    kind: str
    stays: Storages
    needs: Storages
    gradients: int
    waits: Storages = field(default_factory=dict)


def activations(program: Program, *, split: bool = False) -> list[Activations]:
    """Return what each stage keeps of a micro-batch.

    With `split`, weight gradients come in a second part of the backward.

    What an earlier stage on the same rank keeps already, longer, counts there only, and
    waits there for the weight gradients of both; but each stage has a copy of its own
    of what it reads of the batch.
    """
    placement = program.placement
    assert placement is not None
    row = placement.ranks[0]
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    batch = _union(dict(meta.facts(node).storages) for node in inputs)
    found: list[Activations] = []
    held: list[Storages] = []
    stages = range(len(program.require_stages()))
    parts_of = [_parts(program, index, split=split) for index in stages]
    left = [_left_behind(parts)[0] for _, parts in parts_of]
    for index, (received, parts) in enumerate(parts_of):
        here = [other for other in stages if row[other] == row[index]]
        known = _union(held[other] for other in here if other < index)
        later = _union(left[other] for other in here if other > index)
        found.append(_measure(received, parts, known, later))
        stays = _union([received, *(part.stays for part in parts)])
        held.append(_without(stays, batch))
    return found


def _measure(
    received: Storages, parts: Sequence[_SavedPart], known: Storages, later: Storages
) -> Activations:
    """Return what is kept, and what is alive when a part's backward begins, at most.

    Backward goes from the last part to the first; a part's storages go when its own is
    done. A recomputed part needs all that is saved in it at once. Offloaded parts are
    fetched one ahead: the last one when the backward begins, each other one when the
    offloaded part after it is needed. What is fetched is a copy, even of what stays
    because of another part. What `later` stages leave waiting may be kept here.
    """
    moved = [_without(p.needs, received) if p.kind == "offload" else {} for p in parts]
    offloaded = [position for position, storages in enumerate(moved) if storages]
    everything = _without(_union([received, *(p.stays for p in parts)]), known)
    kept = sum(everything.values())
    peak = first_peak = kept + sum(_union(moved[i] for i in offloaded[-1:]).values())
    alive = {*known, *received}
    held = sum(_without(received, known).values())
    to_come = sum(part.gradients for part in parts)
    ahead: Storages = {}
    left = _left_behind(parts)
    for part, copies, waiting in zip(parts, moved, left[1:], strict=True):
        held += sum(_missing(part.stays, alive).values())
        alive.update(part.stays)
        to_come -= part.gradients
        fetched = _union([copies, ahead])
        again = _missing(part.needs, alive) if part.kind == "recompute" else {}
        now = held + sum(fetched.values()) + sum(again.values())
        now += sum(_missing(waiting, alive).values())
        peak, first_peak = max(peak, now), max(first_peak, now + to_come)
        ahead = copies or ahead
    total = sum(_union(moved).values())
    shared = {key: size for key, size in later.items() if key in everything}
    waiting_bytes = sum(_without(_union([left[0], shared]), known).values())
    return Activations(kept, peak - kept, first_peak - kept, total, waiting_bytes)


def _left_behind(parts: Sequence[_SavedPart]) -> list[Storages]:
    """Return, for each part and the end, what waits of the parts from there on."""
    found: list[Storages] = [{}]
    for part in reversed(parts):
        found.append(_union([found[-1], part.waits]) if part.waits else found[-1])
    return found[::-1]


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
        parts += [_plain(each, split=split) for each in plain]
        plain = []
        stays = _inputs(nodes) if kind == "recompute" else {}
        parts.append(_SavedPart(kind, stays, _saved(nodes), _gradients(nodes)))
    return received, [*parts, *(_plain(each, split=split) for each in plain)]


def _plain(node: fx.Node, *, split: bool) -> _SavedPart:
    saved, gradients = _saved([node]), _gradients([node])
    facts = meta.facts(node)
    if not split or not facts.waits:
        return _SavedPart("plain", saved, saved, gradients)
    waits = {**_without(saved, dict.fromkeys(facts.casts, 0)), **dict(facts.waits)}
    return _SavedPart("plain", saved, saved, gradients - facts.weight_bytes, waits)


def waiting_gradient_bytes(program: Program, index: int) -> int:
    """Return the bytes of the gradients that a split backward leaves for later."""
    stage = program.require_stages()[index]
    return sum(meta.facts(node).weight_bytes for node in stage.nodes)


def _gradients(nodes: Iterable[fx.Node]) -> int:
    return sum(meta.facts(node).parameter_bytes for node in nodes)


def _saved(nodes: Iterable[fx.Node]) -> Storages:
    return {key: size for node in nodes for key, size in meta.facts(node).saved}


def _inputs(nodes: Sequence[fx.Node]) -> Storages:
    """Return the storages of what comes into a row of nodes."""
    return {
        key: size
        for node in external_inputs(nodes)
        for key, size in meta.facts(node).storages
    }


def _union(many: Iterable[Storages]) -> Storages:
    return {key: size for one in many for key, size in one.items()}


def _without(storages: Storages, known: Storages) -> Storages:
    return _missing(storages, set(known))


def _missing(storages: Storages, known: set[int]) -> Storages:
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
    assert program.placement is not None
    saving = [i for i, node in enumerate(nodes) if meta.facts(node).saved]
    if program.placement.grid(index):
        count = len(nodes)
    elif saving:
        last = nodes[saving[-1]]
        own = {storage for storage, _ in meta.facts(last).storages}
        runs = bool(own & {storage for storage, _ in meta.facts(last).saved})
        count = saving[-1] + runs
    else:
        count = 0
    return sum(meta.facts(node).forward_seconds for node in nodes[:count])
