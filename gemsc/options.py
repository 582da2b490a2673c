"""Every choice of one compilation, with its default; the only place with defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import TypeVar

from gemsc.errors import GemscError

__all__ = ["AUTO", "BALANCES", "CompileOptions", "choose"]

Choice = TypeVar("Choice")

BALANCES = ("compute", "memory", "explicit", "auto")
AUTO = -1  # a number that is left to the compiler
MOST = 1_000_000  # ranks, replicas, micro-batches: more is a slip of the hand
GRID = re.compile(r"[1-9]\d*(x[1-9]\d*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The user's choices: the same names on the command line and in Python.

    `balance` is "compute" (least time of the slowest stage), "memory" (least memory of
    the rank with the highest peak) or "explicit", in which case either `blocks` is the
    number of blocks of each stage, or `cuts` the module path at which each later stage
    begins; one of the two is enough.

    `ranks` share one data-parallel replica of the model; `data` such replicas share the
    batch. `micro_batches` counts those of one data-parallel replica in one step; in
    schedules with two mirrored replicas each gets half of them. `times` is the number
    of pairs of runs of `master`: 2 x times micro-batches. `placement` "natural" is the
    one that the schedule is made for; `chunks` is the number of stages on each rank
    under `looped` placement; "0,1,1,0" lists the rank of each stage. `schedule`,
    `placement` and `balance` may be "auto", `micro_batches` and `data` AUTO: the
    compiler takes what is predicted to be fastest and fits `device_memory`. With `data`
    AUTO, `ranks` and `micro_batches` are those of all data-parallel replicas together.

    `hardware` names a shipped machine or a hardware file; "" is one core of a CPU.
    `profile` times the model's blocks on this machine instead of predicting them.
    `recompute` and `offload` name blocks or modules whose saved activations are
    recomputed in the backward, or wait for it in host memory. "auto" takes as few as
    `device_memory` requires, "all" every block where that frees anything.
    `tiles` splits the images of the leading groups of ranks: with "2x2" the first stage
    runs on four ranks, with a tile of 2 x 2 each; with "2x2,2x1" the second stage runs
    on two. Each of the remaining ranks has one stage, as without tiles. There is one
    number for each spatial axis. "auto" takes the grid that is predicted to be fastest,
    or none. `local_batchnorm` lets each tile normalise by its own statistics, which is
    not what the model does on one rank. `fuse_halos` is the most layers
    for which one wider halo is sent, which recompute the rows in between; 0 is none.
    `overlap_halos` convolves a tile while its halo is on its way.
    """

    ranks: int = 2
    data: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 4
    times: int | None = None
    chunks: int = 2
    balance: str = "compute"
    blocks: tuple[int, ...] = ()
    cuts: tuple[str, ...] = ()
    placement: str = "natural"
    frontend: str = "record"
    device_memory: int | None = None
    hardware: str = ""
    profile: bool = False
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    check: bool = True
    tiles: tuple[str, ...] = ()
    local_batchnorm: bool = False
    fuse_halos: int = 0
    overlap_halos: bool = True

    def __post_init__(self) -> None:
        """Refuse values that no model could be compiled with.

        Raises:
            GemscError: an option is out of its range, or two contradict each other.
        """
        self._check_counts()
        self._check_tiles()
        if self.balance not in BALANCES:
            raise GemscError(
                f"unknown balance '{self.balance}'",
                help=f"choose one of {', '.join(BALANCES)}",
            )
        if self.times is not None and self.schedule != "master":
            raise GemscError(
                f"--times {self.times} has no effect with --schedule {self.schedule}",
                help="use --schedule master, or --micro-batches",
            )
        for name in ("recompute", "offload"):
            _check_names(name, getattr(self, name))
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
                    "--balance memory chooses the split, and "
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
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """The grids of the leading groups of ranks, as numbers."""
        if self.open_tiles:
            return ()
        return tuple(tuple(map(int, grid.split("x"))) for grid in self.tiles)

    @property
    def open_tiles(self) -> bool:
        """Whether the grids are left to the compiler."""
        return self.tiles == ("auto",)

    def _check_tiles(self) -> None:
        """Bring `tiles` into its form: ("2x2", "2x1") for "2x2,2x1"."""
        tiles: tuple[str, ...] | str = self.tiles
        if isinstance(tiles, str):
            object.__setattr__(self, "tiles", tuple(filter(None, tiles.split(","))))
        for grid in () if self.open_tiles else self.tiles:
            if not GRID.fullmatch(grid):
                raise GemscError(
                    f"--tiles {','.join(self.tiles)}: '{grid}' is not a grid",
                    help="write one number for each spatial axis: 2x2, 4x1, 2x2x2; "
                    "2x2,2x1 splits the first two stages",
                )
        needed = sum(map(prod, self.grids))
        if needed > self.ranks:
            raise GemscError(
                f"--tiles {','.join(self.tiles)} needs {needed} ranks, "
                f"--ranks is {self.ranks}",
                help=f"use --ranks {needed} or more, or fewer tiles",
            )
        if self.local_batchnorm and not self.tiles:
            raise GemscError(
                "--local-batchnorm has no effect without --tiles",
                help="leave it out: without tiles BatchNorm sees whole images",
            )
        if not 0 <= self.fuse_halos <= MOST:
            raise GemscError(
                f"--fuse-halos is {self.fuse_halos}",
                help="give the most layers that share one halo, or 0 for none",
            )
        if self.fuse_halos and not self.tiles:
            raise GemscError(
                f"--fuse-halos {self.fuse_halos} has no effect without --tiles",
                help="leave it out, or split images with --tiles 2x2",
            )

    def _check_counts(self) -> None:
        for name in ("ranks", "data", "micro_batches", "times", "chunks"):
            value = getattr(self, name)
            if value == AUTO and name in ("data", "micro_batches"):
                continue
            if value is not None and not 1 <= value <= MOST:
                flag = name.replace("_", "-")
                raise GemscError(
                    f"--{flag} is {value}",
                    help=f"give --{flag} a value from 1 to {MOST:,}",
                )

    def command_line(self) -> str:
        """Return the flags that differ from the defaults, as a user would type them."""
        words = [f"--ranks {self.ranks}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "ranks" or value == field.default:
                continue
            flag = field.name.replace("_", "-")
            if value == AUTO and field.name in ("data", "micro_batches"):
                words.append(f"--{flag} auto")
            elif isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif isinstance(value, tuple):
                words.append(f"--{flag} {','.join(map(str, value))}")
            else:
                words.append(f"--{flag} {value}")
        return " ".join(words)


def _check_names(option: str, names: tuple[str, ...]) -> None:
    """Refuse `all` or `auto` beside names."""
    words = {"all", "auto"} & set(names)
    if words and len(names) > 1:
        raise GemscError(
            f"--{option} {','.join(names)} mixes '{min(words)}' with names",
            help=f"give --{option} {min(words)}, or names only",
        )


def choose(what: str, name: str, table: Mapping[str, Choice]) -> Choice:
    """Return the entry of a table that an option names.

    Raises:
        GemscError: there is no entry of that name.
    """
    if name not in table:
        raise GemscError(
            f"unknown {what} '{name}'", help=f"choose one of {', '.join(table)}"
        )
    return table[name]
