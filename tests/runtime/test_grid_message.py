"""What one grid sends another: each tile gets what it wants, gradients come home."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from worker_support import worker_of

from gemsc.base.boxes import Box, everything, intersection, shape_of
from gemsc.messages.grid_message import GridMessage, RankMessage, TileValue
from gemsc.messages.message import Input, Message, Tiles
from gemsc.passes.spatial.cuts import boxes
from gemsc.runtime.data.tiled import Window, window_of
from gemsc.runtime.transport.local import LocalTransport, run_local

GRIDS = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2)]
NUM_MICRO_BATCHES = 3


def spread(shape: tuple[int, ...], grid: tuple[int, ...], *, whole: bool) -> list[Box]:
    if whole:
        return [everything(shape)] * prod(grid)
    return list(boxes(shape, (None, None, 0, 1), grid))


def widen(box: Box, halo: int) -> Box:
    return (*box[:2], *((start - halo, stop + halo) for start, stop in box[2:]))


@st.composite
def values(
    draw: st.DrawFn, source: tuple[int, int], dest: tuple[int, int]
) -> TileValue:
    shape = (2, draw(st.integers(1, 2)), *(draw(st.integers(3, 9)) for _ in range(2)))
    held = spread(shape, source, whole=draw(st.booleans()))
    wanted = spread(shape, dest, whole=draw(st.booleans()))
    halo = draw(st.integers(0, 2))
    return TileValue(
        f"v{draw(st.integers(0, 10**6))}",
        shape,
        torch.float64,
        tuple(held),
        tuple(widen(box, halo) for box in wanted),
        gradient=draw(st.booleans()),
        fill=float(draw(st.integers(0, 1))),
    )


@st.composite
def messages(draw: st.DrawFn) -> GridMessage:
    source, dest = (draw(st.sampled_from(GRIDS)) for _ in range(2))
    sources = tuple(range(prod(source)))
    dests = tuple(range(len(sources), len(sources) + prod(dest)))
    several = draw(st.lists(values(source, dest), min_size=1, max_size=3))
    names = {value.name: value for value in several}
    return GridMessage(6, sources, dests, tuple(names.values()))


def cut(whole: Tensor, box: Box, fill: float) -> Tensor:
    """Return a box of a tensor, with `fill` outside of it."""
    result = torch.full(shape_of(box), fill, dtype=whole.dtype)
    inside = intersection(box, everything(tuple(whole.shape)))
    place = tuple(
        slice(a - first, b - first)
        for (a, b), (first, _) in zip(inside, box, strict=True)
    )
    result[place] = whole[tuple(slice(a, b) for a, b in inside)]
    return result


def sent(message: GridMessage, m: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(m)
    return [
        torch.randn(v.shape, dtype=torch.float64, generator=generator)
        for v in message.values
    ]


def as_tuple(tensors: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)


@given(messages())
@settings(deadline=None, max_examples=40)
def test_each_tile_gets_its_boxes_and_gradients_are_the_transpose(
    message: GridMessage,
) -> None:
    has_gradient = any(value.gradient for value in message.values)

    def work(transport: LocalTransport) -> float:
        """Return this rank's part of <A x, y> - <x, A' y>: fill does not count."""
        worker = worker_of(
            transport, num_micro_batches=NUM_MICRO_BATCHES, copy_ranks=transport.size
        )
        worker.begin({}, training=True)
        rank, part = transport.rank, 0.0
        for m in range(NUM_MICRO_BATCHES):
            wholes = sent(message, m)
            if rank in message.sources:
                tile = message.sources.index(rank)
                pieces = [
                    cut(whole, value.held[tile], 0.0)
                    for whole, value in zip(wholes, message.values, strict=True)
                ]
                worker.send(message, m, *pieces)
                if has_gradient:
                    back = as_tuple(worker.receive(message.gradient, m))
                    pairs = zip(pieces, message.values, strict=True)
                    pieces = [tensor for tensor, value in pairs if value.gradient]
                    part -= sum(
                        float((x * g).sum()) for x, g in zip(pieces, back, strict=True)
                    )
                continue
            tile = message.dests.index(rank)
            got = as_tuple(worker.receive(message, m))
            flowing = []
            for whole, value, tensor in zip(wholes, message.values, got, strict=True):
                assert tensor.requires_grad == value.gradient
                wanted = cut(whole, value.wanted[tile], value.fill)
                assert torch.equal(tensor.detach(), wanted)
                if value.gradient:
                    flowing.append(torch.randn_like(wanted))
                    without_fill = cut(whole, value.wanted[tile], 0.0)
                    part += float((without_fill * flowing[-1]).sum())
            if has_gradient:
                worker.send(message.gradient, m, *flowing)
        worker.end()
        return part

    parts = run_local(len(message.sources) + len(message.dests), work)
    assert sum(parts) == pytest.approx(0.0, abs=1e-10)


def test_threads_that_ask_at_once_get_the_same_parts() -> None:
    """A mailbox knows a message by which object it is."""
    both = threading.Barrier(2)

    class Slow(GridMessage):
        def _all_parts(self) -> Iterator[RankMessage]:
            both.wait(timeout=10)
            return super()._all_parts()

    held = tuple(spread((2, 1, 4, 4), (2, 2), whole=False))
    value = TileValue("x", (2, 1, 4, 4), torch.float32, held)
    message = Slow(0, (0, 1, 2, 3), (4, 5, 6, 7), (value,))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: message.parts, range(2))
    assert first is second


def test_each_tile_sends_the_tile_of_its_number_without_wanted_boxes() -> None:
    held = tuple(spread((2, 1, 4, 4), (2, 2), whole=False))
    value = TileValue("x", (2, 1, 4, 4), torch.float32, held)
    message = GridMessage(0, (0, 1, 2, 3), (4, 5, 6, 7), (value,))
    ends = [(part.source, part.dest) for part in message.parts]
    assert ends == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_of_a_value_that_all_hold_each_rank_takes_it_from_one() -> None:
    whole = everything((2, 8))
    value = TileValue("x", (2, 8), torch.float32, (whole,) * 4, (whole,) * 2)
    message = GridMessage(0, (0, 1, 2, 3), (4, 5), (value,))
    assert [(part.source, part.dest) for part in message.parts] == [(0, 4), (1, 5)]


def test_a_rank_without_parts_gets_zeros_as_gradient() -> None:
    whole = everything((2,))
    value = TileValue("x", (2,), torch.float64, (whole,) * 2, (whole,), gradient=True)
    message = GridMessage(0, (0, 1), (2,), (value,))

    def work(transport: LocalTransport) -> list[float]:
        worker = worker_of(transport, copy_ranks=transport.size)
        worker.begin({}, training=True)
        if transport.rank == 2:
            worker.receive(message, 0)
            worker.send(message.gradient, 0, torch.ones(2).double())
            result = []
        else:
            worker.send(message, 0, torch.zeros(2).double())
            result = worker.receive(message.gradient, 0).tolist()
        worker.end()
        return result

    assert run_local(3, work) == [[1.0, 1.0], [0.0, 0.0], []]


def test_between_lone_ranks_messages_are_as_before() -> None:
    assert not hasattr(Message(0, 0, 1, ()), "parts")


# Inputs


X = Input(
    ("input", 0), (2, 1, 4, 6), torch.float32, box=((0, 2), (0, 1), (2, 4), (0, 6))
)


def bound(batch: Tensor, window: Window | None = None) -> Tensor:
    def work(transport: LocalTransport) -> Tensor:
        worker = worker_of(
            transport, inputs={"x": X}, tiles=Tiles((1,), (0,), 0), num_micro_batches=2
        )
        bound = worker.steps.shape.bind({"input": (batch,)}, window)
        worker.begin(bound, training=True)
        return worker.input("x", 1)

    (result,) = run_local(1, work)
    return result


def test_a_rank_keeps_its_box_of_the_batch() -> None:
    batch = torch.arange(4 * 24.0).view(4, 1, 4, 6)
    box = bound(batch)
    assert torch.equal(box, batch[2:, :, 2:])
    assert box.untyped_storage().nbytes() < batch.untyped_storage().nbytes()


def test_a_batch_may_hold_a_window_only() -> None:
    batch = torch.arange(4 * 24.0).view(4, 1, 4, 6)
    window = Window((4, 6), ((1, 4), (0, 6)))
    box = bound(batch[:, :, 1:], window)
    assert torch.equal(box, batch[2:, :, 2:])


def test_the_window_is_the_hull_of_what_a_rank_reads() -> None:
    mask = Input(("target",), (2, 4, 6), torch.int64, box=((0, 2), (1, 3), (0, 5)))
    label = Input(("target",), (2,), torch.int64)
    assert window_of([X, mask, label], (4, 6)).box == ((1, 4), (0, 6))
    assert window_of([label], (4, 6)).box == ((0, 0), (0, 0))
    assert window_of([Input(("target",), (2, 4, 6), torch.int64)], (4, 6)).is_whole
