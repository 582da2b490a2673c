"""Cut evaluation where training is cut."""

from __future__ import annotations

from dataclasses import replace

from gemsc.compilation import TileProgram, Traced
from gemsc.costs.hardware import read_hardware
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.flow import has_random, owned_tensors
from gemsc.ir.holder import put_layer
from gemsc.ir.layers import layer_source
from gemsc.ir.program import Program
from gemsc.ir.staged import random_nodes, same_stages, with_copies
from gemsc.lowering.stages import make_again, replicas_of, tile_passes
from gemsc.options import CompileOptions
from gemsc.passes.annotate import Annotate
from gemsc.passes.checks.statistics import check_changes, check_copies
from gemsc.passes.follow_stages import (
    FollowShards,
    FollowStages,
    find_twins,
)
from gemsc.passes.insert_comms import InsertComms
from gemsc.passes.manager import Runs
from gemsc.planner.fitting import Scheduled
from gemsc.planner.layout import stage_layout


def evaluate(
    traced: Traced, done: Scheduled, options: CompileOptions, run: Runs
) -> tuple[TileProgram, tuple[TileProgram, ...]]:
    """Cut evaluation where training is cut: of the whole, and of what each tile runs.

    Where the two graphs differ in constants only, evaluation is training, and the
    model's outputs travel too.
    """
    whole, twins = done.program, traced.twins
    chosen = stage_layout(options)
    if twins is not None:
        bare, twins = with_copies(whole, traced.evaluation, twins)
        graph = same_stages(whole, bare, twins)
        evaluation = run(whole, _outputs_too(whole))
    else:
        follow = FollowStages(whole, owned := owned_tensors(whole))
        annotate = Annotate(training=False)
        again = make_again(traced, read_hardware(options.hardware), chosen)
        graph = run(traced.evaluation, annotate, follow, again)
        num_runs, with_weights = replicas_of(options, chosen)
        check_changes(graph, num_runs, with_weights=with_weights)
        check_copies(graph, owned)
        evaluation = run(graph, _outputs_alone(whole))
    of_whole = TileProgram(whole, evaluation, twins)
    grids, halos = chosen.grids, done.tiles[0].halos
    if halos is None:  # no stage is split
        return of_whole, (of_whole,)
    graph = replace(graph, halos=halos.for_evaluation(twins))
    if whole.shards:
        if twins is not None and any(shards.forks for shards in whole.shards.values()):
            _note_draws(whole, graph)
        names = {node.name: twin.name for node, twin in (twins or {}).items()}
        graph = run(graph, FollowShards(whole, names or None))
    splits = [
        run(graph, *tile_passes(number, grids, options, training=False))
        for number in range(len(done.tiles))
    ]
    pairs = [*zip(done.tiles, splits, strict=True)]
    same = [find_twins(*pair) if twins is not None else None for pair in pairs]
    if None not in same:
        both = [run(tile, _outputs_too(tile)) for tile in done.tiles]
    else:  # on one rank, perhaps: what they send is alike
        annotate = Annotate(training=False, known=traced.facts)
        both = [run(split, annotate, _outputs_alone(tile)) for tile, split in pairs]
        same = [None] * len(pairs)
        for tile, split in zip(done.tiles, both, strict=True):
            _separate_layers(tile, split)
    return of_whole, tuple(map(TileProgram, done.tiles, both, same))


def _note_draws(training: Program, evaluation: Program) -> None:
    """Say which nodes draw random numbers in evaluation, too: branches draw apart."""
    nodes = evaluation.compute_nodes
    if not (has_random(training.compute_nodes) or random_nodes(evaluation, nodes)):
        return
    known = Annotate(training=False).apply(evaluation).compute_nodes
    for node, like in zip(nodes, known, strict=True):
        meta.facts.set(node, meta.Facts(random=meta.facts(like).random))


def _separate_layers(training: Program, evaluation: Program) -> None:
    """Give layers that a tile calls with other settings in evaluation another name.

    Example: a loss whose samples are cut in training adds up, and is a mean in
    evaluation, where each rank has all samples: `_loss` and `_loss_eval`.

    Raises:
        InternalError: such a layer has tensors, and can be there once only.
    """
    known = {meta.layer(node) for node in training.graph.nodes}
    for node in evaluation.graph.find_nodes(op="call_module"):
        path = str(node.target)
        if path not in known:
            continue
        layer = evaluation.module.get_submodule(path)
        before = training.module.get_submodule(path)
        if layer is before or layer_source(layer) == layer_source(before):
            continue
        if layer.state_dict():
            raise InternalError(f"'{path}' is cut in another way in evaluation")
        node.target = f"{path}_eval"
        for program in (training, evaluation):
            put_layer(program.module, node.target, layer)


def _outputs_too(training: Program) -> InsertComms:
    """Return the pass that lets outputs travel besides all that does in training."""
    return InsertComms(outputs=True, known=training.transfers or ())


def _outputs_alone(training: Program) -> InsertComms:
    """Return the pass for another graph: its transfers have numbers of their own."""
    return InsertComms(outputs=True, first_index=len(training.transfers or ()))
