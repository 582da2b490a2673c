"""What annotate says of a node is what a real run of it does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from program_support import Net, blocks_of, mean, node, run_passes
from torch import Tensor, fx, nn

from gemsc.costs.operators import draws
from gemsc.errors import GemscError
from gemsc.frontend import record
from gemsc.ir import meta
from gemsc.ir.interpret import run_nodes
from gemsc.ir.program import Program
from gemsc.passes.annotate import Annotate
from gemsc.passes.canonicalize import Canonicalize


def annotated(model: nn.Module, *inputs: Tensor, training: bool = True) -> Program:
    loss = mean if training else None
    program = record(model, inputs, loss=loss, training=training)
    return run_passes(program, (Canonicalize(), Annotate(training=training)))


def layers_of(program: Program) -> nn.Module:
    """Return copies of a graph's layers, to run it with."""
    holder = nn.Module()
    holder._modules.update(copy.deepcopy(program.module._modules))
    holder._parameters.update(copy.deepcopy(program.module._parameters))
    return holder.train()


def run_graph(program: Program, layers: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    places = [n for n in program.graph.nodes if n.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(places, inputs, strict=True))
    run_nodes(program.graph.nodes, values, layers)
    return values


def saved_by(run: Callable[[], Any], module: nn.Module) -> int:
    """Return the bytes of all storages that autograd keeps while `run` runs."""
    of_module = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*module.parameters(), *module.buffers())
    }
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in of_module:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del result
    return size


def conv_bn_relu() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    )


def in_place() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    return nn.Sequential(*layers, nn.Conv2d(8, 2, 1), nn.Hardtanh(inplace=True))


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Views(nn.Module):
    """Several views of one storage are kept once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v


class Recurrent(nn.Module):
    """What oneDNN keeps of an LSTM has no size on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(x)[0]
        return hidden


PICTURE = (torch.randn(2, 3, 8, 8),)
TEXT = (torch.randn(2, 5, 8),)
SAVED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "conv, BatchNorm, ReLU": (conv_bn_relu, PICTURE),
    "in place": (in_place, PICTURE),
    "pools": (pooled, PICTURE),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), TEXT),
    "attention": (Attention, TEXT),
    "views": (Views, TEXT),
    "LSTM": (Recurrent, TEXT),
    "resnet18": (MODELS["resnet18"].build, MODELS["resnet18"].example_inputs),
    "encoder": (MODELS["encoder"].build, MODELS["encoder"].example_inputs),
}


@pytest.mark.slow(3)
@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes_are_those_of_a_real_run(name: str) -> None:
    make, inputs = SAVED[name]
    model = make()
    program = annotated(model, *inputs)
    said = sum(meta.facts(node).saved_bytes for node in program.compute_nodes)
    layers = layers_of(program)
    assert said == saved_by(lambda: run_graph(program, layers, inputs), layers) > 0


@pytest.mark.slow(5)
@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes_are_those_of_the_users_model(name: str) -> None:
    make, inputs = SAVED[name]
    model = make()
    program = annotated(model, *inputs)
    said = sum(meta.facts(node).saved_bytes for node in program.compute_nodes)
    copied = copy.deepcopy(model)
    assert said == saved_by(lambda: mean(copied(*inputs)), copied) > 0


@pytest.mark.parametrize("length", [33, pytest.param(200, marks=pytest.mark.slow)])
def test_saved_bytes_of_a_long_lstm_are_told_by_short_ones(length: int) -> None:
    inputs, model = (torch.randn(4, length, 8),), Recurrent()
    program = annotated(model, *inputs)
    said = sum(meta.facts(node).saved_bytes for node in program.compute_nodes)
    real = saved_by(lambda: mean(model(*inputs)), model)
    assert said == pytest.approx(real, rel=0.02)
    assert real > 20 * length * 4 * 2 * 2 * 16  # most of it is oneDNN's


def facts(program: Program, name: str) -> meta.Facts:
    return meta.facts(node(program, name))


def test_operations_are_those_of_the_formulas() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        convolved = self.conv(x)
        grown = self.grow(convolved)
        line = self.line(grown.flatten(2))
        product = torch.bmm(line, line.transpose(1, 2))
        heads = F.scaled_dot_product_attention(y, y, y)
        total = product.sum() + heads.sum()
        return total

    model = Net(
        forward,
        conv=nn.Conv2d(6, 8, (3, 5), stride=2, padding=(1, 2), groups=2),
        grow=nn.ConvTranspose2d(8, 4, 2, stride=2),
        line=nn.Linear(64, 10),
    )
    x, y = torch.randn(2, 6, 8, 8), torch.randn(2, 3, 7, 16)
    program = annotated(model, x, y)
    assert facts(program, "convolved").flops == 2 * (2 * 8 * 4 * 4) * (6 // 2) * 3 * 5
    assert facts(program, "grown").flops == 2 * (2 * 8 * 4 * 4) * 4 * 2 * 2
    assert facts(program, "line").flops == 2 * (2 * 4) * 64 * 10
    assert facts(program, "product").flops == 2 * 2 * 4 * 10 * 4
    assert facts(program, "heads").flops == 2 * (2 * 2 * 3 * 7 * 7 * 16)
    assert facts(program, "total").flops == 0


def test_empty_matrices_take_no_operations() -> None:
    with warnings.catch_warnings(action="ignore"):  # nothing to initialize
        model = nn.Sequential(nn.Linear(4, 0), nn.LayerNorm(0), nn.Linear(0, 4))
    program = annotated(model, torch.randn(2, 4))
    assert {meta.facts(n).flops for n in program.compute_nodes} == {0}


def test_bytes_are_those_of_the_tensors() -> None:
    program = annotated(nn.Sequential(nn.Linear(8, 4), nn.Tanh()), torch.randn(3, 8))
    line, tanh = program.compute_nodes[:2]
    assert meta.facts(line).parameter_bytes == 4 * (8 * 4 + 4)
    assert meta.facts(line).output_bytes == 4 * 3 * 4
    assert meta.facts(tanh).moved_bytes == 2 * 4 * 3 * 4
    assert meta.facts(tanh).parameter_bytes == 0


def test_what_several_nodes_keep_counts_once() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        first = h.square()
        second = h.exp() * h
        return first + second

    program = annotated(Net(forward), torch.randn(2, 4))
    assert facts(program, "first").saved_bytes == 4 * 2 * 4
    assert dict(facts(program, "second").saved)  # h again
    total = sum(meta.facts(n).saved_bytes for n in program.compute_nodes)
    assert total < sum(b for n in program.compute_nodes for _, b in meta.facts(n).saved)


def test_heavy_nodes_multiply_or_own_a_weight() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        line = self.a(x)
        normed = self.norm(line)
        turned = self.b.weight.T  # by itself no work: what multiplies with it is
        weighted = normed @ turned
        scaled = weighted * self.gain
        return scaled.relu()

    gain = nn.Parameter(torch.ones(4))
    model = Net(forward, norm=nn.LayerNorm(4), gain=gain)
    program = annotated(model, torch.randn(2, 4))
    heavy = [n.name for n in program.compute_nodes if meta.facts(n).heavy]
    assert heavy == ["line", "weighted"]
    embedding = annotated(nn.Embedding(10, 4), torch.zeros(2, 3, dtype=torch.int64))
    assert meta.facts(embedding.compute_nodes[0]).heavy


def test_gradients_flow_back_only_where_the_loss_depends_on_a_parameter() -> None:
    def forward(self: Any, x: Tensor, index: Tensor) -> Tensor:
        early = x.sin()  # of no parameter
        trained = self.a(early)
        cut = self.b(trained.square()).detach()
        with torch.no_grad():
            frozen = self.c(x)
        mask = index > 0
        unused = self.d(trained)
        chosen = torch.where(mask, trained, frozen)
        return chosen + cut + unused.detach()

    program = annotated(Net(forward), torch.randn(2, 4), torch.ones(2, 4).long())
    needing = {n.name for n in program.compute_nodes if meta.needs_gradient(n)}
    assert {"trained", "chosen"} <= needing
    assert not needing & {"early", "cut", "frozen", "mask", "unused", "b", "d"}


def test_frozen_parameters_need_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    program = annotated(model, torch.randn(2, 4))
    assert [meta.needs_gradient(n) for n in program.compute_nodes[:3]] == [0, 0, 1]


def test_nan_is_not_looked_for_in_shapes() -> None:
    with torch.autograd.set_detect_anomaly(True):
        program = annotated(nn.Linear(4, 4), torch.randn(2, 4))
        assert torch.is_anomaly_enabled()
    assert meta.needs_gradient(program.compute_nodes[0])


def test_nothing_needs_a_gradient_without_a_loss() -> None:
    program = annotated(nn.Linear(4, 4), torch.randn(2, 4), training=False)
    assert not any(meta.needs_gradient(n) for n in program.compute_nodes)


def test_random_nodes_are_those_that_draw() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        line = self.a(x)
        dropped = self.drop(line)
        kept = F.dropout(dropped, 0.5, training=False)
        noise = torch.rand_like(kept)
        heads = F.scaled_dot_product_attention(noise, line, line, dropout_p=0.1)
        return heads.relu()

    program = annotated(Net(forward, drop=nn.Dropout(0.2)), torch.randn(2, 4, 4))
    random = [n.name for n in program.compute_nodes if meta.facts(n).random]
    assert random == ["dropped", "noise", "heads"]
    evaluation = annotated(nn.Dropout(0.2), torch.randn(2, 4), training=False)
    assert not any(meta.facts(n).random for n in evaluation.compute_nodes)


def test_layers_that_stay_in_eval_mode_do_not_draw() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.5))
    model[1].eval()
    program = annotated(model, torch.randn(2, 4))
    assert [meta.facts(n).random for n in program.compute_nodes[1:3]] == [False, True]


def test_the_users_model_and_the_random_numbers_stay_as_they_are() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU()
    )
    model[2].eval()
    tensors = {n: (t, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    before = torch.get_rng_state(), [m.training for m in model.modules()]
    program = annotated(model, torch.randn(2, 3, 8, 8, generator=torch.Generator()))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is tensors[name][0]
        assert torch.equal(tensor, tensors[name][1])
        assert tensor.grad is None
    assert [m.training for m in model.modules()] == before[1]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert dict(program.module.named_parameters()).keys() == {
        "0.weight", "0.bias", "1.weight", "1.bias"
    }  # fmt: skip


def test_tensors_that_no_node_uses_stay_in_the_program() -> None:
    model = Net(lambda self, x: self.b(x), spare=nn.Parameter(torch.ones(1)))
    model.register_buffer("idle", torch.ones(2), persistent=False)
    program = blocks_of(model, torch.randn(2, 4))
    names = {n for n, _ in program.module.named_parameters()}
    assert names == {n for n, _ in model.named_parameters()}
    assert [n for n, _ in program.module.named_buffers()] == ["idle"]
    assert "idle" not in program.module.state_dict()


def test_the_input_program_keeps_its_graph() -> None:
    program = run_passes(
        record(nn.Linear(4, 4), (torch.randn(2, 4),), loss=mean), (Canonicalize(),)
    )
    done = Annotate().apply(program)
    assert done.graph is not program.graph
    assert all(meta.facts(n) == meta.Facts() for n in program.compute_nodes)


class Gate(nn.Module):
    """Depends on data, so that it is not looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        rows: Tensor = self.table(words)
        return rows if rows.sum() < 1e6 else -rows


SPARSE: dict[str, tuple[nn.Module, Callable[[Any, Tensor], Tensor]]] = {
    "layer": (nn.Embedding(5, 4, sparse=True), lambda net, x: net.rows(x)),
    "bags": (nn.EmbeddingBag(5, 4, sparse=True), lambda net, x: net.rows(x)),
    "function": (
        nn.Embedding(5, 4),
        lambda net, x: F.embedding(x, net.rows.weight, sparse=True),
    ),
    "bags by function": (
        nn.Embedding(5, 4),
        lambda net, x: F.embedding_bag(x, net.rows.weight, sparse=True),
    ),
}
WORDS = torch.tensor([[0, 1], [4, 1]])


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_are_refused_at_the_line(name: str) -> None:
    rows, look_up = SPARSE[name]
    with pytest.raises(GemscError, match="a sparse gradient") as caught:
        annotated(Net(lambda net, x: net.a(look_up(net, x)), rows=rows), WORDS)
    assert caught.value.at is not None
    assert caught.value.at.file == __file__
    assert "sparse=False" in caught.value.help


def test_frozen_tables_may_be_sparse() -> None:
    rows = nn.Embedding(5, 4, sparse=True)
    rows.weight.requires_grad_(False)
    annotated(Net(lambda net, x: net.a(net.rows(x)), rows=rows), WORDS)


def test_sparse_gradients_in_a_module_that_depends_on_data_are_refused() -> None:
    with pytest.raises(GemscError) as caught:
        annotated(Net(lambda net, x: net.a(net.gate(x)), gate=Gate()), WORDS)
    assert "the gradient of 'table.weight' is sparse" in str(caught.value)


@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_fused_attention_draws_if_it_drops(probability: float) -> None:
    """As on a GPU, where no other operator tells."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.zeros(1, 1, 2, 4)
    assert draws(attend, (q, q, q, probability), {}) is (probability > 0)
    assert draws(attend, (q, q, q), {"dropout_p": probability}) is (probability > 0)
    assert not draws(torch.ops.aten.add.Tensor, (q, q), {})
    assert draws(torch.ops.aten.bernoulli.default, (q,), {})
