"""Mark segments: blocks that are recomputed or offloaded instead of kept.

Example, --recompute layer1 --offload layer2.0:
    segment layer1 recompute      # blocks layer1.0 and layer1.1, as one
    segment layer2.0 offload
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import ClassVar

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.mutation import mutated_inputs
from gemsc.ir.program import Block, Program, Segment
from gemsc.ir.segments import frees_anything, may_recompute
from gemsc.passes.base import Pass

__all__ = ["MarkSegments"]


@dataclass(frozen=True)
class MarkSegments(Pass):
    """Find the blocks that the user names; see `CompileOptions.recompute`.

    A name makes one segment of all its blocks, cut where stages are. "all" makes one of
    each block that saves more than it takes; "auto" is decided later, when the schedule
    is known.
    """

    name: ClassVar[str] = "mark-segments"
    requires: ClassVar[tuple[str, ...]] = ("stages",)
    provides: ClassVar[tuple[str, ...]] = ("segments",)

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def apply(self, program: Program) -> Program:
        """Return the program with its segments.

        Raises:
            GemscError: no block has such a name, a block is named twice, or cannot run
                twice because it changes something.
        """
        found = [
            *self._segments(program, "recompute", self.recompute),
            *self._segments(program, "offload", self.offload),
        ]
        _refuse_twice(program, found)
        for segment in found:
            if segment.kind == "recompute":
                _refuse_effects(program, segment)
        found.sort(key=lambda segment: segment.blocks)
        return replace(program, segments=tuple(found))

    def _segments(
        self, program: Program, kind: str, names: Sequence[str]
    ) -> Iterator[Segment]:
        blocks = program.blocks or ()
        if tuple(names) == ("all",):
            for block in blocks:
                if frees_anything(block) and may_recompute(program, block):
                    yield Segment(block.name, kind, (block.index,))
            return
        for name in names:
            if name in ("auto", "off"):
                continue
            inside = {b.index for b in blocks if _lies_in(b, name)}
            if not inside:
                raise _unknown(kind, name, blocks)
            for stage in program.require_stages():
                mine = [b.index for b in stage.blocks if b.index in inside]
                for run in _runs(mine):
                    yield Segment(name, kind, run)


def _lies_in(block: Block, path: str) -> bool:
    """Whether a block has layers in a module, or bears its name."""
    heavy = [n for n in block.nodes if meta.facts(n).heavy] or list(block.nodes)
    paths = [
        str(node.target) if node.op == "call_module" else meta.module_path(node)
        for node in heavy
    ]
    return any(p == path or p.startswith(f"{path}.") for p in [*paths, block.name])


def _runs(indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Split into runs of consecutive numbers."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [tuple(run) for run in runs]


def _unknown(kind: str, name: str, blocks: Sequence[Block]) -> GemscError:
    names = [block.name for block in blocks]
    close = get_close_matches(name, names, n=3, cutoff=0.4)
    return GemscError(
        f"--{kind} {name}: no block lies in a module '{name}'",
        help="blocks: " + ", ".join(close or names),
    )


def _refuse_twice(program: Program, segments: Sequence[Segment]) -> None:
    owner: dict[int, Segment] = {}
    for segment in segments:
        for index in segment.blocks:
            other = owner.setdefault(index, segment)
            if other is not segment:
                block = (program.blocks or ())[index].name
                raise GemscError(
                    f"block '{block}' is named twice: by --{other.kind} {other.name} "
                    f"and --{segment.kind} {segment.name}",
                    help="name each block once",
                )


def _refuse_effects(program: Program, segment: Segment) -> None:
    for index in segment.blocks:
        block = (program.blocks or ())[index]
        for node in block.nodes:
            if mutated_inputs(node, program.module):
                raise GemscError(
                    f"--recompute {segment.name}: block '{block.name}' changes a "
                    "tensor that it does not own, and would do so twice",
                    at=meta.location(node),
                    help="leave it out, or --offload it",
                )
