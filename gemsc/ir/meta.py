"""The only file that reads or writes `node.meta`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import Autocast, Format
from gemsc.errors import InternalError, SourceLocation
from gemsc.ir.layout import Layout
from gemsc.runtime.tiles.collectives import TileGrid

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        """Return for example `float32[4, 16, 32, 32]`."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Region:
    """The modes that were on while a node ran in the user's forward.

    `autocast` is (device type, dtype) or None where autocast was off. `draw` numbers a
    node that draws random numbers on one rank of a grid alone.
    """

    grad: bool = True
    autocast: Autocast | None = None
    draw: int | None = None


class Dtypes(NamedTuple):
    """What of a node is the same when the model runs in another floating-point type.

    `value` says so of the dtype of its tensors, `constants` of dtypes that stand among
    its arguments: those that the user wrote, and did not take from a tensor.
    """

    value: bool = False
    constants: bool = True


class TypedNumber(float):
    """A number that comes from a dtype, and what it is in the other one."""

    other: float

    def __new__(cls, value: float, other: float) -> TypedNumber:
        """Return a float that knows another."""
        number = super().__new__(cls, value)
        number.other = other
        return number


class TileSum(NamedTuple):
    """A sum over the tiles of a grid: the bytes of each tile's part."""

    num_bytes: int
    backward: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What the annotate pass knows of a node.

    Seconds are predicted for one micro-batch. `forward_launches` and
    `backward_launches` are the part of them in which an asynchronous device runs
    kernels of other nodes: see `busy_seconds`. `forward_least` and `backward_least` are
    the part that its kernels take however little there is to do.

    `saved` holds (storage, bytes) of all that autograd keeps for this node's backward,
    without parameters and buffers, whose names `saved_state` has; `saved_bytes` counts
    those of `saved` that no earlier node keeps already. `storages` are the (storage,
    bytes) of the node's own value. `heavy` nodes multiply matrices, convolve or own a
    weight: what a stage is made of. `random` nodes draw random numbers. `sums` are
    those over the tiles of a grid, forward and backward. Of the `parameter_bytes` those
    that are `trained_bytes` have gradients. `backward_writes` are the parameters and
    buffers that the backward, which is the user's own, changes.

    `weight_seconds` are the part of the backward's that gives weight gradients and can
    wait, `weight_bytes` the bytes of these gradients (see gemsc.base.weighted). `casts`
    are storages of `saved` that need not wait with them: weights in the precision of
    autocast.

    `gradients` are the (storage, bytes) of the gradient that the node itself gets. Its
    backward holds at most `backward_bytes` more than when it began; `made` are the
    (storage, bytes) that it leaves, `freed` the storages that end with it.
    """

    flops: int = 0
    moved_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0
    trained_bytes: int = 0
    saved_bytes: int = 0
    saved: tuple[tuple[int, int], ...] = ()
    saved_state: tuple[str, ...] = ()
    backward_writes: tuple[str, ...] = ()
    storages: tuple[tuple[int, int], ...] = ()
    heavy: bool = False
    random: bool = False
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_launches: float = 0.0
    backward_launches: float = 0.0
    forward_least: float = 0.0
    backward_least: float = 0.0
    sums: tuple[TileSum, ...] = ()
    weight_seconds: float = 0.0
    weight_bytes: int = 0
    casts: tuple[int, ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    backward_bytes: int = 0
    made: tuple[tuple[int, int], ...] = ()
    freed: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward."""
        return self.forward_seconds + self.backward_seconds


NO_FACTS = Facts()


class NodeEntry(Generic[T]):
    """What is known of each node, under one name: call it, or `set` it."""

    def __init__(self, name: str, default: T) -> None:
        """Take the name, and what is so for nodes of which nothing is said."""
        self.key = f"gemsc_{name}"
        self._default = default

    def __call__(self, node: fx.Node) -> T:
        """Return what is known of a node."""
        return cast("T", node.meta.get(self.key, self._default))

    def set(self, node: fx.Node, value: T) -> None:
        """Say what is known of a node."""
        node.meta[self.key] = value


# the user's line that computed the node, if known
location = NodeEntry[SourceLocation | None]("location", None)
# the path of the innermost user module that ran ('' is the model)
module_path = NodeEntry("module_path", "")
# the modes that were on
region = NodeEntry("region", Region())
# what stays the same in another floating-point type
dtypes = NodeEntry("dtypes", Dtypes())
# what the annotate pass knows; of placeholders their bytes and storages
facts = NodeEntry("facts", NO_FACTS)
# whether a gradient of the loss flows back into this value
needs_gradient = NodeEntry("needs_gradient", default=False)
# where the node, or the one that it comes from, stood in the trace
traced_place = NodeEntry("place", 0)
# the name of the node of an earlier stage of which this is a copy, if any
copy_of = NodeEntry[str | None]("copy_of", None)
# whether a rank computes the node once, not for each micro-batch
is_made_once = NodeEntry("made_once", default=False)
# the group of nodes that must stay in one block, None for most nodes
glue = NodeEntry[int | None]("glue", None)
# how the value is spread over the tiles of its stage's grid; None for a value of a
# stage that is not split, and where the value is no tensor
layout = NodeEntry[Layout | None]("layout", None)
# how all of a value lies in memory, where the node has the part of a tile: one row of
# it may seem to lie otherwise, and what is sent must lie the same on both ends
whole_format = NodeEntry[Format | None]("whole_format", None)
# which of its arguments a custom autograd function was seen to change in place
writes = NodeEntry[tuple[int | str, ...]]("writes", ())
# the grid whose tiles' gradients a node's backward needs, None for none
whole_gradients = NodeEntry[TileGrid | None]("whole_gradients", None)


def set_traced(
    node: fx.Node,
    *,
    value: object,
    location: SourceLocation | None,
    module_path: str,
    region: Region,
) -> None:
    """Attach what the frontend saw: fake value, user's line, module path, modes."""
    node.meta["val"] = value
    node.meta |= {
        "gemsc_location": location,
        "gemsc_module_path": module_path,
        "gemsc_region": region,
    }


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    """Give `target` all that is known of `source`."""
    target.meta = dict(source.meta)


def value(node: fx.Node) -> Any:
    """Return the fake value (a tensor, or a nest of tensors and constants)."""
    if "val" not in node.meta:
        raise InternalError(f"node {node.name} has no traced value")
    return node.meta["val"]


def set_value(node: fx.Node, value: object) -> None:
    """Replace the fake value."""
    node.meta["val"] = value


def is_one_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(value(node), torch.Tensor)


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors in the node's value, in order."""
    leaves = pytree.tree_leaves(value(node))
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def spec(node: fx.Node) -> TensorSpec:
    """Return shape and dtype of a node whose value is one tensor."""
    fake = value(node)
    if not isinstance(fake, torch.Tensor):
        raise InternalError(f"node {node.name} is not a tensor: {type(fake).__name__}")
    return TensorSpec(tuple(int(size) for size in fake.shape), fake.dtype)


def set_draw(node: fx.Node, draw: int) -> None:
    """Say that a node draws random numbers that the other ranks do not draw."""
    region.set(node, replace(region(node), draw=draw))


def learnt(node: fx.Node) -> dict[str, Any]:
    """Return what the annotate pass knows of a node, for `learn`."""
    keys = ("val", facts.key, needs_gradient.key)
    return {key: node.meta[key] for key in keys if key in node.meta}


def learn(node: fx.Node, learnt: dict[str, Any]) -> None:
    """Give a node what the annotate pass knows of its like."""
    node.meta.update(learnt)


def drop_facts(node: fx.Node) -> None:
    """Forget what the annotate pass knew: the node's sizes are others now."""
    node.meta.pop(facts.key, None)


def layer(node: fx.Node) -> str:
    """Return the path of the layer that a node calls or stands for, '' for others."""
    if node.op == "call_module":
        return str(node.target)
    return cast("str", node.meta.get("gemsc_layer", ""))


def set_layer(node: fx.Node, path: str) -> None:
    """Say for which layer a node stands, which is a function on tiles."""
    node.meta["gemsc_layer"] = path
