"""The program directory: every rank's module, the main program, plan and weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import fx

from gemsc.codegen.expressions import literal
from gemsc.codegen.rank import RankText, Run, write_rank
from gemsc.codegen.stage import StageText
from gemsc.errors import GemscError
from gemsc.ir.compilation import Compilation
from gemsc.ir.flow import value_names
from gemsc.ir.program import DataclassValue, Slot, Stage
from gemsc.runtime.weights import write_tensors
from gemsc.units import show_bytes, show_flops

__all__ = ["rank_modules", "write_directory"]

MAIN = '''"""Start this rank: `mpirun -n {ranks} python {name}`, or `gemsc run {name}`."""

import sys
from pathlib import Path

from gemsc.runtime.train import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent))
'''


def rank_modules(compilation: Compilation) -> dict[str, str]:
    """Return file name -> text for every rank of one copy of the model."""
    placement = compilation.program.placement
    assert placement is not None
    return {
        f"rank{rank}.py": write_rank(_rank_text(compilation, rank))
        for rank in range(placement.num_ranks)
    }


def write_directory(compilation: Compilation, directory: Path) -> None:
    """Write the program; what else is in the directory stays.

    Every file is written beside its place and renamed. The plan goes first and comes
    last, so that a directory that is not whole has none and is refused.

    Raises:
        GemscError: the directory holds something that is no program of ours.
    """
    _check_target(directory)
    modules = rank_modules(compilation)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.toml").unlink(missing_ok=True)
    weights = {
        f"stage{index}.safetensors": names
        for index, names in enumerate(compilation.owned)
    }
    _remove_stale(directory, "rank*.py", set(modules))
    _remove_stale(directory / "weights", "stage*.safetensors", set(weights))
    module = compilation.program.module
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for file, names in weights.items():
        write_tensors(
            directory / "weights" / file, {name: tensors[name] for name in names}
        )
    for name, text in modules.items():
        _write(directory / name, text)
    main = MAIN.format(ranks=compilation.plan.ranks, name=directory.name)
    _write(directory / "__main__.py", main)
    _write(directory / "plan.toml", compilation.plan.to_toml())


def _check_target(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise GemscError(f"{directory} is a file", help="choose another folder with -o")
    if not directory.exists() or (directory / "plan.toml").exists():
        return
    found = sorted(path.name for path in directory.iterdir())
    if found and "__main__.py" not in found and "rank0.py" not in found:
        raise GemscError(
            f"{directory} holds other files ({', '.join(found[:3])}, ...)",
            help="choose an empty or new folder with -o",
        )


def _remove_stale(directory: Path, pattern: str, keep: set[str]) -> None:
    for path in directory.glob(pattern):
        if path.name not in keep:
            path.unlink()


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _rank_text(compilation: Compilation, rank: int) -> RankText:
    program, plan = compilation.program, compilation.plan
    placement = program.placement
    assert placement is not None
    all_transfers = (*(program.transfers or ()), *(compilation.evaluation.transfers or ()))
    names = value_names(all_transfers, program, compilation.evaluation)
    runs = tuple(
        Run(replica, _stage_text(compilation, stage, names))
        for replica in range(placement.num_replicas)
        for stage in program.require_stages()
        if rank in placement.ranks[replica][stage.index]
    )
    shared = {}
    for name, stages in compilation.shared.items():
        ranks = sorted({r for s in stages for replica in placement.ranks for r in replica[s]})
        if rank in ranks and len(ranks) > 1:
            shared[name] = tuple(ranks)
    return RankText(
        rank=rank,
        num_ranks=placement.num_ranks,
        docstring=_docstring(compilation, rank, runs),
        program=program,
        evaluation=compilation.evaluation,
        twin=compilation.twins is not None,
        runs=runs,
        steps=compilation.steps[rank],
        num_micro_batches=plan.micro_batches,
        shared=shared,
        names=names,
        user_path=compilation.user_path,
    )


def _stage_text(
    compilation: Compilation, stage: Stage, names: dict[fx.Node, str]
) -> StageText:
    blocks = _span([block.name for block in stage.blocks])
    evaluation = compilation.evaluation_flow(stage.index)
    twins = compilation.twins
    return StageText(
        class_name=f"Stage{stage.index}",
        docstring=_clean(f"Stage {stage.index}: {blocks}."),
        program=compilation.program,
        flow=compilation.flow(stage.index),
        owned=compilation.owned[stage.index],
        names=names,
        twins=twins,
        evaluation=evaluation,
        structure=_structure(compilation),
    )


def _docstring(
    compilation: Compilation, rank: int, runs: tuple[Run, ...]
) -> list[str]:
    plan = compilation.plan
    stages = ", ".join(str(run.stage.flow.index) for run in runs)
    word = "stage" if len(runs) == 1 else "stages"
    lines = [
        _clean(f"Rank {rank} of {plan.ranks}: {word} {stages} of {plan.model}."),
        "Written by gemsc; do not edit, compile again:",
        *_wrapped(_clean(plan.command), 84),
        "",
    ]
    for run in runs:
        stage = plan.stages[run.stage.flow.index]
        lines.append(
            f"Stage {stage.index}: {show_flops(stage.flops)} forward, "
            f"{show_bytes(stage.parameter_bytes)} of parameters,"
        )
        lines.append(f"{show_bytes(stage.saved_bytes)} kept for each micro-batch.")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    lines, line = [], "   "
    for word in text.split(" "):
        if len(line) + 1 + len(word) > width:
            lines.append(line)
            line = "       "
        line += f" {word}"
    return [*lines, line]


def _span(names: list[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]}, {len(names)} blocks"


def _clean(text: str) -> str:
    """Make text safe inside a docstring."""
    kept = "".join(c if c.isprintable() else " " for c in text)
    return kept.replace("\\", "/").replace('"""', "'''")


def _structure(compilation: Compilation) -> Any:
    """Return a function from the texts of the outputs to the text of their structure."""
    structure = compilation.evaluation.structure

    def show(value: Any, outputs: list[str]) -> str:
        if isinstance(value, Slot):
            return outputs[value.index]
        if isinstance(value, DataclassValue):  # its fields, under their names
            return show(dict(value.fields), outputs)
        if isinstance(value, tuple):
            inside = ", ".join(show(item, outputs) for item in value)
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if isinstance(value, list):
            return f"[{', '.join(show(item, outputs) for item in value)}]"
        if isinstance(value, dict):
            pairs = (f"{literal(k)}: {show(v, outputs)}" for k, v in value.items())
            return "{" + ", ".join(pairs) + "}"
        return literal(value)

    return lambda outputs: show(structure, outputs)

