"""From a plan.toml that a person has edited back to options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gemsc.base.grid_shape import SPLITS
from gemsc.base.toml_file import TomlFile
from gemsc.errors import GemscError, SourceLocation, say_note
from gemsc.ir.flow import used_tensors
from gemsc.ir.program import Block, Program
from gemsc.ir.segments import blocks_in, blocks_named
from gemsc.options import CompileOptions
from gemsc.plan import Plan, cut_name, plan_file
from gemsc.plan_tables import PlannedFork, PlannedStage
from gemsc.planner.layout import stages_per_rank
from gemsc.schedules import SCHEDULES, place

DEFAULTS = CompileOptions()
_KINDS = {bool: "true or false", int: "number", str: "text"}
ORDER = "stages hold the model's blocks in their order, each once"
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
        return cls(Plan.of(file, is_edited=True), file)

    @classmethod
    def of(cls, plan: Plan) -> EditedPlan:
        """Take a plan as it would be read if it were written."""
        text = plan.to_toml()
        file = TomlFile(Path("plan.toml"), text, tomllib.loads(text), "compile again")
        return cls(Plan.of(file, is_edited=True), file)

    def options(self) -> CompileOptions:
        """Return the options that give this plan: stages, their ranks, the schedule.

        Raises:
            GemscError: what was edited contradicts itself; says in which line.
        """
        plan = self.plan
        known = {field.name for field in fields(CompileOptions)}
        options = {key: plan.choices[key] for key in known & plan.options.keys()}
        unknown = plan.options.keys() - known if plan.gemsc == version("gemsc") else ()
        for key in sorted(unknown):
            close = get_close_matches(key, known, n=1) or sorted(known)
            raise self.file.error(
                ("options", key),
                f"unknown entry 'options.{key}'",
                help=f"known: {', '.join(close)}",
            )
        if plan.schedule not in SCHEDULES:
            raise self.file.error(
                ("schedule",),
                f"unknown schedule '{plan.schedule}'",
                help=f"choose one of {', '.join(SCHEDULES)}",
            )
        placement, two = self._placement(), SCHEDULES[plan.schedule].num_replicas == 2
        if two != (placement == "mirrored"):
            raise self.file.error(
                ("schedule",),
                f"{plan.schedule} takes {'both ways' if two else 'one way'} through "
                "the ranks, and the stages are not on them so",
                help=f"undo the change, or compile with --schedule {plan.schedule}",
            )
        decided = {
            "ranks": plan.ranks,
            "data": plan.data,
            "schedule": plan.schedule,
            "micro_batches": plan.micro_batches,
            "times": None,
            "cuts": (),
            "balance": "explicit",
            "blocks": tuple(len(stage.blocks) for stage in plan.stages),
            "placement": placement,
            "recompute": _all_of(stage.recompute for stage in plan.stages),
            "offload": _all_of(stage.offload for stage in plan.stages),
        }
        trunks = {stage.trunk for stage in plan.stages if stage.trunk}
        if len(trunks) == 1:
            decided["trunk"] = trunks.pop()
        for key in options.keys() - decided.keys():
            self._check_kind(key, plan.options[key])
        settled = CompileOptions(**{**options, **decided})
        self._check_grids(settled)
        return settled

    def check(self, blocks: Sequence[Block]) -> None:
        """Make sure that the plan's stages hold the model's blocks, in their order.

        Raises:
            GemscError: a block is unknown, missing, doubled or out of order; says
                where.
        """
        names = [block.name for block in blocks]
        following = 0
        for stage in self.plan.stages:
            if not stage.blocks:
                message = f"stage {stage.index} has no blocks"
                help = "move a block there, or remove the stage"
                raise self._error(stage, "blocks", message, help)
            for name in stage.blocks:
                if name != (names[following] if following < len(names) else None):
                    raise self._misplaced(stage, name, names, following)
                following += 1
            for entry in ("recompute", "offload"):
                for name in getattr(stage, entry):
                    named = (*blocks_named(blocks, name), *blocks_in(blocks, name))
                    if {block.name for block in named} & {*stage.blocks}:
                        continue
                    message = f"stage {stage.index} has no block '{name}'"
                    help = f"{entry} names blocks of its stage"
                    raise self._error(stage, entry, message, help, name)
        if following < len(names):
            keys = "stages", len(self.plan.stages) - 1, "blocks"
            message = f"block '{names[following]}' is in no stage"
            raise self.file.error(keys, message, help=ORDER)

    def check_shared(self, compiled: Plan) -> None:
        """Make sure that a new plan holds trunks and places branches as this one does.

        Raises:
            GemscError: it does not; names the stage.
        """
        forks = {fork.join: fork.placed for s in compiled.stages for fork in s.forks}
        for stage, now in zip(self.plan.stages, compiled.stages, strict=True):
            if stage.trunk not in ("", now.trunk):
                message = (
                    f"stage {stage.index} has trunk {now.trunk}, not {stage.trunk}"
                )
                help = "give all stages with shards the same trunk"
                raise self._error(stage, "trunk", message, help)
            for index, fork in enumerate(stage.forks):
                placed = [set(names) for names in forks.get(fork.join, ())]
                if fork.placed and placed != [set(names) for names in fork.placed]:
                    message = f"the branches of {fork.name} cannot be placed so with "
                    message += "all else in this plan"
                    help = "place those of one fork only where forks overlap"
                    raise self._error(stage, ("forks", index), message, help, fork.name)

    def placed(self) -> dict[str, list[list[str]]] | None:
        """Return the branches of each rank, by joins; None if no stage shares any.

        Raises:
            GemscError: a branch is unknown, missing or doubled; says where.
        """
        shared = [stage for stage in self.plan.stages if stage.branches > 1]
        for stage in shared:
            for index, fork in enumerate(stage.forks):
                self._check_branches(stage, index, fork)
        placed = {f.join: f.placed for s in shared for f in s.forks if f.placed}
        return placed if shared else None

    def taken_out(self, program: Program) -> tuple[str, ...]:
        """Return the parameters of shards that `cut`, `whole` and `alone` lack.

        The stages hold the program's blocks.

        Raises:
            GemscError: `cut` names what the stage does not have; says where.
        """
        blocks = iter(program.blocks or ())
        parameters = dict(program.module.named_parameters())
        lacking: list[str] = []
        for stage in self.plan.stages:
            nodes = [node for _ in stage.blocks for node in next(blocks).nodes]
            names = used_tensors(program, nodes) if stage.shards > 1 else []
            cut = {cut_name(text): text for text in stage.cut}
            for name in cut.keys() - set(names):
                near = get_close_matches(name, names, n=3) or names[:3]
                message = f"stage {stage.index} has no parameter '{name}'"
                help = f"parameters: {', '.join(near)}"
                raise self._error(stage, "cut", message, help, cut[name])
            others = (*(whole.names for whole in stage.whole), *stage.alone)
            listed = {*cut, *(name for names in others for name in names)}
            lacking += [n for n in names if n in parameters and n not in listed]
        return tuple(dict.fromkeys(lacking))

    def say_ignored(self, compiled: Plan) -> None:
        """Say which entries are not those of the new plan, which nothing is read from.

        A stage's own ranks say where it is, whatever the name of the placement.
        """
        for key in ("model", "dtype", "placement"):
            here, now = getattr(self.plan, key), getattr(compiled, key)
            if here != now:
                at = self.file.location((key,)).short
                say_note(f"{at}: {key} {here} has no effect: it is {now}")

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
                line = self.file.location(keys)
                if line != self.file.location(keys[:-1]):
                    return line
        return None

    def _error(
        self,
        stage: PlannedStage,
        entry: str | tuple[str | int, ...],
        message: str,
        help: str,
        word: str = "",
    ) -> GemscError:
        """Return an error at an entry of a stage: at the text `word` in it."""
        keys = ("stages", stage.index, *((entry,) if isinstance(entry, str) else entry))
        return self.file.error(keys, message, help=help, word=word and f'"{word}"')

    def _misplaced(
        self, stage: PlannedStage, name: str, names: Sequence[str], following: int
    ) -> GemscError:
        """Return what is wrong with a block of a stage, which is not the next one."""
        if name not in names:
            message = f"the model has no block '{name}'"
            help = f"blocks: {', '.join(get_close_matches(name, names, n=3) or names)}"
        else:
            message = f"block '{name}' is out of order in stage {stage.index}: " + (
                f"'{names[following]}' comes next"
                if following < len(names)
                else "all are there already"
            )
            help = ORDER
        return self._error(stage, "blocks", message, help, name)

    def _check_branches(
        self, stage: PlannedStage, index: int, fork: PlannedFork
    ) -> None:
        """Refuse a fork that does not place each of its branches on one rank."""
        if not fork.placed:
            return
        here = "forks", index, "placed"
        if len(fork.placed) != stage.branches:
            message = f"{fork.name} has branches of {len(fork.placed)} ranks, stage "
            message += f"{stage.index} has {stage.branches}"
            help = "give a list for each rank: [] for one without a branch"
            raise self._error(stage, here, message, help)
        named = [name for names in fork.placed for name in names]
        for name in dict.fromkeys((*named, *fork.branches)):
            if name not in fork.branches or named.count(name) != 1:
                what = "is on several ranks" if name in named else "is on no rank"
                if name not in fork.branches:
                    what = "is none of its branches"
                help = f"place each of {', '.join(fork.branches)} once, or take this "
                help += "fork out: then every rank computes all of them"
                message = f"'{name}' of {fork.name} {what}"
                raise self._error(stage, here, message, help, name)

    def _check_grids(self, options: CompileOptions) -> None:
        """Refuse tiles, shards or branches of a stage that are not the options'."""
        for stage in self.plan.stages:
            pairs = zip(self.plan.members, options.groups, strict=False)
            grid = next(
                (g for ranks, g in pairs if ranks[0] in stage.ranks), stage.grid
            )
            if grid != stage.grid:
                both = grid, stage.grid
                name = next(n for n in SPLITS if len({getattr(g, n) for g in both}) > 1)
                message = f"stage {stage.index} has {stage.grid}, its ranks are {grid}"
                help = f"change {name} under [options] and the groups, or compile "
                help += f"anew with other --{name}"
                raise self._error(stage, name, message, help)

    def _check_kind(self, key: str, value: Any) -> None:
        """Refuse an option that is of another type than its default."""
        default = getattr(DEFAULTS, key)
        if isinstance(default, tuple):
            kind, fits = "list of texts", isinstance(value, list)
            fits = fits and all(isinstance(text, str) for text in value)
        else:
            wanted = int if default is None else type(default)
            kind, fits = _KINDS[wanted], type(value) is wanted
        if not fits:
            raise self.file.error(
                ("options", key),
                f"{key} is {value!r}, which is not a {kind}",
                help="write it as gemsc did, or undo the change",
            )

    def _placement(self) -> str:
        """Return the placement's name if it gives the stages' ranks, else the ranks."""
        plan = self.plan
        if plan.groups:
            return self._placement_of_groups()
        for stage in plan.stages:
            wrong = [rank for rank in stage.ranks if not 0 <= rank < plan.copy_ranks]
            if wrong:
                message = f"stage {stage.index} is on rank {wrong[0]}, but the ranks "
                message += f"of a replica are 0 to {plan.copy_ranks - 1}"
                help = "all replicas are placed in the same way"
                raise self._error(stage, "ranks", message, help)
        if plan.placement != "explicit" and self._is_placed_as_named():
            return plan.placement
        for stage in plan.stages:
            if len(stage.ranks) != 1:
                message = f"stage {stage.index} is on {len(stage.ranks)} ranks, which "
                message += f"placement {plan.placement} does not allow"
                help = "give one rank for each stage, or undo the change"
                raise self._error(stage, "ranks", message, help)
        ranks = [rank for stage in plan.stages for rank in stage.ranks]
        if idle := set(range(plan.copy_ranks)) - set(ranks):
            raise self.file.error(
                ("ranks",),
                f"rank {min(idle)} has no stage",
                help="lower ranks, or give the rank a stage",
            )
        return ",".join(map(str, ranks))

    def _placement_of_groups(self) -> str:
        """Return the placement of stages on grids of ranks."""
        plan = self.plan
        groups = [set(members) for members in plan.groups]
        for stage in plan.stages:
            ranks = set(stage.ranks)
            if not ranks or ranks != set().union(*(g for g in groups if ranks & g)):
                message = f"stage {stage.index} is on ranks {stage.ranks}, which are "
                message += "not whole grids"
                help = f"the grids are ranks {plan.groups}"
                raise self._error(stage, "ranks", message, help)
        if plan.placement != "explicit":
            return plan.placement
        for stage in plan.stages:
            if set(stage.ranks) not in groups:
                message = f"stage {stage.index} is on several grids"
                help = "give the ranks of one grid for each stage"
                raise self._error(stage, "ranks", message, help)
        return ",".join(str(groups.index(set(stage.ranks))) for stage in plan.stages)

    def _is_placed_as_named(self) -> bool:
        """Whether the ranks of each stage are those under the plan's placement."""
        plan = self.plan
        per_rank = stages_per_rank(plan.placement, plan.options.get("chunks", 2))
        if len(plan.stages) != per_rank * plan.copy_ranks:
            return False
        replicas = SCHEDULES[plan.schedule].num_replicas
        placed = place(plan.placement, len(plan.stages), plan.copy_ranks, replicas)
        named = [sorted(set(ranks)) for ranks in zip(*placed, strict=True)]
        return named == [stage.ranks for stage in plan.stages]


def _all_of(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the names of all stages, each once."""
    return tuple(dict.fromkeys(name for of_stage in names for name in of_stage))
