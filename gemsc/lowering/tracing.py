"""Trace a model in both modes and find its blocks: what no plan changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx, nn

from gemsc.base.dtypes import convert, converted
from gemsc.base.elementwise import OptimizerFactory, updated_together, updated_whole
from gemsc.base.nests import normalize_inputs
from gemsc.base.plain_forward import with_threads
from gemsc.base.visible import forgetting
from gemsc.compilation import Traced
from gemsc.costs.hardware import Hardware
from gemsc.costs.optimizer_memory import optimizer_bytes
from gemsc.costs.profile import Progress
from gemsc.errors import GemscError, choose
from gemsc.frontend import FRONTENDS
from gemsc.frontend.check import check_against_eager
from gemsc.frontend.eager import autocast_of, check_optimizer, try_optimizer
from gemsc.frontend.values import sample_dims
from gemsc.frontend.writer import name_constants
from gemsc.ir import meta
from gemsc.ir.opaque import Opaque, opaques
from gemsc.ir.program import Program
from gemsc.passes.annotate import Annotate
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.checks.shared_memory import check_shared_memory
from gemsc.passes.constants.causal_masks import CausalMasks
from gemsc.passes.constants.move_updates import MoveUpdates
from gemsc.passes.detect_skips import DetectSkips
from gemsc.passes.follow_stages import FollowOrder, find_twins
from gemsc.passes.group_blocks import GroupBlocks
from gemsc.passes.manager import Observer, Runs
from gemsc.passes.separate_towers import SeparateTowers
from gemsc.passes.time_blocks import TimeBlocks

PLAIN = MoveUpdates(), Canonicalize(), CausalMasks()
SHARED_FLOPS = 1e10  # forward, of a check for which several threads are worth it
MOST_FLOPS = 2e11  # forward, of a check that is limited: a minute of one core


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    example_target: Any = None,
    optimizer: OptimizerFactory | None = None,
    frontend: str = "record",
    precision: str = "float32",
    memory_format: str = "as-given",
    check: bool = True,
    is_limited: bool = False,
    evaluates: bool = True,
    hardware: Hardware | None = None,
    profile: bool = False,
    device: torch.device | None = None,
    progress: Progress = lambda name, share: None,
    after_each: Observer | None = None,
    constants: dict[str, torch.Tensor] | None = None,
) -> Traced:
    """Trace a model in both modes and find its blocks: what no plan changes.

    Seconds are those of the hardware's device, the shipped default if None; or measured
    here, on the `device`, if `profile`. Without `evaluates` the result can be planned,
    not compiled. Several graphs of a model are traced with one dict of `constants`.
    A check that `is_limited` is left out where it would take minutes.
    """
    convert(model, memory_format)
    example_inputs = converted(normalize_inputs(example_inputs), memory_format)
    feed = {"loss": loss, "target": example_target}
    trains, run = loss is not None, Runs(after_each)
    how = {**feed, "autocast": autocast_of(model, precision)}
    record = choose("frontend", frontend, FRONTENDS), constants
    recorded = partial(_recorded, *record, model, example_inputs, **how)

    checked = model, example_inputs, {**feed, "training": trains}
    compare = partial(_compare, checked, is_limited, torch.get_num_threads())

    def prepared(opaque: Mapping[str, Opaque]) -> Program:
        program = recorded(opaque=opaque, training=trains)
        annotate = Annotate(device=hardware.device if hardware else None)
        try:
            cut = SeparateTowers(), DetectSkips(), GroupBlocks()
            program = run(program, *PLAIN, annotate, *cut)
        except Exception as error:
            if check and not isinstance(error, GemscError):  # is it the model?
                compare(program)
            raise
        parameters = dict(program.module.named_parameters())
        factory = optimizer if trains else None
        unfused = check_optimizer(parameters, factory) if factory is not None else ""
        program = replace(
            program,
            optimizer_bytes=optimizer_bytes(parameters, factory),
            updated_whole=cache(partial(updated_whole, parameters, factory)),
            updated_together=cache(partial(updated_together, parameters, factory)),
            unfused_optimizer=unfused,
            try_optimizer=cache(partial(try_optimizer, parameters, factory)),
        )
        if check:
            program = replace(program, halves=compare(program))
        if profile:
            given = example_inputs, example_target
            program = run(program, TimeBlocks(*given, device=device, progress=progress))
        return program

    with with_threads(1):  # with more it takes other kernels, which are predicted
        program = prepared({})
        if not evaluates:
            return Traced(program, program, None)
        known = opaques(program.module)
        evaluation = recorded(opaque=known, training=False)
        opaque = opaques(evaluation.module)
        if opaque.keys() != known.keys():  # what is not cut in one mode is in neither
            program = prepared(opaque)
        same_order = *PLAIN, FollowOrder(program)
        evaluation = run(evaluation, *same_order)
        program = replace(
            program, sample_dims=sample_dims(model, example_inputs, evaluation)
        )
        return Traced(program, evaluation, _in_one_forward(program, evaluation))


def _in_one_forward(
    program: Program, evaluation: Program
) -> dict[fx.Node, fx.Node] | None:
    """Return the twins of two graphs, whose messages are one: None if shapes differ."""

    def kinds(node: fx.Node) -> list[Any]:
        return [(tensor.shape, tensor.dtype) for tensor in meta.tensors(node)]

    twins = find_twins(program, evaluation)
    pairs = (pair for pair in (twins or {}).items() if pair[0].op != "output")
    return twins if all(kinds(one) == kinds(other) for one, other in pairs) else None


def _compare(
    checked: tuple[nn.Module, Any, dict[str, Any]],
    is_limited: bool,
    threads: int,
    program: Program,
) -> str:
    model, example_inputs, how = checked
    flops = sum(meta.facts(node).flops for node in program.graph.nodes)
    if is_limited and flops > MOST_FLOPS:
        return ""
    threads = threads if flops > SHARED_FLOPS else 1
    with with_threads(threads), forgetting(model, how["loss"]):
        return check_against_eager(program, model, example_inputs, **how)


def _recorded(
    record: Callable[..., Program],
    constants: dict[str, torch.Tensor] | None,
    *given: Any,
    **how: Any,
) -> Program:
    """Return a graph whose constants have names of their own among these."""
    program = record(*given, **how)
    check_shared_memory(program)
    if constants is not None:
        name_constants(program.module, constants)
    return program
