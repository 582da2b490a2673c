"""Equal tensors that torch.onnx made one are parameters of their own again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onnx_files import OLDER, exported, imported
from torch import Tensor, nn

from gemsc.importers.back import write_back

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
MERGED: dict[str, Any] = {"dynamo": True, "external_data": False}  # as it comes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Linear(width, width)
        for linear in (self.qkv, self.out, self.mlp):
            nn.init.zeros_(linear.bias)
        self.scale1 = nn.Parameter(torch.full((width,), 0.1))
        self.scale2 = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.scale1 * self.out((q @ k.mT).softmax(-1) @ v)
        return x + self.scale2 * F.gelu(self.mlp(self.norm2(x)))


class Words(nn.Module):
    """A fresh GPT: a head that is the table, and a copy of its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.zeros(1, 5, 8))
        first = Block(8)
        self.blocks = nn.Sequential(first, copy.deepcopy(first), Block(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.table(x) + self.position)
        return self.head(self.norm(self.blocks[2].norm1(x)))  # one that is used twice


class Picture(nn.Module):
    """Norms of fresh statistics, one of which begins as zeros throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, momentum=0.5) for _ in range(3))
        nn.init.zeros_(self.norms[1].weight)
        self.slopes = nn.ModuleList(nn.PReLU(4) for _ in range(3))
        self.groups = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(2))
        self.register_buffer("shift", torch.zeros(4, 1, 1))
        self.register_buffer("blur", torch.full((4, 1, 3, 3), 1 / 9))

    def forward(self, x: Tensor) -> Tensor:
        for norm, slope in zip(self.norms, self.slopes, strict=True):
            x = x + F.max_pool2d(slope(norm(x)), 3, 1, 1)
        x = F.conv2d(x + self.shift, self.blur, groups=4)
        return self.groups[1](self.groups[0](x) + 0.5)


def made(model: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model().double()


def batches(model: type[nn.Module]) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    if model is Words:
        return [torch.randint(11, (2, 5), generator=random) for _ in range(4)]
    shape = (2, 4, 6, 6)
    return [torch.rand(shape, generator=random, dtype=torch.float64) for _ in range(4)]


def train(network: nn.Module, data: list[Tensor]) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
    network.train()
    for x in data:
        optimizer.zero_grad()
        out = network(x)
        (out * torch.linspace(-1, 1, out.shape[-1])).square().sum().backward()
        optimizer.step()


def check_same(network: nn.Module, wanted: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(wanted, kind)())
        ours = dict(getattr(network, kind)())
        theirs |= (
            {  # an exporter takes one of the two names of a tied tensor
                "head.weight": theirs.pop("table.weight")
            }
            if "table.weight" in theirs
            else {}
        )
        if kind == "named_buffers":
            theirs = {n: t for n, t in theirs.items() if "running" in n}
            ours = {n: t for n, t in ours.items() if "running" in n}
        else:
            ours = {n: t for n, t in ours.items() if t.requires_grad}
        assert set(ours) == set(theirs)
        for name, tensor in ours.items():
            same = theirs[name].reshape(tensor.shape)  # (4, 1, 1) of a norm of groups
            if "running_var" not in name:  # of biased variances, in ONNX
                torch.testing.assert_close(tensor, same, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Words, Picture])
def test_a_fresh_network_trains_as_the_one_that_made_the_file(model, tmp_path):
    data = batches(model)
    path = exported(made(model).eval(), data[:1], tmp_path / "a.onnx", **MERGED)
    held = len(onnx.load(path).graph.initializer)
    network, read = imported(path)
    theirs = made(model)
    assert held < len(list(theirs.parameters()))
    for one in (network, theirs):
        train(one, data)
    check_same(network, theirs)
    (note,) = [n for n in read.notes if n.startswith("the exporter merged tensors")]
    assert ("blocks.0.norm1.weight (of 7)" in note) == (model is Words)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Words, Picture])
@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_each_of_them_is_written_back_to_a_tensor_of_its_own(model, outside, tmp_path):
    data = batches(model)
    how = MERGED | {"external_data": outside}
    path = exported(made(model).eval(), data[:1], tmp_path / "a.onnx", **how)
    network, read = imported(path)
    assert bool(read.tensors.files) == outside
    train(network, data)
    state = network.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    new = tmp_path / "out" / "b.onnx"
    new.parent.mkdir()
    write_back(path.with_suffix(""), new, shapes, state.__getitem__)
    again, read = imported(new)
    assert not [n for n in read.notes if n.startswith("the exporter merged")]
    assert set(again.state_dict()) == set(state)
    for name, tensor in again.state_dict().items():
        if "batches" not in name:
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)
    x = data[0]
    evaluator = onnx.reference.ReferenceEvaluator(str(new))
    (wanted,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    output = network.eval()(x)
    torch.testing.assert_close(output, torch.from_numpy(wanted), rtol=1e-6, atol=1e-6)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.LayerNorm(4) for _ in range(3))
        self.four, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.last.bias)
        self.five = copy.deepcopy(self.four)

    def forward(self, x: Tensor) -> Tensor:
        x = self.three(self.two(torch.tanh(self.one(x))))
        return self.last(self.one(self.five(torch.tanh(self.four(x)))))


def unnoted(path: Path, keep: str) -> Path:
    """Take away what torch notes at the nodes, all but the entries of one name."""
    model = onnx.load(path)
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key.endswith(keep)]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(model, path)
    return path


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", ["scopes", "older", "nothing"])
def test_without_notes_modules_part_what_is_one_number(kind, tmp_path):
    path = tmp_path / "a.onnx"
    how = OLDER if kind == "older" else MERGED
    exported(made(Twice).eval(), [torch.rand(3, 2, 4).double()], path, **how)
    if kind != "older":
        unnoted(path, "name_scopes" if kind == "scopes" else "none")
    network, read = imported(path)
    count = {"scopes": 10, "older": 10, "nothing": 5}[kind]
    assert len(list(network.parameters())) == count
    (told,) = [note for note in read.notes if note.startswith("one tensor in the file")]
    assert "four.bias" in told


@pytest.mark.slow
def test_a_bias_of_zeros_that_the_exporter_left_out_is_told(tmp_path):
    path = tmp_path / "a.onnx"
    exported(made(Twice).eval(), [torch.rand(3, 4).double()], path, **MERGED)
    network, read = imported(path)
    assert "last.bias" not in dict(network.named_parameters())
    (note,) = [note for note in read.notes if note.startswith("left out by the")]
    assert "not trained: last.bias; export with optimize=False" in note
    kept = exported(
        made(Twice).eval(),
        [torch.rand(3, 4).double()],
        tmp_path / "b.onnx",
        **MERGED,
        optimize=False,
    )
    network, read = imported(kept)
    assert "last.bias" in dict(network.named_parameters())
    assert not [note for note in read.notes if note.startswith("left out by the")]


class Folded(nn.Module):
    """One convolution that is used twice, or a copy of it, and norms for each use."""

    def __init__(self, count: int) -> None:
        super().__init__()
        first = nn.Conv2d(4, 4, 3, padding=1)
        copies = (copy.deepcopy(first) for _ in range(count - 1))
        self.convs = nn.ModuleList([first, *copies])
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, norm in enumerate(self.norms):
            x = torch.tanh(norm(self.convs[number % len(self.convs)](x)))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_convolutions_that_took_norms_in_are_as_many_as_they_were(count, tmp_path):
    x = torch.rand(2, 4, 6, 6).double()
    model = Folded(count).double().eval()
    network, _ = imported(exported(model, [x], tmp_path / "a.onnx", **MERGED))
    assert sum(p.dim() == 4 for p in network.parameters()) == count


class Gates(nn.Module):
    """Single numbers that are trained, equal ones, and one that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.near, self.far = (nn.Parameter(torch.zeros(())) for _ in range(2))
        self.register_buffer("share", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for linear, gate in zip(self.linears, (self.near, self.far), strict=True):
            x = x * self.share + gate * torch.tanh(linear(x))
        return x


@pytest.mark.slow(1)
@pytest.mark.parametrize("optimize", [True, False])
def test_single_numbers_are_trained_where_the_exporter_says_so(optimize, tmp_path):
    x = torch.rand(3, 2, 4).double()
    how = MERGED | {"optimize": optimize}
    network, _ = imported(exported(made(Gates).eval(), [x], tmp_path / "a.onnx", **how))
    theirs = made(Gates)
    for one in (network, theirs):
        train(one, [x] * 3)
    check_same(network, theirs)


class Functions(nn.Module):
    """Functions of weights: what they are of is trained, in all places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.table = nn.Parameter(torch.rand(3, 4))
        self.height, self.power = (nn.Parameter(torch.tensor(n)) for n in (0.3, 1.7))

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(self.first(x), dim=-1) @ F.normalize(self.table, dim=-1).T
        return x.abs() ** self.power * self.height.exp()


@pytest.mark.slow(1)
def test_a_parameter_is_trained_through_a_function_of_it(tmp_path: Path) -> None:
    x = torch.rand(3, 2, 4).double()
    how = MERGED | {"optimize": False}
    path = exported(made(Functions).eval(), [x], tmp_path / "a.onnx", **how)
    network, _ = imported(path)
    theirs = made(Functions)
    for one in (network, theirs):
        train(one, [x] * 3)
    check_same(network, theirs)
    state = network.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    new = tmp_path / "b.onnx"
    write_back(path.with_suffix(""), new, shapes, state.__getitem__)
    evaluator = onnx.reference.ReferenceEvaluator(str(new))
    (output,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), theirs(x).detach())


@pytest.mark.slow(1)
@pytest.mark.parametrize("model", [Functions, Words])
def test_functions_of_parameters_that_the_exporter_has_computed_are_told(
    model: type[nn.Module], tmp_path: Path
) -> None:
    x = [torch.rand(3, 2, 4).double()] if model is Functions else batches(Words)[:1]
    _, read = imported(exported(made(model).eval(), x, tmp_path / "a.onnx", **MERGED))
    told = [note for note in read.notes if "has computed functions" in note]
    assert len(told) == (model is Functions)
    assert all("height, table; export with optimize=False" in note for note in told)


class Computed(nn.Module):
    """A norm without weights, a constant matrix, and weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.norm = nn.LayerNorm(6, elementwise_affine=False)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.first(x)) @ torch.eye(6).roll(1, 0)
        return self.last((mixed + torch.arange(6.0)).unsqueeze(1))


def test_what_the_exporter_computes_of_no_parameter_is_not_trained(
    tmp_path: Path,
) -> None:
    path = exported(
        Computed().eval(), [torch.rand(4, 6)], tmp_path / "a.onnx", **MERGED
    )
    net, _ = imported(path)
    trained = sorted(tuple(p.shape) for p in net.parameters() if p.requires_grad)
    assert trained == [(2,), (2, 6), (6,), (6, 6)]


@pytest.mark.slow(1)
@pytest.mark.parametrize("how", [MERGED, OLDER])
def test_a_norm_without_weights_is_not_given_any(how: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 2))
    path = exported(model.eval(), [torch.rand(4, 6)], tmp_path / "a.onnx", **how)
    net, _ = imported(path)
    trained = sorted(tuple(p.shape) for p in net.parameters() if p.requires_grad)
    assert trained == [(2,), (2, 6)]
