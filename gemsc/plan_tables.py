"""The tables of plan.toml: stages, transfers, shapes, phases, and what others list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from gemsc.base.cost import Edge, StageCost
from gemsc.base.grid_shape import GridShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWhole:
    """Parameters that every shard of a stage holds as a whole, and why; their bytes."""

    reason: str
    """Why no rank has only a part of them."""
    num_bytes: int
    """All of them together."""
    names: list[str]
    """The parameters and buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFork:
    """Parallel branches of a stage, and the ranks that compute them."""

    name: str
    """The module that has them, or what they are called: `image and text`."""
    join: str
    """The value that they end in."""
    branches: list[str]
    """Their names."""
    seconds: list[float]
    """Of each branch, forward and backward."""
    placed: list[list[str]] = field(default_factory=list)
    """The branches of each rank; empty: every rank computes all of them."""
    saved_seconds: float = 0.0
    """What sharing them out saves, less what its messages take."""
    trunk_seconds: float = 0.0
    """What each rank computes since the fork before, or the begin."""
    reason: str = ""
    """Why every rank computes all of them."""

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

    A stage that is split has `tiles` along each axis, or several `shards` or
    `branches`; its work is then that of all its ranks.
    """

    index: int
    """Stages are numbered in their order."""
    ranks: list[int]
    """Those that run it, in any replica of one copy."""
    blocks: list[str]
    """Their names, in order."""
    flops: int
    """Operations of one micro-batch, forward; of all its ranks."""
    parameter_bytes: int
    """Its parameters, as they are traced."""
    cost: StageCost
    """Of one micro-batch; of the peak-memory rank, if several share the stage."""
    recompute: list[str] = field(default_factory=list)
    """Blocks that keep nothing, and are computed again in the backward."""
    offload: list[str] = field(default_factory=list)
    """Blocks whose activations wait in host memory."""
    tiles: list[int] = field(default_factory=list)
    """Along each axis of the images; empty: they are whole."""
    shards: int = 1
    """The ranks that share its layers."""
    branches: int = 1
    """The ranks that share its parallel branches."""
    trunk: str = ""
    """How shards hold the values between: whole, batch or sequence."""
    messages: int = 0
    """Between its ranks, for one micro-batch, forward and backward."""
    message_bytes: int = 0
    """What those carry."""
    sums: int = 0
    """All-reduces between its ranks, counted like messages."""
    sum_bytes: int = 0
    """What all ranks bring to those."""
    talking_seconds: float = 0.0
    """How long a rank waits for these messages and sums."""
    cut: list[str] = field(default_factory=list)
    """Parameters of which each shard has a part: `mlp.weight.0 of 512 features` is cut
    along dimension 0. One whose line is taken out stays whole."""
    whole: list[PlannedWhole] = field(default_factory=list)
    """All other parameters of shards."""
    alone: list[list[str]] = field(default_factory=list)
    """Parameters and buffers that one rank alone holds, for each rank."""
    forks: list[PlannedFork] = field(default_factory=list)
    """Its parallel branches; of one that is taken out, every rank computes all."""
    halo_bytes: int = field(default_factory=int)
    """What tiles send each other in the forward."""
    exchanges: int = field(default_factory=int)
    """How often they do, in the forward."""
    unfused_exchanges: int = field(default_factory=int)
    """How often, if no wide halo served several layers."""
    unfused_halo_bytes: int = field(default_factory=int)
    """How much, if no wide halo served several layers."""
    overlapped: list[str] = field(default_factory=list)
    """Layers whose halo travels while their inner part is computed."""

    @property
    def grid(self) -> GridShape:
        """How ranks share the stage."""
        return GridShape(tuple(self.tiles), self.shards, self.branches)

    @property
    def seconds(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.cost.forward + self.cost.backward

    @property
    def units(self) -> str:
        """What its shards have parts of: `heads, features`."""
        return ", ".join(dict.fromkeys(text.rpartition(" ")[2] for text in self.cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Values that travel from one stage to another for each micro-batch."""

    index: int
    """Transfers are numbered."""
    values: list[str]
    """Their names."""
    num_bytes: int
    """Of all values, and of all tiles, one way."""
    edge: Edge
    """Between which stages, and how long it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShape:
    """A shape that batches may have, with a step of its own."""

    name: str
    """By what its shapes differ from others: `128`, `512x384`."""
    variant: str
    """Of its rank files, `rank0_128.py`; empty for `rank0.py`."""
    micro_batch_size: int
    """Samples."""
    sizes: dict[str, list[int]]
    """Of each tensor of a sample: `input.0`, `input.mask`, `target`."""
    step_seconds: float
    """Predicted for a step, with its ending."""
    peak_bytes: list[int]
    """The highest memory of each rank, or group, in such steps."""

    def shape_at(self, place: Iterable[str | int]) -> tuple[int, ...] | None:
        """Return the shape of a tensor of a sample; None if it has no samples."""
        shape = self.sizes.get(".".join(map(str, place)))
        return None if shape is None else tuple(shape)

    @property
    def num_elements(self) -> int:
        """How many numbers the inputs of a sample have."""
        inputs = self.sizes.items()
        return sum(prod(shape) for name, shape in inputs if name.startswith("input."))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPhase:
    """One of several updates of a step."""

    name: str
    """That of its rank files, `rank0_d.py`."""
    step_seconds: float
    """Predicted, up to the end of the last backward."""
    peak_bytes: list[int]
    """The highest memory of each rank, or group, meanwhile."""


ENTRIES = {  # of these tables, or of those in these lists
    "memory": {
        "parameters": "Weights and buffers.",
        "optimizer": "The optimizer's state.",
        "gradients": "Of the weights.",
        "activations": "What backwards will need.",
        "messages": "Receives posted ahead, and messages between tiles.",
        "workspace": "What libraries take for themselves.",
        "working": "Gradients on their way through a stage.",
    },
    "traffic": {
        "messages": "Of values and gradients, from stage to stage and tile to tile.",
        "message_bytes": "What those carry.",
        "sums": "All-reduces inside stages, forward and backward; each rank's counts.",
        "sum_bytes": "What all ranks bring to those.",
    },
    "barriers": {
        "stage": "Its index.",
        "value": "Its name.",
        "num_bytes": "The whole value.",
        "line": "Yours, that computes it.",
        "reason": "Why it cannot stay split.",
    },
    "opaque": {
        "module": "Its path in the model.",
        "stages": "Those that call it.",
        "line": "Yours, that depends on data.",
        "reason": "What depends on data there.",
    },
    "skips": {
        "value": "Its name.",
        "source": "The block that computes it.",
        "dest": "The last block that uses it.",
        "num_bytes": "Of one micro-batch.",
        "kind": "Whether it is sent, or stays on its rank.",
    },
    "made": {
        "value": "Its name.",
        "stages": "Those that make it, besides the first.",
        "num_bytes": "Of the value.",
        "when": "Whether once, or for each micro-batch.",
    },
    "sums": {
        "stage": "Its index.",
        "start": "Seconds from the start of the step.",
        "end": "Seconds from the start of the step.",
    },
}
