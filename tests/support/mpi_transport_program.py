"""What every transport must do: cases for threads and, run as a program, for MPI.

mpirun -n 2 python mpi_transport_program.py [case ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gemsc.errors import InternalError
from gemsc.runtime.transport import mpi_group, mpi_messages, waiting
from gemsc.runtime.transport.choose import start_transport
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.transport.waiting import Request

Case = Callable[[Transport], None]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def random_bits(dtype: torch.dtype, num_values: int, seed: int) -> Tensor:
    """Return values of all kinds, not-a-number included: equality is of bytes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(num_values, generator=generator) < 0.5
    num_bytes = num_values * dtype.itemsize
    bits = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.view(torch.uint8))


def neighbours(transport: Transport) -> tuple[int, int]:
    return (
        (transport.rank - 1) % transport.size,
        (transport.rank + 1) % transport.size,
    )


def every_dtype_arrives_bit_for_bit(transport: Transport) -> None:
    before, after = neighbours(transport)
    requests: list[Request] = []
    pairs = []
    for tag, dtype in enumerate(DTYPES):
        received = torch.zeros(1000, dtype=dtype)
        pairs.append((received, random_bits(dtype, 1000, seed=100 * before + tag)))
        requests.append(transport.receive(received, before, tag))
        sent = random_bits(dtype, 1000, seed=100 * transport.rank + tag)
        requests.append(transport.send(sent, after, tag))
    transport.wait(*requests)
    assert all(request.done() for request in requests)
    assert all(same_bits(received, expected) for received, expected in pairs)


def messages_with_one_tag_keep_their_order(transport: Transport) -> None:
    before, after = neighbours(transport)
    sizes = (3, 3, 70_000, 3, 1, 70_000)  # eager and rendezvous mixed
    received = [torch.empty(size) for size in sizes]
    requests = [
        transport.send(torch.full((size,), float(number)), after, 7)
        for number, size in enumerate(sizes)
    ]
    requests += [transport.receive(buffer, before, 7) for buffer in received]
    transport.wait(*requests)
    assert [buffer[0].item() for buffer in received] == [0, 1, 2, 3, 4, 5]


def tags_keep_messages_apart(transport: Transport) -> None:
    before, after = neighbours(transport)
    first, second = torch.empty(5), torch.empty(5)
    requests = [transport.receive(second, before, 32767)]
    requests += [transport.send(torch.ones(5), after, 0)]
    requests += [transport.send(torch.full((5,), 2.0), after, 32767)]
    requests += [transport.receive(first, before, 0)]
    transport.wait(*requests)
    assert first.tolist() == [1.0] * 5
    assert second.tolist() == [2.0] * 5


def many_messages_cross_without_a_deadlock(transport: Transport) -> None:
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    sends = [
        transport.send(torch.full((40_000,), 10.0 * transport.rank + n), other, n)
        for n in range(20)
        for other in others
    ]
    for n in reversed(range(20)):
        for other in others:
            buffer = torch.empty(40_000)
            transport.wait(transport.receive(buffer, other, n))
            assert buffer.eq(10.0 * other + n).all()
    transport.wait(*sends)


def a_message_of_32_mib_arrives(transport: Transport) -> None:
    before, after = neighbours(transport)
    pattern = torch.arange(256, dtype=torch.uint8).repeat(2**17)
    received = torch.empty_like(pattern)
    request = transport.receive(received, before, 1)
    transport.wait(transport.send(pattern + transport.rank, after, 1), request)
    assert same_bits(received, pattern + before)


def empty_and_scalar_tensors_arrive(transport: Transport) -> None:
    before, after = neighbours(transport)
    empty, scalar = torch.empty(0, 3), torch.empty(())
    transport.wait(
        transport.receive(empty, before, 1),
        transport.receive(scalar, before, 2),
        transport.send(torch.empty(0, 3), after, 1),
        transport.send(torch.tensor(4.0), after, 2),
    )
    assert scalar.item() == 4


def a_rank_can_send_to_itself(transport: Transport) -> None:
    me, received = transport.rank, [torch.empty(100_000) for _ in range(2)]
    requests = [transport.receive(received[tag], me, tag) for tag in range(2)]
    requests += [
        transport.send(torch.full((100_000,), float(tag)), me, tag) for tag in (1, 0)
    ]
    transport.wait(*requests)
    assert all(received[tag].eq(tag).all() for tag in range(2))


def a_posted_receive_completes_by_turns_alone(transport: Transport) -> None:
    before, after = neighbours(transport)
    received = torch.zeros(100_000)
    requests = [transport.receive(received, before, 1)]
    requests += [transport.send(torch.ones(100_000), after, 1)]
    deadline = time.monotonic() + 20
    while not all(request.done() for request in requests):
        assert time.monotonic() < deadline
        transport.progress()
    assert received.eq(1).all()


def what_cannot_be_sent_is_refused(transport: Transport) -> None:
    for tensor, peer, tag in (
        (torch.ones(4, 4).t(), 0, 1),
        (torch.ones(4), transport.size, 1),
        (torch.ones(4), 0, 32768),
        (torch.ones(4, device="meta"), 0, 1),
    ):
        try:
            transport.send(tensor, peer, tag)
        except InternalError:
            continue
        raise AssertionError(f"{tensor.shape} to {peer} with tag {tag} was sent")


def sums_have_the_same_bits_on_all_ranks(
    transport: Transport, largest: int = 1_200_001
) -> None:
    everyone = tuple(range(transport.size))
    group = transport.group(everyone)
    assert transport.group(everyone) is group
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
    for size in (1, 1000, largest // 4, largest):
        wide = []
        for rank in everyone:
            generator = torch.Generator().manual_seed(rank)
            part = torch.randn(size, generator=generator, dtype=torch.float64)
            wide.append(part * 1000)
        for dtype in dtypes:
            parts = [part.to(dtype, copy=True) for part in wide]
            tensor = parts[transport.rank]
            exact = torch.stack([part.double() for part in parts]).sum(0)
            request = group.all_reduce(tensor)
            transport.wait(request)
            summed, tensor = tensor.clone(), tensor.zero_()
            assert request.done()
            assert not tensor.any()  # which is its owner's again
            error = (summed.double() - exact).abs().max()
            roundings = 1 if dtype in (torch.bfloat16, torch.float16) else len(parts)
            eps = 0 if dtype == torch.int64 else torch.finfo(dtype).eps
            assert error <= 0.51 * roundings * eps * exact.abs().max()
            texts = transport.all_gather_object(summed.double().sum().item().hex())
            assert len(set(texts)) == 1


def sums_over_overlapping_groups_are_in_flight_together(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    everyone = transport.group(tuple(range(size)))
    pairs = [(first, (first + 1) % size) for first in range(size)] if size > 2 else []
    groups = [transport.group(pair) for pair in pairs if rank in pair]
    tensors = [torch.full((1000,), float(rank)) for _ in range(2 + len(groups))]
    requests = [
        group.all_reduce(tensor)
        for group, tensor in zip([everyone, everyone, *groups], tensors, strict=True)
    ]
    alone = torch.ones(3)
    requests.append(transport.group((rank,)).all_reduce(alone))
    transport.wait(*requests)
    total = sum(range(size))
    expected = [total, total, *(sum(group.ranks) for group in groups)]
    assert [tensor[0].item() for tensor in tensors] == expected
    assert alone.tolist() == [1, 1, 1]


def parts_of_sums_are_added_in_the_order_of_ranks(transport: Transport) -> None:
    """Some parts may be empty; gathered again they are the sum on every rank."""
    size = transport.size
    group = transport.group(tuple(range(size)), "parts")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex128):
        for sizes in ([3] * size, [0] * (size - 1) + [5], [*range(size)]):
            terms = []
            for rank in range(size):
                generator = torch.Generator().manual_seed(rank)
                term = torch.randn(sum(sizes), generator=generator) * 1000
                terms.append(term.to(dtype))
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            total = terms[0].to(wide)
            for term in terms[1:]:
                total = total + term
            total = total.to(dtype)
            mine = terms[transport.rank].clone()
            part = torch.empty(sizes[transport.rank], dtype=dtype)
            whole = torch.empty(sum(sizes), dtype=dtype)
            transport.wait(group.reduce_scatter(mine, sizes, part))
            again = mine.clone()
            place = again.split(sizes)[transport.rank]  # in its own place
            transport.wait(group.reduce_scatter(again, sizes, place))
            assert torch.equal(place, part)
            assert torch.equal(part, total.split(sizes)[transport.rank])
            assert torch.equal(mine, terms[transport.rank])
            transport.wait(group.all_gather(part, sizes, whole))
            assert torch.equal(whole, total)


def objects_reach_all_ranks(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    value = {"rank": rank, "text": "x" * 1000 * rank}
    gathered = transport.all_gather_object(value)
    assert gathered == [{"rank": n, "text": "x" * 1000 * n} for n in range(size)]
    transport.barrier()
    assert 0 <= transport.local_rank < size


def a_link_carries_what_has_gaps(transport: Transport) -> None:
    before, after = neighbours(transport)
    link = DeviceTransport(transport, Streams())
    for step in range(3):
        incoming = link.receive((4, 6), torch.float32, before, 3)
        weights = torch.full((6, 4), float(step), requires_grad=True)
        sent = link.send(weights.t(), after, 3)
        tensor = incoming.take()
        assert tensor.tolist() == [[step] * 6] * 4
        link.wait(sent)
        link.progress()
        transport.barrier()


def a_link_carries_lazy_conjugates_and_negatives(transport: Transport) -> None:
    before, after = neighbours(transport)
    link = DeviceTransport(transport, Streams())
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    for value in (conjugate, torch._neg_view(torch.ones(3))):
        incoming = link.receive(tuple(value.shape), value.dtype, before, 3)
        sent = link.send(value, after, 3)
        assert torch.equal(incoming.take(), value)
        link.wait(sent)
        transport.barrier()


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        every_dtype_arrives_bit_for_bit,
        messages_with_one_tag_keep_their_order,
        tags_keep_messages_apart,
        many_messages_cross_without_a_deadlock,
        a_message_of_32_mib_arrives,
        empty_and_scalar_tensors_arrive,
        a_rank_can_send_to_itself,
        a_posted_receive_completes_by_turns_alone,
        what_cannot_be_sent_is_refused,
        sums_have_the_same_bits_on_all_ranks,
        sums_over_overlapping_groups_are_in_flight_together,
        parts_of_sums_are_added_in_the_order_of_ranks,
        objects_reach_all_ranks,
        a_link_carries_what_has_gaps,
        a_link_carries_lazy_conjugates_and_negatives,
    )
}


def a_rank_that_raises(transport: Transport) -> None:
    if transport.rank == 1:
        raise ValueError("an error on rank 1")
    transport.wait(transport.receive(torch.empty(1), 1, 1))


def a_message_that_is_too_short(transport: Transport) -> None:
    if transport.rank == 1:
        transport.wait(transport.send(torch.ones(2), 0, 1))
        transport.barrier()
    transport.wait(transport.receive(torch.empty(3), 1, 1))


def a_long_wait(transport: Transport) -> None:
    transport.barrier()
    if transport.rank == 1:
        time.sleep(1)
        transport.wait(transport.send(torch.ones(2), 0, 1))
    if transport.rank != 0:
        return
    started = time.process_time()
    transport.wait(transport.receive(torch.empty(2), 1, 1))
    sys.stdout.write(f"cpu seconds {time.process_time() - started:.3f}\n")


def a_message_in_pieces(transport: Transport) -> None:
    mpi_messages.LARGEST_PIECE = 1000
    a_rank_can_send_to_itself(transport)
    every_dtype_arrives_bit_for_bit(transport)
    messages_with_one_tag_keep_their_order(transport)


def a_sum_in_pieces(transport: Transport) -> None:
    """As of 2^31 elements and more: each piece is as large as a count can say."""
    mpi_group.LARGEST_PIECE = 77_777
    mpi_messages.LARGEST_PIECE = 100_000
    sums_have_the_same_bits_on_all_ranks(transport, 200_001)
    parts_of_sums_are_added_in_the_order_of_ranks(transport)
    mpi_group.LARGEST_PIECE, mpi_group.PIECE_BYTES = 2**30, 40_000
    sums_have_the_same_bits_on_all_ranks(transport, 200_001)


def large_halves(transport: Transport) -> None:
    """They are added in the order of ranks; each wait moves all sums that go on."""
    rank, size = transport.rank, transport.size
    group = transport.group(tuple(range(size)), "halves")
    least = mpi_group.HALVES_BYTES // 2
    terms = []  # of each sum: small ones overtake large ones
    for number, num in enumerate((7 * least, least, least + 1, 5 * least, least + 2)):
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(size, num, generator=generator) * 100
        terms.append([row.bfloat16() for row in rows])
    for _ in range(3):
        sums = [parts[rank].clone() for parts in terms]
        requests = [group.all_reduce(tensor) for tensor in sums]
        before, after = neighbours(transport)
        for step in range(len(sums)):  # each waits for another sum, some for none
            incoming = transport.receive(torch.empty(1), before, 5)
            if rank:
                transport.wait(requests[(step + rank) % len(sums)])
            sent = transport.send(torch.ones(1), after, 5)
            transport.wait(incoming, sent)
        transport.wait(*requests)
        for parts, summed in zip(terms, sums, strict=True):
            total = torch.zeros(len(summed))
            for part in parts:
                total += part
            assert torch.equal(summed, total.bfloat16())


def a_message_comes_while_its_receiver_computes(transport: Transport) -> None:
    """Its sender is done before the receiver calls MPI again."""
    name = tempfile.mktemp() if transport.rank == 0 else ""
    done = Path(transport.all_gather_object(name)[0])
    large = torch.ones(2**23)
    if transport.rank == 1:
        transport.wait(transport.send(large, 0, 4))
        done.touch()
    if transport.rank == 0:
        incoming = transport.receive(torch.zeros(2**23), 1, 4)
        matrix, end = torch.ones(300, 300), time.monotonic() + 20
        while not done.exists():
            torch.mm(matrix, matrix)
            assert time.monotonic() < end
        transport.wait(incoming)
        done.unlink()
    transport.barrier()


OTHERS: dict[str, Case] = {
    case.__name__: case
    for case in (
        a_rank_that_raises,
        a_message_that_is_too_short,
        a_message_comes_while_its_receiver_computes,
        large_halves,
        a_message_in_pieces,
        a_sum_in_pieces,
        a_long_wait,
    )
}


# they change settings
LAST = (
    "a_message_comes_while_its_receiver_computes",
    "large_halves",
    "a_message_in_pieces",
    "a_sum_in_pieces",
    "a_long_wait",
)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    transport = start_transport()
    try:
        for name in names or [*CASES, *LAST]:
            (CASES | OTHERS)[name](transport)
            transport.barrier()
            if transport.rank == 0:
                sys.stdout.write(f"passed {name}\n")
                sys.stdout.flush()
        transport.close()
        assert not waiting._checks
    except BaseException:
        traceback.print_exc()
        transport.abort(3)


if __name__ == "__main__":
    main(sys.argv[1:])
