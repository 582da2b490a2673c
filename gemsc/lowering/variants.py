"""Several graphs of one model that share stages and weights: phases, other shapes.

    graphs = {"": the model, "d": a loss for the discriminator, "g": for the generator}

The graph that costs most decides where cuts fall; the others follow it. What a stage
holds is what any of them needs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from gemsc.base.examples import Examples
from gemsc.base.nests import normalize_inputs
from gemsc.base.phase import Phase, check_phases
from gemsc.base.units import show_seconds
from gemsc.compilation import Compilation, Followed, Traced
from gemsc.errors import GemscError, InternalError
from gemsc.frontend.phases import (
    own_loss,
    phase_inputs,
    phase_model,
    reject_left,
    with_target,
)
from gemsc.frontend.writer import share_constants
from gemsc.ir import meta
from gemsc.ir.flow import owned_tensors
from gemsc.ir.program import Program
from gemsc.ir.staged import same_stages
from gemsc.options import CompileOptions
from gemsc.passes.follow_stages import find_twins
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedPhase, PlannedShape
from gemsc.planner.notes import OWN_LOSS


def trace_phase(
    trace: Callable[..., Traced],
    model: nn.Module,
    phase: Phase,
    example_inputs: Any,
    target: Any,
) -> Traced:
    """Return the graph of a phase, of which this is the model, as `trace` gives it."""
    inputs = normalize_inputs(example_inputs)
    given = model, phase_inputs(inputs, target)
    traced = trace(*given, loss=own_loss, optimizer=phase.optimizer)
    program, evaluation = (
        with_target(program, inputs) for program in (traced.program, traced.evaluation)
    )
    of_trained = partial(program.try_optimizer, frozen=False)
    program = replace(program, try_optimizer=of_trained)
    return replace(traced, program=program, evaluation=evaluation, is_phase=True)


def trace_all(
    trace: Callable[..., Traced],
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    example_target: Any = None,
    optimizer: Any = None,
    phases: Sequence[Phase] = (),
) -> dict[str, Traced]:
    """Return the graph of a model's step; or of the model and of each phase of it.

    Of several shapes of batches, the one that costs most has no name.

    Raises:
        GemscError: the model cannot be traced, or has not what phases train.
    """
    examples = Examples.of(example_inputs, example_target)
    if not phases:
        by_shape = {
            name: trace(
                model, inputs, loss=loss, example_target=target, optimizer=optimizer
            )
            for name, inputs, target in zip(
                examples.names, examples.inputs, examples.targets, strict=True
            )
        }
        return {"": by_shape.pop(find_largest(by_shape)), **by_shape}
    check_phases(phases, model)
    if len(examples.inputs) > 1:
        raise GemscError(
            "example_inputs has several shapes, but the phases of a step need one",
            help="return one shape from example_inputs",
        )
    graphs = {"": trace(model, example_inputs)}
    left = {}
    for phase in phases:
        is_last = phase is phases[-1]
        trained, left[phase.name] = phase_model(model, phase, is_last=is_last)
        given = trained, phase, example_inputs, example_target
        graphs[phase.name] = trace_phase(trace, *given)
    reject_left(left, {phase.name: graphs[phase.name].program for phase in phases})
    return graphs


def find_largest(graphs: Mapping[str, Traced]) -> str:
    """Return the name of the graph that costs most: seconds, of equal ones bytes."""

    def cost(name: str) -> tuple[float, int]:
        blocks = graphs[name].program.blocks or ()
        seconds = sum(block.busy_seconds for block in blocks)
        return seconds, sum(block.total("output_bytes") for block in blocks)

    return max(graphs, key=cost)


def with_blocks_of(
    others: Mapping[str, Traced], graphs: Mapping[str, Traced]
) -> dict[str, Traced]:
    """Return graphs with the blocks that others have.

    They would be grouped otherwise where samples are fewer, and other nodes cost most.

    Raises:
        GemscError: one has other calls: the model asks how many samples there are.
    """
    largest = others[find_largest(others)]

    def with_blocks(name: str, traced: Traced) -> Traced:
        like = others.get(name, largest)
        other = like.program
        if _calls(like) != _calls(traced):
            raise GemscError(f"{other.name} does something else with fewer samples")
        twins = find_twins(other, traced.program)
        if twins is None:  # it calls the same more often
            return traced
        return replace(traced, program=same_stages(other, traced.program, twins))

    return {name: with_blocks(name, graph) for name, graph in graphs.items()}


def _calls(traced: Traced) -> list[set[tuple[Any, ...]]]:
    """Return all that each of both graphs calls, and where."""
    graphs = traced.program.graph, traced.evaluation.graph
    calls = [[n for n in g.nodes if n.op.startswith("call")] for g in graphs]
    return [{(n.op, n.target, meta.location(n)) for n in nodes} for nodes in calls]


def knowing_all(graphs: Mapping[str, Traced]) -> dict[str, Traced]:
    """Return the graphs, each with the others and the tensors that any of them changes.

    Each gets the constants of all: a stage holds what any of them needs.
    """
    programs = [p for g in graphs.values() for p in (g.program, g.evaluation)]
    share_constants([program.module for program in programs])
    named = {name: _with_names(name, graph) for name, graph in graphs.items()}
    changing = frozenset(name for graph in graphs.values() for name in graph.changing)
    return {
        name: replace(
            graph,
            elsewhere=changing,
            beside={n: p for other in graphs if other != name for n, p in named[other]},
        )
        for name, graph in graphs.items()
    }


def _with_names(name: str, traced: Traced) -> list[tuple[str, Program]]:
    """Return the graphs of both modes, if they differ, with what they are called."""
    whole = traced.program.name
    if name and name not in whole:  # another shape
        whole = f"{whole}, {name}"
    return [(whole, traced.program), (f"{whole} in evaluation", traced.evaluation)][
        : len(traced.graphs)
    ]


def followed(
    graphs: Mapping[str, Traced], lowered: Mapping[str, Compilation], name: str
) -> Followed | None:
    """Return what a graph follows: the first one that is lowered, if there is one."""
    if not lowered:
        return None
    first, compilation = next(iter(lowered.items()))
    twins = find_twins(graphs[first].program, graphs[name].program)
    if twins is None:
        return Followed(compilation, None)
    return Followed(compilation, {node.name: twin for node, twin in twins.items()})


def options_of(
    graphs: Mapping[str, Traced], name: str, options: CompileOptions
) -> CompileOptions:
    """Return the options of a graph: the model of phases has nothing to update."""
    is_trained = graphs[name].program.loss is not None or len(graphs) == 1
    if is_trained:
        return options
    return replace(options, shard="off")


def with_one_ownership(
    lowered: Mapping[str, Compilation], largest: str
) -> dict[str, Compilation]:
    """Return the graphs where each stage holds what any of them needs."""
    if len(lowered) == 1:
        return dict(lowered)
    first = lowered[largest]
    others = [graph for graph in lowered.values() if graph is not first]
    programs = [p for g in (first, *others) for p in (g.program, g.evaluation)]
    owned = owned_tensors(*programs)
    for graph in others:
        for one, other in zip(first.tiles, graph.tiles, strict=True):
            if one.program.parts != other.program.parts:
                raise InternalError(f"{graph.program.name} has other parts of weights")
    return {name: graph.with_owned(owned) for name, graph in lowered.items()}


def as_family(lowered: Mapping[str, Compilation], largest: str) -> Compilation:
    """Return the graph without a name, with all others as its variants.

    Its plan is that of the one that costs most; ranks need what they need in any of
    them.
    """
    variants = {name: graph for name, graph in lowered.items() if name}
    plan = lowered[largest].plan
    losses = [variant.program.loss for variant in variants.values()]
    if lowered[""].program.loss is None and any(losses):  # it has phases
        seconds = {n: show_seconds(v.plan.step_seconds) for n, v in variants.items()}
        shown = ", ".join(f"{name} ({text})" for name, text in seconds.items())
        about = f"a step has the phases {shown}; this is the plan of {largest}"
        notes = [n for n in plan.notes if not n.startswith(OWN_LOSS)]
        phases = [
            PlannedPhase(
                name=name,
                step_seconds=variant.plan.step_seconds,
                peak_bytes=variant.plan.peak_bytes,
            )
            for name, variant in variants.items()
        ]
        plan = replace(
            plan,
            model=lowered[""].plan.model,
            phases=phases,
            sample_dims=lowered[""].plan.sample_dims,
            notes=[about, *notes],
            **_memory([v.plan for v in variants.values()], one_optimizer=False),
        )
    return replace(lowered[""], plan=plan, variants=variants, largest=largest)


def of_shapes(family: Compilation, examples: Examples) -> dict[str, Any]:
    """Return the entries of a plan for the shapes that batches may have, if several.

    One says what each of them costs; what ranks need is what they need in any.
    """
    if len(examples.inputs) == 1:
        return {}
    shapes, plans = [], []
    for number, name in enumerate(examples.names):
        plan = family.variants[name].plan if name in family.variants else family.plan
        plans.append(plan)
        shapes.append(
            PlannedShape(
                name=name,
                variant=name if name in family.variants else "",
                micro_batch_size=plan.micro_batch_size,
                sizes=examples.sizes(number),
                step_seconds=plan.step_seconds + plan.ending_seconds,
                peak_bytes=plan.peak_bytes,
            )
        )
    return {"shapes": shapes, **_memory(plans, one_optimizer=True)}


def _memory(plans: Sequence[Plan], *, one_optimizer: bool) -> dict[str, Any]:
    """Return the entries of a plan that say what ranks need in the fullest graph.

    Phases have an optimizer each, and each rank keeps the states of all in all of them.
    """
    peaks, memory = [], []
    for rank in range(len(plans[0].peak_bytes)):
        states = [plan.memory[rank]["optimizer"] for plan in plans]
        kept = max(states) if one_optimizer else sum(states)
        others = [kept - plan.memory[rank]["optimizer"] for plan in plans]
        totals = [
            plan.peak_bytes[rank] + n for plan, n in zip(plans, others, strict=True)
        ]
        fullest = plans[totals.index(max(totals))]
        peaks.append(max(totals))
        memory.append({**fullest.memory[rank], "optimizer": kept})
    rows = [plan.activation_bytes for plan in plans]
    most = [max(row) for row in zip(*rows, strict=True)]
    return {"peak_bytes": peaks, "memory": memory, "activation_bytes": most}
