"""Every choice of one compilation, with its default; the only place with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, cast

from gemsc.base.grid_shape import ALONE, BESIDE, GRID, SPLITS, GridShape
from gemsc.errors import GemscError, choose

CHOICES = {  # what an option may be
    "balance": ("compute", "memory", "explicit", "auto"),
    "precision": ("float32", "bfloat16", "float16"),
    "memory_format": ("as-given", "channels_last"),
    "trunk": ("auto", "whole", "batch", "sequence"),
    "attention": ("auto", "gather", "ring"),
    "shard": ("off", "optimizer", "gradients", "weights"),  # ZeRO, stages 1 to 3
}
AUTO = -1  # a number that is left to the compiler
RANKS = 2  # of each replica, if nothing is said
MOST = 1_000_000  # ranks, replicas, micro-batches: more is a slip of the hand


def option(default: Any, help: str = "", *, auto: bool = False, unit: str = "") -> Any:
    """Return a field: `help` is the command line's, `auto` whether AUTO is a value."""
    return field(default=default, metadata={"help": help, "auto": auto, "unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The user's choices: the same names on the command line and in Python.

    `ranks` are all processes, as `mpirun -n` counts them; by default two for each of
    `data` replicas. Either `blocks` or `cuts` makes `balance` "explicit". "auto", for
    numbers AUTO, is what is predicted to be fastest and fits `device_memory`; with
    `data` AUTO, `micro_batches` are those of all replicas together. In schedules
    with two mirrored replicas each gets half of the micro-batches; `master` has
    2 x `times`. A `placement` "0,1,1,0" lists the rank of each stage. `tiles` "2x2,2x1"
    splits the first stage over four ranks and the second over two; each of the
    remaining ranks has one stage. `shards` "2" gives two ranks to every stage without
    tiles; "2,1,4" gives two to the first stage, one to the second and four to the last.
    `branches` is like it, on the same ranks where a stage has both. `attention` "ring"
    lets keys and values of tokens that are cut go from rank to rank instead of being
    gathered and kept.
    Of `data` replicas, `per_device` share each device and its memory; AUTO is what gets
    most out of a device. `hardware` "" is one core of a CPU. `recompute` and
    `offload` "auto" take as few blocks as `device_memory` requires, "all" every block
    where that frees anything.
    `shard` "optimizer", "gradients" or "weights" says what ranks that hold the same
    weights keep their rows of only, each with what stands before it (ZeRO, stages 1 to
    3); `shard_optimizer=True` is another name of the first.
    `precision` "bfloat16" or "float16" computes within `torch.autocast`; weights and
    their gradients stay in float32. `memory_format` "channels_last" gives weights and
    inputs of images and volumes that format, in place; their values stay. With
    `torch_compile` the stages' forwards go through `torch.compile` where they run.
    """

    ranks: int = option(None, "total number of processes, as for mpirun -n")
    data: int = option(1, "number of data-parallel replicas, or auto", auto=True)
    per_device: int = option(
        1, "replicas that share each device, or auto: as many as pay off", auto=True
    )
    schedule: str = option("1f1b", "pipeline schedule")
    micro_batches: int = option(
        4, "micro-batches per step, each like example_inputs(), or auto", auto=True
    )
    times: int | None = option(
        None, "with --schedule master: pairs of micro-batches per step"
    )
    chunks: int = option(2, "with looped placement: stages per rank")
    balance: str = option("compute", "what to balance the stages by")
    blocks: tuple[int, ...] = option((), "number of blocks in each stage: 3,4,4,5")
    cuts: tuple[str, ...] = option(
        (), "modules at which the later stages begin: layer2,layer3"
    )
    placement: str = option("natural", "rank of each stage, as 0,1,1,0 or by rule")
    frontend: str = option("record", "how to trace the model")
    precision: str = option("float32", "compute dtype, via torch.autocast")
    memory_format: str = option(
        "as-given", "memory layout of images, volumes and their weights"
    )
    torch_compile: bool = option(
        False, "run the stages through torch.compile; needs a C++ compiler"
    )
    device_memory: int | None = option(
        None, "memory limit of each device, for example 16GiB", unit="bytes"
    )
    hardware: str = option("", "machine to plan for: a built-in name or a .toml file")
    profile: bool = option(
        False, "measure the time of the model's blocks on this machine"
    )
    device: str = option("", "device to profile on (default: the model's device)")
    recompute: tuple[str, ...] = option(
        (), "blocks to recompute in the backward pass: off, all, auto or names"
    )
    offload: tuple[str, ...] = option(
        (), "blocks whose activations are kept in host memory: off, auto or names"
    )
    check: bool = option(
        True, "compare the traced graph, and one step of the program, with the model"
    )
    tiles: tuple[str, ...] = option(
        (), "split images over ranks: off, auto, 2x2, 2x2x2, or by stage: 2x2,2x1"
    )
    local_batchnorm: bool = option(
        False, "let BatchNorm use each tile's own statistics: cheaper, but not exact"
    )
    fuse_halos: int = option(
        0, "maximum number of layers that share one wide halo (0: none)"
    )
    overlap_halos: bool = option(
        True, "compute the inside of a tile while its halo is exchanged"
    )
    shards: tuple[str, ...] = option(
        (), "split heads, channels and words: off, auto, 2, or by stage: 2,1,4"
    )
    branches: tuple[str, ...] = option(
        (), "run parallel branches on different ranks: off, auto, 2, or by stage: 2,1"
    )
    trunk: str = option(
        "auto", "how the ranks of a stage split values between shards or branches"
    )
    attention: str = option(
        "gather", "how attention over split tokens gets the keys of other ranks"
    )
    whole: tuple[str, ...] = option(
        (), "modules that every rank computes in full: head,layers.0"
    )
    shard: str = option(
        "off", "what to divide among ranks with the same weights (ZeRO 1 to 3)"
    )
    shard_optimizer: InitVar[bool] = option(  # noqa: RUF009, for it is no field
        False, "the same as --shard optimizer"
    )

    def __post_init__(self, shard_optimizer: bool) -> None:
        """Refuse values that no model could be compiled with.

        Raises:
            GemscError: an option is out of its range, or two contradict each other.
        """
        for name, known in CHOICES.items():
            choose(name.replace("_", " "), getattr(self, name), dict.fromkeys(known))
        self._check_counts()
        self._check_tiles()
        self._check_shards()
        if shard_optimizer and self.shard == "off":
            object.__setattr__(self, "shard", "optimizer")
        if self.shard == "weights" and self.torch_compile:
            raise GemscError(
                "--shard weights cannot be combined with --torch-compile: a compiled "
                "stage keeps its weights",
                help="leave one of them out, or use --shard gradients",
            )
        if self.data != AUTO:
            _ = self.groups
        if self.times is not None and self.schedule != "master":
            raise GemscError(
                f"--times {self.times} has no effect with --schedule {self.schedule}",
                help="use --schedule master, or --micro-batches",
            )
        for name in ("recompute", "offload"):
            self._split_words(name)
            _check_names(name, getattr(self, name))
        self._check_split()

    def _check_split(self) -> None:
        """Let `balance` be "explicit" where blocks or cuts are given."""
        if self.blocks and self.cuts:
            raise GemscError(
                "both --blocks and --cuts are given", help="give only one of them"
            )
        if min(self.blocks, default=1) < 1:
            numbers = ",".join(map(str, self.blocks))
            raise GemscError(
                f"--blocks {numbers} has a stage without blocks",
                help="give each stage at least one block",
            )
        if self.blocks or self.cuts:
            if self.balance == "memory":
                raise GemscError(
                    "--balance memory chooses the split, but "
                    f"{'--blocks' if self.blocks else '--cuts'} gives one",
                    help="leave out one of them",
                )
            object.__setattr__(self, "balance", "explicit")
        elif self.balance == "explicit":
            raise GemscError(
                "--balance explicit needs the split",
                help="add --blocks 3,4,4,5 (blocks of each stage) or "
                "--cuts layer2,layer3 (where each later stage begins)",
            )

    @property
    def rank_memory(self) -> int | None:
        """What a rank may take of `device_memory`."""
        return self.device_memory and self.device_memory // max(1, self.per_device)

    @property
    def copy_ranks(self) -> int:
        """The ranks of one data-parallel replica; all of them with `data` AUTO."""
        return self.ranks // self._copies

    @property
    def _copies(self) -> int:
        return 1 if self.data == AUTO else self.data

    @property
    def groups(self) -> tuple[GridShape, ...]:
        """How the ranks share the stages: in groups, of which each has its stages.

        The leading groups have tiles. What is left open is one rank to a group.

        Raises:
            GemscError: that does not come to so many ranks, or two of tiles, shards and
                branches do not go together on a stage.
        """
        counts = {name: self._given(name) for name in SPLITS}
        listed = any(len(counts[name]) > 1 for name in BESIDE)
        longest = (
            max(len(counts[n]) for n in SPLITS) if listed else len(counts["tiles"])
        )
        leading = tuple(self._shape(index, counts) for index in range(longest))
        left = self.copy_ranks - sum(grid.size for grid in leading)
        if left < 0 or (listed and left):
            raise self._too_few(self.copy_ranks - left)
        if listed:
            return leading
        group = self._shape(longest, counts)
        if over := left % group.size:
            raise self._uneven(leading, group, left, over)
        return (*leading, *(group,) * (left // group.size))

    def _given(self, name: str) -> tuple[str, ...]:
        """Return what is given of tiles, shards or branches; () if it is left open."""
        return () if name in self.open_splits else getattr(self, name)

    def _shape(self, stage: int, counts: Mapping[str, tuple[str, ...]]) -> GridShape:
        """Return how ranks share a stage: one number is for all stages."""
        tiles = counts["tiles"]
        grid = GridShape.of(tiles[stage]) if stage < len(tiles) else ALONE
        beside = {}
        for name in BESIDE:
            given = counts[name]
            listed = given[stage] if 1 < len(given) > stage else "1"
            beside[name] = int(given[0] if len(given) == 1 else listed)
        if len({*beside.values()} - {1}) > 1:
            both = " and ".join(typed(name, counts[name]) for name in BESIDE)
            raise GemscError(
                f"{both}: stage {stage} would be on {beside['shards']} ranks and on "
                f"{beside['branches']}",
                help="shards and branches of a stage are on the same ranks: give both "
                "the same number there, or one of them 1",
            )
        return GridShape(grid.tiles, **beside)

    def _uneven(
        self, leading: tuple[GridShape, ...], group: GridShape, left: int, over: int
    ) -> GemscError:
        """Return the error where equal groups do not come to so many ranks."""
        names = [name for name in BESIDE if getattr(group, name) > 1]
        sizes = (group.size,) * (left // group.size) + (over,)
        listed = (
            typed(name, (*(getattr(grid, name) for grid in leading), *sizes))
            for name in names
        )
        whole = self.copy_ranks - over
        fitting = (whole, whole + group.size)
        of_all = (str(count * self._copies) for count in fitting if count)
        whose = f"--ranks {self.ranks}"
        if self._copies > 1:
            whose = f"the {self.copy_ranks} ranks of a replica"
        if leading:
            whose = f"the {left} ranks left by {typed('tiles', self.tiles)}"
        return GemscError(
            " ".join(typed(name, group.size) for name in names)
            + f" does not divide {whose}",
            help=f"use --ranks {' or '.join(of_all)}, or list "
            f"the {' and '.join(names)} of each stage: {' '.join(listed)}",
        )

    def _too_few(self, needed: int) -> GemscError:
        """Return the error where groups need another number of ranks."""
        names = [name for name in SPLITS if self._given(name)]
        given = " ".join(typed(name, getattr(self, name)) for name in names)
        listed = any(len(getattr(self, name)) > 1 for name in BESIDE)
        held = f"--ranks is {self.ranks}"
        if self._copies > 1:
            held = f"a replica has {self.copy_ranks}"
        return GemscError(
            f"{given} needs {needed} ranks, {held}",
            help=f"use --ranks {needed * self._copies}"
            + ("" if listed else " or more")
            + f", or other {' and '.join(names)}",
        )

    @property
    def open_splits(self) -> tuple[str, ...]:
        """Which of tiles, shards and branches are left to the compiler."""
        return tuple(name for name in SPLITS if getattr(self, name) == ("auto",))

    def _check_tiles(self) -> None:
        """Bring `tiles` into its form: ("2x2", "2x1") for "2x2,2x1"."""
        self._split_words("tiles")
        for grid in self._given("tiles"):
            if not GRID.fullmatch(grid):
                raise GemscError(
                    f"--tiles {','.join(self.tiles)}: '{grid}' is not a grid",
                    help="write one number for each spatial axis: 2x2, 4x1, 2x2x2; "
                    "2x2,2x1 splits the first two stages",
                )
        if self.local_batchnorm and not self.tiles:
            raise GemscError(
                "--local-batchnorm has no effect without --tiles",
                help="leave it out: without tiles BatchNorm sees whole images",
            )
        if not 0 <= self.fuse_halos <= MOST:
            raise GemscError(
                f"--fuse-halos is {self.fuse_halos}",
                help="give the number of layers that share one halo, or 0 for none",
            )
        if self.fuse_halos and not self.tiles:
            raise GemscError(
                f"--fuse-halos {self.fuse_halos} has no effect without --tiles",
                help="leave it out, or split images with --tiles 2x2",
            )

    def _check_shards(self) -> None:
        """Bring what is beside tiles into its form: ("2", "1") for "2,1" and 2,1."""
        for name in (*BESIDE, "whole", "cuts"):
            self._split_words(name)
        for name in BESIDE:
            for count in self._given(name):
                if not count.isdecimal() or not 1 <= int(count) <= MOST:
                    raise GemscError(
                        f"{typed(name, getattr(self, name))}: '{count}' is not a "
                        f"number of {name}",
                        help=f"give one number for every stage, --{name} 2, or one for "
                        f"each stage: --{name} 2,1,4",
                    )
        choose("device", self.device or "cpu", dict.fromkeys(("cpu", "cuda")))
        if self.device and not self.profile:
            raise GemscError(
                f"--device {self.device} has no effect without --profile",
                help="leave it out: `gemsc run --device` says where a program runs",
            )
        if self.attention != "gather" and not (self.shards or self.tiles):
            raise GemscError(
                f"--attention {self.attention} has no effect without --tiles or "
                "--shards",
                help="leave it out, or split tokens with --shards 2 --trunk sequence",
            )
        for name in ("trunk", "whole"):
            value = getattr(self, name)
            if value not in ("auto", ()) and not (self.shards or self.branches):
                raise GemscError(
                    f"{typed(name, value)} has no effect without --shards or "
                    "--branches",
                    help="leave it out, or split heads and channels with --shards 2",
                )

    def _split_words(self, name: str) -> None:
        """Take text for a tuple, as on the command line: "2,1" for ("2", "1")."""
        value: Any = getattr(self, name)
        is_one = isinstance(value, str | int)
        words = str(value).split(",") if is_one else map(str, value)
        given = () if value == "off" else tuple(filter(None, words))
        object.__setattr__(self, name, given)

    def _check_counts(self) -> None:
        for name in ("ranks", "data", "micro_batches", "times", "chunks", "per_device"):
            value = getattr(self, name)
            if value == AUTO and name in MAY_BE_AUTO:
                continue
            if value is not None and not 1 <= value <= MOST:
                raise GemscError(
                    f"{flag(name)} is {value}",
                    help=f"give {flag(name)} a value from 1 to {MOST:,}",
                )
        if cast("int | None", self.ranks) is None:
            object.__setattr__(self, "ranks", RANKS * self._copies)
        if self.ranks % self._copies:
            count = self.ranks * self.data
            raise GemscError(
                f"--ranks {self.ranks} is not a multiple of --data {self.data}",
                help="--ranks counts the processes of all replicas: "
                f"{self.data} replicas of {self.ranks} each are --ranks {count}",
            )
        if self.per_device == AUTO and AUTO in (self.data, self.micro_batches):
            raise GemscError(
                "--per-device auto needs numbers for --data and --micro-batches",
                help="give the replicas that share devices: --ranks 8 --data 8",
            )
        if self.per_device == AUTO and self.data == 1:
            raise GemscError(
                "--per-device auto has nothing to choose: replicas share devices, and "
                "--data is 1",
                help="give the replicas that are to share: "
                f"--ranks {4 * self.ranks} --data 4",
            )
        if self.data != AUTO and self.data % max(1, self.per_device):
            raise GemscError(
                f"--per-device {self.per_device} does not divide --data {self.data}",
                help="use a divisor of --data, which counts all replicas",
            )

    def flags(self) -> list[str]:
        """Return the flags that differ from the defaults, as a user would type them."""
        values = [(option, getattr(self, option.name)) for option in fields(self)]
        return [typed(e.name, value) for e, value in values if value != e.default]

    def command_line(self) -> str:
        """Return those flags in one line."""
        return " ".join(self.flags())


MAY_BE_AUTO = {e.name for e in fields(CompileOptions) if e.metadata["auto"]}


def flag(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def typed(name: str, value: Any) -> str:
    """Return the flag and the value of an option as a user would type them."""
    if isinstance(value, bool):
        return flag(name if value else f"no-{name}")
    return f"{flag(name)} {text_of(value)}"


def text_of(value: Any) -> str:
    """Return a value as a user would type it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "off"
    return "auto" if value == AUTO else str(value)


def _check_names(option: str, names: tuple[str, ...]) -> None:
    """Refuse `all` or `auto` beside names."""
    words = {"all", "auto"} & set(names)
    if words and len(names) > 1:
        raise GemscError(
            f"--{option} {','.join(names)} mixes '{min(words)}' with names",
            help=f"give --{option} {min(words)}, or names only",
        )
