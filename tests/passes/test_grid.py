"""Exchanges between tiles: their transpose is their backward; sums over tiles."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gemsc.base.boxes import Box, everything, intersection, shape_of
from gemsc.errors import InternalError
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.messages.exchange import Exchange
from gemsc.runtime.tiles import all_reduce, redistribute
from gemsc.runtime.tiles.grid import Grid
from gemsc.runtime.tiles.norms import functional_batch_norm
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.streams import Streams

T = TypeVar("T")


def on_tiles(num_tiles: int, work: Callable[[Grid], T]) -> list[T]:
    """Return what `work(grid)` gives on each tile, a thread each."""

    def main(transport: object) -> T:
        link = DeviceTransport(transport, Streams())  # type: ignore[arg-type]
        rank = transport.rank  # type: ignore[attr-defined]
        return work(Grid(link, tuple(range(num_tiles)), rank))

    return run_local(num_tiles, main)


def cut_at_random(size: int, parts: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return intervals that cover a size; some may be empty."""
    cuts = [0, *sorted(rng.randint(0, size) for _ in range(parts - 1)), size]
    return list(itertools.pairwise(cuts))


def random_exchange(seed: int) -> Exchange:
    rng = random.Random(seed)
    dims = rng.choice([1, 2, 3])
    shape = tuple(rng.randint(1, 7) for _ in range(dims))
    grid = [rng.choice([1, 2, 3]) for _ in range(dims)]
    held = tuple(itertools.product(*map(cut_at_random, shape, grid, [rng] * dims)))
    if rng.random() < 0.15:
        held = (everything(shape),) * len(held)
    elif rng.random() < 0.2:  # each box is on two tiles
        held = held * 2
    wanted = tuple(random_box(shape, rng) for _ in held)
    fill, wraps = rng.choice([0.0, -3.0]), rng.random() < 0.4
    return Exchange(seed, shape, held, wanted, fill=fill, wraps=wraps)


def random_box(shape: tuple[int, ...], rng: random.Random) -> Box:
    """Return a box that may reach outside, miss the value or be empty."""
    box = []
    for size in shape:
        start = rng.randint(-3, size + 2)
        box.append((start, start + rng.choice([0, 1, 2, 4, size, size + 3])))
    return tuple(box)


def part(value: Tensor, box: Box) -> Tensor:
    return value[tuple(slice(start, stop) for start, stop in box)].clone()


def expected_part(value: Tensor, box: Box, exchange: Exchange) -> Tensor:
    """Return a box that may reach outside, element by element."""
    result = torch.full(shape_of(box), exchange.fill, dtype=value.dtype)
    for place, index in inside(box, exchange):
        result[place] = value[index]
    return result


def inside(
    box: Box, exchange: Exchange
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (place in the box, index of the value) of all elements that there are."""
    shape = exchange.shape
    for index in itertools.product(*(range(a, b) for a, b in box)):
        place = tuple(i - a for i, (a, _) in zip(index, box, strict=True))
        around = tuple(i % size for i, size in zip(index, shape, strict=True))
        if exchange.wraps or index == around:
            yield place, around


@pytest.mark.slow(1)
@pytest.mark.parametrize("seeds", [range(i, i + 30) for i in range(0, 120, 30)])
def test_the_backward_of_an_exchange_is_its_transpose(seeds: range) -> None:
    for seed in seeds:
        exchange = random_exchange(seed)
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(exchange.shape, generator=generator, dtype=torch.float64)
        weights = [
            torch.randn(shape_of(box), generator=generator, dtype=torch.float64)
            for box in exchange.wanted
        ]

        def work(
            grid: Grid,
            exchange: Exchange = exchange,
            value: Tensor = value,
            weights: list[Tensor] = weights,
        ) -> tuple[Tensor, Tensor]:
            held = part(value, exchange.held[grid.tile]).requires_grad_()
            result = redistribute(grid, held, exchange)
            (result * weights[grid.tile]).sum().backward()
            assert held.grad is not None
            return result.detach(), held.grad

        results = on_tiles(len(exchange.held), work)
        gradient = torch.zeros_like(value)
        for tile, (result, held_gradient) in enumerate(results):
            box = exchange.wanted[tile]
            assert torch.equal(result, expected_part(value, box, exchange))
            at = tuple(slice(a, b) for a, b in exchange.held[tile])
            gradient[at] += held_gradient
        # <A x, y> = <x, A' y> on all of a basis: the gradient adds up the weights
        expected = torch.zeros_like(value)
        for weight, box in zip(weights, exchange.wanted, strict=True):
            for place, index in inside(box, exchange):
                expected[index] += weight[place]
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-12), exchange


def random_sum(seed: int) -> Exchange:
    """Return an exchange that adds: parts, copies, halos, empty and placed boxes."""
    rng = random.Random(seed)
    tiles, dims = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3])
    shape = tuple(rng.randint(1, 6) for _ in range(dims))

    def boxes() -> tuple[Box, ...]:
        kind = rng.choice(["whole", "part", "placed", "any"])
        if kind == "whole":
            return (everything(shape),) * tiles
        if kind == "part":
            dim = rng.randrange(dims)
            cuts = cut_at_random(shape[dim], tiles, rng)
            whole = everything(shape)
            return tuple((*whole[:dim], cut, *whole[dim + 1 :]) for cut in cuts)
        if kind == "placed":
            owner, empty = rng.randrange(tiles), ((0, 0),) * dims
            return tuple(
                everything(shape) if tile == owner else empty for tile in range(tiles)
            )
        return tuple(random_box(shape, rng) for _ in range(tiles))

    inside = tuple(intersection(box, everything(shape)) for box in boxes())
    return Exchange(seed, shape, inside, boxes(), adds=True)


@pytest.mark.slow(2)
@pytest.mark.parametrize("seeds", [range(i, i + 40) for i in range(0, 120, 40)])
def test_an_exchange_that_adds_gives_sums_and_its_backward_is_its_transpose(
    seeds: range,
) -> None:
    for seed in seeds:
        exchange = random_sum(seed)
        generator = torch.Generator().manual_seed(seed)

        def drawn(
            boxes: tuple[Box, ...], generator: torch.Generator = generator
        ) -> list[Tensor]:
            return [
                torch.randn(shape_of(box), generator=generator, dtype=torch.float64)
                for box in boxes
            ]

        addends, weights = drawn(exchange.held), drawn(exchange.wanted)

        def work(
            grid: Grid,
            exchange: Exchange = exchange,
            addends: list[Tensor] = addends,
            weights: list[Tensor] = weights,
        ) -> tuple[Tensor, Tensor]:
            held = addends[grid.tile].clone().requires_grad_()
            result = redistribute(grid, held, exchange)
            fake = redistribute(ShapeGrid(grid.tile, grid.num_tiles), held, exchange)
            assert fake.shape == result.shape
            (result * weights[grid.tile]).sum().backward()
            assert held.grad is not None
            return result.detach(), held.grad

        results = on_tiles(len(exchange.held), work)
        total = torch.zeros(exchange.shape, dtype=torch.float64)
        for box, addend in zip(exchange.held, addends, strict=True):
            total[tuple(slice(a, b) for a, b in box)] += addend
        for box, (result, _) in zip(exchange.wanted, results, strict=True):
            assert torch.equal(result, expected_part(total, box, exchange)), exchange
        forward = sum((r * y).sum() for (r, _), y in zip(results, weights, strict=True))
        backward = sum(
            (x * g).sum() for x, (_, g) in zip(addends, results, strict=True)
        )
        assert abs(forward - backward) < 1e-12 * (1 + abs(forward)), exchange


def test_many_addends_of_half_precision_are_rounded_once() -> None:
    held = (everything((1,)),) * 4
    exchange = Exchange(0, (1,), held, held, adds=True)

    def work(grid: Grid) -> float:
        value = torch.tensor([256.0 if grid.tile == 0 else 1.0], dtype=torch.bfloat16)
        return float(redistribute(grid, value, exchange))

    assert on_tiles(4, work) == [260.0] * 4  # 256 + 1 is 256 in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_before_a_batch_norm_are_rounded_once(dtype: torch.dtype) -> None:
    """They are mostly their mean, which is subtracted: the rest has all its bits."""
    torch.manual_seed(0)
    weight = torch.tensor([1.0, 2.0, -0.5], dtype=dtype)
    value = torch.randn(2, 3, 8, 8).bfloat16()
    gradient = (1 + torch.randn(2, 3, 8, 8) / 32).bfloat16()

    def before(value: Tensor, gradient: Tensor, norm: Callable[..., Tensor]) -> Tensor:
        value, scale = value.clone().requires_grad_(), weight.clone().requires_grad_()
        if value.dtype is torch.float64:
            scale = scale.detach().double()
        bias = torch.zeros_like(scale)
        norm(value, weight=scale, bias=bias, training=True).backward(gradient)
        assert scale.grad is None or scale.grad.dtype is dtype
        assert value.grad is not None
        return value.grad

    def work(grid: Grid) -> Tensor:
        rows = slice(4 * grid.tile, 4 * grid.tile + 4)
        norm = partial(functional_batch_norm, grid)
        return before(value[:, :, rows], gradient[:, :, rows], norm)

    norm = partial(F.batch_norm, running_mean=None, running_var=None)
    exact = before(value.double(), gradient.double(), norm)
    error = (torch.cat(on_tiles(2, work), 2) - exact).abs().max()
    assert error <= exact.abs().max() * torch.finfo(torch.bfloat16).eps / 2


def test_nothing_is_sent_where_every_tile_holds_what_it_wants() -> None:
    overlapping = Exchange(
        0,
        (8,),
        (((0, 5),), ((3, 8),)),
        (((-1, 5),), ((4, 9),)),
        owned=(((0, 4),), ((4, 8),)),
    )
    assert overlapping.is_local
    shifted = Exchange(
        0,
        (8,),
        (((0, 5),), ((3, 8),)),
        (((0, 6),), ((3, 8),)),
        owned=(((0, 4),), ((4, 8),)),
    )
    assert not shifted.is_local
    assert sum(shape_of(p.box)[0] for p in shifted.pieces if p.dest == 0) == 6


def test_a_whole_value_is_shared_out_among_the_tiles_of_another_grid() -> None:
    whole = everything((4,))
    exchange = Exchange(0, (4,), (whole, whole), (((0, 2),), ((1, 3),), ((2, 4),)))
    assert [(p.source, p.dest) for p in exchange.pieces] == [(0, 0), (1, 1), (0, 2)]


def test_an_element_that_nobody_holds_is_our_fault() -> None:
    exchange = Exchange(0, (4,), (((0, 1),), ((2, 4),)), (((0, 4),), ((0, 4),)))
    with pytest.raises(InternalError, match="no tile holds"):
        _ = exchange.pieces


def test_the_gradient_of_a_sum_is_the_sum_of_the_gradients() -> None:
    def work(grid: Grid) -> tuple[float, float]:
        value = torch.tensor(float(grid.tile + 1), requires_grad=True)
        total = all_reduce(grid, value)
        (total * (10.0**grid.tile)).backward()
        assert value.grad is not None
        return float(total), float(value.grad)

    assert on_tiles(3, work) == [(6.0, 111.0)] * 3


def test_shapes_are_known_without_other_tiles() -> None:
    exchange = Exchange(
        0,
        (2, 8),
        (((0, 2), (0, 4)), ((0, 2), (4, 8))),
        (((0, 2), (-1, 5)), ((0, 2), (3, 9))),
    )
    value = torch.zeros(2, 4, requires_grad=True)
    result = redistribute(ShapeGrid(1, 2), value, exchange)
    result.sum().backward()
    assert result.shape == (2, 6)
    assert value.grad is not None
    assert value.grad.shape == (2, 4)
