"""From a plan.toml that a person has edited back to options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gemsc.errors import GemscError, SourceLocation
from gemsc.ir.program import Block
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.schedules import SCHEDULES, place

__all__ = ["EditedPlan"]

DEFAULTS = CompileOptions()
_KINDS = {bool: "true or false", int: "number", str: "text"}


@dataclass(frozen=True)
class EditedPlan:
    """A plan and the file that it stands in."""

    plan: Plan
    path: Path

    @classmethod
    def read(cls, path: Path) -> EditedPlan:
        """Read the file.

        Raises:
            GemscError: it cannot be read, or is no plan.
        """
        return cls(Plan.read(path), path)

    def options(self) -> CompileOptions:
        """Return the options that give this plan (see `options_of`)."""
        return options_of(self.plan, self.path)

    def check(self, blocks: Sequence[Block]) -> None:
        """Make sure that its stages hold these blocks (see `check_blocks`)."""
        check_blocks(self.plan, blocks, self.path)


def options_of(plan: Plan, path: Path) -> CompileOptions:
    """Return the options that give this plan: its stages, their ranks, its schedule.

    Raises:
        GemscError: what was edited contradicts itself; says in which line.
    """
    known = {field.name for field in fields(CompileOptions)}
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in plan.options.items()
        if key in known
    }
    if plan.schedule not in SCHEDULES:
        raise GemscError(
            f"unknown schedule '{plan.schedule}'",
            at=locate(path, "", "schedule"),
            help=f"choose one of {', '.join(SCHEDULES)}",
        )
    if plan.data < 1 or plan.ranks % plan.data:
        raise GemscError(
            f"{plan.ranks} ranks cannot be shared by {plan.data} copies",
            at=locate(path, "", "data"),
            help="ranks counts those of all copies",
        )
    changed = {
        "ranks": plan.copy_ranks,
        "data": plan.data,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "times": None,
        "cuts": (),
        "balance": "explicit",
        "blocks": tuple(len(stage.blocks) for stage in plan.stages),
        "placement": _placement(plan, path),
        "recompute": _all_of(stage.recompute for stage in plan.stages),
        "offload": _all_of(stage.offload for stage in plan.stages),
    }
    for key in given.keys() - changed.keys():
        _check_kind(key, plan.options[key], path)
    return CompileOptions(**{**given, **changed})


def _check_kind(key: str, value: Any, path: Path) -> None:
    """Refuse an option that is of another type than its default."""
    default = getattr(DEFAULTS, key)
    if isinstance(default, tuple):
        kind, fits = "list of texts", isinstance(value, list)
        fits = fits and all(isinstance(each, str) for each in value)
    else:
        wanted = int if default is None else type(default)
        kind, fits = _KINDS[wanted], type(value) is wanted
    if not fits:
        raise GemscError(
            f"{key} is {value!r}, which is no {kind}",
            at=locate(path, "options", key),
            help="write it as gemsc did, or undo the change",
        )


def _all_of(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the names of all stages, each once."""
    return tuple(dict.fromkeys(name for each in names for name in each))


def _placement(plan: Plan, path: Path) -> str:
    """Return the placement's name where the stages' ranks are still those it gives."""
    if plan.groups:
        return _placement_of_groups(plan, path)
    rows = [tuple(stage.ranks) for stage in plan.stages]
    for index, ranks in enumerate(rows):
        wrong = [rank for rank in ranks if not 0 <= rank < plan.copy_ranks]
        if wrong:
            raise GemscError(
                f"stage {index} is on rank {wrong[0]}, but the ranks of a copy are 0 "
                f"to {plan.copy_ranks - 1}",
                at=locate(path, "stages", "ranks", index),
                help="ranks of all copies are placed alike",
            )
    if plan.placement != "explicit" and rows == _named_rows(plan):
        return plan.placement
    several = [index for index, ranks in enumerate(rows) if len(ranks) != 1]
    if several:
        raise GemscError(
            f"stage {several[0]} is on {len(rows[several[0]])} ranks, which "
            f"placement {plan.placement} does not give",
            at=locate(path, "stages", "ranks", several[0]),
            help="give one rank for each stage, or undo the change",
        )
    idle = set(range(plan.copy_ranks)) - {rank for (rank,) in rows}
    if idle:
        raise GemscError(
            f"rank {min(idle)} has no stage",
            at=locate(path, "", "ranks"),
            help="lower ranks, or give it a stage",
        )
    return ",".join(str(rank) for (rank,) in rows)


def _placement_of_groups(plan: Plan, path: Path) -> str:
    """Return the placement of stages on grids of ranks."""
    groups = [set(members) for members in plan.groups]
    for index, stage in enumerate(plan.stages):
        ranks = set(stage.ranks)
        if any(0 < len(ranks & group) < len(group) for group in groups):
            raise GemscError(
                f"stage {index} is on ranks {stage.ranks}, a part of a grid",
                at=locate(path, "stages", "ranks", index),
                help=f"the ranks that go together are {plan.groups}",
            )
    if plan.placement != "explicit":
        return plan.placement
    return ",".join(str(groups.index(set(stage.ranks))) for stage in plan.stages)


def _named_rows(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of each stage under the plan's placement."""
    replicas = SCHEDULES[plan.schedule].num_replicas
    placed = place(plan.placement, len(plan.stages), plan.copy_ranks, replicas)
    return [tuple(sorted(set(ranks))) for ranks in zip(*placed, strict=True)]


def check_blocks(plan: Plan, blocks: Sequence[Block], path: Path) -> None:
    """Make sure that the plan's stages hold the model's blocks, in their order.

    Raises:
        GemscError: a block is unknown, missing, doubled or out of order; says where.
    """
    names = [block.name for block in blocks]
    following = 0
    for index, stage in enumerate(plan.stages):
        if not stage.blocks:
            raise GemscError(
                f"stage {index} has no blocks",
                at=locate(path, "stages", "blocks", index),
                help="move a block there, or remove the stage",
            )
        for name in stage.blocks:
            expected = names[following] if following < len(names) else None
            if name == expected:
                following += 1
                continue
            at = locate(path, "stages", "blocks", index, f'"{name}"')
            if name not in names:
                near = get_close_matches(name, names, n=3) or names
                raise GemscError(
                    f"the model has no block '{name}'",
                    at=at,
                    help=f"blocks: {', '.join(near)}",
                )
            raise GemscError(
                f"block '{name}' is out of order in stage {index}: "
                + (f"'{expected}' comes next" if expected else "all are there already"),
                at=at,
                help="stages hold the model's blocks in their order, each once",
            )
    if following < len(names):
        raise GemscError(
            f"block '{names[following]}' is in no stage",
            at=locate(path, "stages", "blocks", len(plan.stages) - 1),
            help="stages hold the model's blocks in their order, each once",
        )


def locate(
    path: Path, table: str, key: str, index: int = 0, word: str = ""
) -> SourceLocation | None:
    """Return the line of a key in the index-th `[[table]]` ("" is the head).

    With `word` it is the first line from there on that holds the word.
    """
    section, count = "", -1
    found = 0
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text.startswith("["):
            if found:
                break
            section = text.strip("[] ")
            count = count + 1 if section == table else count
        inside = section == table and (not table or count == index)
        if inside and text.partition("=")[0].strip() == key:
            found = number
        if found and word in line:
            return SourceLocation(str(path), number)
    return SourceLocation(str(path), found) if found else None
