"""The program directory: every rank's module, the main program, plan and weights."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import fx

from gemsc.base.units import show_bytes, show_flops
from gemsc.base.weights import write_tensors
from gemsc.codegen.expressions import literal
from gemsc.codegen.rank import write_rank
from gemsc.codegen.rank_text import RankText, RunText, StageText
from gemsc.compilation import Compilation, TileProgram
from gemsc.errors import GemscError
from gemsc.ir.flow import reductions, segments_of, value_names
from gemsc.ir.program import DataclassValue, Slot

__all__ = ["check_target", "rank_modules", "write_directory"]

BESIDE = ".gemsc-"  # the folder in which a program is written
MAIN = '''"""Start one rank: mpirun -n {ranks} python {name}, or gemsc run {name}."""

import sys
from pathlib import Path

from gemsc.runtime import main

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

    All of it is written into a folder inside, then moved to its place: a program that
    was there stays whole until the new one is. While files move there is no plan, and
    a directory without one is refused.

    Raises:
        GemscError: the directory holds something that is no program of ours.
        OSError: it cannot be written.
    """
    check_target(directory)
    texts = dict(compilation.files)
    texts["__main__.py"] = MAIN.format(
        ranks=compilation.plan.ranks, name=_clean(directory.resolve().name)
    )
    texts["plan.toml"] = compilation.plan.to_toml(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=BESIDE, dir=directory) as name:
        new = Path(name)
        _write_weights(compilation, new / "weights")
        for file, text in texts.items():
            (new / file).write_text(text, encoding="utf-8")
        (directory / "plan.toml").unlink(missing_ok=True)
        (directory / "weights").mkdir(exist_ok=True)
        _remove(directory, "rank*.py")
        _remove(directory / "weights", "stage*.safetensors")
        for path in (new / "weights").iterdir():
            path.replace(directory / "weights" / path.name)
        for file in texts:  # the plan comes last
            (new / file).replace(directory / file)


def check_target(directory: Path) -> None:
    """Make sure that writing a program into a directory overwrites nothing else.

    Raises:
        GemscError: it is a file, or holds something that is no program of ours.
    """
    if directory.exists() and not directory.is_dir():
        raise GemscError(f"{directory} is a file", help="choose another folder with -o")
    if not directory.exists() or _is_program(directory):
        return
    found = sorted(path.name for path in directory.iterdir())
    found = [name for name in found if not name.startswith(BESIDE)]
    if found:
        names = ", ".join(found[:3]) + ", ..." * (len(found) > 3)
        raise GemscError(
            f"{directory} holds other files ({names})",
            help="choose an empty or new folder with -o",
        )


def _is_program(directory: Path) -> bool:
    try:
        text = (directory / "__main__.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return "from gemsc.runtime" in text and "import main" in text


def _write_weights(compilation: Compilation, folder: Path) -> None:
    module = compilation.program.module
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for index, names in enumerate(compilation.owned):
        path = folder / f"stage{index}.safetensors"
        write_tensors(path, {name: tensors[name] for name in names})


def _remove(directory: Path, pattern: str) -> None:
    for path in directory.glob(pattern):
        path.unlink()


def _rank_text(compilation: Compilation, rank: int) -> RankText:
    plan = compilation.plan
    placement = compilation.program.placement
    assert placement is not None
    group = next(i for i, ranks in enumerate(placement.groups) if rank in ranks)
    ranks = placement.groups[group]
    tile = ranks.index(rank) if len(ranks) > 1 else None
    own = compilation.tiles[tile or 0]
    program = own.program
    all_transfers = (*(program.transfers or ()), *(own.evaluation.transfers or ()))
    names = value_names(all_transfers, program, own.evaluation)
    runs = tuple(
        RunText(replica, _stage_text(compilation, own, stage.index, names, tile))
        for replica in range(placement.num_replicas)
        for stage in program.require_stages()
        if rank in placement.ranks[replica][stage.index]
    )
    sums = {}
    for name, stages in reductions(compilation.program, compilation.owned).items():
        places = {r for s in stages for row in placement.ranks for r in row[s]}
        if rank in places and len(places) * plan.data > 1:
            sums[name] = tuple(sorted(places))
    return RankText(
        rank=rank,
        num_ranks=placement.num_ranks,
        docstring=_docstring(compilation, rank, runs, tile),
        program=program,
        evaluation=own.evaluation,
        twin=own.twins is not None,
        runs=runs,
        steps=compilation.steps[group],
        num_micro_batches=plan.micro_batches // plan.replicas,
        num_replicas=plan.replicas,
        reductions=sums,
        names=names,
        tile=tile,
    )


def _stage_text(
    compilation: Compilation,
    own: TileProgram,
    index: int,
    names: dict[fx.Node, str],
    tile: int | None,
) -> StageText:
    stage = compilation.program.require_stages()[index]
    blocks = _span([block.name for block in stage.blocks])
    flow, evaluation = own.flow(index), own.evaluation_flow(index)
    for value, node in (*flow.joined.items(), *evaluation.joined.items()):
        names[node] = names[value]
    return StageText(
        class_name=f"Stage{index}",
        docstring=_clean(f"Stage {index}: {blocks}."),
        program=own.program,
        flow=flow,
        owned=compilation.owned[index],
        names=names,
        twins=own.twins,
        evaluation=evaluation,
        structure=_structure(compilation),
        segments=segments_of(own.program, flow),
        tile=tile,
    )


def _docstring(
    compilation: Compilation, rank: int, runs: tuple[RunText, ...], tile: int | None
) -> list[str]:
    plan = compilation.plan
    stages = ", ".join(str(run.stage.flow.index) for run in runs)
    word = "stage" if len(runs) == 1 else "stages"
    what = f"{word} {stages}"
    if tile is not None:
        grid = plan.stages[runs[0].stage.flow.index].tiles
        what = f"tile {tile} of {' x '.join(map(str, grid))}, {what}"
    lines = [
        _clean(f"Rank {rank} of {plan.ranks}: {what} of {plan.model}."),
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
        saved = show_bytes(stage.cost.saved_bytes)
        if tile is None:
            lines.append(f"{saved} kept for each micro-batch.")
            continue
        lines.append(f"{saved} kept for each micro-batch by the tile that keeps most;")
        lines.append(f"{show_bytes(stage.halo_bytes)} from tile to tile in forward.")
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
    """Return a function from the outputs' texts to the text of their structure."""
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
