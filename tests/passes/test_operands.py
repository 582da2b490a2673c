"""Whichever operand is cut, whole or a parameter: what one process gives."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shard_support import on_shards
from tile_support import assert_same, eager, on_tiles, uneven_loss
from torch import Tensor, nn

pytestmark = [
    pytest.mark.usefixtures("in_double"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
]

Shape = tuple[int, ...]
FORMS = ("cut", "whole", "parameter")


class Operands(nn.Module):
    """A function of operands: parts of images, values gathered, or parameters."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        shapes: tuple[Shape, ...],
        forms: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.function, self.shapes, self.forms = function, shapes, forms
        self.parameters_of = nn.ParameterList(torch.rand(shape) for shape in shapes)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, *images: Tensor) -> Tensor:
        operands = map(self.operand, range(len(images)), images)
        used = sum(image.square().mean() for image in images)
        return self.function(*operands).sin() + used

    def operand(self, index: int, image: Tensor) -> Tensor:
        """Return an operand: of fewer dimensions than an image, its last ones."""
        form, shape = self.forms[index], self.shapes[index]
        if form == "parameter":
            return self.parameters_of[index]
        x = image * self.scale
        x = x.sum(2, keepdim=True) if len(shape) == 1 else x
        for _ in range(4 - len(shape)):
            x = x[0]
        return x.cumsum(-1).flip(-1).cumsum(-1) if form == "whole" else x


def image_of(shape: Shape) -> Tensor:
    """Return an image whose last dimensions are an operand."""
    if len(shape) == 1:
        return torch.rand(1, 1, 4, *shape)
    return torch.rand((1,) * (4 - len(shape)) + shape)


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]


MAP = (2, 4, 8, 6)
ROW = (1, 4, 1, 6)


def written(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    x[..., 1:4] = y[..., 1:4]
    return x


def added_in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    x[:, 1:3] += y[:, 1:3]
    return x.add_(y)


def through_a_view(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    rows = x.flatten(2)
    rows += y.flatten(2)
    return x.mul_(y)


CASES: dict[str, Case] = {
    "conv": Case(
        lambda x, w, b: F.conv2d(x, w, b, padding=1), (MAP, (4, 4, 3, 3), (4,))
    ),
    "conv_transpose": Case(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (MAP, (4, 2, 2, 2), (2,))
    ),
    "batch_norm": Case(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (MAP, (4,), (4,)),
    ),
    "batch_norm in evaluation": Case(
        lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()), (MAP, (4,), (4,))
    ),
    "group_norm": Case(lambda x, w, b: F.group_norm(x, 2, w, b), (MAP, (4,), (4,))),
    "instance_norm": Case(lambda x, w: F.instance_norm(x, weight=w), (MAP, (4,))),
    "layer_norm": Case(
        lambda x, w, b: F.layer_norm(x, (4, 8, 6), w, b), (MAP, (4, 8, 6), (4, 8, 6))
    ),
    "layer_norm of columns": Case(lambda x, w: F.layer_norm(x, (6,), w), (MAP, (6,))),
    "rms_norm": Case(lambda x, w: F.rms_norm(x, (6,), w), (MAP, (6,))),
    "prelu": Case(F.prelu, (MAP, (4,))),
    "linear": Case(F.linear, ((2, 4, 8, 6), (8, 6), (8,))),
    "matmul": Case(torch.matmul, (MAP, (2, 4, 6, 8))),
    "matmul of matrices": Case(operator.matmul, ((8, 6), (6, 8))),
    "matmul by a vector": Case(torch.matmul, (MAP, (6,))),
    "bmm": Case(torch.bmm, ((4, 8, 6), (4, 6, 8))),
    "mm": Case(lambda a, b: torch.mm(a, mat2=b), ((8, 6), (6, 8))),
    "addmm": Case(torch.addmm, ((8,), (8, 6), (6, 8))),
    "baddbmm": Case(torch.baddbmm, ((4, 8, 8), (4, 8, 6), (4, 6, 8))),
    "cat": Case(lambda a, b: torch.cat((a, b), 1), (MAP, (2, 3, 8, 6))),
    "cat of rows": Case(lambda a, b: torch.cat((a, b), 2), (MAP, MAP)),
    "stack": Case(lambda a, b: torch.stack((a, b), 1), (MAP, MAP)),
    "index_select": Case(lambda x, i: x.index_select(1, i.argsort()), (MAP, (4,))),
    "index_select of rows": Case(
        lambda x, i: x.index_select(2, i.argsort()), (MAP, (6,))
    ),
    "index": Case(lambda x, i: x[:, i.argsort()], (MAP, (4,))),
    "embedding": Case(lambda i, w: F.embedding(i.long() % 6, w), (MAP, (6, 8))),
    "gather": Case(lambda x, i: x.gather(3, (i.long().abs() % 6)), (MAP, MAP)),
    "maximum": Case(torch.maximum, (MAP, ROW)),
    "max of two": Case(torch.max, (MAP, MAP)),
    "max by name": Case(lambda x, y: torch.max(x, other=y), (MAP, MAP)),
    "min by name": Case(lambda x, y: torch.min(input=x, other=y), (MAP, MAP)),
    "where": Case(lambda c, x, y: torch.where(c > 1, x, y), (MAP, ROW, MAP)),
    "addcmul": Case(torch.addcmul, (ROW, MAP, MAP)),
    "lerp": Case(torch.lerp, (MAP, MAP, ROW)),
    "clamp": Case(lambda x, a, b: torch.clamp(x, a, b + 2), (MAP, ROW, ROW)),
    "masked_fill": Case(lambda x, m: x.masked_fill(m > 1, 0.5), (MAP, (1, 1, 8, 6))),
    "mse_loss": Case(F.mse_loss, (MAP, MAP)),
    "l1_loss of each": Case(lambda x, y: F.l1_loss(x, y, reduction="none"), (MAP, MAP)),
    "smooth_l1_loss broadcast": Case(
        lambda x, y: F.smooth_l1_loss(x, y.expand(2, 4, 8, 6)), (MAP, ROW)
    ),
    "mse_loss with weights": Case(
        lambda x, y, w: F.mse_loss(x, y, weight=w), (MAP, MAP, MAP)
    ),
    "bce with logits": Case(
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, w.detach()),
        (MAP, MAP, MAP),
    ),
    "bce with pos_weight": Case(
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w.detach()),
        (MAP, MAP, (6,)),
    ),
    "cross_entropy": Case(
        lambda x, t, w: F.cross_entropy(x, t.long() % 4, w.detach()),
        (MAP, (2, 8, 6), (4,)),
    ),
    "cross_entropy of probabilities": Case(
        lambda x, t: F.cross_entropy(x, t.softmax(1)), (MAP, MAP)
    ),
    "attention": Case(F.scaled_dot_product_attention, (MAP, MAP, MAP)),
    "attention with a mask": Case(
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), (MAP, MAP, (8, 8))
    ),
    "einsum": Case(lambda x, y: torch.einsum("nchw,ncw->nchw", x, y), (MAP, (2, 4, 6))),
    "einsum that sums": Case(
        lambda x, y: torch.einsum("nchw,cw->nch", x, y), (MAP, (4, 6))
    ),
    "expand_as": Case(lambda x, y: x.expand_as(y) * y.cos(), (ROW, MAP)),
    "expand_as of a map": Case(lambda x, y: x.expand_as(y) * y.cos(), (MAP, MAP)),
    "expand_as of fewer": Case(lambda x, y: x.expand_as(y) + y, ((8, 6), MAP)),
    "view_as": Case(lambda x, y: x.view_as(y) + y, (MAP, MAP)),
    "view_as of rows": Case(
        lambda x, y: x.reshape(2, 4, 48).view_as(y) + y, (MAP, MAP)
    ),
    "view_as of another": Case(
        lambda x, y: x.contiguous().view_as(y) * y, ((2, 4, 6, 8), MAP)
    ),
    "reshape_as": Case(lambda x, y: x.reshape_as(y) * y, ((4, 48, 2), MAP)),
    "expand_as and view_as": Case(
        lambda x, y: x.sum((2, 3), keepdim=True).expand_as(y).flatten(2).view_as(y) + y,
        (MAP, MAP),
    ),
    "type_as": Case(lambda x, y: x.type_as(y) * y, (ROW, MAP)),
    "type_as of another type": Case(lambda x, y: (x > 1).type_as(y) * y, (ROW, MAP)),
    "type_as of another shape": Case(
        lambda x, y: (x > 1).type_as(y[0, 0]) + y.sum(), (MAP, ROW)
    ),
    "to": Case(lambda x, y: x.to(y) + y, (ROW, MAP)),
    "to another type": Case(lambda x, y: (x > 1).to(y) + y, (MAP, ROW)),
    "zeros_like": Case(lambda x, y: torch.zeros_like(x) + x * y, (MAP, MAP)),
    "full_like": Case(lambda x, y: torch.full_like(x, 2.0) * y, (MAP, ROW)),
    "new_zeros": Case(lambda x, y: x.new_zeros(2, 4, 8, 6) + y, (MAP, MAP)),
    "new_full": Case(lambda x, y: x.new_full((1, 4, 1, 6), 3.0) * y, (ROW, MAP)),
    "new_ones": Case(lambda x, y: x.new_ones(y.shape) * y + x, (ROW, MAP)),
    "broadcast_tensors": Case(
        lambda x, y: operator.mul(*torch.broadcast_tensors(x, y)), (ROW, MAP)
    ),
    "assignment": Case(written, (MAP, MAP)),
    "assignment of a row": Case(written, (MAP, ROW)),
    "in place": Case(added_in_place, (MAP, MAP)),
    "in place through a view": Case(through_a_view, (MAP, MAP)),
    "copy_": Case(lambda x, y: (x * 2).copy_(y) + x, (MAP, ROW)),
    "squeeze": Case(
        lambda x, y: x.squeeze() + y.squeeze(2).squeeze(-1),
        ((1, 4, 2, 2), (2, 1, 2, 2)),
    ),
    "addmm by name": Case(
        lambda b, x, y: torch.addmm(b, mat1=x, mat2=y, beta=0.5),
        ((8, 8), (8, 6), (6, 8)),
    ),
    "grid_sample": Case(
        lambda x, y: F.grid_sample(x, y - 0.5, align_corners=False),
        (MAP, (2, 5, 4, 2)),
    ),
    "cosine_similarity": Case(lambda x, y: F.cosine_similarity(x, y, 1), (MAP, MAP)),
    "outer": Case(torch.outer, ((6,), (8,))),
    "bilinear": Case(F.bilinear, ((8, 6), (8, 4), (2, 6, 4))),
    "torch.batch_norm": Case(
        lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
        (MAP, (4,), (4,)),
    ),
    "torch.instance_norm": Case(
        lambda x, w, b: torch.instance_norm(
            x, w, b, None, None, True, 0.1, 1e-5, False
        ),
        (MAP, (4,), (4,)),
    ),
    "torch.embedding": Case(
        lambda w, i: torch.embedding(w, i.long() % 6), ((6, 8), MAP)
    ),
    "mean by NumPy's names": Case(
        lambda x, y: x.mean(axis=(2, 3), keepdims=True) + torch.add(x, y), (MAP, ROW)
    ),
    "sum by NumPy's names": Case(
        lambda x, y: torch.sum(x * y, axis=2, keepdims=True) + x, (MAP, ROW)
    ),
    "amax by NumPy's names": Case(
        lambda x, y: (x * y).amax(axis=3, keepdims=True) + x, (MAP, ROW)
    ),
    "softmax by NumPy's names": Case(
        lambda x, y: torch.softmax(x * y, axis=2) + x, (MAP, ROW)
    ),
    "cat by NumPy's names": Case(lambda a, b: torch.cat((a, b), axis=2), (MAP, MAP)),
    "softmax in another type": Case(
        lambda x, y: (x * y > 1).float().softmax(2, torch.float64) + x, (MAP, ROW)
    ),
    "kl_div": Case(lambda x, y: F.kl_div(x, y, reduction="batchmean"), (MAP, MAP)),
}


def cases() -> list[Any]:
    """Return (operator, forms), for all ways in which its operands can be there."""
    ways = []
    for name, case in CASES.items():
        for forms in itertools.product(FORMS, repeat=len(case.shapes)):
            if "cut" in forms:
                ways.append(pytest.param(name, forms, id=f"{name} {' '.join(forms)}"))
    return ways


def check_on_tiles(name: str, forms: tuple[str, ...]) -> None:
    case = CASES[name]
    model = Operands(case.function, case.shapes, forms)
    images = tuple(map(image_of, case.shapes))
    expected = eager(model, images, uneven_loss, None)
    for grid in ((2, 1), (1, 2)):
        assert_same(on_tiles(model, images, uneven_loss, None, grid), expected)


@pytest.mark.slow(3)
@pytest.mark.by_day(12)
@pytest.mark.parametrize(("name", "forms"), cases())
def test_any_operand_may_be_the_one_that_is_cut(
    name: str, forms: tuple[str, ...]
) -> None:
    check_on_tiles(name, forms)


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("expand_as", ("parameter", "cut")),
        ("view_as of rows", ("whole", "cut")),
        ("reshape_as", ("parameter", "cut")),
        ("to", ("parameter", "cut")),
        ("type_as", ("whole", "cut")),
        ("linear", ("parameter", "cut", "parameter")),
        ("batch_norm", ("parameter", "cut", "whole")),
        ("bce with logits", ("whole", "parameter", "cut")),
        ("broadcast_tensors", ("parameter", "cut")),
        ("squeeze", ("cut", "cut")),
        ("max by name", ("cut", "parameter")),
        ("mean by NumPy's names", ("cut", "cut")),
        ("cat by NumPy's names", ("parameter", "cut")),
        ("torch.batch_norm", ("cut", "parameter", "parameter")),
        ("softmax in another type", ("cut", "cut")),
    ],
)
def test_operands_and_names_that_went_wrong_once(
    name: str, forms: tuple[str, ...]
) -> None:
    check_on_tiles(name, forms)


# ---------------------------------------------------------------------- shards

TOKENS = (4, 5, 6)
FEATURES = (1, 1, 6)


class OnShards(nn.Module):
    """A function of values of the trunk, of features that are cut, of parameters."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        shapes: tuple[Shape, ...],
        forms: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.function, self.shapes, self.forms = function, shapes, forms
        self.up = nn.ModuleList(nn.Linear(6, 6) for _ in (*shapes, 1))
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in (*shapes, 1))
        self.parameters_of = nn.ParameterList(torch.rand(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down[-1](self.up[-1](x).sin())
        y = self.function(*(self.operand(x, i) for i in range(len(self.shapes))))
        return y.sin() + x.square().mean()

    def operand(self, x: Tensor, index: int) -> Tensor:
        form, shape = self.forms[index], self.shapes[index]
        if form == "parameter":
            return self.parameters_of[index]
        x = self.up[index](x).sin()
        if form != "feature":
            x = self.down[index](x)
        if form == "whole":
            x = x.cumsum(0).cumsum(1)
        dims = tuple(dim for dim in (0, 1) if shape[dim - 3 :][:1] == (1,))
        x = x.sum(dims, keepdim=True) if dims else x
        return x.flatten(0, 1)[: shape[0]] if len(shape) == 2 else x


SHARD_CASES: dict[str, Case] = {
    "linear": Case(F.linear, (TOKENS, (6, 6))),
    "matmul": Case(torch.matmul, (TOKENS, (6, 6))),
    "mm": Case(lambda a, b: torch.mm(a, mat2=b), ((6, 6), (6, 6))),
    "addmm": Case(torch.addmm, ((6, 6), (6, 6), (6, 6))),
    "layer_norm": Case(lambda x, w: F.layer_norm(x, (6,), w[0, 0]), (TOKENS, FEATURES)),
    "cat": Case(lambda a, b: torch.cat((a, b), -1), (TOKENS, TOKENS)),
    "cat of tokens": Case(lambda a, b: torch.cat((a, b), 1), (TOKENS, TOKENS)),
    "stack": Case(lambda a, b: torch.stack((a, b), 1), (TOKENS, TOKENS)),
    "max by name": Case(lambda x, y: torch.max(x, other=y), (TOKENS, FEATURES)),
    "where": Case(lambda c, x, y: torch.where(c > 0, x, y), (TOKENS, FEATURES, TOKENS)),
    "mse_loss": Case(F.mse_loss, (TOKENS, TOKENS)),
    "smooth_l1_loss broadcast": Case(F.smooth_l1_loss, (FEATURES, TOKENS)),
    "mse_loss of a part": Case(
        lambda x, y: F.mse_loss(x.mean(-1), y.mean(-1)), (TOKENS, TOKENS)
    ),
    "attention": Case(F.scaled_dot_product_attention, (TOKENS, TOKENS, TOKENS)),
    "einsum": Case(lambda x, y: torch.einsum("blh,blh->bl", x, y), (TOKENS, TOKENS)),
    "gather": Case(
        lambda x, i: x.gather(2, (i * 9).long().abs() % 6), (TOKENS, TOKENS)
    ),
    "expand_as": Case(lambda x, y: x.expand_as(y) * y.cos(), (FEATURES, TOKENS)),
    "view_as": Case(lambda x, y: x.reshape(20, 6).view_as(y) + y, (TOKENS, TOKENS)),
    "reshape_as": Case(lambda x, y: x.sin().reshape_as(y) * y, (TOKENS, TOKENS)),
    "type_as": Case(lambda x, y: x.type_as(y) * y, (FEATURES, TOKENS)),
    "type_as of another type": Case(
        lambda x, y: (x > 0).type_as(y[0, 0]) * y, (FEATURES, TOKENS)
    ),
    "to": Case(lambda x, y: x.to(y) + y, (FEATURES, TOKENS)),
    "new_zeros": Case(lambda x, y: x.new_zeros(4, 5, 6) + y, (TOKENS, TOKENS)),
    "zeros_like": Case(lambda x, y: torch.ones_like(x) * y, (TOKENS, FEATURES)),
    "broadcast_tensors": Case(
        lambda x, y: operator.mul(*torch.broadcast_tensors(x, y)), (FEATURES, TOKENS)
    ),
    "mean by NumPy's names": Case(
        lambda x, y: (x * y).mean(axis=(0, 2), keepdims=True) + y, (TOKENS, TOKENS)
    ),
    "softmax by NumPy's names": Case(
        lambda x, y: torch.softmax(x * y, axis=1), (TOKENS, TOKENS)
    ),
    "assignment": Case(written, (TOKENS, TOKENS)),
    "in place": Case(added_in_place, (TOKENS, TOKENS)),
    "in place through a view": Case(
        lambda x, y: through_a_view(x[None], y[None])[0], (TOKENS, TOKENS)
    ),
    "reshape by name": Case(
        lambda x, y: torch.reshape(input=x, shape=(20, 6)) * y.reshape(20, 6),
        (TOKENS, TOKENS),
    ),
    "unflatten by name": Case(
        lambda x, y: torch.unflatten(input=x, dim=-1, sizes=(2, 3)).flatten(2) * y,
        (TOKENS, TOKENS),
    ),
}


def shard_cases() -> list[Any]:
    """Return (operator, forms), for all ways in which its operands can be there."""
    ways = []
    for name, case in SHARD_CASES.items():
        for forms in itertools.product((*FORMS, "feature"), repeat=len(case.shapes)):
            if {*forms} - {"parameter"}:
                ways.append(pytest.param(name, forms, id=f"{name} {' '.join(forms)}"))
    return ways


def check_on_shards(name: str, forms: tuple[str, ...], trunk: str) -> None:
    case = SHARD_CASES[name]
    model = OnShards(case.function, case.shapes, forms)
    inputs = (torch.rand(TOKENS),)
    expected = eager(model, inputs, uneven_loss, None)
    assert_same(on_shards(model, inputs, uneven_loss, None, 2, trunk), expected)


@pytest.mark.slow(1)
@pytest.mark.by_day(8)
@pytest.mark.parametrize("trunk", ["whole", "batch", "sequence"])
@pytest.mark.parametrize(("name", "forms"), shard_cases())
def test_any_operand_may_be_cut_among_shards(
    name: str, forms: tuple[str, ...], trunk: str
) -> None:
    check_on_shards(name, forms, trunk)


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("name", "forms", "trunk"),
    [
        ("in place through a view", ("cut", "cut"), "batch"),
        ("view_as", ("whole", "cut"), "sequence"),
        ("mm", ("cut", "feature"), "whole"),
        ("mean by NumPy's names", ("cut", "cut"), "batch"),
        ("reshape by name", ("cut", "cut"), "sequence"),  # by features
    ],
)
def test_operands_among_shards_that_went_wrong_once(
    name: str, forms: tuple[str, ...], trunk: str
) -> None:
    check_on_shards(name, forms, trunk)
