"""Program: the traced graph plus the facts that passes have found about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from gemsc.base.cost import StateBytes
from gemsc.base.dtypes import Autocast
from gemsc.base.grid_shape import ALONE, GridShape
from gemsc.base.nests import OF_ALL
from gemsc.base.parts import Part
from gemsc.errors import InternalError, SourceLocation
from gemsc.ir.halos import Halos
from gemsc.ir.meta import TensorSpec, facts, location
from gemsc.ir.shards import StageShards

MIXES = "forward mixes samples"  # what `Program.halves` begins with where it does
MIXES_IN_TRAINING = f"{MIXES} in training"
NO_SUM = "the loss returns a pair that is not a sum and a count"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One placeholder of the graph.

    `path` says where its tensor is in what the user feeds: ("input", 0) is the first
    positional input, ("input", "mask") a keyword input, ("target",) the target if it
    is one tensor, ("target", "boxes", 1) a part of a nested one.
    """

    name: str
    path: tuple[str | int, ...]
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of output tensor number `index` in the structure of the outputs."""

    index: int


@dataclass(frozen=True, slots=True)
class DataclassValue:
    """A dataclass in the structure of the outputs: its class and its fields."""

    cls: type
    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Skip:
    """A value that is used again after the next block, or again inside its block."""

    value: fx.Node
    last_use: fx.Node
    num_bytes: int
    long: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Nodes that stay together; cuts fall only between blocks."""

    index: int
    name: str
    nodes: tuple[fx.Node, ...]

    def total(self, fact: str) -> Any:
        """Return the sum of one field of `Facts` over the nodes."""
        return sum(getattr(facts(node), fact) for node in self.nodes)

    @property
    def busy_seconds(self) -> float:
        """The seconds of forward and backward, where launches and kernels overlap."""
        return sum(
            busy_seconds(self.total(f"{way}_seconds"), self.total(f"{way}_launches"))
            for way in ("forward", "backward")
        )


def busy_seconds(seconds: float, launches: float) -> float:
    """Return how long nodes keep a device: the longer of launching and computing.

    `seconds` count both; `launches` are 0 where they do not overlap.
    """
    return max(launches, seconds - launches)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive blocks that run as one unit."""

    index: int
    blocks: tuple[Block, ...]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes of all blocks, in order."""
        return tuple(node for block in self.blocks for node in block.nodes)

    def total(self, fact: str) -> Any:
        """Return the sum of one field of `Facts` over the nodes."""
        return sum(block.total(fact) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks of one stage that do not keep what autograd saves in them.

    `kind` is "recompute" (they run again in the backward) or "offload" (what they save
    waits for the backward in host memory). `blocks` are indices.
    """

    name: str
    kind: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """(replica, stage) -> ranks: `ranks[replica][stage]` are that stage's ranks.

    `grids` has the shape of each stage's grid. Without any split stage it may be empty.
    """

    name: str
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    grids: tuple[GridShape, ...] = ()

    @property
    def num_replicas(self) -> int:
        """How many full copies of the stages there are."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of one model copy."""
        return 1 + max(rank for r in self.ranks for stage in r for rank in stage)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each grid, a lone rank for what is not split: all disjoint.

        All ranks of a group do the same actions in the same order, so the schedule
        engine takes a group for one rank.
        """
        return tuple(sorted({ranks for replica in self.ranks for ranks in replica}))

    def ranks_of(self, stage: int) -> set[int]:
        """Return all ranks that run a stage, in any replica."""
        return {rank for row in self.ranks for rank in row[stage]}

    def group(self, replica: int, stage: int) -> int:
        """Return the number of the group that runs a stage."""
        return self.groups.index(self.ranks[replica][stage])

    def grid(self, stage: int) -> GridShape:
        """Return the shape of a stage's grid, false if it is not split."""
        return self.grids[stage] if self.grids else ALONE

    @property
    def num_tiles(self) -> int:
        """The number of tiles of the largest grid."""
        return max(len(ranks) for ranks in self.groups)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Values that travel together from one stage to another; gradients travel back.

    `index` is unique in the program and gives the MPI tags.
    """

    index: int
    source: int
    dest: int
    values: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Barrier:
    """A node before which a tiled value had to be gathered, and why.

    `num_bytes` are those of the gathered value; every tile then computes all of it.
    """

    node: fx.Node
    reason: str
    num_bytes: int

    @property
    def location(self) -> SourceLocation | None:
        """The user's line."""
        return location(self.node)


@dataclass(frozen=True, slots=True)
class Program:
    """A graph and what is known of it. None means: no pass has provided it yet.

    The graph's nodes stand in the order in which the user's model ran them. Its output
    node returns `(loss, outputs)`: `loss` a node or None, `outputs` the tuple of the
    tensors that the model returned. `structure` is what the model returned (tuples,
    lists, dicts, `DataclassValue`, constants) with a `Slot` for each tensor.
    `module` holds the user's own layers, parameters and buffers (the same objects, not
    copies) under the user's names; a loss that is a module stands under `_loss`,
    tensors that are neither parameter nor buffer under `_constants`.
    `aliases` maps each further name of a tied parameter to its first name.
    `frozen` are the paths of layers that stay in eval mode while the model trains.
    `only_dtype` says why the program can run in the dtype of the trace only, "" if it
    can run in others. `autocast` is what it runs within, where precision is mixed.
    `optimizer_bytes` is the state that the optimizer keeps of each parameter; those in
    `updated_whole()` it does not update element by element, which is tried when it is
    first asked for; `updated_together(sets)` are those that step otherwise where others
    are not there. `try_optimizer(names)` refuses one that fails for what a rank has.
    Where ranks that hold the same parameters share the update, `updated` says how many
    elements of each one the rank has that updates most.
    `shard` says what they keep their rows of only, if that is not "off", and `kept` how
    many elements; of weights, those of `whole_stages` stages are whole at a time.
    `unfused_optimizer` is the name of one that would be faster with `fused=True`.
    `halves` says how the loss of a batch is another one than the mean of those of its
    samples, "" if it is not known to be. `sample_dims` are the dimensions of samples in
    what the model returns, ONCE or OF_ALL where it has none; () where all are 0.
    `shards` says, by stage, how ranks share its channels, heads, features or words;
    `parts` are the parameters and buffers of which the rank at hand has a part only, or
    nothing; `owned` are those that it has of each stage, where it runs a part of it.
    `towers` are branches worth a stage of their own, each one a row of the nodes.
    `facts` says that all nodes have them. `halos` are what tiles have beyond their own
    parts; `tile` is the one of each grid that runs the graph (`tile % size` of smaller
    ones). `barriers` are the places where split stages had to gather a value. `notes`
    tell the user what is done otherwise than the model says.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    structure: Any = None
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    only_dtype: str = ""
    autocast: Autocast | None = None
    towers: tuple[tuple[fx.Node, ...], ...] | None = None
    skips: tuple[Skip, ...] | None = None
    blocks: tuple[Block, ...] | None = None
    stages: tuple[Stage, ...] | None = None
    placement: Placement | None = None
    segments: tuple[Segment, ...] | None = None
    transfers: tuple[Transfer, ...] | None = None
    facts: bool | None = None
    halos: Halos | None = None
    shards: dict[int, StageShards] = field(default_factory=dict)
    optimizer_bytes: dict[str, StateBytes] = field(default_factory=dict)
    updated_whole: Callable[[], Mapping[str, float]] = dict
    updated_together: Callable[..., Mapping[str, float]] = dict
    try_optimizer: Callable[..., object] = tuple
    updated: dict[str, int] | None = None
    kept: dict[str, int] = field(default_factory=dict)
    shard: str = "off"
    whole_stages: int = 0
    unfused_optimizer: str = ""
    halves: str = ""
    sample_dims: tuple[int, ...] = ()
    tile: int = 0
    parts: dict[str, Part] = field(default_factory=dict)
    owned: tuple[tuple[str, ...], ...] | None = None
    barriers: tuple[Barrier, ...] = ()

    @property
    def mixes_samples(self) -> bool:
        """Whether what the model returns for a sample depends on the others."""
        return self.halves.startswith(MIXES)

    @property
    def evaluation_mixes(self) -> bool:
        """Whether it does in evaluation, too: a BatchNorm of one's own does not."""
        return self.mixes_samples and not self.halves.startswith(MIXES_IN_TRAINING)

    @property
    def loss_of_all(self) -> bool:
        """Whether the loss takes what the model computes of a whole micro-batch."""
        dims = dict(zip(self.outputs, self.sample_dims, strict=False))
        seen = {self.loss: None} if self.loss is not None else {}
        for node in (way := [*seen]):
            new = [n for n in node.all_input_nodes if n not in seen]
            way += new if node not in dims else []
            seen |= dict.fromkeys(new)
        return any(dims.get(node) == OF_ALL for node in way)

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.module.graph

    @property
    def compute_nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that compute: no placeholders, parameters or output."""
        passive = {"placeholder", "get_attr", "output"}
        return tuple(n for n in self.graph.nodes if n.op not in passive)

    @property
    def output(self) -> fx.Node:
        """The output node."""
        nodes: list[fx.Node] = list(self.graph.find_nodes(op="output"))
        return nodes[-1]

    @property
    def loss(self) -> fx.Node | None:
        """The node of the loss, None for a program without one."""
        (result,) = self.output.args
        loss = result[0]  # type: ignore[index]
        if loss is not None and not isinstance(loss, fx.Node):
            raise InternalError(f"the loss is not a node: {loss!r}")
        return loss

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes of the tensors that the model returns."""
        (result,) = self.output.args
        return tuple(result[1])  # type: ignore[index,arg-type]

    @property
    def home(self) -> int:
        """The stage that computes the loss (the last one if there is none)."""
        stages = self.require_stages()
        for stage in stages:
            if self.loss in stage.nodes:
                return stage.index
        return stages[-1].index

    def with_module(self, module: fx.GraphModule) -> Program:
        """Return the program on another graph, of which nothing is known yet."""
        return replace(
            self,
            module=module,
            towers=None,
            skips=None,
            blocks=None,
            stages=None,
            placement=None,
            segments=None,
            transfers=None,
            facts=None,
        )

    def segments_of(
        self, stage: int
    ) -> tuple[tuple[Segment, tuple[fx.Node, ...]], ...]:
        """Return a stage's segments, each with its nodes."""
        blocks = {block.index: block for block in self.require_stages()[stage].blocks}
        return tuple(
            (segment, tuple(n for b in segment.blocks for n in blocks[b].nodes))
            for segment in self.segments or ()
            if segment.blocks[0] in blocks
        )

    @property
    def adds_at_once(self) -> bool:
        """Whether gradients are added up after each backward, and kept in parts."""
        return self.shard in ("gradients", "weights")

    @property
    def stage_of(self) -> dict[fx.Node, int]:
        """The stage of each node."""
        stages = self.require_stages()
        return {node: stage.index for stage in stages for node in stage.nodes}

    def require_placement(self) -> Placement:
        """Return the placement; it is our fault if there is none yet."""
        if self.placement is None:
            raise InternalError("no placement yet")
        return self.placement

    def require_stages(self) -> tuple[Stage, ...]:
        """Return the stages; it is our fault if there are none yet."""
        if self.stages is None:
            raise InternalError("no stages yet")
        return self.stages
