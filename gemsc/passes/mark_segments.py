"""Mark segments: blocks that are recomputed or offloaded instead of kept.

Example, --recompute layer1,layer3.1..layer4.0 --offload layer2.0:
    segment layer1 recompute                # blocks layer1.0 and layer1.1, as one
    segment layer2.0 offload
    segment layer3.1..layer4.0 recompute    # from the one to the other, as one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.program import Block, Program, Segment
from gemsc.ir.segments import (
    TO,
    blocks_in,
    blocks_named,
    frees_anything,
    may_recompute,
    runs_once,
    segment_name,
)
from gemsc.passes.base import Pass
from gemsc.passes.group_blocks import not_found

WORDS = ("all", "auto", "off")


@dataclass(frozen=True)
class MarkSegments(Pass):
    """Find the blocks that the user names; see `CompileOptions.recompute`.

    A module's name makes one segment of its blocks, cut where stages are, and so does
    `first..last` of the blocks from the one to the other. "all" makes
    one of each block that saves more than it takes; "auto" is decided later, when the
    schedule is known. A graph that `follows` another one may lack what is named.
    """

    requires = ("facts", "stages")
    provides = ("segments",)

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    follows: bool = False

    def apply(self, program: Program) -> Program:
        """Return the program with its segments.

        A block that is named itself goes by that, not by the name of its module.

        Raises:
            GemscError: no block has such a name, a block is named twice, or cannot run
                twice because it changes something.
        """
        given = {"recompute": self.recompute, "offload": self.offload}
        wishes = [(k, name) for k in given for name in _expanded(program, given, k)]
        blocks = program.blocks or ()
        owner: dict[int, tuple[str, str]] = {}
        for kind, name in wishes:
            for block in _named(kind, name, blocks):
                _refuse_twice(block, owner.get(block.index), kind)
                owner[block.index] = kind, name
        for kind, name in wishes:
            if TO in name:
                continue
            inside = blocks_in(blocks, name)
            if not inside and not self.follows:
                raise not_found(kind, name, blocks)
            for block in inside:
                owner.setdefault(block.index, (kind, name))
        segments = tuple(_segments(program, owner))
        for segment in segments:
            if segment.kind == "recompute":
                _refuse_effects(program, segment)
        return replace(program, segments=segments)


def _expanded(
    program: Program, given: Mapping[str, Sequence[str]], kind: str
) -> Sequence[str]:
    """Return names of blocks or modules: for "all" each block where it helps.

    Those that are named for the other kind are left out.
    """
    if tuple(given[kind]) != ("all",):
        return [name for name in given[kind] if name not in ("auto", "off")]
    blocks = program.blocks or ()
    taken = {
        block.index
        for other in given.keys() - {kind}
        for name in given[other]
        if name not in WORDS
        for block in (*_named(other, name, blocks), *blocks_in(blocks, name))
    }
    return [
        segment_name([block], blocks)
        for block in blocks
        if block.index not in taken
        and frees_anything(block)
        and may_recompute(program, block)
    ]


def _segments(program: Program, owner: dict[int, tuple[str, str]]) -> Iterator[Segment]:
    """Yield the runs of blocks with one owner in one stage."""
    for stage in program.require_stages():
        for wish, run in groupby(stage.blocks, lambda block: owner.get(block.index)):
            if wish is not None:
                kind, name = wish
                yield Segment(name, kind, tuple(block.index for block in run))


def _named(kind: str, name: str, blocks: Sequence[Block]) -> Sequence[Block]:
    """Return the block of this name, or those from first to last of `first..last`."""
    for end in name.split(TO) if TO in name else ():
        if not blocks_named(blocks, end):
            raise not_found(kind, end, blocks)
    return blocks_named(blocks, name)


def _refuse_twice(block: Block, known: tuple[str, str] | None, kind: str) -> None:
    if known is not None:
        raise GemscError(
            f"block '{block.name}' is named twice, by --{known[0]} and by --{kind}",
            help="name each block once",
        )


def _refuse_effects(program: Program, segment: Segment) -> None:
    for index in segment.blocks:
        block = (program.blocks or ())[index]
        for node in block.nodes:
            if runs_once(program, node):
                raise GemscError(
                    f"--recompute {segment.name}: block '{block.name}' changes a "
                    "tensor that it does not own, and would change it twice, or reads "
                    "statistics that have changed by then, or its forward calls "
                    "torch.autograd.grad",
                    at=meta.location(node),
                    help="leave the block out, or --offload it",
                )
