"""Which part of each parameter one rank updates, where several ranks hold it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod

from gemsc.errors import GemscError
from gemsc.ir.flow import owned_tensors, shared_parameters
from gemsc.ir.program import Program
from gemsc.messages.rows import rows_of_holders


def share_updates(program: Program, copies: int) -> Program:
    """Let the ranks that hold the same parameters update a part of them each.

    `copies` are the data-parallel copies of the program's ranks.

    Raises:
        GemscError: each parameter is on one rank, or nothing is trained.
    """
    if program.loss is None:
        raise GemscError(
            "--shard-optimizer has no effect on a program that cannot train",
            help="add loss(output, target) to the model's file, or leave it out",
        )
    named = dict(program.module.named_parameters())
    groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
    holders: dict[tuple[str, bool], int] = {}
    owned = owned_tensors(program)
    tied = shared_parameters(program, owned)
    for stage, of_stage in enumerate(owned):
        for name in of_stage:
            if name in named and named[name].requires_grad:
                key = (name if name in tied else f"stage{stage}", name in program.parts)
                groups[key].append(name)
                holders[key] = copies * _holders(program, tied.get(name, (stage,)), key)
    if max(holders.values(), default=1) == 1:
        raise GemscError(
            "--shard-optimizer has no effect: each weight is on one rank",
            help="use --data 2 or --schedule mast, or leave it out",
        )
    updated: dict[str, int] = {}
    for key, names in groups.items():
        shapes = {name: tuple(named[name].shape) for name in names}
        updated |= _most_updated(program, shapes, holders[key])
    return replace(program, updated=updated)


def _holders(program: Program, stages: tuple[int, ...], key: tuple[str, bool]) -> int:
    """Return how many ranks of one copy hold the same of a group of parameters."""
    placement, (_, is_part) = program.placement, key
    assert placement is not None
    ranks = {r for stage in stages for row in placement.ranks for r in row[stage]}
    return len(ranks) // placement.grid(stages[0]).beside if is_part else len(ranks)


def _most_updated(
    program: Program, shapes: dict[str, tuple[int, ...]], holders: int
) -> dict[str, int]:
    """Return how many elements of each the holder updates that keeps most state."""

    def kept(elements: dict[str, int]) -> int:
        state = program.optimizer_bytes
        names = state.keys() & elements.keys()
        return sum(state[n].of(elements[n], prod(shapes[n])) for n in names)

    rows = rows_of_holders(shapes, holders, program.updated_whole())
    found = [
        {
            name: prod(shape[1:]) * (rows[name][holder][1] - rows[name][holder][0])
            for name, shape in shapes.items()
        }
        for holder in range(holders)
    ]
    return max(found, key=lambda each: (kept(each), sum(each.values())))
