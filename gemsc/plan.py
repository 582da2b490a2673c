"""Plan <-> plan.toml: every decision of one compilation, as plain data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from gemsc.base.cost import Edge, StageCost
from gemsc.base.grid_shape import GridShape
from gemsc.base.toml_file import Keys, TomlFile
from gemsc.base.units import show_micro_batches
from gemsc.errors import GemscError

__all__ = [
    "Plan",
    "PlannedFork",
    "PlannedStage",
    "PlannedTransfer",
    "PlannedWhole",
    "cut_name",
    "plan_file",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWhole:
    """Parameters that every shard of a stage holds as a whole, and why; their bytes."""

    reason: str
    num_bytes: int
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFork:
    """Parallel branches of a stage: their seconds, forward and backward, and ranks.

    `join` is the value that they end in. `placed` has the branches of each rank; it is
    empty where `reason` says why every rank computes all of them. `saved_seconds` is
    what sharing them out saves, less what its messages take. Each rank computes
    `trunk_seconds` between the fork before, or the begin of the stage, and this one.
    """

    name: str
    join: str
    branches: list[str]
    seconds: list[float]
    placed: list[list[str]] = field(default_factory=list)
    saved_seconds: float = 0.0
    trunk_seconds: float = 0.0
    reason: str = ""

    @property
    def total_seconds(self) -> float:
        """The seconds of all branches."""
        return sum(self.seconds)

    @property
    def balance(self) -> float | None:
        """The mean seconds of the ranks by the most of a rank: 1 is even."""
        seconds = dict(zip(self.branches, self.seconds, strict=True))
        loads = [sum(map(seconds.__getitem__, names)) for names in self.placed]
        most = max(loads, default=0.0)
        return sum(loads) / len(loads) / most if most else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage: what it holds, where it runs, what one micro-batch costs.

    `recompute` and `offload` name the blocks that keep nothing, or keep it in host
    memory.

    A stage that is split has `tiles` along each axis, or several `shards` or
    `branches`: then its
    cost is that of the peak-memory rank, work is that of all, and `halo_bytes` go from
    rank to rank in forward, in `exchanges`. `unfused_exchanges` and
    `unfused_halo_bytes` are those if no wide halo served several layers. `overlapped`
    are the layers whose halo travels while their inner part is computed.
    `messages` and `sums` are those between the ranks for one micro-batch, forward and
    backward, with the bytes that all ranks bring; a rank waits `talking_seconds` for
    them.

    Of shards, `cut` lists the parameters and buffers of which each rank has a part
    (`mlp.weight.0 of 512 features`: dimension 0), `whole` all other parameters; `trunk`
    says how values between are held. A line taken out of `cut` keeps that one whole.
    `forks` are its parallel branches: every rank computes those of a fork that is taken
    out. `alone` lists the parameters and buffers that each rank alone holds.
    """

    index: int
    ranks: list[int]
    blocks: list[str]
    flops: int
    parameter_bytes: int
    cost: StageCost
    recompute: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)
    tiles: list[int] = field(default_factory=list)
    shards: int = 1
    branches: int = 1
    trunk: str = ""
    messages: int = 0
    message_bytes: int = 0
    sums: int = 0
    sum_bytes: int = 0
    talking_seconds: float = 0.0
    cut: list[str] = field(default_factory=list)
    whole: list[PlannedWhole] = field(default_factory=list)
    alone: list[list[str]] = field(default_factory=list)
    forks: list[PlannedFork] = field(default_factory=list)
    halo_bytes: int = field(default_factory=int)
    exchanges: int = field(default_factory=int)
    unfused_exchanges: int = field(default_factory=int)
    unfused_halo_bytes: int = field(default_factory=int)
    overlapped: list[str] = field(default_factory=list)

    @property
    def grid(self) -> GridShape:
        """How ranks share the stage."""
        return GridShape(tuple(self.tiles), self.shards, self.branches)

    @property
    def units(self) -> str:
        """What its shards have parts of: `heads, features`."""
        return ", ".join(dict.fromkeys(text.rpartition(" ")[2] for text in self.cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Values that travel from one stage to another for each micro-batch.

    `num_bytes` are those of all tiles.
    """

    index: int
    values: list[str]
    num_bytes: int
    edge: Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was decided and for what.

    `ranks` counts those of all `data` copies of the model, `micro_batches` those of all
    `replicas` of one copy; each has `micro_batch_size` samples. `sources` maps each of
    the user's files to the fingerprints of its definitions; `graph` is the fingerprint
    of the traced graph. `times` says where the seconds come from. `memory` holds the
    parts of the peak of each rank of one copy, in bytes, with `workspace_bytes` for
    libraries; `places` are the ranks of its stages, for each replica, and `order` the
    actions of a step as text (`2F0` is the forward of stage 2 on micro-batch 0).

    `step_seconds` end with the last backward; `ending_seconds` come on top for the sums
    of gradients that nothing hides, and for the update. `sums` say when those of each
    stage start and end.

    The ranks of a grid do the same: with `groups`, peaks, places and orders are those
    of each group of ranks. `barriers` are values of split stages that had to be
    gathered, `opaque` the modules that stay whole because their forward depends on
    data. `dtype` is that of the parameters as traced; `only_dtype` says why the program
    can run in no other, "" if it can. `notes` tell what is done otherwise than the
    model says. `weights` is the folder that the program starts from.
    """

    gemsc: str
    torch: str
    command: str
    model: str
    spec: str
    graph: str
    ranks: int
    data: int
    replicas: int
    schedule: str
    placement: str
    micro_batches: int
    micro_batch_size: int
    times: str
    step_seconds: float
    bubble: float
    peak_bytes: list[int]
    activation_bytes: list[int]
    places: list[list[int]]
    stages: list[PlannedStage]
    transfers: list[PlannedTransfer]
    constants: dict[str, str] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)
    ending_seconds: float = 0.0
    sums: list[dict[str, Any]] = field(default_factory=list)
    workspace_bytes: int = 0
    memory: list[dict[str, int]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    barriers: list[dict[str, Any]] = field(default_factory=list)
    opaque: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dtype: str = "float32"
    only_dtype: str = ""
    weights: str = "weights"
    skips: list[dict[str, Any]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, dict[str, str]] = field(default_factory=dict)

    def to_toml(self, directory: Path | None = None) -> str:
        """Return the text of plan.toml.

        The user's files are named relative to the program directory, so that both can
        move together; files of installed packages stay where they are.
        """
        plan = self if directory is None else _map_files(self, _relative_to(directory))
        head = (
            "# Every decision of this compilation. Units: bytes, seconds.\n"
            "# `gemsc show` prints it as tables.\n\n"
        )
        return head + tomli_w.dumps(_without_none(asdict(plan)))

    @property
    def precision(self) -> str:
        """What stages compute in within `torch.autocast`; "float32" without it."""
        return str(self.options.get("precision", "float32"))

    @property
    def memory_format(self) -> str:
        """What weights and inputs were converted to; "as-given" if to nothing."""
        return str(self.options.get("memory_format", "as-given"))

    @property
    def torch_compile(self) -> bool:
        """Whether stages' forwards go through `torch.compile`."""
        return bool(self.options.get("torch_compile"))

    @property
    def batch_size(self) -> int:
        """The samples of one step, over all copies of the model."""
        return self.data * self.micro_batches * self.micro_batch_size

    @property
    def copy_ranks(self) -> int:
        """The ranks that share one copy of the model."""
        return self.ranks // self.data

    @property
    def per_device(self) -> int | None:
        """How many ranks it was compiled to have on each device, if not one."""
        found = self.options.get("per_device", 1)
        return found if found != 1 else None

    @property
    def rank_memory(self) -> int | None:
        """The bytes that a rank may take: its part of a device's limit, or None."""
        found = self.options.get("device_memory")
        return found and found // (self.per_device or 1)

    @property
    def members(self) -> list[list[int]]:
        """The ranks of each group of one copy: alone, where no stage is split."""
        return self.groups or [[rank] for rank in range(self.copy_ranks)]

    @property
    def summary(self) -> str:
        """For example `Net: 2 ranks, stages of 3, 4 blocks, 1f1b, 4 micro-batches`."""
        stages = ", ".join(f"{len(stage.blocks)}" for stage in self.stages)
        return (
            f"{self.model}: {self.ranks} ranks, stages of {stages} blocks, "
            f"{self.schedule}, {show_micro_batches(self.micro_batches)}"
        )

    def by_rank(self, values: Sequence[T]) -> list[T]:
        """Return what is known of each group for each rank of one copy."""
        pairs = zip(self.members, values, strict=True)
        found = {rank: value for ranks, value in pairs for rank in ranks}
        return [found[rank] for rank in range(self.copy_ranks)]

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read plan.toml; the user's files are absolute paths.

        Raises:
            GemscError: the file is missing, no TOML, or an entry is missing, unknown
                or wrong; names the line.
        """
        if not path.parent.is_dir() or not path.exists():
            raise GemscError(
                f"{path.parent} is not a program directory: it has no {path.name}",
                help="give the folder that `gemsc compile -o` wrote",
            )
        return cls.of(plan_file(path))

    @classmethod
    def of(cls, file: TomlFile) -> Plan:
        """Return what the file holds, as `read` does.

        A plan of another version of gemsc may have entries that this one lacks.
        """
        folder = file.path.parent.resolve()
        same = file.entries.get("gemsc") == version("gemsc")
        plan = file.build(cls, _check, strict=same)
        _check_rows(plan, file)
        return _map_files(plan, lambda found: os.path.normpath(folder / found))


def cut_name(text: str) -> str:
    """Return the name of the parameter in an entry of `cut`."""
    return text.partition(" of ")[0].rpartition(".")[0]


def plan_file(path: Path) -> TomlFile:
    """Read a plan's text; an error names the line."""
    return TomlFile.read(path, what="plan", advice="compile again to rewrite it")


_ENTRIES = {  # of the tables in these lists
    "memory": (
        "parameters",
        "optimizer",
        "gradients",
        "activations",
        "messages",
        "workspace",
    ),
    "barriers": ("stage", "value", "num_bytes", "line", "reason"),
    "opaque": ("module", "stages", "line", "reason"),
    "skips": ("value", "source", "dest", "num_bytes", "kind"),
    "sums": ("stage", "start", "end"),
}


def _check_rows(plan: Plan, file: TomlFile) -> None:
    """Make sure that every rank, or group of ranks, and every table is complete.

    Raises:
        GemscError: names the line.
    """
    if plan.ranks % plan.data:
        raise file.error(
            ("data",),
            f"{plan.ranks} ranks cannot be divided into {plan.data} data-parallel "
            "replicas",
            help="ranks counts the ranks of all replicas",
        )
    if not re.fullmatch(r"weights(-\d+)?", plan.weights):
        raise file.error(
            ("weights",),
            f"weights = {plan.weights!r} is no folder of this program",
            help=f"undo the change, or {file.advice}",
        )
    ranks = len(plan.members)
    for name in ("memory", "peak_bytes", "activation_bytes", "order"):
        if len(found := getattr(plan, name)) != ranks:
            raise file.error(
                (name, 0),
                f"{name} has {len(found)} entries, of {ranks} ranks of a replica",
                help=f"undo the change, or {file.advice}",
            )
    for name, wanted in _ENTRIES.items():
        for index, row in enumerate(getattr(plan, name)):
            if missing := [key for key in wanted if key not in row]:
                raise file.error(
                    (name, index),
                    f"there is no entry '{name}[{index}].{missing[0]}'",
                    help=f"add it, or {file.advice}",
                )


def _check(keys: Keys, number: float) -> str | None:
    """Say what a number has to be, if it is not."""
    if keys[-1] in ("ranks", "data", "replicas", "micro_batches", "micro_batch_size"):
        return None if number >= 1 else "give 1 or more"
    if keys[0] == "stages" and keys[-1] == "index" and number != keys[1]:
        return f"stages are numbered in their order: this is {keys[1]}"
    return None if number >= 0 else "give 0 or more"


def _map_files(plan: Plan, change: Callable[[str], str]) -> Plan:
    sources = {change(file): found for file, found in plan.sources.items()}
    return replace(plan, spec=plan.spec and change(plan.spec), sources=sources)


def _relative_to(directory: Path) -> Callable[[str], str]:
    folder = directory.resolve()

    def change(file: str) -> str:
        return file if "-packages" in file else os.path.relpath(file, folder)

    return change


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    """Drop empty options, which TOML cannot express."""
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if value is not None
    }
