"""From a plan.toml that a person has edited back to options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gemsc.base.grid_shape import SPLITS
from gemsc.base.toml_file import TomlFile
from gemsc.errors import GemscError, SourceLocation
from gemsc.ir.flow import used_tensors
from gemsc.ir.program import Block, Program
from gemsc.options import CompileOptions
from gemsc.plan import Plan, PlannedStage, cut_name, plan_file
from gemsc.schedules import SCHEDULES, place

DEFAULTS = CompileOptions()
_KINDS = {bool: "true or false", int: "number", str: "text"}
_NAMED = re.compile(r"(?:--|unknown )([a-z-]+)")


@dataclass(frozen=True)
class EditedPlan:
    """A plan and the file that it stands in."""

    plan: Plan
    file: TomlFile

    @classmethod
    def read(cls, path: Path) -> EditedPlan:
        """Read the file.

        Raises:
            GemscError: it cannot be read, or is no plan.
        """
        file = plan_file(path)
        return cls(Plan.of(file), file)

    def options(self) -> CompileOptions:
        """Return the options that give this plan: stages, their ranks, the schedule.

        Raises:
            GemscError: what was edited contradicts itself; says in which line.
        """
        return options_of(self.plan, self.file)

    def check(self, blocks: Sequence[Block]) -> None:
        """Make sure that its stages hold these blocks (see `check_blocks`)."""
        check_edited_blocks(self.plan, blocks, self.file)

    def check_shared(self, found: Plan) -> None:
        """Make sure that a new plan holds trunks and places branches as this one does.

        Raises:
            GemscError: it does not; names the stage.
        """
        forks = {fork.join: fork.placed for s in found.stages for fork in s.forks}
        for stage, now in zip(self.plan.stages, found.stages, strict=True):
            if stage.trunk not in ("", now.trunk):
                raise self.file.error(
                    ("stages", stage.index, "trunk"),
                    f"stage {stage.index} has trunk {now.trunk}, not {stage.trunk}",
                    help="give all stages with shards the same trunk",
                )
            for index, fork in enumerate(stage.forks):
                placed = [set(names) for names in forks.get(fork.join, ())]
                if fork.placed and placed != [set(names) for names in fork.placed]:
                    raise self.file.error(
                        ("stages", stage.index, "forks", index),
                        f"the branches of {fork.name} cannot be placed so with all else"
                        " in this plan",
                        help="place those of one fork only where forks overlap",
                        word=f'"{fork.name}"',
                    )

    def placed(self) -> dict[str, list[list[str]]] | None:
        """Return the branches of each rank, by joins; None if no stage shares any.

        Raises:
            GemscError: a branch is unknown, missing or doubled; says where.
        """
        shared = [stage for stage in self.plan.stages if stage.branches > 1]
        placed = {
            fork.join: placed_branches(stage, index, self.file)
            for stage in shared
            for index, fork in enumerate(stage.forks)
            if fork.placed
        }
        return placed if shared else None

    def taken_out(self, program: Program) -> tuple[str, ...]:
        """Return the parameters that were taken out of a stage's `cut`.

        Its stages hold the program's blocks.

        Raises:
            GemscError: `cut` names what the stage does not have.
        """
        return taken_out(self.plan, program, self.file)

    @contextmanager
    def lines(self) -> Iterator[None]:
        """Give errors of compiling the plan the line of the option that they name."""
        try:
            yield
        except GemscError as error:
            error.at = error.at or self._line_of(f"{error.message} {error.help}")
            raise

    def _line_of(self, text: str) -> SourceLocation | None:
        """Return the line of the first option that a message names."""
        for flag in _NAMED.findall(text):
            name = flag.removeprefix("no-").replace("-", "_")
            stage = "blocks" if name == "cuts" else name
            for keys in ((name,), ("stages", 0, stage), ("options", name)):
                found = self.file.location(keys)
                if found != self.file.location(keys[:-1]):
                    return found
        return None


def options_of(plan: Plan, file: TomlFile) -> CompileOptions:
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
        raise file.error(
            ("schedule",),
            f"unknown schedule '{plan.schedule}'",
            help=f"choose one of {', '.join(SCHEDULES)}",
        )
    changed = {
        "ranks": plan.ranks,
        "data": plan.data,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "times": None,
        "cuts": (),
        "balance": "explicit",
        "blocks": tuple(len(stage.blocks) for stage in plan.stages),
        "placement": _placement(plan, file),
        "recompute": _all_of(stage.recompute for stage in plan.stages),
        "offload": _all_of(stage.offload for stage in plan.stages),
    }
    trunks = {stage.trunk for stage in plan.stages if stage.trunk}
    if len(trunks) == 1:
        changed["trunk"] = trunks.pop()
    for key in given.keys() - changed.keys():
        _check_kind(key, plan.options[key], file)
    options = CompileOptions(**{**given, **changed})
    _check_grids(plan, options, file)
    return options


def _check_grids(plan: Plan, options: CompileOptions, file: TomlFile) -> None:
    """Refuse tiles, shards or branches of a stage that are not those of the options."""
    for stage in plan.stages:
        pairs = zip(plan.members, options.groups, strict=False)
        grid = next((g for ranks, g in pairs if ranks[0] in stage.ranks), stage.grid)
        if grid != stage.grid:
            both = grid, stage.grid
            name = next(n for n in SPLITS if len({getattr(g, n) for g in both}) > 1)
            raise file.error(
                ("stages", stage.index, name),
                f"stage {stage.index} has {stage.grid}, its ranks are {grid}",
                help=f"change {name} under [options] and the groups, or compile anew "
                f"with other --{name}",
            )


def _check_kind(key: str, value: Any, file: TomlFile) -> None:
    """Refuse an option that is of another type than its default."""
    default = getattr(DEFAULTS, key)
    if isinstance(default, tuple):
        kind, fits = "list of texts", isinstance(value, list)
        fits = fits and all(isinstance(each, str) for each in value)
    else:
        wanted = int if default is None else type(default)
        kind, fits = _KINDS[wanted], type(value) is wanted
    if not fits:
        raise file.error(
            ("options", key),
            f"{key} is {value!r}, which is not a {kind}",
            help="write it as gemsc did, or undo the change",
        )


def _all_of(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the names of all stages, each once."""
    return tuple(dict.fromkeys(name for each in names for name in each))


def _placement(plan: Plan, file: TomlFile) -> str:
    """Return the placement's name where the stages' ranks are still those it gives."""
    if plan.groups:
        return _placement_of_groups(plan, file)
    rows = [tuple(stage.ranks) for stage in plan.stages]
    for index, ranks in enumerate(rows):
        wrong = [rank for rank in ranks if not 0 <= rank < plan.copy_ranks]
        if wrong:
            raise file.error(
                ("stages", index, "ranks"),
                f"stage {index} is on rank {wrong[0]}, but the ranks of a replica are "
                f"0 to {plan.copy_ranks - 1}",
                help="all replicas are placed in the same way",
            )
    if plan.placement != "explicit" and rows == _named_rows(plan):
        return plan.placement
    several = [index for index, ranks in enumerate(rows) if len(ranks) != 1]
    if several:
        raise file.error(
            ("stages", several[0], "ranks"),
            f"stage {several[0]} is on {len(rows[several[0]])} ranks, which "
            f"placement {plan.placement} does not allow",
            help="give one rank for each stage, or undo the change",
        )
    idle = set(range(plan.copy_ranks)) - {rank for (rank,) in rows}
    if idle:
        raise file.error(
            ("ranks",),
            f"rank {min(idle)} has no stage",
            help="lower ranks, or give it a stage",
        )
    return ",".join(str(rank) for (rank,) in rows)


def _placement_of_groups(plan: Plan, file: TomlFile) -> str:
    """Return the placement of stages on grids of ranks."""
    groups = [set(members) for members in plan.groups]
    for index, stage in enumerate(plan.stages):
        ranks = set(stage.ranks)
        whole = [group for group in groups if ranks & group]
        if ranks != set().union(*whole) or not ranks:
            raise file.error(
                ("stages", index, "ranks"),
                f"stage {index} is on ranks {stage.ranks}, which are not whole grids",
                help=f"the grids are ranks {plan.groups}",
            )
    if plan.placement != "explicit":
        return plan.placement
    several = [
        i for i, stage in enumerate(plan.stages) if set(stage.ranks) not in groups
    ]
    if several:
        raise file.error(
            ("stages", several[0], "ranks"),
            f"stage {several[0]} is on several grids",
            help="give the ranks of one grid for each stage",
        )
    return ",".join(str(groups.index(set(stage.ranks))) for stage in plan.stages)


def _named_rows(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of each stage under the plan's placement."""
    replicas = SCHEDULES[plan.schedule].num_replicas
    placed = place(plan.placement, len(plan.stages), plan.copy_ranks, replicas)
    return [tuple(sorted(set(ranks))) for ranks in zip(*placed, strict=True)]


def check_edited_blocks(plan: Plan, blocks: Sequence[Block], file: TomlFile) -> None:
    """Make sure that the plan's stages hold the model's blocks, in their order.

    Raises:
        GemscError: a block is unknown, missing, doubled or out of order; says where.
    """
    names = [block.name for block in blocks]
    following = 0
    for index, stage in enumerate(plan.stages):
        if not stage.blocks:
            raise file.error(
                ("stages", index, "blocks"),
                f"stage {index} has no blocks",
                help="move a block there, or remove the stage",
            )
        for name in stage.blocks:
            expected = names[following] if following < len(names) else None
            if name == expected:
                following += 1
                continue
            here = ("stages", index, "blocks")
            if name not in names:
                near = get_close_matches(name, names, n=3) or names
                raise file.error(
                    here,
                    f"the model has no block '{name}'",
                    help=f"blocks: {', '.join(near)}",
                    word=f'"{name}"',
                )
            raise file.error(
                here,
                f"block '{name}' is out of order in stage {index}: "
                + (f"'{expected}' comes next" if expected else "all are there already"),
                help="stages hold the model's blocks in their order, each once",
                word=f'"{name}"',
            )
        for entry in ("recompute", "offload"):
            for name in set(getattr(stage, entry)) - set(stage.blocks):
                raise file.error(
                    ("stages", index, entry),
                    f"stage {index} has no block '{name}'",
                    help=f"{entry} names blocks of its stage",
                    word=f'"{name}"',
                )
    if following < len(names):
        raise file.error(
            ("stages", len(plan.stages) - 1, "blocks"),
            f"block '{names[following]}' is in no stage",
            help="stages hold the model's blocks in their order, each once",
        )


def placed_branches(stage: PlannedStage, index: int, file: TomlFile) -> list[list[str]]:
    """Return the branches of each rank of a stage's fork.

    Raises:
        GemscError: a branch is unknown, missing or doubled; says where.
    """
    fork = stage.forks[index]
    here = ("stages", stage.index, "forks", index, "placed")
    if len(fork.placed) != stage.branches:
        raise file.error(
            here,
            f"{fork.name} has branches of {len(fork.placed)} ranks, stage "
            f"{stage.index} has {stage.branches}",
            help="give a list for each rank: [] for one without a branch",
        )
    named = [name for names in fork.placed for name in names]
    for name in dict.fromkeys((*named, *fork.branches)):
        if name not in fork.branches or named.count(name) != 1:
            what = "is on several ranks" if name in named else "is on no rank"
            if name not in fork.branches:
                what = "is none of its branches"
            raise file.error(
                here,
                f"'{name}' of {fork.name} {what}",
                help=f"place each of {', '.join(fork.branches)} once, or take this "
                "fork out: then every rank computes all of them",
                word=f'"{name}"',
            )
    return fork.placed


def taken_out(plan: Plan, program: Program, file: TomlFile) -> tuple[str, ...]:
    """Return the parameters of stages of shards that `cut`, `whole`, `alone` lack.

    Raises:
        GemscError: `cut` names what the stage does not have; says where.
    """
    blocks = iter(program.blocks or ())
    parameters = dict(program.module.named_parameters())
    found: list[str] = []
    for stage in plan.stages:
        own = [next(blocks) for _ in stage.blocks]
        nodes = (node for block in own for node in block.nodes)
        names = used_tensors(program, nodes) if stage.shards > 1 else []
        cut = {cut_name(text): text for text in stage.cut}
        for name in cut.keys() - set(names):
            near = get_close_matches(name, names, n=3) or names[:3]
            raise file.error(
                ("stages", stage.index, "cut"),
                f"stage {stage.index} has no parameter '{name}'",
                help=f"parameters: {', '.join(near)}",
                word=f'"{cut[name]}"',
            )
        others = (*(each.names for each in stage.whole), *stage.alone)
        listed = {*cut, *(name for names in others for name in names)}
        found += [n for n in names if n in parameters and n not in listed]
    return tuple(dict.fromkeys(found))
