"""What must hold on a simulated device: numbers, memory, and that it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from device_programs import SIZE, Program, assert_equal, compiled
from program_support import written
from sim_cuda import DEVICE, SimDevice, on_device
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.runtime.memory.offload import OffloadedRun, PinnedStore, offloaded
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport import device_transport, streams, waiting
from gemsc.runtime.transport.device_transport import DeviceTransport, Operation, _Until
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.transport.streams import Arrival, CudaStreams, Pending
from gemsc.runtime.transport.waiting import Awaited, Request

__all__ = ["CHECKS", "ends"]

SEEDS = 2
LARGEST = 2 * 4 * SIZE * SIZE * 4  # bytes: a value that is saved, or sent
MOST_SLEEPS = 500  # of a rank in one wait while no device does anything


@cache
def program(schedule: str, use: str, micro_batches: int = 4) -> Program:
    """Return a compiled program, one for all checks."""
    return compiled(Path(mkdtemp(prefix="gemsc-")), schedule, use, micro_batches)


def numbers(
    use: str,
    policy: str,
    *,
    schedule: str = "gpipe",
    cuda_aware: bool = False,
    micro_batches: int = 4,
) -> None:
    """Those of the CPU, where much waits at a time."""
    built = program(schedule, use, micro_batches)
    for seed in range(SEEDS):
        results = built.simulated(seed, cuda_aware=cuda_aware, policy=policy)
        assert_equal(results, built.on_cpu)


def peaks(built: Program, policy: str) -> list[tuple[int, int]]:
    """Return the bytes of the device and of pinned memory of each rank."""
    results = built.simulated(0, policy=policy)
    return [(result.peak_bytes, result.peak_pinned_bytes) for result in results]


def memory_of_offload() -> None:
    """It does not depend on how far the host is ahead, and is what was predicted.

    What operators need for a moment is not predicted, and so are copies.
    """
    plain = program("gpipe", "plain", 8)
    pairs = zip(peaks(plain, "keeps up"), plain.peak_bytes, strict=True)
    moments = max(actual - predicted for (actual, _), predicted in pairs)
    moments += streams.MOST_LEAVING * LARGEST
    built = program("1f1b", "one rank", 8)
    ((least, pinned),) = peaks(built, "keeps up")
    assert least <= built.peak_bytes[0] + moments
    batch = 8 * 2 * (SIZE * SIZE * 4 + 8)  # of micro-batches that wait for the device
    for policy in ("copies last", "copies first"):
        ((mine, my_pinned),) = peaks(built, policy)
        assert mine == least
        assert my_pinned <= pinned + batch
    ((_, of_fewer),) = peaks(program("1f1b", "one rank"), "keeps up")
    assert of_fewer == pinned  # one micro-batch at a time


def memory_of_messages() -> None:
    """On the device it does not depend on it; on the host it is a few messages more."""
    built = program("1f1b", "plain", 8)
    ahead = device_transport.MOST_DEFERRED * LARGEST
    pairs = zip(peaks(built, "copies last"), peaks(built, "keeps up"), strict=True)
    for (mine, my_pinned), (least, least_pinned) in pairs:
        assert mine == least
        assert my_pinned <= least_pinned + ahead


def comes_back_early() -> None:
    """What was offloaded is fetched while something else is computed.

    The last block's is needed at once, where the last block was offloaded.
    """
    assert all(fetched_early("one block"))
    early = fetched_early("one rank")
    assert early.count(False) <= len(early) / 4  # of four blocks


def fetched_early(use: str) -> list[bool]:
    """Return, for all that comes back, whether something is computed meanwhile."""
    early: list[bool] = []

    class Noting(CudaStreams):
        def fetch(self, copy: Pending) -> Arrival:
            arrival, begin = super().fetch(copy), self._cuda.num_computed

            def take() -> None:
                early.append(self._cuda.num_computed > begin)
                assert arrival.wait is not None
                arrival.wait()

            return Arrival(arrival.tensor, take)

    program("1f1b", use).simulated(0, make=Noting)
    assert early
    return early


class Scaled(nn.Module):
    """A layer, and a factor that is the same for all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x) * scale


def batches() -> None:
    """Micro-batches do not wait for the device; what is not batched comes once."""
    folder = Path(mkdtemp(prefix="gemsc-"))
    x, scale, target = torch.zeros(2, 4), torch.ones(3), torch.zeros(2, 3)
    options = {"ranks": 1, "micro_batches": 4}
    written(folder, Scaled(), (x, scale), F.mse_loss, target, **options)
    made: list[Counting] = []

    class Counting(CudaStreams):
        shapes: list[tuple[int, ...]]

        def upload(self, tensor: Tensor) -> Tensor:
            is_new = tensor.device != DEVICE
            result = super().upload(tensor)
            if is_new:
                self.shapes.append(tuple(tensor.shape))
                assert self._cuda.current.queue  # the host is ahead
            return result

    def steps(inner: LocalTransport, streams: Any = None) -> list[float]:
        cpu = torch.device("cpu")
        trainer = Trainer(folder, inner, streams=streams, device=cpu)
        many = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        batch = many, torch.arange(1.0, 4.0)
        return [trainer.step(batch, torch.ones(8, 3)) for _ in range(2)]

    def simulated(inner: LocalTransport) -> list[float]:
        with on_device(0, "copies last") as device:
            made.append(Counting(DEVICE, device))
            made[0].shapes = []
            return steps(inner, made[0])

    assert run_local(1, simulated) == run_local(1, steps)
    with on_device(0) as device:
        pinned = CudaStreams(DEVICE, device).host_buffer((3,), torch.float32)
        before = device.peak_pinned_bytes
        CudaStreams(DEVICE, device).upload(pinned)
        assert device.peak_pinned_bytes == before
    assert sorted(made[0].shapes) == sorted(2 * ([(2, 4), (2, 3)] * 4 + [(3,)]))


def copies_overlap() -> None:
    """What is computed after a copy outward begins does not wait for that."""
    with on_device(0, "copies last") as device:
        made = CudaStreams(DEVICE, device)
        copy = made.to_host(torch.ones(3).to(DEVICE))
        computed = made.in_place(torch.ones(3).to(DEVICE) + 1)
        while not computed.event.mark.done:
            device.move()
        assert not copy.event.mark.done


def moments() -> None:
    """They have the device's time, and the host waits for none before it asks."""
    with on_device(0, "copies last") as device:
        made = CudaStreams(DEVICE, device)
        x = torch.ones(3).to(DEVICE) + 1
        before = time.perf_counter_ns()
        made.start_clock()
        after = time.perf_counter_ns()
        assert device.num_run == device.num_computed
        noted = [made.moment()]
        for count in (2, 3):
            for _ in range(count):
                x = x + 1
            noted.append(made.moment())
        assert device.num_run == device.num_computed - 5
        first, *later = [moment() for moment in noted]
        assert before <= first <= after
        assert later == [first + 2_000_000, first + 5_000_000]


def a_part_that_keeps_nothing() -> None:
    """The part before it comes back nevertheless."""
    with on_device(0, "copies last") as device:
        store = PinnedStore(CudaStreams(DEVICE, device))
        x = torch.ones(3).to(DEVICE).requires_grad_()
        with OffloadedRun(lambda: store, nn.Module()) as run:
            with offloaded():
                y = (x * 2).tanh()
            with offloaded():
                z = y + 1
        run.prefetch()
        z.sum().backward()
        assert x.grad is not None
        expected = 2 * (1 - torch.tensor(2.0).tanh() ** 2)
        assert torch.allclose(x.grad.cpu(), expected.expand(3))


def nobody_takes() -> None:
    """Memory that something is copied back to is not free before, taken or not."""
    with on_device(0, "copies last") as device:
        made = CudaStreams(DEVICE, device)
        made.fetch(made.to_host(torch.ones(3).to(DEVICE)))
        room = made.device_buffer((3,), torch.float32)
        while not room.ready():
            pass
        device.data_of(room.tensor).fill_(7.0)  # as a CUDA-aware library does
        assert room.tensor.tolist() == [7.0] * 3
        for stream in device.streams:
            stream.synchronize()
        assert room.tensor.tolist() == [7.0] * 3


class Host:
    """A library, and a group, that notes what it gets; a sum is twice a tensor."""

    has_lanes = False

    def __init__(self, *, cuda_aware: bool = False, sums: bool = False) -> None:
        self.cuda_aware, self.sums_on_device = cuda_aware, sums
        self.sent: list[Tensor] = []
        self.begun: list[str] = []
        self.num_turns = 0

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        self.sent.append(tensor)
        self.begun.append("send")
        return Done()

    def group(self, ranks: tuple[int, ...], key: str) -> Host:
        self.begun.append("group")
        return self

    def connect(self) -> None:
        pass

    @contextmanager
    def as_one(self) -> Iterator[None]:
        self.begun.append("together")
        yield
        self.begun.append("over")

    def receive(self, tensor: Tensor, source: int, tag: int) -> Request:
        return Done()

    def all_reduce(self, tensor: Tensor) -> Request:
        assert not tensor.is_complex()  # MPI has no sums of these
        self.sent.append(tensor)
        tensor.mul_(2)
        return Done()

    def wait(self, *requests: Request) -> None:
        pass

    def progress(self) -> None:
        self.num_turns += 1


def sums_are_there_once_done() -> None:
    """A request of which somebody asks whether it is done needs no wait."""
    for dtype in (torch.float32, torch.complex64):
        with on_device(0, "keeps up") as device:
            host: Any = Host()
            transport = DeviceTransport(host, CudaStreams(DEVICE, device))
            x = torch.ones(3, dtype=dtype).to(DEVICE)
            assert transport.all_reduce(host, x).done()
            assert x.tolist() == [2.0] * 3


def the_library_reads_the_device() -> None:
    """One that is CUDA-aware gets the device's own memory."""
    with on_device(0, "keeps up") as device:
        host: Any = Host(cuda_aware=True)
        transport = DeviceTransport(host, CudaStreams(DEVICE, device))
        transport.send(torch.ones(3).to(DEVICE), 1, 7)
        assert device.owns(host.sent[0])
        incoming = transport.receive((3,), torch.float32, 1, 7)
        assert incoming.memory is incoming.room
        turns = host.num_turns
        assert incoming.take() is incoming.buffer
        assert host.num_turns == turns  # nothing is copied that would be waited for


def the_library_sums_on_the_device() -> None:
    """Where it can, nothing goes through the host; else it gets the host's memory."""
    for sums in (True, False):
        with on_device(0, "keeps up") as device:
            host: Any = Host(sums=sums)
            transport = DeviceTransport(host, CudaStreams(DEVICE, device))
            transport.wait(transport.all_reduce(host, torch.ones(3).to(DEVICE)))
            assert device.owns(host.sent[0]) is sums


def what_waits_starts_before_others_do() -> None:
    """A group that all ranks ask for, and messages that are one operation."""
    for has_lanes in (True, False):
        with on_device(0, "keeps up") as device:
            host: Any = Host()
            host.has_lanes = has_lanes
            transport = DeviceTransport(host, CudaStreams(DEVICE, device))
            sent = torch.ones(3).to(DEVICE)
            device.keeps_up = False
            transport.send(sent, 1, 7)
            assert not host.begun  # the device has not computed it
            transport.group((0, 1))
            assert host.begun == ["send", "group"]
            transport.send(sent, 1, 7)
            with transport.as_one():
                last = transport.send(sent, 1, 7)
            transport.wait(last)
            wanted = ["send", "together", "send", "over"] if has_lanes else ["send"] * 2
            assert host.begun[2:] == wanted


def few_messages_wait() -> None:
    """For the device, in either direction."""
    most = device_transport.MOST_DEFERRED
    with on_device(0, "copies last") as device:
        host: Any = Host()
        transport = DeviceTransport(host, CudaStreams(DEVICE, device))
        for number in range(3 * most):
            transport.send(torch.ones(3).to(DEVICE), 1, 7)
            assert number < len(host.sent) + most
    for cuda_aware in (False, True):
        with on_device(0, "copies last") as device:
            made = CudaStreams(DEVICE, device)
            transport = DeviceTransport(Host(cuda_aware=cuda_aware), made)  # type: ignore[arg-type]
            for _ in range(3 * most):
                transport.receive((SIZE,), torch.float32, 1, 7).take()
            assert device.peak_pinned_bytes <= (most + 1) * SIZE * 4


class Silent:
    """An operation that is done, and does not say what it takes."""

    def done(self) -> bool:
        return True


class Done(Silent):
    """One that says it."""

    need = Awaited("a message", (1,))


def nothing_on_the_cpu() -> None:
    """There the transport's own operations are all that there is."""

    def work(inner: LocalTransport) -> None:
        requests: list[Request] = []

        class Noting:
            cuda_aware = False

            def __getattr__(self, name: str) -> Any:
                return lambda *_: requests.append(Done()) or requests[-1]

        host: Any = Noting()
        transport, x = DeviceTransport(host, streams.Streams()), torch.ones(3)
        made = [
            transport.send(x, 0, 0),
            transport.receive((3,), torch.float32, 0, 0).request,
            transport.all_reduce(host, x),
            transport.reduce_scatter(host, x, [3], x),
            transport.all_gather(host, x, [3], x),
        ]
        assert all(a is b for a, b in zip(made, requests, strict=True))

    run_local(1, work)


def sends_start_at_once() -> None:
    """What the device has computed is sent before anybody asks for something."""
    with on_device(0, "keeps up") as device:
        host = Host()
        transport = DeviceTransport(host, CudaStreams(DEVICE, device))  # type: ignore[arg-type]
        request = transport.send(torch.ones(3).to(DEVICE), 1, 7)
        assert len(host.sent) == 1
        assert request.done()
        turns = host.num_turns
        transport.progress()
        assert host.num_turns == turns + 1
        device.keeps_up = False
        incoming = transport.receive((3,), torch.float32, 1, 9)
        for number, ask in ((2, None), (3, incoming.done)):
            later = transport.send(torch.ones(3).to(DEVICE) + 1, 1, 8)
            while any(stream.can_move for stream in device.streams):
                device.move()
            assert (ask or later.done)()  # to ask is enough, for anything
            assert len(host.sent) == number
        first = Operation(transport, Pending(torch.empty(0)), Silent)
        first.begin()
        assert _Until(lambda: True, (first, request)).need == Done.need
        assert _Until(lambda: True).need.what == "the device"


CHECKS: dict[str, Callable[[], None]] = {  # those that take long come last
    "nothing on the CPU": nothing_on_the_cpu,
    "sums are there once done": sums_are_there_once_done,
    "the library reads the device": the_library_reads_the_device,
    "the library sums on the device": the_library_sums_on_the_device,
    "what waits starts before others do": what_waits_starts_before_others_do,
    "few messages wait": few_messages_wait,
    "copies overlap": copies_overlap,
    "moments": moments,
    "what nobody takes": nobody_takes,
    "a part that keeps nothing": a_part_that_keeps_nothing,
    "sends start at once": sends_start_at_once,
    "batches": batches,
    "messages, copies first": lambda: numbers("plain", "copies first"),
    "messages, copies last": lambda: numbers("plain", "copies last"),
    "messages, CUDA-aware": lambda: numbers("plain", "copies first", cuda_aware=True),
    "offload, copies last": lambda: numbers("offload", "copies last"),
    "offload, inward first": lambda: numbers("offload", "inward first"),
    "offload and back at once": lambda: numbers(
        "offload", "inward first", micro_batches=1
    ),
    "what comes back is early": comes_back_early,
    "memory of messages": memory_of_messages,
    "memory of offload": memory_of_offload,
    "sums": lambda: numbers("data 2", "copies last"),
    "state in parts": lambda: numbers("state in parts", "copies last"),
}


@contextmanager
def ends() -> Iterator[None]:
    """Raise in all ranks once each waits for what no device will do."""
    sleeps: dict[int, tuple[int, int]] = {}  # by thread: activity, sleeps since then

    def sleep(seconds: float) -> None:
        thread = threading.get_ident()
        activity, count = sleeps.get(thread, (-1, 0))
        count = count + 1 if activity == SimDevice.activity else 0
        sleeps[thread] = SimDevice.activity, count
        if count > MOST_SLEEPS:
            raise RuntimeError("all ranks wait for ever")
        time.sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_sleep", sleep)
        yield
