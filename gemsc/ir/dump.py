"""Program -> text, for --print-after and golden files; always the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from gemsc.base.units import show_bytes, show_flops, show_seconds
from gemsc.ir import meta
from gemsc.ir.program import Program, Stage


def dump(program: Program) -> str:
    """Return the program as text, one line a node, under its stages and blocks."""
    return "\n".join(_lines(program)) + "\n"


def target_name(node: fx.Node) -> str:
    """Return what the node calls, by its public name (never an address)."""
    if node.op in ("call_module", "call_method", "get_attr", "placeholder"):
        return str(node.target)
    if node.op == "output":
        return "output"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    module = str(getattr(target, "__module__", None) or "torch")
    name = str(getattr(target, "__qualname__", None) or target.__name__)
    if module == "torch.nn.functional":  # max_pool2d is called `fn` in there
        name = target.__name__
    name = name.removeprefix("_VariableFunctionsClass.")
    return f"{module.removeprefix('torch._C.').removeprefix('_')}.{name}"


def _lines(program: Program) -> Iterator[str]:
    yield f"program {program.name}"
    for item in program.inputs:
        path = ".".join(map(str, item.path))
        yield f"input %{item.name}: {item.spec} = {path}"
    for tower in program.towers or ():
        yield f"tower %{tower[0].name} to %{tower[-1].name}"
    for skip in program.skips or ():
        kind = "long" if skip.long else "short"
        size = show_bytes(skip.num_bytes)
        yield f"skip %{skip.value.name} -> %{skip.last_use.name} {kind} {size}"
    if program.stages is not None:
        for stage in program.stages:
            yield from _stage_lines(program, stage)
    elif program.blocks is not None:
        for block in program.blocks:
            yield f"block {block.index} {block.name}"
            yield from (f"  {_node_line(node)}" for node in block.nodes)
    else:
        yield from (_node_line(n) for n in program.graph.nodes if n.op != "output")
    for segment in program.segments or ():
        inside = ", ".join(map(str, segment.blocks))
        yield f"segment {segment.name} {segment.kind}: blocks {inside}"
    for transfer in program.transfers or ():
        names = ", ".join(f"%{value.name}" for value in transfer.values)
        yield f"transfer {transfer.index} {transfer.source} -> {transfer.dest}: {names}"
    loss = program.loss.name if program.loss is not None else None
    yield f"return loss %{loss}, outputs " + ", ".join(
        f"%{node.name}" for node in program.outputs
    )


def _stage_lines(program: Program, stage: Stage) -> Iterator[str]:
    ranks = ""
    if program.placement is not None:
        on = [r[stage.index] for r in program.placement.ranks]
        ranks = " on ranks " + " ".join(str(list(r)) for r in on)
    yield f"stage {stage.index}{ranks}"
    for block in stage.blocks:
        yield f"  block {block.index} {block.name}"
        yield from (f"    {_node_line(node)}" for node in block.nodes)


def _node_line(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"%{node.name} = input: {meta.spec(node)}"
    arguments = [_show(argument) for argument in node.args]
    arguments += [f"{key}={_show(value)}" for key, value in node.kwargs.items()]
    line = f"%{node.name} = {node.op} {target_name(node)}({', '.join(arguments)})"
    facts = meta.facts(node)
    if facts != meta.Facts():
        line += (
            f"  {show_flops(facts.flops)}, {show_bytes(facts.saved_bytes)} saved, "
            f"{show_seconds(facts.forward_seconds)} + "
            f"{show_seconds(facts.backward_seconds)}"
        )
    where = meta.location(node)
    if where is not None:
        line += f"  # {where.short}  {where.text}"
    return line


def _show(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return f"%{argument.name}"
    if isinstance(argument, (tuple, list)):
        inside = ", ".join(map(_show, argument))
        return f"({inside})" if isinstance(argument, tuple) else f"[{inside}]"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{k}: {_show(v)}" for k, v in argument.items()) + "}"
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return "slice(" + ", ".join(map(_show, parts)) + ")"
    if isinstance(argument, torch.dtype):
        return str(argument)
    return repr(argument)
