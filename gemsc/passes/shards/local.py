"""Local layers: the user's, smaller, with a rank's parts of parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from gemsc.base.nests import as_kind
from gemsc.base.parts import Part
from gemsc.ir.holder import attribute, put_layer, shallow_copy

# the settings that say how large a layer's tensors are: (tensors, dimension)
_SIZES = {
    "out_features": ("weight", 0),
    "in_features": ("weight", 1),
    "num_embeddings": ("weight", 0),
    "embedding_dim": ("weight", 1),
    "num_features": ("running_mean weight", 0),
    "num_channels": ("weight", 0),
    "num_parameters": ("weight", 0),
}


def put_parts(module: fx.GraphModule, parts: Mapping[str, Part]) -> None:
    """Give a module smaller layers and parameters, whose memory holds nothing yet.

    The user's own module and layers stay as they are. A tied parameter has its part
    under each of its names. A layer of which the rank has nothing keeps its settings:
    it is neither called nor written.
    """
    own_parts: dict[str, dict[str, Part]] = {}
    for name, part in parts.items():
        path, _, last = name.rpartition(".")
        own_parts.setdefault(path, {})[last] = part
    made: dict[int, Tensor] = {}  # by the whole tensor: tied ones are one
    for path, layer_parts in own_parts.items():
        owner: nn.Module = module
        if path:
            owner = shallow_copy(module.get_submodule(path))
            put_layer(module, path, owner)
        owner.__dict__["_parameters"] = dict(owner._parameters)
        owner.__dict__["_buffers"] = dict(owner._buffers)
        before = {name: attribute(owner, name) for name in layer_parts}
        for name, part in layer_parts.items():
            whole = before[name]
            blank = torch.empty(part.local_shape, dtype=whole.dtype)
            tensor = made.setdefault(id(whole), as_kind(blank, whole))
            slots: dict[str, Any] = owner._parameters
            slots = slots if name in slots else owner._buffers
            slots[name] = tensor
        _resize(owner, {name: part for name, part in layer_parts.items() if part.share})


def _resize(layer: Any, parts: Mapping[str, Part]) -> None:
    """Let a layer's settings fit its tensors, where it has any."""
    if not parts:
        return
    if isinstance(layer, nn.modules.conv._ConvNd):
        _resize_convolution(layer, parts.get("weight"))
        return
    # not by getattr: a parametrized weight (spectral_norm) would be made, with a step
    held = {**layer._parameters, **layer._buffers}
    for setting, (names, dim) in _SIZES.items():
        attributes = (held.get(name) for name in names.split())
        tensor = next((t for t in attributes if isinstance(t, Tensor)), None)
        if hasattr(layer, setting) and tensor is not None:
            if setting == "num_channels":  # of a GroupNorm: whole groups
                groups = layer.num_groups * tensor.shape[0]
                layer.num_groups = groups // layer.num_channels
            setattr(layer, setting, tensor.shape[dim])


def _resize_convolution(layer: Any, part: Part | None) -> None:
    """Let the channels fit the weight: [out, in / groups, ...] or [in, out / groups].

    Groups are cut where the dimension that has them is, in whole groups; what is cut
    inside of each group leaves as many.
    """
    if part is None:
        return
    if part.dim == 0 and part.outer * part.units <= layer.groups:
        layer.groups = layer.groups * (part.rows[1] - part.rows[0]) // part.units
    first, second = layer.weight.shape[:2]
    outer, inner = first, second * layer.groups
    if layer.transposed:
        layer.in_channels, layer.out_channels = outer, inner
    else:
        layer.out_channels, layer.in_channels = outer, inner
