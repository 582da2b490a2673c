"""Plan <-> plan.toml: every decision of one compilation, as plain data."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from gemsc.base.toml_file import Keys, TomlFile
from gemsc.base.units import show_micro_batches
from gemsc.errors import GemscError
from gemsc.plan_tables import (
    ENTRIES,
    PlannedPhase,
    PlannedShape,
    PlannedStage,
    PlannedTransfer,
)

T = TypeVar("T")

FUSED = "fused=True"  # what a note asks an optimizer for
WITHOUT_KERNELS = "torch.compile was off"  # when a step was compared
COMPARED = "", WITHOUT_KERNELS  # what `unchecked` says then


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was decided and for what: the entries of plan.toml, in their order."""

    gemsc: str
    """The version that wrote it."""
    torch: str
    """The version of PyTorch."""
    command: str
    """What was typed."""
    model: str
    """The name of the model's class."""
    spec: str
    """The model's file, seen from the program."""
    graph: str
    """The fingerprint of the traced graph."""
    ranks: int
    """Those of all copies of the model."""
    data: int
    """Data-parallel copies of the model, each with ranks of its own."""
    replicas: int
    """Mirrored replicas in one copy, on the same ranks: 1 or 2."""
    schedule: str
    """Its name, as `--schedule` takes it."""
    placement: str
    """Which ranks run which stage: linear, mirrored, folded, looped, explicit."""
    micro_batches: int
    """In one step, those of all replicas of one copy."""
    micro_batch_size: int
    """Samples."""
    times: str
    """Where the seconds come from: measured, calibrated or data sheet."""
    step_seconds: float
    """Predicted, up to the end of the last backward."""
    bubble: float
    """The share of a step in which ranks wait, as predicted: 0 to 1."""
    peak_bytes: list[int]
    """The highest memory of each rank of one copy, or of each group."""
    activation_bytes: list[int]
    """The most activations of each rank, or group, at any time."""
    places: list[list[int]]
    """The ranks of the stages, for each replica."""
    stages: list[PlannedStage]
    """What is computed together."""
    transfers: list[PlannedTransfer]
    """What stages send each other."""
    constants: dict[str, str] = field(default_factory=dict)
    """Values that `--set` gave to constants of the model's file."""
    traffic: dict[str, int] = field(default_factory=dict)
    """Messages and sums between the ranks of one copy in one step."""
    ending_seconds: float = 0.0
    """On top of `step_seconds`: the update, and gradient sums that nothing hides."""
    sums: list[dict[str, Any]] = field(default_factory=list)
    """When the gradients of each stage are summed over copies."""
    workspace_bytes: int = 0
    """What libraries take on each rank, as assumed."""
    whole_stages: int = 0
    """Of how many stages at a time a rank keeps all weights, where it has rows of them
    only."""
    memory: list[dict[str, int]] = field(default_factory=list)
    """What the peak of each rank, or group, is made of."""
    groups: list[list[int]] = field(default_factory=list)
    """The ranks of each grid, which do the same actions; peaks, places and orders are
    then those of groups."""
    barriers: list[dict[str, Any]] = field(default_factory=list)
    """Values of split stages that every rank needs whole."""
    opaque: list[dict[str, Any]] = field(default_factory=list)
    """Modules that stay whole because their forward depends on data."""
    notes: list[str] = field(default_factory=list)
    """What is done otherwise than the model says."""
    unchecked: str = "--no-check"
    """Why no step of the program was compared with the model; empty if one was."""
    dtype: str = "float32"
    """Of the parameters, as traced."""
    only_dtype: str = ""
    """Why the program can run in no other dtype; empty if it can."""
    sample_dims: list[int] = field(default_factory=list)
    """Where samples count in each tensor that the model returns; empty: in the first
    dimension. -1: nowhere, it needs no samples; -2: it is of a whole micro-batch."""
    loss_of_all: bool = False
    """Whether the loss takes what the model computes of a whole micro-batch."""
    mixes_samples: bool = False
    """Whether forward makes of each sample what depends on others, in evaluation."""
    ignored: list[dict[str, Any]] = field(default_factory=list)
    """Labels that a mean over labels leaves out: tensor, value, line of the loss."""
    numbers: list[dict[str, Any]] = field(default_factory=list)
    """Of the examples: place and value of each number that is no tensor, a constant."""
    tokens: int = 0
    """Of one sample; 0 where the model takes no words."""
    peak_flops: float = 0.0
    """Operations per second of a device, as its data sheet says."""
    peak_dtype: str = ""
    """The dtype in which they are: float32, tf32, bfloat16, ..."""
    weights: str = "weights"
    """The folder that the program starts from."""
    shapes: list[PlannedShape] = field(default_factory=list)
    """The shapes that batches may have, where there are several. All entries of the
    plan but these are about the largest one."""
    skips: list[dict[str, Any]] = field(default_factory=list)
    """Values that jump over blocks."""
    phases: list[PlannedPhase] = field(default_factory=list)
    """The updates of a step, in their order, if there are several; the rest of the plan
    is then that of the one that costs most."""
    made: list[dict[str, Any]] = field(default_factory=list)
    """Values of shapes and constants that stages make instead of receiving them."""
    order: list[str] = field(default_factory=list)
    """The actions of each rank in one step: `2F0` is the forward of stage 2 on
    micro-batch 0, `2B0` its backward, `2W0` the weight gradients that it deferred."""
    options: dict[str, Any] = field(default_factory=dict)
    """As given, or chosen by `auto`."""
    sources: dict[str, dict[str, str]] = field(default_factory=dict)
    """Fingerprints of the definitions in each of the user's files."""

    def to_toml(self, directory: Path | None = None) -> str:
        """Return the text of plan.toml.

        The user's files are named relative to the program directory, so that both can
        move together; files of installed packages stay where they are.
        """
        plan = self
        if directory is not None:
            plan = _map_files(self, partial(_seen_from, directory.resolve()))
        head = (
            "# Every decision of this compilation. Units: bytes, seconds.\n"
            "# `gemsc show` prints it as tables.\n\n"
        )
        return head + tomli_w.dumps(asdict(plan))

    @property
    def choices(self) -> dict[str, Any]:
        """The options as `CompileOptions` takes them."""
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.options.items()
        }

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
    def micro_batch_sizes(self) -> list[int]:
        """The samples of a micro-batch of each shape."""
        sizes = [shape.micro_batch_size for shape in self.shapes]
        return sizes or [self.micro_batch_size]

    @property
    def batch_sizes(self) -> list[int]:
        """The samples of a step of each shape, over all copies of the model."""
        count = self.data * self.micro_batches
        return [count * size for size in self.micro_batch_sizes]

    @property
    def copy_ranks(self) -> int:
        """The ranks that share one copy of the model."""
        return self.ranks // self.data

    @property
    def per_device(self) -> int | None:
        """How many ranks it was compiled to have on each device, if not one."""
        count = self.options.get("per_device", 1)
        return count if count != 1 else None

    @property
    def rank_memory(self) -> int | None:
        """The bytes that a rank may take: its part of a device's limit, or None."""
        limit = self.options.get("device_memory")
        return limit and limit // (self.per_device or 1)

    @property
    def members(self) -> list[list[int]]:
        """The ranks of each group of one copy: alone, where no stage is split."""
        return self.groups or [[rank] for rank in range(self.copy_ranks)]

    @property
    def first_shape(self) -> int | None:
        """The number of the shape that all other entries are about."""
        numbers = (i for i, shape in enumerate(self.shapes) if not shape.variant)
        return next(numbers, None)

    def variant_of(self, shape: int) -> str:
        """Return the name of the graph for batches of a shape, by its number."""
        return self.shapes[shape].variant if self.shapes else ""

    @property
    def variants(self) -> list[str]:
        """The names of further graphs, whose rank files are beside the first ones."""
        shapes = [shape.variant for shape in self.shapes if shape.variant]
        return [*(phase.name for phase in self.phases), *shapes]

    @property
    def summary(self) -> str:
        """For example `Net: 2 ranks, stages of 3, 4 blocks, 1f1b, 4 micro-batches`."""
        stages = ", ".join(f"{len(stage.blocks)}" for stage in self.stages)
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        copies = f" in {self.data} replicas" if self.data > 1 else ""
        names = ", ".join(shape.name for shape in self.shapes)
        shapes = f", shapes {names}" if names else ""
        return (
            f"{self.model}: {ranks}{copies}, stages of {stages} blocks, "
            f"{self.schedule}, {show_micro_batches(self.micro_batches)}{shapes}"
        )

    def command_for(self, directory: Path) -> str:
        """Return what compiles the model again, into a folder."""
        return f"{self.command} -o {shlex.quote(str(directory))}"

    def by_rank(self, values: Sequence[T]) -> list[T]:
        """Return what is known of each group for each rank of one copy."""
        groups = zip(self.members, values, strict=True)
        of_ranks = {rank: value for ranks, value in groups for rank in ranks}
        return [of_ranks[rank] for rank in range(self.copy_ranks)]

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
    def of(cls, file: TomlFile, *, is_edited: bool = False) -> Plan:
        """Return what the file holds, as `read` does.

        A plan of another version of gemsc may have entries that this one lacks. One
        that `is_edited` may have predictions for another number of ranks.
        """
        folder = file.path.parent.resolve()
        same = file.entries.get("gemsc") == version("gemsc")
        plan = file.build(cls, _check, strict=same)
        if plan.options.pop("shard_optimizer", False):  # an option of its own, once
            kept = plan.options.get("shard", "off")
            plan.options["shard"] = "optimizer" if kept == "off" else kept
        for keys, message, help in _wrong_rows(plan, file.advice, is_edited):
            raise file.error(keys, message, help=help)
        return _map_files(plan, lambda path: os.path.normpath(folder / path))


def rank_file(rank: int, name: str = "") -> str:
    """Return the file of a rank, or of its variant with a name."""
    return f"rank{rank}_{name}.py" if name else f"rank{rank}.py"


def cut_name(text: str) -> str:
    """Return the name of the parameter in an entry of `cut`."""
    return text.partition(" of ")[0].rpartition(".")[0]


def plan_file(path: Path) -> TomlFile:
    """Read a plan's text; an error names the line."""
    return TomlFile.read(path, what="plan", advice="compile again to rewrite it")


def _wrong_rows(
    plan: Plan, advice: str, is_edited: bool
) -> Iterator[tuple[Keys, str, str]]:
    """Yield what is wrong with ranks and tables: where it is, what, and advice."""
    undo = f"undo the change, or {advice}"
    if plan.ranks % plan.data:
        copies = f"{plan.data} data-parallel replicas"
        message = f"{plan.ranks} ranks cannot be divided into {copies}"
        yield ("data",), message, "ranks counts the ranks of all replicas"
    if not re.fullmatch(r"weights(-\d+)?", plan.weights):
        message = f"weights = {plan.weights!r} is not a folder of this program"
        yield ("weights",), message, undo
    ranks = len(plan.members)
    for name in ("memory", "peak_bytes", "activation_bytes", "order"):
        if len(rows := getattr(plan, name)) != ranks and not is_edited:
            message = f"{name} has {len(rows)} entries, of {ranks} ranks of a replica"
            yield (name, 0), message, undo
    for name, wanted in ENTRIES.items():
        rows = getattr(plan, name)
        for index, row in enumerate(rows if isinstance(rows, list) else ()):
            for key in wanted:
                if key not in row:
                    message = f"there is no entry '{name}[{index}].{key}'"
                    yield (name, index), message, f"add it, or {advice}"


def _check(keys: Keys, number: float) -> str | None:
    """Say what a number has to be, if it is not."""
    if keys[-1] in ("ranks", "data", "replicas", "micro_batches", "micro_batch_size"):
        return None if number >= 1 else "give 1 or more"
    if keys[0] == "stages" and keys[-1] == "index" and number != keys[1]:
        return f"stages are numbered in their order: this is {keys[1]}"
    if keys[-1] == "saved_seconds":  # one fork may cost what others save
        return None
    least = -2 if keys[0] == "sample_dims" else 0
    return None if number >= least else f"give {least} or more"


def _map_files(plan: Plan, change: Callable[[str], str]) -> Plan:
    sources = {change(file): digests for file, digests in plan.sources.items()}
    return replace(plan, spec=plan.spec and change(plan.spec), sources=sources)


def _seen_from(folder: Path, file: str) -> str:
    return file if "-packages" in file else os.path.relpath(file, folder)
