"""Weights and buffers of branches, which one rank of a stage holds alone."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from torch import fx, nn

from gemsc.base.parts import Part, make_whole
from gemsc.ir.holder import with_graph
from gemsc.ir.layers import layer_source
from gemsc.passes.shards.local import put_parts


@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 3), (4, 3, 2, 2)])
def test_all_of_a_tensor_and_nothing_of_it_are_parts(shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    alone, nothing = Part(shape), Part.nothing(shape)
    assert alone.local_shape == shape
    assert alone.of(whole).equal(whole)
    assert nothing.of(whole).numel() == 0
    assert nothing.of(whole).shape == nothing.local_shape
    assert (alone.share, nothing.share) == (1, 0)
    rows, ((start, stop),) = whole.reshape(shape or (1,)), alone.intervals
    assert rows[start:stop].equal(rows)
    target = whole + 1
    nothing.put(nothing.of(whole), target)
    assert target.equal(whole + 1)
    alone.put(alone.of(whole), target)
    assert target.equal(whole)
    assert make_whole([alone, nothing])
    assert make_whole([alone])
    assert not make_whole([nothing])
    assert str(alone) == f"Part({shape})"
    for part in (alone, nothing):
        assert eval(str(part)) == part
        assert Part.read(json.loads(json.dumps(asdict(part)))) == part


LAYERS = [
    nn.Linear(4, 3),
    nn.Conv2d(4, 6, 3, groups=2),
    nn.ConvTranspose1d(4, 6, 3, groups=2),
    nn.BatchNorm2d(4),  # with a buffer without dimensions
    nn.GroupNorm(2, 4),
    nn.LayerNorm((4, 3)),
    nn.Embedding(5, 3),
    nn.PReLU(3),
    nn.GRU(4, 3),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_rank_has_all_of_a_layer_or_nothing(layer: nn.Module) -> None:
    """The rank of the branch has a layer of the same text, the others no elements."""
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": layer})})
    held = {}
    for kind in (Part, Part.nothing):
        held[kind] = with_graph(model, fx.Graph())
        parts = {f"a.b.{name}": kind(shape) for name, shape in shapes.items()}
        put_parts(held[kind], parts)
    there = held[Part].get_submodule("a.b")
    assert layer_source(there) == layer_source(layer)
    assert {n: tuple(t.shape) for n, t in there.state_dict().items()} == shapes
    elsewhere = held[Part.nothing].get_submodule("a.b")
    assert all(not t.numel() for t in elsewhere.state_dict().values())
    assert {n: tuple(t.shape) for n, t in layer.state_dict().items()} == shapes
