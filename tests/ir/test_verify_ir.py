"""Each invariant of a program is broken once and caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from program_support import Net, X, blocks_of, cut, mean, mse, run_passes, trunk
from torch import Tensor, fx, nn
from torch.nn import functional

from gemsc.compiler import compile
from gemsc.errors import InternalError
from gemsc.frontend import record
from gemsc.ir import meta
from gemsc.ir.flow import owned_tensors, shared_parameters
from gemsc.ir.holder import copied_graph, with_graph
from gemsc.ir.invariants import data_operands, lost_nothing, sources, verify
from gemsc.ir.program import Block, Placement, Program, Stage, Transfer
from gemsc.passes.base import Pass
from gemsc.runtime import tiles


@pytest.fixture(scope="module")
def program() -> Program:
    """Return three stages; `h` skips the second."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.d(self.trunk(h)) * h

    done = cut(blocks_of(Net(forward, trunk=trunk()), torch.zeros(2, 4)), 3)
    verify(done)
    return done


def refuse(program: Program, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        verify(program)


def test_a_value_used_before_it_is_there() -> None:
    program = record(Net(lambda self, x: self.b(self.a(x))), (torch.zeros(2, 4),))
    copied = fx.Graph()
    copied.output(copied.graph_copy(program.graph, {}))
    first, second = [n for n in copied.nodes if n.op == "call_module"]
    first.prepend(second)
    broken = program.with_module(with_graph(program.module, copied))
    with pytest.raises((InternalError, RuntimeError), match="before"):
        verify(broken)


def test_a_read_that_passes_a_write() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.zeros(2, 4)
        y[:, 0] = self.a(x)[:, 0]
        return self.b(y)

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    assert {"'a.weight'", "'b.weight'", "input input.0"} <= sources(program).keys()
    copied, _ = copied_graph(program.graph)
    read = next(node for node in copied.nodes if node.target == "b")
    write = next(node for node in copied.nodes if node.name == "setitem")
    read.append(write)
    broken = program.with_module(with_graph(program.module, copied))
    refuse(broken, "%b passes %setitem, whose memory it uses")


def test_a_write_that_passes_a_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.zeros(2, 4)
        read = self.a(y)
        y[:, 0] = x[:, 0]
        return self.b(y) + read

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    copied, _ = copied_graph(program.graph)
    read = next(node for node in copied.nodes if node.target == "a")
    for write in [node for node in copied.nodes if node.name.startswith("getitem")]:
        read.prepend(write)
    read.prepend(next(node for node in copied.nodes if node.name == "setitem"))
    broken = program.with_module(with_graph(program.module, copied))
    refuse(broken, "%setitem passes %read, whose memory it uses")


def test_a_read_of_statistics_that_passes_the_layer_which_changes_them() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.norm(self.a(x))
        scale = self.norm.running_mean.exp()
        return self.b(y * scale)

    program = blocks_of(Net(forward, norm=nn.BatchNorm1d(4)), torch.zeros(2, 4))
    copied, _ = copied_graph(program.graph)
    norm = next(node for node in copied.nodes if node.target == "norm")
    scale = next(node for node in copied.nodes if node.name == "scale")
    norm.prepend(scale.args[0])
    norm.prepend(scale)
    broken = program.with_module(with_graph(program.module, copied))
    refuse(broken, "%scale passes %y, whose memory it uses")


def test_an_order_that_was_right_is_looked_at_again_where_it_has_changed() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.zeros(2, 4)
        y[:, 0] = self.a(x)[:, 0]
        return self.b(y)

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    verify(program)
    read = next(node for node in program.graph.nodes if node.target == "b")
    write = next(node for node in program.graph.nodes if node.name == "setitem")
    read.append(write)
    refuse(replace(program, blocks=None), "%b passes %setitem, whose memory it uses")


def test_placeholders_that_are_not_the_inputs(program: Program) -> None:
    refuse(replace(program, inputs=()), "are not the inputs")
    renamed = tuple(replace(item, name="y") for item in program.inputs)
    refuse(replace(program, inputs=renamed), "are not the inputs")


def test_a_node_in_no_block(program: Program) -> None:
    blocks = program.blocks or ()
    first = replace(blocks[0], nodes=blocks[0].nodes[1:])
    broken = replace(program, blocks=(first, *blocks[1:]))
    refuse(broken, "the blocks are not the graph's nodes in order")


def test_a_node_in_two_blocks(program: Program) -> None:
    blocks = program.blocks or ()
    extra = Block(len(blocks), "again", blocks[0].nodes)
    refuse(replace(program, blocks=(*blocks, extra)), "the blocks are not")


def test_stages_that_are_not_the_blocks(program: Program) -> None:
    stages = program.require_stages()
    refuse(replace(program, stages=stages[:-1]), "the stages are not the blocks")
    refuse(replace(program, stages=stages[::-1]), "the stages are not the blocks")


def test_an_empty_stage(program: Program) -> None:
    stages = (*program.require_stages(), Stage(3, ()))
    refuse(replace(program, stages=stages), "the stages are not the blocks")


@pytest.mark.parametrize("ranks", [(((0,), (1,)),), (((0,), (1,), ()),)])
def test_a_stage_without_a_rank(program: Program, ranks: Any) -> None:
    placement = Placement("linear", ranks)
    refuse(replace(program, placement=placement), "misses a stage")


def test_a_missing_transfer(program: Program) -> None:
    for index in range(len(program.transfers or ())):
        transfers = list(program.transfers or ())
        del transfers[index]
        broken = replace(program, transfers=tuple(transfers))
        refuse(broken, "the transfers are not the values that stages use")


def test_a_value_sent_twice(program: Program) -> None:
    transfers = program.transfers or ()
    again = replace(transfers[0], index=99)
    broken = replace(program, transfers=(*transfers, again))
    refuse(broken, "the transfers are not the values that stages use")


def test_a_value_that_nobody_uses(program: Program) -> None:
    stages = program.require_stages()
    idle = next(n for n in stages[0].nodes if n not in sent(program))
    extra = Transfer(99, 0, 2, (idle,))
    broken = replace(program, transfers=(*(program.transfers or ()), extra))
    refuse(broken, "the transfers are not the values that stages use")


def sent(program: Program) -> set[fx.Node]:
    return {value for t in program.transfers or () for value in t.values}


def test_a_relayed_value(program: Program) -> None:
    """A skip goes straight: stage 1 may not hand on what stage 0 computed."""
    skip = next(t for t in program.transfers or () if t.dest - t.source > 1)
    others = tuple(t for t in program.transfers or () if t is not skip)
    relayed = (replace(skip, dest=1), replace(skip, source=1, index=99))
    refuse(replace(program, transfers=(*others, *relayed)), "transfers")


def test_a_transfer_from_another_stage_than_the_values(program: Program) -> None:
    skip = next(t for t in program.transfers or () if t.dest - t.source > 1)
    others = tuple(t for t in program.transfers or () if t is not skip)
    broken = replace(program, transfers=(*others, replace(skip, source=1)))
    refuse(broken, "does not lead forward")


def test_indices_that_two_transfers_share(program: Program) -> None:
    transfers = tuple(replace(t, index=0) for t in program.transfers or ())
    refuse(replace(program, transfers=transfers), "have the same index")


def test_a_program_without_facts_is_well_formed() -> None:
    verify(record(Net(lambda self, x: self.a(x)), (torch.zeros(2, 4),), loss=mean))


def shaped(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = self.b(self.a(x))
    return (x * self.scale.expand_as(x) + torch.zeros_like(y)) @ y.view_as(x).t()


SHAPED = Net(shaped, scale=nn.Parameter(torch.ones(2, 4)))


def test_sources_are_what_gives_elements() -> None:
    traced = record(SHAPED, (torch.zeros(2, 4), torch.zeros(2, 4)))
    layers = {f"'{name}.{kind}'" for name in "ab" for kind in ("weight", "bias")}
    assert sources(traced).keys() == {
        *layers,
        "'scale'",
        "input input.0",
        "input input.1",
    }
    (zeros,) = (n for n in traced.graph.nodes if n.target is torch.zeros_like)
    assert data_operands(zeros) == []


@pytest.mark.parametrize("target", ["expand_as", "view_as"])
def test_a_pass_that_takes_the_shape_for_the_value_is_caught(target: str) -> None:
    class Swap(Pass):
        def apply(self, program: Program) -> Program:
            graph = fx.Graph()
            graph.output(graph.graph_copy(program.graph, copied := {}))
            meta.copy_meta(program.output, graph.output_node())
            for node in graph.nodes:
                if node.target == target:
                    node.args = (node.args[1], node.args[1])
            assert copied
            return program.with_module(with_graph(program.module, graph))

    traced = record(SHAPED, (torch.zeros(2, 4), torch.zeros(2, 4)))
    lost = {"expand_as": "'scale'", "view_as": "input input.1"}[target]
    with pytest.raises(InternalError, match=rf"py:\d+: .*{lost} is"):
        run_passes(traced, [Swap()])


def test_draws_and_glued_writes_are_sources() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        part = h[:, :2]
        part += self.b(x)[:, :2]
        return functional.dropout(self.c(h) + part.sum(), 0.5)

    program = blocks_of(Net(forward), torch.zeros(2, 4))
    names = sources(program)
    assert "'b.weight'" in names
    assert any(name.startswith("the random numbers of ") for name in names)
    lost_nothing(program, [program])
    for name in ("dropout", "part_1"):
        with pytest.raises(InternalError, match="wrong program"):
            lost_nothing(program, [without(program, name)])


@pytest.mark.parametrize("exchange", [tiles.redistribute, tiles.all_reduce])
def test_what_a_rank_gives_counts_if_another_uses_it(exchange: Any) -> None:
    whole = blocks_of(Net(lambda self, x: self.b(self.a(x))), torch.zeros(2, 4))

    def rank(*, given: str, used: str) -> Program:
        """Return the program of a rank that gives `given` and computes b(`used`)."""
        graph = fx.Graph()
        nodes: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(whole.graph, nodes))
        meta.copy_meta(whole.output, graph.output_node())
        by_name = {n.name: n for n in graph.nodes}
        b = by_name["b"]
        with graph.inserting_before(b):
            args = ("grid", by_name[given], "what")
            by_name["result"] = graph.call_function(exchange, args)
        meta.copy_meta(b, by_name["result"])
        b.args = (by_name[used],)
        return whole.with_module(with_graph(whole.module, graph))

    gives, takes = rank(given="a", used="args_0"), rank(given="args_0", used="result")
    lost_nothing(whole, [gives, takes])
    lost_nothing(whole, [takes, gives])
    with pytest.raises(InternalError, match=r"'a\.weight' is part of what the model"):
        lost_nothing(whole, [gives, rank(given="args_0", used="args_0")])


def without(program: Program, name: str) -> Program:
    """Return the program with what a node computes replaced by its first operand."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    meta.copy_meta(program.output, graph.output_node())
    for node in [n for n in graph.nodes if n.name == name]:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    return program.with_module(with_graph(program.module, graph))


def test_each_tensor_is_somewhere_and_gradients_of_frozen_ones_are_not_added() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(self.d(self.c(self.b(self.a(x)))))

    net: Any = Net(forward, unused=nn.Linear(2, 3))
    net.a.weight.requires_grad_(False)
    given: dict[str, Any] = {"example_target": X, "ranks": 2, "check": False}
    compilation = compile(net, (X,), loss=mse, micro_batches=1, **given).compilation
    owned = owned_tensors(compilation.program, compilation.evaluation)
    assert {*owned[0]} | {*owned[1]} == net.state_dict().keys()
    assert {"unused.weight", "unused.bias", "a.weight", "a.bias"} <= {*owned[0]}
    assert shared_parameters(compilation.program, owned) == {"a.bias": (0, 1)}
