"""What a rank's file tells of itself, and what it takes of the user's own code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from gemsc.base.parts import Part, holder_of, parts_of
from gemsc.messages.grid_message import GridMessage
from gemsc.messages.message import Input, Message, Tiles
from gemsc.plan import Plan
from gemsc.source import RENAMED, put_on_path, run_file

StepFunction = Callable[[Any], None]  # of the rank's Worker


@dataclass(frozen=True, order=True, slots=True)
class Run:
    """A stage that a rank runs, in one of the replicas that share the ranks."""

    stage: int
    replica: int = 0

    @property
    def stage_name(self) -> str:
        """The name of the stage, in whichever replica, in files and all-reduces."""
        return f"stage{self.stage}"

    def __str__(self) -> str:
        """Return `stage 2`, `stage 2 mirrored` or `stage 2 replica 3`."""
        suffix = {0: "", 1: " mirrored"}.get(self.replica, f" replica {self.replica}")
        return f"stage {self.stage}{suffix}"


Turn = Message | GridMessage | Run | str
Order = Sequence[Turn | tuple[Turn | int, ...]]


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """All that the runtime takes from the file of one rank.

    num_micro_batches: of each replica.
    num_replicas: those that share the ranks.
    stages: the class of each stage that the rank runs.
    inputs: what the rank reads of each micro-batch, by name.
    reductions: the ranks that hold the same parameters and all-reduce their gradients:
        those of a stage, those of its parts, or those of one parameter that stages
        share. What this rank holds alone is not among them.
    parts: the parameters and buffers of which the rank has a part only, by all names.
    placed: the tile of the grid that alone holds all parameters and buffers under a
        path, those of a branch.
    aliases: further names of parameters and buffers that the rank holds, with the first
        ones, where no module of a stage has them.
    branches: whether branches of some stage are on different ranks: a rank may lack
        gradients that others have, of what leads to their branches.
    shard: what each of the ranks in a reduction keeps its rows of only, as `--shard`.
    whole_stages: how many stages' weights may be whole at a time, where each keeps its
        rows only; 0: all are, always.
    gather_order: in which order a training step uses stages whose weights are in parts,
        written as `train_order` is: while one computes, the next is gathered.
    updated_whole: parameters that one of these ranks updates, all rows of them.
    deferred: of which micro-batches a backward leaves the weight gradients for later.
    tiles: the grid of which the rank computes a tile.
    depends_on_data: whether some gradients may be absent.
    precision: what stages run in within `torch.autocast`; None without it.
    torch_compile: whether stages' forwards go through `torch.compile`.
    train_order: in which order what ranks do together begins in a training step:
        messages, of micro-batch after micro-batch, sums of gradients by their names,
        and, where the rank computes a tile, what its runs exchange. `(3, X, Y)` is X
        and Y three times, `(X, Y)` once.
    eval_order: the same for an evaluation step.
    train_step: one training step of this rank; None without a loss.
    eval_step: one evaluation step of this rank.
    """

    num_micro_batches: int
    num_replicas: int
    stages: Mapping[Run, type[nn.Module]]
    inputs: Mapping[str, Input]
    reductions: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, Part] = field(default_factory=dict)
    placed: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    branches: bool = False
    shard: str = "off"
    shard_optimizer: InitVar[bool] = False  # as older files say it
    shard_gradients: InitVar[bool] = False
    whole_stages: int = 0
    gather_order: Sequence[Run | tuple[Run | int, ...]] = ()
    updated_whole: Collection[str] = ()
    deferred: Mapping[Run, Collection[int]] = field(default_factory=dict)
    tiles: Tiles | None = None
    depends_on_data: bool = False
    precision: torch.dtype | None = None
    torch_compile: bool = False
    train_order: Order = ()
    eval_order: Order = ()
    train_step: StepFunction | None
    eval_step: StepFunction

    def __post_init__(self, shard_optimizer: bool, shard_gradients: bool) -> None:
        if any(stage.__module__ == "__main__" for stage in self.stages.values()):
            path = Path(str(getattr(sys.modules["__main__"], "__file__", "")))
            if path.name.startswith("rank"):
                raise SystemExit(
                    f"error: {path.name} is what one rank runs, and starts nothing\n"
                    f"help: gemsc run {path.parent}"
                )
        if shard_optimizer:
            parts = "gradients" if shard_gradients else "optimizer"
            object.__setattr__(self, "shard", "weights" if self.whole_stages else parts)

    @cached_property
    def train_turns(self) -> tuple[Turn, ...]:
        """What begins in a training step, one after the other."""
        return tuple(_repeated(self.train_order))

    @cached_property
    def eval_turns(self) -> tuple[Turn, ...]:
        """What begins in an evaluation step."""
        return tuple(_repeated(self.eval_order))

    @cached_property
    def gather_turns(self) -> tuple[Run, ...]:
        """Whose weights a training step gathers, action after action."""
        return cast("tuple[Run, ...]", tuple(_repeated(self.gather_order)))

    @property
    def copy_micro_batches(self) -> int:
        """The micro-batches of all replicas in one step."""
        return self.num_micro_batches * self.num_replicas

    def sum_of(self, run: Run, name: str) -> str:
        """Return the reduction that adds up what a run's stage has of a name."""
        if name in self.reductions:
            return name
        stage = run.stage_name
        return parts_of(stage) if name in self.parts or self.is_placed(name) else stage

    def alike_and_others(
        self, key: str, rank: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return who runs what a sum is of as this rank does, and who mirrored.

        Both are ranks of one copy; those of a grid do the same in the same order.
        """
        grid = self.tiles.ranks if self.tiles is not None else (rank,)
        holders = sorted(self.reductions[key])
        alike = tuple(holder for holder in holders if holder in grid)
        return alike, tuple(holder for holder in holders if holder not in grid)

    def is_placed(self, name: str) -> bool:
        """Whether one rank of the grid alone holds a tensor."""
        return holder_of(name, self.placed) is not None

    def is_first(self, key: str, rank: int) -> bool:
        """Whether a rank is the first of its copy of those that hold the same.

        `key` is that of their sum; it may be held by this rank alone.
        """
        return min(self.reductions.get(key, (rank,))) == rank

    @property
    def tile(self) -> int:
        """The tile that the rank computes, 0 if its stages are not split."""
        return self.tiles.tile if self.tiles is not None else 0

    @property
    def num_tiles(self) -> int:
        """The tiles of the rank's stages."""
        return len(self.tiles.ranks) if self.tiles is not None else 1


def _repeated(order: Order) -> Iterator[Turn]:
    for turn in order:
        if isinstance(turn, tuple):
            count, *inside = turn if isinstance(turn[0], int) else (1, *turn)
            yield from cast("list[Turn]", inside) * cast("int", count)
        else:
            yield turn


@dataclass(frozen=True)
class RankPlace:
    """A rank among the data-parallel replicas of the model, which are called copies."""

    world_rank: int
    copy_ranks: int = 1  # that share one copy
    num_copies: int = 1

    @property
    def copy(self) -> int:
        """Which of the copies the rank belongs to."""
        return self.world_rank // self.copy_ranks

    @property
    def first_rank(self) -> int:
        """The first rank of this copy."""
        return self.copy * self.copy_ranks

    @property
    def rank(self) -> int:
        """The number of the rank in its copy."""
        return self.world_rank - self.first_rank

    def everywhere(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks with these numbers in all copies."""
        copies, ranks = range(self.num_copies), tuple(ranks)
        return tuple(copy * self.copy_ranks + rank for copy in copies for rank in ranks)

    def in_copy(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks with these numbers in this copy."""
        return tuple(self.first_rank + rank for rank in ranks)

    def number_of(self, run: Run, num_replicas: int) -> int:
        """Return the number of a run among those of its stage in all copies."""
        return self.copy * num_replicas + run.replica


T = TypeVar("T")


def user_object(rank_file: str, module: str, qualname: str) -> Any:
    """Return `qualname` of the user's module, loaded from the model file if it is new.

    plan.toml, beside the rank's file, says where the model file is; its folder is where
    the user's other modules are found.
    """
    if module not in sys.modules:
        plan = Plan.read(Path(rank_file).parent / "plan.toml")
        _load(module, _model_file(plan), plan.constants)
    target: Any = sys.modules[module]
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def user_module(cls: type[T], /, **parts: Any) -> T:
    """Return an object of the user's class that holds these parts.

    Its `__init__` does not run. Parameters, buffers and modules are registered in their
    order; everything else is an attribute.
    """
    made: Any = cls.__new__(cls)
    if not isinstance(made, nn.Module):
        vars(made).update(parts)
        return cast("T", made)
    nn.Module.__init__(made)
    for name, part in parts.items():
        if isinstance(part, nn.Parameter):
            made._parameters[name] = part
        elif isinstance(part, nn.Buffer):
            made._buffers[name] = part
            if not part.persistent:
                made._non_persistent_buffers_set.add(name)
        elif isinstance(part, nn.Module):
            made._modules[name] = part
        else:
            vars(made)[name] = part
    return cast("T", made)


def _model_file(plan: Plan) -> Path | None:
    """Return the file of `path/model.py:name`; None if the model came from Python."""
    spec = plan.spec
    return Path(spec.partition(".py:")[0]).with_suffix(".py") if spec else None


def _load(module: str, path: Path | None, constants: Mapping[str, str]) -> None:
    if path is not None:
        put_on_path(path)
    if path is None or path.stem != module.removeprefix(RENAMED):
        importlib.import_module(module)
        return
    run_file(module, path, constants)
