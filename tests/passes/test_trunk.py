"""Values cut by samples or tokens: what a stage computes between its regions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import tile_support
import torch
import torch.nn.functional as F
from random_networks import LOSSES, RandomNetwork
from shard_support import on_shards
from tile_support import assert_same, eager, on_tiles
from torch import Tensor, fx, nn

from gemsc.base.grid_shape import GridShape
from gemsc.base.rng import same_draws
from gemsc.compiler import compile
from gemsc.ir.flow import is_exchange
from gemsc.ir.interpret import run_nodes
from gemsc.passes.spatial.cuts import Axes, fits
from gemsc.passes.spatial.inputs import Placeholders
from gemsc.passes.spatial.values import whole_shape

pytestmark = pytest.mark.usefixtures("in_double")


@pytest.fixture
def cut_along(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what lets all inputs come in cut along a dimension."""

    def cut(dim: int) -> None:
        def axes(self: Placeholders, node: fx.Node, grid: GridShape) -> Axes | None:
            shape = whole_shape(node)
            along = tuple(0 if d == dim else None for d in range(len(shape)))
            return (
                along
                if grid and len(shape) > dim and fits(shape, along, grid.axes)
                else None
            )

        monkeypatch.setattr(Placeholders, "_image_axes", axes)

    return cut


def drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiles, which are threads, draw what the model alone draws."""

    def run(*args: Any) -> None:
        with same_draws():
            run_nodes(*args)

    monkeypatch.setattr(tile_support, "run_nodes", run)


IN_PLACE = "it shares memory that is changed in place"


@pytest.mark.slow(1)
@pytest.mark.by_day(6)
@pytest.mark.parametrize("seed", range(12))
def test_random_networks_on_samples(
    seed: int, cut_along: Callable[[int], None]
) -> None:
    cut_along(0)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank = rng.choice([1, 2, 2, 3])
    size = {1: range(5, 20), 2: range(5, 12), 3: range(4, 7)}[rank]
    shape = (rng.choice([3, 4, 5]), rng.choice([1, 2, 4]))
    shape += tuple(rng.choice(size) for _ in range(rank))
    model = RandomNetwork(rng, shape, rng.randint(2, 6))
    x, target = torch.randn(shape), torch.randn(model.out_shape)
    loss = LOSSES[rng.choice(list(LOSSES))]
    expected = eager(model, (x,), loss, target)
    if not expected.is_finite:
        pytest.skip("a variance of one element")
    step = on_tiles(model, (x,), loss, target, (rng.choice([2, 3]),))
    assert_same(step, expected)
    # what writes into views may need all of a value
    assert {b.reason for b in step.barriers} <= {IN_PLACE}


class Attention(nn.Module):
    """Attention written out, and by PyTorch, of words with positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(7, 12, padding_idx=2)
        self.positions = nn.Parameter(torch.randn(6, 12))
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.RMSNorm(12)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], 3, 4).transpose(1, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = F.dropout(self.words(words) + self.positions, 0.3)
        y = self.norm(x)
        q, k, v = (self.heads(f(y)) for f in (self.query, self.key, self.value))
        known = (words != 3)[:, None, None]
        if self.kind == "written":
            scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~known, -1e9)
            mixed = F.dropout(scores.softmax(-1), 0.2) @ v
        else:
            options: dict[str, Any] = {"attn_mask": known}
            if self.kind == "causal":
                options = {"is_causal": True}
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, **options)
        first, second = mixed.transpose(1, 2).flatten(2).chunk(2, -1)
        return x + torch.cat([second, first], -1) @ self.query.weight


@pytest.mark.slow(1)
@pytest.mark.by_day(6)
@pytest.mark.parametrize("kind", ["written", "masked", "causal"])
@pytest.mark.parametrize(("dim", "count"), [(0, 2), (0, 3), (1, 2), (1, 4)])
def test_attention_between_regions(
    kind: str,
    dim: int,
    count: int,
    cut_along: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_along(dim)
    drawn_alike(monkeypatch)
    torch.manual_seed(0)
    model, words = Attention(kind), torch.randint(7, (5, 6))
    target = torch.randn(5, 6, 12)
    with same_draws():
        expected = eager(model, (words,), F.smooth_l1_loss, target)
    step = on_tiles(model, (words,), F.smooth_l1_loss, target, (count,))
    assert_same(step, expected)
    gathered = [barrier.reason for barrier in step.barriers]
    if dim == 0:
        assert not gathered
        assert not any(map(is_exchange, step.programs[0].graph.nodes))
    else:  # keys and values travel, queries and weights do not
        assert not gathered


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_channels_are_dropped_as_in_one_process(
    rank: int, cut_along: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_along(0)
    drawn_alike(monkeypatch)
    layer = getattr(nn, f"Dropout{rank}d")(0.4)
    model = nn.Sequential(getattr(nn, f"Conv{rank}d")(2, 6, 1), layer)
    x = torch.randn(5, 2, *(3,) * rank)
    target = torch.randn(5, 6, *(3,) * rank)
    with same_draws():
        expected = eager(model, (x,), F.mse_loss, target)
    step = on_tiles(model, (x,), F.mse_loss, target, (2,))
    assert_same(step, expected)
    assert not step.barriers


@pytest.mark.slow
def test_a_single_sample_of_a_tile_has_the_gradient_of_all(
    cut_along: Callable[[int], None],
) -> None:
    """PyTorch's own instance norm has another one if that is in channels-last order."""
    cut_along(0)

    class Swapped(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    model = nn.Sequential(nn.InstanceNorm2d(4, affine=True), Swapped(4))
    x, target = torch.randn(3, 4, 5, 4), torch.randn(3, 4, 5, 4)
    expected = eager(model, (x,), F.mse_loss, target)
    step = on_tiles(model, (x,), F.mse_loss, target, (3,))
    assert_same(step, expected)
    assert not step.barriers


@pytest.mark.slow
def test_cross_entropy_counts_the_words_of_all_samples(
    cut_along: Callable[[int], None],
) -> None:
    """Not the mean of means: samples differ in how many words count."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5))
    words, target = torch.randint(9, (5, 6)), torch.randint(5, (5, 6))
    target[0] = -100
    weight = torch.rand(5)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        logits = output.transpose(1, 2)
        return F.cross_entropy(logits, target, weight, label_smoothing=0.2)

    expected = eager(model, (words,), loss, target)
    for dim, count in ((0, 2), (0, 3), (1, 4)):
        cut_along(dim)
        step = on_tiles(model, (words,), loss, target, (count,))
        assert_same(step, expected)
        assert not step.barriers


class Joined(nn.Module):
    """Samples and tokens as rows of one matrix, as in the GPT-2 of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(6, 9)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        weight = self.first.weight.t()
        rows = torch.addmm(self.first.bias, x.view(-1, 4), weight, alpha=2).relu()
        rows = torch.cat([torch.tensor([]), rows, -rows], -1)
        return self.second(rows.view(*words.shape, 6))


@pytest.mark.parametrize("samples", [4, 5])
def test_rows_of_samples_and_tokens(
    samples: int, cut_along: Callable[[int], None]
) -> None:
    cut_along(0)
    torch.manual_seed(0)
    model, words = Joined(), torch.randint(7, (samples, 3))
    target = torch.randint(9, (samples, 3))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.view(-1, 9), target.view(-1))

    expected = eager(model, (words,), loss, target)
    step = on_tiles(model, (words,), loss, target, (2,))
    assert_same(step, expected)
    if samples == 4:  # even: each tile has rows that lie together
        assert not step.barriers


class Patches(nn.Module):
    """A picture whose rows and columns are the tokens between two regions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.patches(image).flatten(2).transpose(1, 2))
        x = x + self.down(self.up(x).relu())
        picture = x.view(x.shape[0], 4, 6, 8)
        return (picture + picture.roll(-1, 1)).flatten(1, 2).sin() * x


@pytest.mark.slow(1)
@pytest.mark.parametrize("trunk", ["batch", "sequence"])
def test_tokens_of_pictures_on_shards(trunk: str) -> None:
    torch.manual_seed(0)
    model, image, target = Patches(), torch.randn(4, 3, 8, 12), torch.randn(4, 24, 8)
    expected = eager(model, (image,), F.mse_loss, target)
    assert_same(on_shards(model, (image,), F.mse_loss, target, 2, trunk), expected)


class LowRank(nn.Module):
    """A weight and two thin factors (LoRA), whose inner dimension alone can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.a, self.b = nn.Parameter(torch.randn(2, 16)), nn.Linear(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight + self.b.weight @ self.a)
        return F.linear(F.gelu(x), self.weight) + self.b.bias


@pytest.mark.parametrize("trunk", ["auto", "batch", "whole"])
def test_a_product_of_parameters_that_are_cut_is_a_sum(trunk: str) -> None:
    torch.manual_seed(0)
    model, x, target = LowRank(), torch.randn(6, 16), torch.randn(6, 16)
    expected = eager(model, (x,), F.mse_loss, target)
    assert_same(on_shards(model, (x,), F.mse_loss, target, 2, trunk), expected)


class Rotated(nn.Module):
    """Pairs of numbers turned as complex ones; as many samples as heads and pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).tanh())
        heads = self.query(x).view(2, 6, 2, 4).transpose(1, 2)
        pairs = torch.view_as_complex(heads.reshape(2, 2, 6, 2, 2))
        angles = torch.arange(12.0, dtype=x.dtype).view(6, 2)
        turned = torch.view_as_real(pairs * torch.polar(angles.cos(), angles))
        return self.out(turned.flatten(3).transpose(1, 2).reshape(2, 6, 8))


@pytest.mark.slow(1)
@pytest.mark.parametrize("trunk", ["batch", "sequence"])
def test_complex_numbers_keep_the_dimensions_of_pairs(trunk: str) -> None:
    x = torch.randn(2, 6, 8)
    options: dict[str, Any] = {"ranks": 2, "shards": "2", "trunk": trunk}
    compile(Rotated(), (x,), loss=F.mse_loss, example_target=x, **options)
