"""The only file that reads or writes `node.meta`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import Autocast
from gemsc.errors import InternalError, SourceLocation
from gemsc.ir.layout import Layout
from gemsc.runtime.tiles.collectives import TileGrid


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        count = 1
        for size in self.shape:
            count *= size
        return count

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
    those over the tiles of a grid, forward and backward.

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
    saved_bytes: int = 0
    saved: tuple[tuple[int, int], ...] = ()
    saved_state: tuple[str, ...] = ()
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
    node.meta["gemsc_location"] = location
    node.meta["gemsc_module_path"] = module_path
    node.meta["gemsc_region"] = region


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


def location(node: fx.Node) -> SourceLocation | None:
    """Return the user's line that computed the node, if known."""
    return cast("SourceLocation | None", node.meta.get("gemsc_location"))


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost user module that ran ('' is the model)."""
    return cast("str", node.meta.get("gemsc_module_path", ""))


def region(node: fx.Node) -> Region:
    """Return the modes that were on."""
    return cast("Region", node.meta.get("gemsc_region", Region()))


def set_draw(node: fx.Node, draw: int) -> None:
    """Say that a node draws random numbers that the other ranks do not draw."""
    node.meta["gemsc_region"] = replace(region(node), draw=draw)


def dtypes(node: fx.Node) -> Dtypes:
    """Return what stays the same in another floating-point type."""
    return cast("Dtypes", node.meta.get("gemsc_dtypes", Dtypes()))


def set_dtypes(node: fx.Node, dtypes: Dtypes) -> None:
    """Say what stays the same in another floating-point type."""
    node.meta["gemsc_dtypes"] = dtypes


def facts(node: fx.Node) -> Facts:
    """Return the annotate pass' facts; of placeholders their bytes and storages."""
    return cast("Facts", node.meta.get("gemsc_facts", NO_FACTS))


def set_facts(node: fx.Node, facts: Facts) -> None:
    """Attach the facts."""
    node.meta["gemsc_facts"] = facts


def learnt(node: fx.Node) -> dict[str, Any]:
    """Return what the annotate pass knows of a node, for `learn`."""
    keys = ("val", "gemsc_facts", "gemsc_needs_gradient")
    return {key: node.meta[key] for key in keys if key in node.meta}


def learn(node: fx.Node, learnt: dict[str, Any]) -> None:
    """Give a node what the annotate pass knows of its like."""
    node.meta.update(learnt)


def drop_facts(node: fx.Node) -> None:
    """Forget what the annotate pass knew: the node's sizes are others now."""
    node.meta.pop("gemsc_facts", None)


def needs_gradient(node: fx.Node) -> bool:
    """Return whether a gradient of the loss flows back into this value."""
    return bool(node.meta.get("gemsc_needs_gradient", False))


def set_needs_gradient(node: fx.Node, needed: bool) -> None:
    """Say whether a gradient of the loss flows back into this value."""
    node.meta["gemsc_needs_gradient"] = needed


def traced_place(node: fx.Node) -> int:
    """Return where the node, or the one that it comes from, stood in the trace."""
    return cast("int", node.meta.get("gemsc_place", 0))


def set_traced_place(node: fx.Node, place: int) -> None:
    """Say where the node stands in the trace."""
    node.meta["gemsc_place"] = place


def copy_of(node: fx.Node) -> str | None:
    """Return the name of the node of which this is a copy in another stage, if any."""
    return cast("str | None", node.meta.get("gemsc_copy_of"))


def set_copy_of(node: fx.Node, name: str) -> None:
    """Say that a node computes in its stage what another one does in an earlier one."""
    node.meta["gemsc_copy_of"] = name


def is_made_once(node: fx.Node) -> bool:
    """Return whether a rank computes the node once, not for each micro-batch."""
    return bool(node.meta.get("gemsc_made_once", False))


def set_made_once(node: fx.Node) -> None:
    """Say that a rank computes the node once."""
    node.meta["gemsc_made_once"] = True


def glue(node: fx.Node) -> int | None:
    """Return the group of nodes that must stay in one block, None for most nodes."""
    return cast("int | None", node.meta.get("gemsc_glue"))


def set_glue(node: fx.Node, group: int) -> None:
    """Put the node into a group of nodes that must stay in one block."""
    node.meta["gemsc_glue"] = group


def layout(node: fx.Node) -> Layout | None:
    """Return how the value is spread over the tiles of its stage's grid.

    None for a value of a stage that is not split, and where the value is no tensor.
    """
    return cast("Layout | None", node.meta.get("gemsc_layout"))


def set_layout(node: fx.Node, layout: Layout | None) -> None:
    """Say how the value is spread over the tiles of its stage's grid."""
    node.meta["gemsc_layout"] = layout


def whole_gradients(node: fx.Node) -> TileGrid | None:
    """Return the grid whose tiles' gradients a node's backward needs, None for none."""
    return cast("TileGrid | None", node.meta.get("gemsc_whole_gradients"))


def set_whole_gradients(node: fx.Node, grid: TileGrid | None) -> None:
    """Say that a node's backward needs the gradients of all tiles of a grid."""
    node.meta["gemsc_whole_gradients"] = grid


def layer(node: fx.Node) -> str:
    """Return the path of the layer that a node calls or stands for, '' for others."""
    if node.op == "call_module":
        return str(node.target)
    return cast("str", node.meta.get("gemsc_layer", ""))


def set_layer(node: fx.Node, path: str) -> None:
    """Say for which layer a node stands, which is a function on tiles."""
    node.meta["gemsc_layer"] = path
