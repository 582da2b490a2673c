"""Every value that another stage uses travels there, straight and once."""

from __future__ import annotations

from typing import Any

import networks
import torch
from networks import PICTURE
from program_support import Net, blocks_of, cut, mse, node, trunk
from torch import Tensor, nn

from gemsc.compiler import lower, trace
from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.options import CompileOptions
from gemsc.passes.insert_comms import InsertComms

X = torch.zeros(2, 4)


def routes(program: Program) -> set[tuple[str, int, int]]:
    return {
        (value.name, t.source, t.dest)
        for t in program.transfers or ()
        for value in t.values
    }


def test_a_skip_is_sent_once_and_straight_to_its_consumer() -> None:
    program = cut(blocks_of(networks.FlatUNet(), PICTURE), 4)
    stage_of = {n: s.index for s in program.require_stages() for n in s.nodes}
    mirror = stage_of[node(program, "up1")]
    assert [r for r in routes(program) if r[0] == "e1"] == [("e1", 0, mirror)]
    assert mirror > 1


def test_a_value_with_several_consuming_stages_goes_to_each() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        end = self.late(self.early(h))
        return self.both(end, h) + h

    model = Net(forward, early=trunk(), late=trunk(), both=nn.Bilinear(4, 4, 4))
    options: Any = {"kind": "explicit", "blocks": (1, 6, 6, 1)}
    program = cut(blocks_of(model, X), 4, **options)
    assert {r for r in routes(program) if r[0] == "h"} == {
        ("h", 0, 1), ("h", 0, 3)
    }  # fmt: skip
    assert len(program.transfers or ()) == 4


def test_inputs_and_parameters_are_not_sent() -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        h = self.a(x) * mask
        k = torch.tanh(self.b(h)) * mask
        return (k @ self.c.weight) * mask + x

    program = cut(blocks_of(Net(forward), X, X), 3)
    assert {r[0] for r in routes(program)}.isdisjoint({"x", "mask", "c_weight"})


def test_integers_and_masks_travel_without_a_gradient() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        mask = h > 0
        place = h.argmax(1)
        end = self.trunk(h)
        return (end * mask).gather(1, place[:, None])

    program = cut(blocks_of(Net(forward, trunk=trunk()), X), 3)
    sent = {v.name: v for t in program.transfers or () for v in t.values}
    assert {"mask", "place"} <= sent.keys()
    assert {n for n, v in sent.items() if not meta.needs_gradient(v)} == {
        "mask", "place"
    }  # fmt: skip


def test_small_values_travel_packed_and_large_ones_alone() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        left, right = h[:, :1], h[:, 1:2]
        wide = h.repeat(1, 8)
        end = self.trunk(left + right + h)
        return self.d(end + left + right) + wide.sum()

    program = cut(blocks_of(Net(forward, trunk=trunk()), X), 3)

    def packed(pack_bytes: int) -> set[frozenset[str]]:
        done = InsertComms(pack_bytes=pack_bytes).apply(program)
        return {
            frozenset(v.name for v in t.values)
            for t in done.transfers or ()
            if (t.source, t.dest) == (0, 2)
        }

    left, right, wide = "getitem", "getitem_1", "wide"
    assert packed(8 * 32) == {frozenset({left, right}), frozenset({wide})}
    assert packed(8 * 32 + 1) == {frozenset({left, right, wide})}
    assert packed(0) == {frozenset({left}), frozenset({right}), frozenset({wide})}


def test_indices_are_unique_and_count_on() -> None:
    program = cut(blocks_of(networks.FlatUNet(), PICTURE), 4)
    indices = [t.index for t in program.transfers or ()]
    assert indices == list(range(len(indices)))
    later = InsertComms(first_index=10).apply(program)
    assert [t.index for t in later.transfers or ()] == [10 + i for i in indices]


def test_known_transfers_stay_and_only_outputs_are_added() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.a(x)
        waves = h.sin()
        return self.trunk(h), waves

    program = blocks_of(Net(forward, trunk=trunk()), X)
    program = cut(program, 3)
    known = program.transfers or ()
    done = InsertComms(outputs=True, known=known).apply(program)
    assert (done.transfers or ())[: len(known)] == known
    extra = (done.transfers or ())[len(known) :]
    assert [(t.source, t.dest) for t in extra] == [(0, 2)]
    assert extra[0].index == len(known)


def test_outputs_that_are_inputs_need_no_transfer() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.b(self.a(x)), x

    traced = trace(Net(forward), (X,), loss=lambda out, t: mse(out[0], t),
                   example_target=X, check=False)  # fmt: skip
    program = lower(traced, CompileOptions(ranks=2)).compilation.evaluation
    assert [len(t.values) for t in program.transfers or ()] == [1]


def test_evaluation_has_the_messages_of_training() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.a(x)
        waves = h.sin()
        return self.trunk(h), waves

    model, given = Net(forward, trunk=trunk()), {"example_target": X, "check": False}
    traced = trace(model, (X,), loss=lambda out, t: mse(out[0], t), **given)
    whole = lower(traced, CompileOptions(ranks=3)).compilation
    known, transfers = whole.program.transfers or (), whole.evaluation.transfers or ()
    assert transfers[: len(known)] == known
    assert [(t.source, t.dest) for t in transfers[len(known) :]] == [(0, 2)]
