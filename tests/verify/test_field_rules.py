"""Operations over a finite field: what torch computes, where that is known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gemsc.verify.field.degree import Degrees
from gemsc.verify.field.mode import OverField
from gemsc.verify.field.numbers import PRIMES, Field, NotDecidedError, _fractions

FIELD = Field(PRIMES[0], 7)


@contextmanager
def over() -> Iterator[OverField]:
    with OverField(FIELD) as mode:
        yield mode


def counts(*shape: int, seed: int = 0) -> Tensor:
    """Return small integers, all positive, few of them equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 90, shape, generator=generator).double()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(FIELD.p, shape, generator=generator) - FIELD.half
    return values.double()


PICTURE, ROWS = counts(2, 4, 6, 5), counts(3, 4, seed=1)
KERNEL = counts(4, 2, 3, 2, seed=2)
INDEX = torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2]])

# what is exact, or a simple fraction, in floats: the field must have the same numbers
EXACT: dict[str, Callable[[], Tensor | tuple[Tensor, ...]]] = {
    "add with a factor": lambda: torch.add(ROWS, PICTURE[0, 0, :3, :4], alpha=0.5),
    "add of booleans": lambda: ROWS + (ROWS > 40),
    "add of integers": lambda: INDEX + 0.5,
    "rsub": lambda: torch.rsub(ROWS, 2, alpha=3),
    "in place on a view": lambda: (
        (x := ROWS.clone()),
        x[:, 1:3].mul_(3).sub_(x[:, :1]),
        x[0].fill_(0.25),
        x.t()[3].copy_(torch.arange(3)),
        x,
    ),
    "in place on a row": lambda: ROWS.clone().index_fill_(0, torch.tensor([1]), 0.5),
    "sum of negative dims": lambda: PICTURE.sum((-1, -3)),
    "sum, kept": lambda: PICTURE.sum((0, -2), keepdim=True),
    "sum of no dims": lambda: PICTURE.sum([]),
    "mean": lambda: PICTURE.mean((1, -1), keepdim=True),
    "mean of all": lambda: PICTURE.mean(),
    "mean of booleans": lambda: (PICTURE > 40).double().mean(-2),
    "cumsum": lambda: PICTURE.cumsum(-2),
    "variance": lambda: (ROWS.var(), PICTURE.var(-1), PICTURE.var((0, 2), False)),
    "variance, corrected": lambda: torch.var(ROWS, 1, correction=2, keepdim=True),
    "mean and variance": lambda: torch.var_mean(ROWS, -1, unbiased=False),
    "square": lambda: ROWS.square(),
    "reciprocal": lambda: ROWS.reciprocal(),
    "powers": lambda: (ROWS**2, ROWS**0, ROWS**-1, ROWS**3.0),
    "a power of a count": lambda: torch.pow(0.5, torch.arange(5.0)),
    "powers of counts": lambda: torch.pow(ROWS, torch.tensor([[0.0], [3.0], [2.0]])),
    "division": lambda: PICTURE / PICTURE[:, :1],
    "division, rounded": lambda: torch.div(PICTURE, 7, rounding_mode="floor"),
    "division toward 0": lambda: torch.div(-PICTURE, 7, rounding_mode="trunc"),
    "whole division": lambda: PICTURE // 7,
    "counts that become integers": lambda: (ROWS.long() % 3, ROWS.bool()),
    "counts that are put into integers": lambda: INDEX.clone().copy_(ROWS[:2]),
    "lerp": lambda: torch.lerp(ROWS, ROWS.flip(0), 0.75),
    "addcmul": lambda: torch.addcmul(ROWS, ROWS, ROWS.flip(1), value=0.5),
    "addcdiv": lambda: torch.addcdiv(ROWS, ROWS, ROWS.flip(1), value=2),
    "mm": lambda: ROWS @ ROWS.t(),
    "mv": lambda: ROWS @ ROWS[0],
    "dot": lambda: ROWS[1] @ ROWS[0],
    "bmm": lambda: PICTURE[0] @ PICTURE[1].transpose(1, 2),
    "addmm": lambda: torch.addmm(ROWS[:, :3], ROWS, ROWS.t(), beta=0.5, alpha=2),
    "baddbmm": lambda: torch.baddbmm(
        ROWS[:, :1, None].expand(3, 6, 6), PICTURE[0, :3], PICTURE[1, :3].mT, beta=2
    ),
    "linear": lambda: F.linear(PICTURE, counts(3, 5), counts(3)),
    "einsum": lambda: torch.einsum("bchw,bcw->hb", PICTURE, PICTURE[:, :, 1]),
    "convolution": lambda: F.conv2d(
        PICTURE, KERNEL, counts(4), (2, 1), (1, 0), (1, 2), groups=2
    ),
    "convolution of one picture": lambda: F.conv2d(PICTURE[0], KERNEL, groups=2),
    "transposed convolution": lambda: F.conv_transpose2d(
        PICTURE, KERNEL, counts(4), 2, 1, (1, 0), groups=2
    ),
    "largest": lambda: (PICTURE.amax((-1, 1), keepdim=True), PICTURE.max()),
    "largest of two": lambda: torch.maximum(PICTURE, PICTURE.flip(-1)),
    "largest, and where": lambda: tuple(ROWS.max(-1)),
    "smallest": lambda: (PICTURE.amin(-2), PICTURE.min(2, keepdim=True).values),
    "where the largest is": lambda: (ROWS.argmax(1), ROWS.argmin(0, keepdim=True)),
    "sort": lambda: tuple(ROWS.sort(-1, descending=True)),
    "topk": lambda: tuple(ROWS.topk(2, 0, largest=False)),
    "clamp": lambda: (ROWS.clamp(20, 60), ROWS.clamp(min=30), ROWS.clamp(max=0.5)),
    "clamp by tensors": lambda: ROWS.clamp(ROWS[:1], ROWS.flip(1)),
    "clamp in place": lambda: ROWS.clone().clamp_(max=30).clamp_min_(25),
    "comparison": lambda: (ROWS > 40, ROWS.flip(0) >= ROWS, ROWS / 8 > 5.5),
    "comparison with booleans": lambda: ROWS.clamp(max=1) > (INDEX[:1] > 0),
    "sameness": lambda: (ROWS.flip(0) == ROWS, ROWS != 40, (ROWS - ROWS[0]).any(1)),
    "where": lambda: torch.where(ROWS > 40, ROWS, 0.5),
    "masked": lambda: ROWS.masked_fill(ROWS > 40, 0.25).masked_select(ROWS > 10),
    "max pool": lambda: F.max_pool2d(PICTURE, 3, 2, 1, ceil_mode=True),
    "max pool, and where": lambda: F.max_pool2d(PICTURE, 2, return_indices=True),
    "adaptive max pool": lambda: F.adaptive_max_pool2d(PICTURE, (2, 3)),
    "average pool": lambda: F.avg_pool2d(PICTURE, 3, 2, 1, ceil_mode=True),
    "average pool without padding": lambda: F.avg_pool2d(
        PICTURE, 3, 2, 1, count_include_pad=False
    ),
    "average pool, divided": lambda: F.avg_pool2d(PICTURE, 2, divisor_override=3),
    "average pool of a row": lambda: F.avg_pool1d(PICTURE[0], 2),
    "adaptive average pool": lambda: F.adaptive_avg_pool2d(PICTURE, (4, 2)),
    "adaptive average pool of one": lambda: F.adaptive_avg_pool2d(PICTURE[0], 3),
    "adaptive average pool in 3d": lambda: F.adaptive_avg_pool3d(PICTURE[None], 3),
    "nearest": lambda: F.interpolate(PICTURE, (4, 7)),
    "bilinear": lambda: F.interpolate(PICTURE, (4, 8), mode="bilinear"),
    "bilinear, corners": lambda: F.interpolate(
        PICTURE, (11, 9), mode="bilinear", align_corners=True
    ),
    "linear in 1d": lambda: F.interpolate(PICTURE[0], 10, mode="linear"),
    "trilinear": lambda: F.interpolate(
        PICTURE[None], (2, 6, 9), mode="trilinear", align_corners=True
    ),
    "bicubic": lambda: F.interpolate(PICTURE, scale_factor=2, mode="bicubic"),
    "bicubic, of thirds": lambda: F.interpolate(PICTURE, (9, 7), mode="bicubic"),
    "padding": lambda: F.pad(PICTURE, (1, -1, 0, 2), value=0.5),
    "reflection": lambda: F.pad(PICTURE, (1, 2, 2, 0), mode="reflect"),
    "around": lambda: F.pad(PICTURE, (1, 2, 2, 0), mode="circular"),
    "fold": lambda: F.fold(F.unfold(PICTURE, 3, padding=1), (6, 5), 3, padding=1),
    "scatter": lambda: torch.scatter(ROWS, 0, INDEX, 0.5),
    "scatter and add": lambda: torch.scatter_add(ROWS, 0, INDEX, ROWS),
    "put": lambda: ROWS.index_put((INDEX[:, 0],), ROWS[:2], accumulate=True),
    "add by index": lambda: ROWS.index_add(0, INDEX[0], ROWS[[0, 1, 2, 0]]),
    "put infinities": lambda: ROWS.index_fill(0, INDEX[0], -math.inf).index_put(
        (INDEX[:, 0],), ROWS[:2]
    ),
    "embedding": lambda: F.embedding(INDEX, ROWS, padding_idx=1),
    "squared error": lambda: (
        F.mse_loss(ROWS, ROWS.flip(0)),
        F.mse_loss(ROWS, ROWS.flip(0), reduction="sum"),
        F.mse_loss(ROWS, ROWS.flip(0), reduction="none"),
    ),
    "one hot": lambda: F.one_hot(INDEX, 3) * ROWS[0, 0],
    "triangle": lambda: ROWS.tril(-1) + ROWS.triu(),
    "constants": lambda: torch.full((2,), 0.1, dtype=torch.float64) * 3,
    "infinities": lambda: ROWS + torch.tensor([0.0, -math.inf, 0.0, math.inf]),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_operations_are_those_of_torch(name: str) -> None:
    wanted = EXACT[name]()
    with over():
        result = EXACT[name]()
    if isinstance(wanted, Tensor):
        result, wanted = (result,), (wanted,)
    for mine, theirs in zip(result, wanted, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        assert torch.equal(FIELD.of(mine.clone()), _in_field(theirs))


def _in_field(t: Tensor) -> Tensor:
    """Return the numbers of the fractions that a tensor has, but for rounding."""
    if not t.is_floating_point():
        return FIELD.of(t)
    numbers = []
    for value in t.reshape(-1).tolist():
        if math.isfinite(value):
            fraction = Fraction(value).limit_denominator(10**6)
            inverse = pow(fraction.denominator, -1, FIELD.p)
            value = FIELD.number(fraction.numerator * inverse)
        numbers.append(value)
    return torch.tensor(numbers, dtype=torch.float64).reshape(t.shape)


# of these also the gradient is exact in floats
DIFFERENTIATED: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": lambda x: x.sum((-1, 1)) + x.mean((0, 2), keepdim=True).sum(),
    "cumsum": lambda x: x.cumsum(-2),
    "variance": lambda x: x.var((0, -1)),
    "division": lambda x: x / x[:, :1],
    "powers": lambda x: x**3 + x.square(),
    "reciprocal": lambda x: x**-1,
    "in place on a view": lambda x: (y := x * 2, y[:, 1:].mul_(3), y)[-1],
    "convolution": lambda x: F.conv2d(x, KERNEL * x[0, 0, 0, 0], None, 2, 1, groups=2),
    "transposed convolution": lambda x: F.conv_transpose2d(
        x, KERNEL * x[0, 0, 0, 0], x[0, 0, 0, :4], 2, 1, (1, 0), groups=2
    ),
    "matrix product": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("bchw,bcw->hb", x, x[:, :, 1]),
    "largest": lambda x: x.amax((-1, 1)) + x.max(1).values.sum() - x.min(),
    "sort": lambda x: x.sort(-1).values.cumsum(-1) + x.topk(2, 2).values.sum(),
    "clamp": lambda x: x.clamp(20, 60),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1) + F.adaptive_max_pool2d(x, 1),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive average pool": lambda x: F.adaptive_avg_pool2d(x, (4, 2)),
    "nearest": lambda x: F.interpolate(x, (4, 7)),
    "bilinear": lambda x: F.interpolate(x, (4, 8), mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(
        x, (11, 9), mode="bilinear", align_corners=True
    ),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "padding": lambda x: F.pad(F.pad(x, (1, -1, 0, 2)), (1, 2, 2, 0), mode="reflect"),
    "around": lambda x: F.pad(x, (1, 2, 2, 0), mode="circular"),
    "replication": lambda x: F.pad(x, (1, 2, 2, 0), mode="replicate"),
    "fold": lambda x: F.fold(F.unfold(x, 3), (6, 5), 3) * 2,
    "index": lambda x: x[:, [0, 0, 2]] * x.gather(1, INDEX[:, :3, None, None]),
    "embedding": lambda x: F.embedding(INDEX, x[0, 0], padding_idx=1),
    "where": lambda x: torch.where(x > 40, x * x, 0.5),
    "masked": lambda x: x.masked_fill(x > 40, 0.25).roll(1, -1).flip(0),
    "squared error": lambda x: F.mse_loss(x, x.flip(1).detach()),
    "largest of two": lambda x: torch.maximum(x, x.flip(-1) + 0.5),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_exact_gradients_are_those_of_torch(name: str) -> None:
    tensors = []
    for context in (nullcontext, over):
        x = PICTURE.clone().requires_grad_()
        with context():
            result = DIFFERENTIATED[name](x)
            result.backward(counts(*result.shape, seed=9))
        tensors += [result.detach(), x.grad]
    wanted, gradient, mine, of_mine = tensors
    assert torch.equal(mine, _in_field(wanted))
    assert torch.equal(of_mine, _in_field(gradient))


def composed_batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    variance, middle = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    normal = (x - middle) * torch.rsqrt(variance + 1e-5)
    return normal * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)


def composed_group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = x.unflatten(1, (2, -1))
    variance, middle = torch.var_mean(groups, (2, 3, 4), correction=0, keepdim=True)
    normal = ((groups - middle) * torch.rsqrt(variance + 1e-5)).flatten(1, 2)
    return normal * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)


def composed_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    middle = x.mean((-2, -1), keepdim=True)
    variance = (x - middle).square().mean((-2, -1), keepdim=True)
    return (x - middle) * torch.rsqrt(variance + 1e-5) * weight + bias


def composed_softmax(x: Tensor) -> Tensor:
    exps = (x - x.amax(1, keepdim=True)).exp()
    return exps / exps.sum(1, keepdim=True)


def composed_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    count = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(count, 1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    return torch.softmax(scores, -1) @ v


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


MAPS = (drawn(2, 4, 3, 2), drawn(4, seed=1), drawn(4, seed=2))
LAYER = (drawn(5, 3, 2), drawn(3, 2, seed=1), drawn(3, 2, seed=2))
HEADS = (drawn(2, 4, 5, 9), drawn(2, 2, 5, 9, seed=1), drawn(2, 2, 5, 9, seed=2))
LONGER = (drawn(2, 2, 5, 9), drawn(2, 2, 7, 9, seed=1), drawn(2, 2, 7, 9, seed=2))

# the same twice: an operation of torch, and what it is composed of
TWICE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Any]] = {
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        composed_batch_norm,
        MAPS,
    ),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), composed_group_norm, MAPS),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (3, 2), w, b),
        composed_layer_norm,
        LAYER,
    ),
    "RMS norm": (
        lambda x, w: F.rms_norm(x, (2,), w, 1e-5),
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w,
        (LAYER[0], drawn(2)),
    ),
    "softmax": (lambda x: x.softmax(1), composed_softmax, MAPS[:1]),
    "log softmax": (
        lambda x: x.log_softmax(1).exp(),
        composed_softmax,
        MAPS[:1],
    ),
    "log softmax that was moved": (
        lambda x: x.log_softmax(1).transpose(0, 1).contiguous().flip(0).exp(),
        lambda x: composed_softmax(x).transpose(0, 1).flip(0),
        MAPS[:1],
    ),
    "exp in place": (
        lambda x: (x * 1).sub_(x.logsumexp(1, keepdim=True)).exp_(),
        composed_softmax,
        MAPS[:1],
    ),
    "cross entropy": (
        lambda x: F.cross_entropy(x, torch.tensor([[[0, 1]] * 3, [[3, 2]] * 3])),
        lambda x: F.nll_loss(
            x - x.logsumexp(1, keepdim=True), torch.tensor([[[0, 1]] * 3, [[3, 2]] * 3])
        ),
        MAPS[:1],
    ),
    "attention": (
        partial(attention, causal=False),
        partial(composed_attention, causal=False),
        LONGER,
    ),
    "causal attention, heads that share keys": (
        partial(attention, causal=True),
        partial(composed_attention, causal=True),
        HEADS,
    ),
    "pool": (
        lambda x: F.avg_pool2d(x, 2, 1, 1),
        lambda x: F.conv2d(
            x, torch.eye(4)[:, :, None, None].expand(4, 4, 2, 2) / 4, padding=1
        ),
        MAPS[:1],
    ),
    "adaptive pool": (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: x.mean((2, 3), keepdim=True),
        MAPS[:1],
    ),
    "nearest": (
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3),
        MAPS[:1],
    ),
    "max pool": (
        lambda x: F.max_pool2d(x, 2, 1),
        lambda x: x.unfold(2, 2, 1).unfold(3, 2, 1).amax((4, 5)),
        MAPS[:1],
    ),
    "squared error": (
        lambda x, y: F.mse_loss(x, y.view(-1, 1, 1).expand_as(x)),
        lambda x, y: (x - y.view(-1, 1, 1)).square().mean(),
        MAPS[:2],
    ),
    "divergence": (
        lambda x, y: F.kl_div(
            x.log_softmax(1), y.softmax(0).view(-1, 1, 1), reduction="batchmean"
        ),
        lambda x, y: (
            (
                y.softmax(0).view(-1, 1, 1)
                * (y.softmax(0).log().view(-1, 1, 1) - x.log_softmax(1))
            ).sum()
            / 2
        ),
        MAPS[:2],
    ),
    "a norm": (
        lambda x: x.norm(dim=1, keepdim=True) * x.norm(),
        lambda x: x.square().sum(1, keepdim=True).sqrt() * x.square().sum().sqrt(),
        MAPS[:1],
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_operations_are_what_they_are_composed_of(name: str) -> None:
    one, other, inputs = TWICE[name]
    both = []
    for function in (one, other):
        leaves = [t.clone().requires_grad_() for t in inputs]
        with over():
            result = function(*leaves)
            result.backward(drawn(*result.shape, seed=9))
        both.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*both, strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["batch norm", "group norm"])
def test_means_of_many_elements_are_exact(name: str) -> None:
    one, other, _ = TWICE[name]
    gradients = []
    for function in (one, other):
        leaves = [drawn(2, 2, 256, 256), drawn(2, seed=1), drawn(2, seed=2)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        with over():
            function(*leaves).backward(drawn(2, 2, 256, 256, seed=9))
        gradients.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *gradients))


def test_the_statistics_of_many_elements_are_exact() -> None:
    x, running = drawn(2, 1, 256, 256), torch.zeros(1, dtype=torch.float64)
    with over() as mode:
        F.batch_norm(x, running.clone(), running, training=True, momentum=1.0)
        assert torch.equal(running, x.var().view(1))
    assert not mode.zeros


# what no rule is for: of each, what torch computes would be wrong, or chance
UNDECIDED: dict[str, Callable[[], Any]] = {
    "integers of numbers": lambda: drawn(5).long(),
    "rounded division": lambda: torch.div(drawn(5), 7, rounding_mode="floor"),
    "half": lambda: drawn(5).half(),
    "complex": lambda: torch.view_as_complex(drawn(5, 2)) * 2,
    "fourier": lambda: torch.fft.fft(drawn(5)),
    "embedding with frequencies": lambda: torch.ops.aten.embedding_dense_backward(
        drawn(4, 2), torch.tensor([0, 1, 1, 2]), 3, -1, True
    ),
    "embedding that changes its weight": lambda: F.embedding(
        INDEX, drawn(3, 2), max_norm=1.0
    ),
    "not a number": lambda: drawn(5) * math.nan,
    "bicubic with large denominators": lambda: F.interpolate(
        drawn(1, 1, 7, 89), (7, 97), mode="bicubic"
    ),
    "attention that drops": lambda: (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            drawn(1, 1, 2, 2), drawn(1, 1, 2, 2), drawn(1, 1, 2, 2), 0.5
        )
    ),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_has_no_rule_is_named(name: str) -> None:
    with over(), pytest.raises(NotDecidedError):
        UNDECIDED[name]()


def test_roots_are_powers() -> None:
    x = drawn(5)
    with over():
        assert torch.equal(x**0.5, x.sqrt())
        assert torch.equal(x**-0.5, x.rsqrt())
        assert torch.equal(1 / x.sqrt(), x.rsqrt())


def test_memory_that_nobody_has_written_is_never_the_same() -> None:
    with over():
        assert not torch.equal(torch.empty(3), torch.empty(3))


def test_infinities_are_not_one_another() -> None:
    low, high = torch.tensor([-math.inf, math.inf], dtype=torch.float64)
    with over():
        assert float(low.exp()) == 0.0
        assert float(high.exp()) == math.inf
        assert float(low.tanh()) != float(high.tanh())


def test_what_exp_of_a_value_is_ends_with_it() -> None:
    x = drawn(2, 4)
    with over():
        known = x - x.amax(1, keepdim=True)
        assert not torch.equal(known.exp(), (known + 0.0 * x).add_(0).mul(1).exp())
        before = known.exp()
        known.copy_(x)
        assert torch.equal(known.exp(), x.exp())
        assert not torch.equal(known.exp(), before)


def test_bytes_that_waited_are_known_as_what_they_were() -> None:
    x = drawn(2, 4)
    with over():
        known = x - x.amax(1, keepdim=True)
        data = torch.empty(0, dtype=torch.uint8).set_(known.untyped_storage())
        waiting = torch.empty(len(data), dtype=torch.uint8).copy_(data)
        wanted = known.exp()
        del known, data
        room = torch.frombuffer(waiting.numpy(), dtype=torch.uint8)
        back = torch.empty(len(room), dtype=torch.uint8).copy_(room)
        again = torch.empty(0, dtype=torch.float64)
        again.set_(back.untyped_storage(), 0, (2, 4), (4, 1))
        assert torch.equal(again.exp(), wanted)
        again[0, 0] += 1
        assert not torch.equal(again.exp(), wanted)


@pytest.mark.parametrize("n", [3, 7, 10, 49])
def test_what_is_left_of_a_fraction_is_one_though_it_is_rounded(n: int) -> None:
    whole = FIELD.number(1) - FIELD.number(1 / n)
    assert FIELD.number(1 - 1 / n) == FIELD.number(int(whole))
    assert FIELD.number(1 - 1 / n) != FIELD.number(1 - 1 / (n + 1))


def test_constants_are_the_fractions_that_round_to_them() -> None:
    values = np.array([0.1, 1 / 3, np.float32(0.7), -2.5, 5e-324, 1e-300, 1.7e308])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tops, bottoms, is_small = _fractions(values)
    assert tops[:4].tolist() == [1, 1, 7, -5]
    assert bottoms[:4].tolist() == [10, 3, 10, 2]
    assert is_small.tolist() == [True] * 4 + [False] * 3


# the degree of a result, and those of the arguments of functions on the way, added up
DEGREES: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "sums": (lambda x: x + x.sum() - 2 * x, 1, 0),
    "products": (lambda x: (x * x) @ x.T, 3, 0),
    "powers": (lambda x: (x**3).square(), 6, 0),
    "in place": (lambda x: (y := x.clone(), y[:1].mul_(x[:1]), y)[-1], 2, 0),
    "in part": (lambda x: (y := x * x, y[:1].zero_(), y)[-1], 2, 0),
    "functions": (lambda x: (x * x).tanh() * (x * x * x).exp(), 2, 5),
    "order": (lambda x: (x * x).clamp(min=0), 2, 2),
    "division": (lambda x: x * x / x.sum(), 3, 1),
    "layer norm": (lambda x: F.layer_norm(x * x, (4,)), 4, 5),
    "constants": (lambda x: x * torch.zeros_like(x) * torch.rand_like(x), 1, 0),
    "dropout": (lambda x: F.dropout(x * x, 0.5), 2, 0),
    "softmax": (lambda x: (x * x).softmax(1), 3, 4),
    "softmax of much": (lambda x: (x**8).softmax(1), 3, 10),
    "log of softmax": (lambda x: (x**8).log_softmax(1), 8, 10),
}


@pytest.mark.parametrize("name", DEGREES)
def test_the_degree_of_terms_is_counted(name: str) -> None:
    function, degree, total = DEGREES[name]
    with over(), Degrees() as degrees:
        result = function(drawn(3, 4))
    assert (degrees.of(result), degrees.total) == (degree, total)


@pytest.mark.parametrize(
    ("function", "chooses"),
    [
        (lambda x: F.max_pool1d(x, 2), True),
        (lambda x: torch.where(x > 0, x, 1.0), True),
        (lambda x: F.dropout(x.relu(), 0.5).softmax(1), False),
        (lambda x: x * (torch.rand_like(x) > 0.5), False),
    ],
)
def test_what_chooses_among_drawn_numbers_is_known(
    function: Callable[[Tensor], Tensor], chooses: bool
) -> None:
    with over(), Degrees() as degrees:
        function(drawn(3, 4))
    assert degrees.chooses is chooses


def test_the_degree_of_a_gradient_grows_with_the_functions_before_it() -> None:
    x = drawn(3, 4).requires_grad_()
    with over(), Degrees() as degrees:
        x.square().tanh().square().tanh().sum().backward()
    # two slopes, and twice what was squared
    assert degrees.of(x.grad) == 4
    assert degrees.highest == 4
