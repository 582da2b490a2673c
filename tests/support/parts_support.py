"""A program whose ranks hold parts of the weights, written by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc.base.parts import Part
from gemsc.compiler import compile
from gemsc.plan import Plan
from gemsc.weights.write import write_tensors

WIDTH, HIDDEN, UNITS = 6, 10, 5  # units of two features; the gate repeats them
FILE = '''"""Rank {rank}, by hand: stages {stages}, shard {shard} of {shards}."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime import Input, Message, Part, RankProgram, Run, Tiles, Value, tiles


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm({width})
        self.up = nn.Linear({width}, 2 * {hidden})
        self.norm = nn.BatchNorm1d(2 * {hidden})
        self.down = nn.Linear({hidden}, {width})

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.norm(self.up(self.first(x))).chunk(2, 1)
        h = F.linear(h * torch.sigmoid(gate), self.down.weight)
        return tiles.all_reduce(self.grid, h) + self.down.bias


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Module()
        self.up.weight = nn.Parameter(torch.empty(2 * {hidden}, {width}))
        self.again = nn.Module()
        self.again.bias = nn.Parameter(torch.empty(2 * {hidden}))
        self.again.weight = self.up.weight  # tied
        self.out = nn.Linear({hidden}, 3)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        h, gate = F.linear(x, self.again.weight, self.again.bias).chunk(2, 1)
        h = F.linear(h * torch.sigmoid(gate), self.out.weight)
        y = tiles.all_reduce(self.grid, h) + self.out.bias
        return y, F.mse_loss(y, target)


def message(tag: int, source: int, dest: int) -> Message:
    value = Value("h", (2, {width}), torch.float32, gradient=True)
    return Message(tag=tag, source=source, dest=dest, values=(value,))


REPLICAS = {replicas}
PLACES = {places}  # of each stage of each replica
TO = [message(2 * r, PLACES[r][0], PLACES[r][1]) for r in range(REPLICAS)]
MICRO_BATCHES = {micro_batches}  # of each replica
RUNS = {runs}


def forward(worker, run, m):
    number = m + MICRO_BATCHES * run.replica
    if run.stage == 0:
        h = worker.run(run, m, worker.input("x", number))
        worker.send(TO[run.replica], m, h)
    else:
        h = worker.receive(TO[run.replica], m)
        _, loss = worker.run(run, m, h, worker.input("target", number))
        worker.add_loss(loss)


def backward(worker, run, m):
    if run.stage == 0:
        gradient = worker.receive(TO[run.replica].gradient, m)
        worker.backward(run, m, gradient)
    else:
        (gradient,) = worker.backward(run, m, None, worker.loss_gradient)
        worker.send(TO[run.replica].gradient, m, gradient)


def train_step(worker):
    for replica in range(REPLICAS):
        for m in range(MICRO_BATCHES):
            for run in RUNS:
                if run.replica == replica:
                    forward(worker, run, m)
                    backward(worker, run, m)
    for key in {started}:
        worker.start_reduction(key)
    worker.finish_reductions()
    worker.update()


PROGRAM = RankProgram(
    num_micro_batches=MICRO_BATCHES,
    num_replicas=REPLICAS,
    stages={{run: (Stage0, Stage1)[run.stage] for run in RUNS}},
    inputs={{
        "x": Input(("input", 0), (2, {width}), torch.float32),
        "target": Input(("target",), (2, 3), torch.float32),
    }},
    reductions={reductions},
    parts={parts},
    tiles=Tiles(grid=(), ranks={grid}, tile={shard}),
    train_step=train_step,
    eval_step=train_step,
)
'''


class Gated(nn.Module):
    """Two gated layers whose first weights are tied, and a normalization of each."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 2 * HIDDEN)
            self.norm = nn.BatchNorm1d(2 * HIDDEN)
            self.down = nn.Linear(HIDDEN, WIDTH)
            self.again = nn.Linear(WIDTH, 2 * HIDDEN)
            self.again.weight = self.up.weight
            self.out = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.norm(self.up(self.first(x))).chunk(2, 1)
        h, gate = self.again(self.down(h * torch.sigmoid(gate))).chunk(2, 1)
        return self.out(h * torch.sigmoid(gate))


class Words(nn.Module):
    """An embedding, two blocks with features, and a head that may be tied to it."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(12, 8)
            self.blocks = nn.ModuleList(
                nn.ModuleDict(
                    {
                        "norm": nn.LayerNorm(8),
                        "up": nn.Linear(8, 10),
                        "mean": nn.BatchNorm1d(10),
                        "down": nn.Linear(10, 8),
                    }
                )
                for _ in range(2)
            )
            self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            h = block["mean"](block["up"](block["norm"](x)))
            x = x + block["down"](torch.tanh(h))
        return self.head(x)


GATED = (
    "up.weight",
    "again.weight",
    "up.bias",
    "norm.weight",
    "norm.bias",
    "again.bias",
)
OWNED = ("first", "up", "norm", "down"), ("up.weight", "again", "out")
STATISTICS = ("norm.running_mean", "norm.running_var")
INNER = ("down.weight", "out.weight")


@cache
def plan_of() -> Plan:
    """Return the plan of the model on two ranks."""
    target = torch.zeros(2, 3)
    return compile(
        Gated(), (torch.zeros(2, WIDTH),), loss=F.mse_loss, example_target=target,
        ranks=2, check=False,
    ).plan  # fmt: skip


@dataclass(frozen=True)
class Written:
    """How a program of two stages is shared out.

    `units` are those of each shard. With two `replicas` the second one is mirrored:
    each rank has one stage of each.
    """

    units: tuple[int, ...] = (3, 2)
    replicas: int = 1
    copies: int = 1
    micro_batches: int = 2

    @property
    def shards(self) -> int:
        return len(self.units)

    @property
    def ranks(self) -> int:
        return 2 * self.shards * self.copies

    @property
    def batch(self) -> int:
        return 2 * self.micro_batches * self.replicas * self.copies

    def parts(self, shard: int) -> dict[str, Part]:
        """Return what a shard has parts of."""
        start = sum(self.units[:shard])
        rows = start, start + self.units[shard]
        parts = {}
        for name in (*GATED, *STATISTICS, *INNER):
            shape: tuple[int, ...] = (2 * HIDDEN,)
            if name in ("up.weight", "again.weight"):
                shape = (2 * HIDDEN, WIDTH)
            if name in INNER:
                shape = (WIDTH if name == "down.weight" else 3, HIDDEN)
            dim, outer = (1, 1) if name in INNER else (0, 2)
            parts[name] = Part(shape, dim, outer, UNITS, rows)
        return parts

    def write(self, folder: Path) -> None:
        """Write the weights of the whole model, the plan and the ranks' files."""
        whole = {**Gated().state_dict(), **dict(Gated().named_parameters())}
        for stage, prefixes in enumerate(OWNED):
            tensors = {n: t for n, t in whole.items() if n.startswith(prefixes)}
            write_tensors(folder / "weights" / f"stage{stage}.safetensors", tensors)
        groups = [[*range(self.shards)], [*range(self.shards, 2 * self.shards)]]
        plan = replace(plan_of(), ranks=self.ranks, data=self.copies, groups=groups)
        (folder / "plan.toml").write_text(plan.to_toml(folder), encoding="utf-8")
        for rank in range(2 * self.shards):
            (folder / f"rank{rank}.py").write_text(self._file(rank), encoding="utf-8")

    def _file(self, rank: int) -> str:
        group, shard = divmod(rank, self.shards)
        runs = [
            f"Run({group ^ replica}, {replica})" for replica in range(self.replicas)
        ]
        stages = {group ^ replica for replica in range(self.replicas)}
        grid = tuple(range(group * self.shards, (group + 1) * self.shards))
        sums = self._reductions(shard, stages, grid)
        kinds = [f"stage{s}{kind}" for s in (1, 0) for kind in ("", " parts")]
        parts = {
            name: part
            for name, part in self.parts(shard).items()
            if any(name.startswith(OWNED[stage]) for stage in stages)
        }
        shown = ", ".join(f"{name!r}: {part}" for name, part in parts.items())
        places = [
            [(stage ^ replica) * self.shards + shard for stage in (0, 1)]
            for replica in range(self.replicas)
        ]
        return FILE.format(
            rank=rank, stages=stages, shard=shard, shards=self.shards, width=WIDTH,
            hidden=2 * self.units[shard], replicas=self.replicas, places=places,
            micro_batches=self.micro_batches, runs=f"[{', '.join(runs)}]", grid=grid,
            started=[key for key in kinds if key in sums], reductions=sums,
            parts=f"{{{shown}}}",
        )  # fmt: skip

    def _reductions(
        self, shard: int, stages: set[int], grid: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        both = shard, self.shards + shard
        everyone = tuple(range(2 * self.shards)) if self.replicas > 1 else grid
        alike = both if self.replicas > 1 else (grid[shard],)
        groups: dict[str, tuple[int, ...]] = {"up.weight": both}
        for stage in stages:
            groups[f"stage{stage}"] = everyone
            groups[f"stage{stage} parts"] = alike
        return {k: r for k, r in groups.items() if len(r) * self.copies > 1}
