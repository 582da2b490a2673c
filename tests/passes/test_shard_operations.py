"""Operations of a part of the heads or words: equal to those of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_grid import on_tiles
from torch import Tensor, nn

from gemsc.base.boxes import everything
from gemsc.base.rng import same_draws
from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.runtime import tiles
from gemsc.runtime.tiles.grid import Grid

DOUBLE = torch.float64
CUTS = {
    2: [(0, 3), (3, 7)],
    3: [(0, 1), (1, 5), (5, 7)],
    4: [(0, 2), (2, 4), (4, 6), (6, 7)],
}


def parts(value: Tensor, dim: int, cuts: list[tuple[int, int]]) -> list[Tensor]:
    return [value.narrow(dim, a, b - a).clone() for a, b in cuts]


@pytest.mark.parametrize("padding_idx", [None, 0, 4])
@pytest.mark.parametrize("count", [2, 3])
def test_embeddings_of_parts_of_the_words_add_up(
    count: int, padding_idx: int | None
) -> None:
    cuts = CUTS[count]
    torch.manual_seed(0)
    ids = torch.randint(0, 7, (5, 6))
    weight = torch.randn(7, 3, dtype=DOUBLE, requires_grad=True)
    whole = F.embedding(ids, weight, padding_idx)
    factor = torch.randn_like(whole)
    (whole * factor).sum().backward()
    assert weight.grad is not None
    total = torch.zeros_like(whole)
    for part, cut, expected in zip(
        parts(weight.detach(), 0, cuts), cuts, parts(weight.grad, 0, cuts), strict=True
    ):
        part.requires_grad_()
        addend = tiles.embedding(ids, part, cut, num_words=7, padding_idx=padding_idx)
        (addend * factor).sum().backward()
        assert torch.allclose(part.grad, expected, rtol=0, atol=1e-14)
        total += addend.detach()
    assert torch.equal(total, whole)


@pytest.mark.parametrize("wrong", [-1, 7, 9])
def test_words_and_classes_that_are_none_are_no_zeros(wrong: int) -> None:
    ids, weight, cuts = torch.tensor([3, wrong]), torch.randn(7, 3), CUTS[3]
    fails = 0
    for part, cut in zip(parts(weight, 0, cuts), cuts, strict=True):
        try:
            tiles.embedding(ids, part, cut, num_words=7)
        except IndexError:
            fails += 1
    assert fails == 1

    def work(grid: Grid) -> None:
        part, cut = parts(torch.zeros(2, 7), 1, cuts)[grid.tile], cuts[grid.tile]
        tiles.parallel_cross_entropy(grid, part, ids, words=cut, num_words=7)

    with pytest.raises(RuntimeError, match="out of bounds"):
        on_tiles(3, work)


LOSSES: list[dict[str, Any]] = [
    {"label_smoothing": e, "reduction": r, "ignore_index": i}
    for e, r, i in itertools.product((0.0, 0.3), ("mean", "sum", "none"), (-100, 2))
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_cross_entropy_of_parts_of_the_classes(count: int, weighted: bool) -> None:
    cuts = CUTS[count]
    torch.manual_seed(count)
    target = torch.randint(0, 7, (5, 4))
    left_out = torch.zeros_like(target, dtype=torch.bool)
    left_out[0, 1] = left_out[3, 0] = True
    logits = 30 * torch.randn(5, 7, 4, dtype=DOUBLE)
    weight = torch.rand(7, dtype=DOUBLE) if weighted else None

    def classes(options: dict[str, Any]) -> Tensor:
        return target.masked_fill(left_out, options["ignore_index"])

    def work(grid: Grid) -> list[tuple[Tensor, Tensor]]:
        cut = cuts[grid.tile]
        pairs = []
        for options in LOSSES:
            part = parts(logits, 1, cuts)[grid.tile].requires_grad_()
            loss = tiles.parallel_cross_entropy(
                grid, part, classes(options), weight, words=cut, num_words=7, **options
            )
            factor = torch.arange(1.0, loss.numel() + 1, dtype=DOUBLE)
            # each tile has an addend of the gradient of a loss that all of them have
            share = (grid.tile + 1) / sum(range(1, count + 1))
            (loss.flatten() * factor).sum().mul(share).backward()
            assert part.grad is not None
            pairs.append((loss.detach(), part.grad))
        return pairs

    results = on_tiles(count, work)
    for place, options in enumerate(LOSSES):
        whole = logits.clone().requires_grad_()
        loss = F.cross_entropy(whole, classes(options), weight, **options)
        factor = torch.arange(1.0, loss.numel() + 1, dtype=DOUBLE)
        (loss.flatten() * factor).sum().backward()
        losses = [result[place][0] for result in results]
        assert all(torch.equal(other, losses[0]) for other in losses)
        assert torch.allclose(losses[0], loss, rtol=1e-13, atol=1e-12), options
        gradient = torch.cat([result[place][1] for result in results], 1)
        assert torch.allclose(gradient, whole.grad, rtol=0, atol=1e-12), options


def test_a_tile_without_finite_logits_and_half_precision() -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf, 1.0, 2.0]], dtype=torch.bfloat16)
    target = torch.tensor([3])

    def work(grid: Grid) -> tuple[float, Tensor]:
        cut = [(0, 2), (2, 4)][grid.tile]
        part = logits[:, slice(*cut)].clone().requires_grad_()
        loss = tiles.parallel_cross_entropy(grid, part, target, words=cut, num_words=4)
        (loss / 2).backward()
        return float(loss.detach()), part.grad

    whole = logits.clone().requires_grad_()
    loss = F.cross_entropy(whole, target)
    loss.backward()
    pairs = on_tiles(2, work)
    assert [number for number, _ in pairs] == [float(loss.detach())] * 2
    assert torch.allclose(torch.cat([g for _, g in pairs], 1), whole.grad, atol=1e-2)


def test_the_loss_keeps_the_logits_and_a_number_a_token() -> None:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    logits = torch.randn(6, 10, requires_grad=True)
    target = torch.randint(0, 20, (6,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tiles.parallel_cross_entropy(
            ShapeGrid(0, 2), logits, target, words=(0, 10), num_words=20
        )
    assert sorted(kept.values()) == [6, 6, 60]  # the target is there anyway


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {
        "attn_mask": torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) > 0.3
    },
    "bias": {"attn_mask": torch.arange(30, dtype=DOUBLE).view(5, 6).sin()},
    "scale": {"scale": 0.7},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("drawn_alike", [True, False])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_of_some_heads_has_the_mask_of_all(
    kind: str, drawn_alike: bool
) -> None:
    torch.manual_seed(1)
    groups = 2 if kind == "grouped" else 1
    query = torch.randn(2, 6, 5, 4, dtype=DOUBLE, requires_grad=True)
    key = torch.randn(2, 6 // groups, 6, 4, dtype=DOUBLE, requires_grad=True)
    value = torch.randn(2, 6 // groups, 6, 3, dtype=DOUBLE, requires_grad=True)
    options = {"dropout_p": 0.4, **MASKS[kind]}
    if kind == "bool":
        options["attn_mask"][2] = False  # a query without a key

    def run(function: Any, *given: Tensor, **more: Any) -> tuple[Tensor, ...]:
        leaves = [t.detach().clone().requires_grad_() for t in given]
        torch.manual_seed(2)
        if drawn_alike:
            with same_draws():
                result = function(*leaves, **options, **more)
        else:
            result = function(*leaves, **options, **more)
        result.sin().sum().backward()
        return result.detach(), *(leaf.grad for leaf in leaves)

    expected = run(F.scaled_dot_product_attention, query, key, value)
    whole = everything((2, 6, 5, 6))
    for first, last in ((0, 2), (2, 6)):
        heads = slice(first // groups, last // groups)
        box = (whole[0], (first, last), *whole[2:])
        given = query[:, first:last], key[:, heads], value[:, heads]
        actual = run(
            tiles.scaled_dot_product_attention, *given, shape=(2, 6, 5, 6), box=box
        )
        for have, want in zip(actual, expected, strict=True):
            part = want[:, first:last] if len(want[0]) == 6 else want[:, heads]
            assert torch.allclose(have, part, rtol=0, atol=1e-13)


class Halves(nn.Module):
    """Of 15 features one rank has 8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 15), nn.Linear(15, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        return self.down(y) * y.mean(-1, keepdim=True)


def test_uneven_parts_weigh_in_a_mean_what_they_have() -> None:
    given: dict[str, Any] = {"ranks": 2, "shards": (2,), "micro_batches": 1}
    model, x = Halves(), torch.randn(4, 6)
    program = compile(model, (x,), loss=lambda y: y.square().mean(), **given)
    assert program.plan.unchecked == ""  # one step was compared with the model
    texts = program.rank_modules()
    for rank, number in enumerate((8, 7)):
        assert f"y.mean(-1, keepdim=True) * {number / 15}" in texts[f"rank{rank}.py"]


class Generated(nn.Module):
    """A layer whose weights are made of five numbers, of which a rank has 3 or 2."""

    def __init__(self) -> None:
        super().__init__()
        self.seed, self.make = nn.Parameter(torch.randn(5)), nn.Linear(5, 72)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.make(self.seed * 2)
        return F.linear(x, weights[:64].view(8, 8), weights[64:])


def test_a_function_of_weights_has_the_sizes_of_the_rank_s_own_part() -> None:
    given: dict[str, Any] = {"ranks": 2, "shards": (2,), "micro_batches": 1}
    loss: Any = lambda y: y.square().mean()  # noqa: E731
    program = compile(Generated(), (torch.randn(4, 8),), loss=loss, **given)
    assert program.plan.unchecked == ""  # one step was compared with the model
    parts = [tile.program.parts for tile in program.compilation.tiles]
    assert [of_rank["seed"].local_shape for of_rank in parts] == [(3,), (2,)]


class Chooses(nn.Module):
    """Four heads, each of which is cut off from the others, and its words are not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.heads = nn.Linear(8, 64), nn.Linear(64, 20)

    def forward(self, x: Tensor) -> Tensor:
        words = self.heads(torch.relu(self.up(x))).unflatten(-1, (4, 5))
        return words + words.cumsum(-1)


def test_samples_of_a_cross_entropy_that_are_cut_are_gathered() -> None:
    def loss(y: Tensor) -> Tensor:
        return F.cross_entropy(y.transpose(1, 2), y.argmax(-1))

    given: dict[str, Any] = {"ranks": 2, "shards": (2,), "micro_batches": 1}
    program = compile(Chooses(), (torch.randn(4, 8),), loss=loss, **given)
    assert program.plan.unchecked == ""
    text = program.rank_modules()["rank0.py"]
    assert "gather 2 shards" in text
    assert "= F.cross_entropy(" in text


class Between(nn.Module):
    """What stands between two linear layers, of which shards cut the features."""

    def __init__(self, between: Any, wide: int, narrow: int, layer: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, wide), nn.Linear(narrow, 8)
        self.between, self.layer = between, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self, self.a(x)))


def heads(h: Tensor, size: int) -> Tensor:
    return h.unflatten(-1, (4, size))


def gated(one: Tensor, two: Tensor) -> Tensor:
    return one.sigmoid() * two


LAYERS = {
    "group": nn.GroupNorm(4, 16, affine=False),
    "instance": nn.InstanceNorm1d(4),
    "addmm": nn.Linear(8, 16, bias=False),
}
# what stands between, features before and after, and what a rank's file says
BETWEEN: dict[str, tuple[Any, int, int, str]] = {
    "glu": (lambda m, h: F.glu(h, -1), 32, 16, "F.glu(a)"),
    "chunk": (lambda m, h: gated(*h.chunk(2, -1)), 32, 16, "a.chunk(2, -1)"),
    "split": (
        lambda m, h: gated(*heads(h, 4).split(2, -1)).flatten(1),
        *(16, 8, "unflatten.split(2, dim=-1)"),
    ),
    "repeat_interleave": (
        lambda m, h: heads(h, 2).repeat_interleave(2, 1).flatten(1),
        *(8, 16, "unflatten.repeat_interleave(2, 1)"),
    ),
    "repeat": (
        lambda m, h: heads(h, 2).repeat(1, 1, 2).flatten(1),
        *(8, 16, "unflatten.repeat(1, 1, 2)"),
    ),
    "full": (
        lambda m, h: h + torch.full(h.shape, 0.5),
        *(16, 16, "torch.full((4, 8), fill_value=0.5)"),
    ),
    "group_norm": (lambda m, h: F.group_norm(h, 4), 16, 16, "F.group_norm(a, 2)"),
    "group": (lambda m, h: m.layer(h), 16, 16, "F.group_norm(a, 2, None, None, 1e-05)"),
    "instance": (
        lambda m, h: m.layer(heads(h, 4)).flatten(1),
        *(16, 16, "F.instance_norm(unflatten, eps=1e-05)"),
    ),
    "addmm": (
        lambda m, h: torch.addmm(m.b.bias, h.relu(), m.layer.weight),
        *(16, 8, "torch.matmul(a.relu(), self.layer.weight)"),
    ),
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_has_a_part_of_the_features(name: str) -> None:
    between, wide, narrow, said = BETWEEN[name]
    model = Between(between, wide, narrow, LAYERS.get(name))
    loss = {"loss": lambda y: y.square().mean(), "micro_batches": 2}
    program = compile(model, (torch.randn(4, 8),), ranks=2, shards=2, **loss)
    assert program.plan.unchecked == ""  # compared with the model
    assert said in program.rank_modules()["rank0.py"]


class Policy(nn.Module):
    """An actor and its critic: stages without two layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).relu()
        return self.b(h).softmax(-1), self.c(h)


def test_advice_counts_all_stages_that_have_nothing_to_cut() -> None:
    options = {"loss": lambda y: y[0][:, 0].mean() + y[1].square().mean()}
    given = Policy(), (torch.randn(4, 8),)
    with pytest.raises(GemscError, match="nothing in stage 0 can be cut") as caught:
        compile(*given, ranks=4, shards=2, **options)
    advice = "give this stage and stage 1 one rank each: --ranks 2 without --shards"
    assert advice in str(caught.value)
    compile(*given, ranks=2, **options)
    with pytest.raises(GemscError, match="stage 0 has no branches") as caught:
        compile(*given, ranks=4, branches=2, **options)
    assert caught.value.help == advice.replace("--shards", "--branches")


def test_advice_splits_the_layers_of_all_stages_without_branches() -> None:
    model = nn.Sequential(
        *(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)),
        *(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)),
    )
    given = {"loss": torch.mean, "ranks": 4, "cuts": "3"}
    with pytest.raises(GemscError, match="stage 0 has no branches") as caught:
        compile(model, (torch.randn(4, 8),), branches=2, **given)
    assert "split their layers: --shards 2,2 --ranks 4" in str(caught.value)
    compile(model, (torch.randn(4, 8),), shards="2,2", branches="off", **given)
