"""What a compilation gives: rank files that are proved, and ways to look at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemsc.codegen.package import write_directory
from gemsc.codegen.read import read_ranks
from gemsc.compilation import Compilation
from gemsc.ir.flow import reductions
from gemsc.plan import Plan
from gemsc.schedules import Task
from gemsc.schedules.check import prove
from gemsc.search.candidates import Candidate
from gemsc.viz.graph import draw_graph, render
from gemsc.viz.report import write_report
from gemsc.viz.timeline import write_timeline


@dataclass(frozen=True, repr=False)
class CompiledProgram:
    """The result of `compile`: inspect it, then write it.

    `candidates` are the options that were compared where something was `auto`, the best
    first.
    """

    compilation: Compilation
    candidates: tuple[Candidate, ...] = ()

    @property
    def plan(self) -> Plan:
        """Every decision, as plain data."""
        return self.compilation.plan

    def with_plan(self, **changes: Any) -> CompiledProgram:
        """Return the program with other entries in its plan."""
        plan = replace(self.plan, **changes)
        return replace(self, compilation=replace(self.compilation, plan=plan))

    def __repr__(self) -> str:
        """Return for example `<Net: 4 ranks, stages of 3, 4, 3, 2 blocks, 1f1b>`."""
        return f"<{self.plan.summary}>"

    def rank_modules(self) -> dict[str, str]:
        """Return the text of each rank's file, by file name."""
        return self.compilation.all_files()

    def graph(self) -> str:
        """Return the graph of the stages as DOT text."""
        return draw_graph(self.compilation.shown, self.plan)

    def write(self, directory: str | Path) -> str | None:
        """Write the program directory; return why graph.svg is missing, if it is."""
        folder = Path(directory)
        write_directory(self.compilation, folder)
        write_timeline(self.plan, folder / "timeline.svg")
        missing = render(self.graph(), folder / "graph.svg")
        write_report(self.plan, folder, self.candidates, with_graph=missing is None)
        return missing


def prove_files(files: Mapping[str, str], compilation: Compilation, task: Task) -> None:
    """Prove what the rank files say: training, and evaluation.

    Raises:
        InternalError: the files are wrong; names stage, micro-batch and user's line.
    """
    placement = compilation.program.placement
    assert placement is not None
    training, evaluation = read_ranks(files)
    prove(evaluation, task.evaluation, groups=placement.groups)
    if not task.has_backward:
        return
    shared = reductions(compilation.program, compilation.owned)
    prove(
        training,
        task,
        groups=placement.groups,
        shared=shared,
        weights=compilation.owned,
        copies=compilation.plan.data,
    )
