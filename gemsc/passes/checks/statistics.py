"""Check statistics: what the forward changes must not depend on who runs it, and when.

Example: two replicas update their BatchNorm's running mean apart, and the two averages
join exactly, and both can count all calls of the user's forward; a table that follows
the data they cannot join. Nor can a stage that has several micro-batches in flight
double a weight which the backward of an earlier one still needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import fx, nn

from gemsc.base.units import show_some
from gemsc.errors import GemscError, SourceLocation
from gemsc.ir import meta
from gemsc.ir.changes import Change, changes_weights, is_settled, unjoined_changes
from gemsc.ir.flow import has_random, makers
from gemsc.ir.holder import CONSTANTS, attribute, called_layer
from gemsc.ir.mutation import (
    changed_by_layer,
    functional_call,
    mutated_state,
    read_statistics,
)
from gemsc.ir.opaque import changed_inside, opaque_of, opaques
from gemsc.ir.program import Program, Skip
from gemsc.passes.base import Pass

_OUT_OF_PLACE = (
    "compute the new value under another name, in each forward: w = ..., and use w"
)
_ROWS = (
    "leave out max_norm and look up in "
    "weight * (max_norm / weight.norm(dim=-1, keepdim=True)).clamp(max=1)"
)


@dataclass(frozen=True)
class CheckStatistics(Pass):
    """Refuse tensors that forward changes and that no rule joins, if there are runs.

    `num_runs` is replicas times data-parallel copies. The statistics of BatchNorm join
    (see gemsc.runtime.worker.reduction), also where a class that derives from it calls
    F.batch_norm as it does (BatchNormAct2d of timm), and a change that needs no data
    and leaves what it has changed as it is. Where a stage changes a buffer and needs no
    data for it, each run makes the changes of the others (`advance_state`); those of a
    parameter only `with_weights` that no other run on its rank shares. Nothing
    else is known to join; nor do the statistics in a module that depends on data, where
    some runs may update them more often.
    """

    requires = ("stages",)

    num_runs: int = 1
    with_weights: bool = False

    def apply(self, program: Program) -> Program:
        """Return the program as it is.

        Raises:
            GemscError: the model could not be trained exactly; names the line.
        """
        check_changes(program, self.num_runs, with_weights=self.with_weights)
        if self.num_runs > 1:
            for node in program.compute_nodes:
                for name in read_statistics(node, program).values():
                    raise GemscError(
                        f"forward reads '{name}', which each of {self.num_runs} "
                        "replicas of the model changes separately until a step ends",
                        at=meta.location(node),
                        help="use a schedule with one replica and --data 1, or "
                        "compute with statistics of the micro-batch",
                    )
        return program


def check_changes(program: Program, num_runs: int, *, with_weights: bool) -> None:
    """Refuse changes that `num_runs` runs of a graph would make differently.

    `with_weights` says whether each run has weights of its own. What is neither a
    parameter nor a buffer no run may change, as no checkpoint holds it.

    Raises:
        GemscError: names the line that changes a parameter or a buffer.
    """
    for node in program.compute_nodes:
        names = mutated_state(node, program.module)
        hidden = [name for name in names if name.startswith(f"{CONSTANTS}.")]
        if any(_is_read(n, program) for n in hidden) and not is_settled(node):
            raise GemscError(
                "forward changes a tensor that is neither a parameter nor a buffer of "
                "the model: no checkpoint would hold it",
                at=meta.location(node),
                help="keep it with register_buffer, or the module that has it as an "
                "attribute: self.teacher = ... in place of self.hidden = [...]",
            )
    stages = [frozenset(stage.nodes) for stage in program.require_stages()]
    for change in unjoined_changes(program) if num_runs > 1 else ():
        again, node = change.again, change.node
        advice = "use a schedule with one replica and --data 1"
        advice += _or_without_change(change, program)
        if any(map(again.issubset, stages)) and again:
            if with_weights or not changes_weights(change, program.module):
                continue
            advice = "use a schedule with one replica; --data may be more"
        raise GemscError(
            f"{change.by} changes '{change.name}', and each of {num_runs} replicas "
            "of the model would change it differently",
            at=meta.location(node),
            help=advice,
            notes=_why_whole(node, program),
        )


def check_copies(evaluation: Program, owned: Sequence[Collection[str]]) -> None:
    """Refuse changes of what several stages have in training: one makes them.

    `owned` are the names of what each stage has there.

    Raises:
        GemscError: names the line that changes a parameter or a buffer.
    """
    for node in evaluation.compute_nodes:
        for name in mutated_state(node, evaluation.module):
            stages = [str(i) for i, names in enumerate(owned) if name in names]
            if len(stages) > 1:
                raise GemscError(
                    f"forward changes '{name}' in evaluation alone, and stages "
                    f"{' and '.join(stages)} each use a copy in training",
                    at=meta.location(node),
                    help="change it in training, too, so that one stage has it: "
                    "self.n += 0 if self.training else 1",
                )


def check_rows(program: Program) -> None:
    """Refuse changes of weights that are whole only while a stage runs.

    What is kept are a rank's rows, in which nobody would see the change.

    Raises:
        GemscError: names the line that changes a parameter.
    """
    for node in program.compute_nodes:
        opaque = opaque_of(called_layer(node, program.module))
        inside = changed_inside(node, program.module)
        for name in (*mutated_state(node, program.module), *inside):
            if isinstance(attribute(program.module, name), nn.Parameter):
                raise GemscError(
                    f"forward changes '{name}', of which a rank keeps its rows only",
                    at=meta.location(node) or (opaque.at if opaque else None),
                    help="use --shard gradients in place of --shard weights",
                )


def check_in_flight(program: Program, crowded: Collection[int]) -> None:
    """Refuse changes of what the backward of an earlier micro-batch still needs.

    `crowded` are the stages that have several micro-batches in flight.

    Raises:
        GemscError: names the line that changes a parameter or a buffer.
    """
    kept = {
        id(attribute(program.module, name)): node
        for node in filter(meta.needs_gradient, program.compute_nodes)
        for name in meta.facts(node).saved_state
        if not _normalizes_without(name, node, program)
    }
    for stage in program.require_stages():
        for node in stage.nodes if stage.index in crowded else ():
            used = {name: node for name in _changed_and_kept(node, program)}
            for name in mutated_state(node, program.module):
                reader = kept.get(id(attribute(program.module, name)))
                if reader and not (is_settled(node) and _is_unseen(node)):
                    used[name] = reader
            for name, reader in used.items():
                other = _without_change(node, program)
                if is_settled(node):
                    other = "write to its .data, which autograd does not look at"
                error = GemscError(
                    f"forward changes '{name}', and the backward of an earlier "
                    "micro-batch still needs the old value",
                    at=meta.location(node),
                    help=f"use --micro-batches 1, or {other}",
                    notes=_why_whole(node, program),
                )
                if at := meta.location(reader):
                    error.add_note(f"it is used at {at}")
                raise error


@contextmanager
def telling_what_ties(program: Program) -> Iterator[None]:
    """Let an error about too few blocks say what keeps much of a model in one."""
    try:
        yield
    except GemscError as error:
        for at, names in _changed_at(program).items():
            name = show_some([f"'{name}'" for name in names], 1)
            error.add_note(
                f"forward changes {name} at {at}: all that uses it stays on one rank"
            )
        for path, known in opaques(program.module).items():
            error.add_note(f"'{path}' stays whole, for {known.at}: {known.why}")
            if known.at and known.at.caller:
                error.add_note(f"which {known.at.caller} calls")
            error.help = (
                f"{error.help}; or compute what depends on data outside of '{path}', "
                "in a small torch.nn.Module of its own or in the loss"
            )
        if (tie := _tie(program)) is not None:
            name, at = tie.value.name, meta.location(tie.value)
            error.add_note(
                f"'{name}' of {at} is used until {meta.location(tie.last_use)}: the "
                "layers in between stay together"
            )
            other = f"compute '{name}' again for each layer that uses it"
            if has_random(makers(tie.value)):  # anew, it would be other numbers
                other = f"draw '{name}' in the dataset, and pass it as an input"
            error.help = f"{error.help}; or {other}"
        raise


def _changed_at(program: Program) -> dict[SourceLocation | None, dict[str, None]]:
    """Return the parameters and buffers that forward changes, by the user's lines."""
    changed: dict[SourceLocation | None, dict[str, None]] = {}
    for node in program.compute_nodes:
        for name in mutated_state(node, program.module):
            changed.setdefault(meta.location(node), {})[name] = None
    return changed


def _tie(program: Program) -> Skip | None:
    """Return the value, if any, that ties most heavy nodes of one block.

    What needs a gradient is no such value: a residual connection ties layers as well,
    and cannot be computed anew.
    """
    order = {node: i for i, node in enumerate(program.compute_nodes)}
    block_of = {n: block.index for block in program.blocks or () for n in block.nodes}

    def tied(skip: Skip) -> int:
        between = program.compute_nodes[order[skip.value] : order[skip.last_use] + 1]
        return sum(meta.facts(node).heavy for node in between)

    ties = [
        skip
        for skip in program.skips or ()
        if not skip.long
        and not meta.needs_gradient(skip.value)
        and block_of.get(skip.value) == block_of.get(skip.last_use)
        and tied(skip) > 1
    ]
    return max(ties, key=tied, default=None)


def _changed_and_kept(node: fx.Node, program: Program) -> Iterator[str]:
    """Yield what a module that is not looked into changes and keeps for backward."""
    opaque = opaque_of(called_layer(node, program.module))
    if opaque is not None:
        both = {*opaque.changes}.intersection(opaque.keeps)
        yield from (f"{node.target}.{name}" for name in sorted(both))


def _why_whole(
    node: fx.Node, program: Program
) -> tuple[tuple[SourceLocation | None, str], ...]:
    """Return a note of why a node is a module that is not looked into, if it is one."""
    opaque = opaque_of(called_layer(node, program.module))
    return (
        ()
        if opaque is None
        else ((opaque.at, f"'{node.target}' stays whole: {opaque.why}"),)
    )


def _normalizes_without(name: str, node: fx.Node, program: Program) -> bool:
    """Whether a node normalizes by what it sees, and only updates these statistics.

    Autograd keeps them for a backward that does not use them then.
    """
    kind = functional_call(node, program.module).kind
    is_norm = kind in ("batch_norm", "instance_norm")
    return is_norm and name in mutated_state(node, program.module)


def _is_read(name: str, program: Program) -> bool:
    """Whether what is computed depends on a tensor, which is not only updated."""

    def reads(node: fx.Node) -> bool:
        updates = name in mutated_state(node, program.module)
        if updates and not any(map(reads, node.users)):
            return False
        return not _normalizes_without(name, node, program)

    sources = program.graph.find_nodes(op="get_attr", target=name)
    return any(reads(user) for source in sources for user in source.users)


def _is_unseen(node: fx.Node) -> bool:
    """Whether autograd does not notice a change, because it is one of `w.data`."""
    (source,) = node.all_input_nodes
    return source.target is getattr and source.args[1:2] == ("data",)


def _or_without_change(change: Change, program: Program) -> str:
    """Return what else helps, if anything: a buffer is there to be changed."""
    is_state = not isinstance(attribute(program.module, change.name), nn.Parameter)
    if is_state and not _why_whole(change.node, program):
        return ""
    return f", or {_without_change(change.node, program)}"


def _without_change(node: fx.Node, program: Program) -> str:
    is_table = "embedding" in str(getattr(node.target, "__name__", node.target))
    if is_table or changed_by_layer(node, program.module):
        return _ROWS
    if _why_whole(node, program):
        return "compute what depends on data in a small torch.nn.Module of its own"
    return _OUT_OF_PLACE
