"""A simulated CUDA device: streams are queues that run in any order events allow.

    with SimDevice(seed) as device:                # one rank, in one thread
        streams = CudaStreams(DEVICE, device)      # it stands for torch.cuda
        x = torch.ones(3).to(DEVICE)

A tensor of the device is a tensor full of NaN; its data are in a block of the device,
which only queued work and the message library touch. An operator runs once for the
shapes of its results, and the real call goes to the queue of the current stream; views
are made at once. Queues move only when the host asks for something (an event, a number,
a copy to the host), in an order drawn from the seed. A block that Python drops is wiped
in the order of its stream, and used again for the next tensor of that size: whoever
reads or writes it too early or too late spoils numbers.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sim_operators import (
    is_view,
    mapped,
    returned_argument,
    tensors_in,
    written_arguments,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gemsc.runtime.transport.local import LocalGroup, LocalTransport

__all__ = ["DEVICE", "POLICIES", "DirectTransport", "SimDevice", "on_device"]

DEVICE = torch.device("cpu", 1)  # of autograd's view: it needs no device of its own
HOST = torch.device("cpu")
NAN = 255  # in every byte: no number in any floating-point type
GRAIN = 64  # bytes; blocks of sizes that round to the same are used again
MOST_LOOKS = 10_000  # of the host, one after the other, while no queue moves
aten = torch.ops.aten

# which stream goes first if several could: 0 computes, 1 copies outward, 2 inward
POLICIES: dict[str, tuple[int, ...]] = {
    "random": (),
    "copies last": (0, 2, 1),
    "copies first": (1, 2, 0),
    "inward first": (2, 0, 1),
    "keeps up": (),  # the device does at once what it is told
}
ORDERS = [name for name in POLICIES if name != "keeps up"]


class DeviceTensor(torch.Tensor):
    """What of a device tensor Python does without asking the dispatcher."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return DEVICE

    def cpu(self) -> Tensor:
        return aten._to_copy(self, device=HOST)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        result = self if dtype in (None, self.dtype) else super().to(dtype)
        if device not in (None, DEVICE):
            return aten._to_copy(result, device=HOST, non_blocking=non_blocking)
        return result

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any) -> Any:
        raise TypeError("a device tensor has no numpy array")


class Mark:
    """A point of a queue, and the device's clock there."""

    done = False
    milliseconds = 0.0


class Stream:
    """A queue of calls, marks and marks to wait for."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], object] | Mark | Wait] = deque()
        device.streams.append(self)

    def wait_event(self, event: Event) -> None:
        if event.mark is not None and not event.mark.done:
            self.queue.append(Wait(event.mark))

    def wait_stream(self, stream: Stream) -> None:
        event = self.device.Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = self.device.Event()
        event.record(self)
        event.synchronize()

    @property
    def can_move(self) -> bool:
        head = self.queue[0] if self.queue else None
        return head is not None and not (isinstance(head, Wait) and not head.mark.done)

    def move(self) -> None:
        head = self.queue.popleft()
        if isinstance(head, Mark):
            head.done = True
            head.milliseconds = float(self.device.num_run)
        elif not isinstance(head, Wait):
            head()


@dataclass
class Wait:
    mark: Mark


class Event:
    """What torch.cuda.Event does, recorded once; an operator takes a millisecond."""

    def __init__(self, device: SimDevice, enable_timing: bool) -> None:
        self.device = device
        self.is_timed = enable_timing
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        self.mark = Mark()
        stream.queue.append(self.mark)

    def query(self) -> bool:
        self.device.move_some()
        return self.mark is None or self.mark.done

    def synchronize(self) -> None:
        self.device.num_synchronized += 1
        while self.mark is not None and not self.mark.done:
            self.device.move()

    def elapsed_time(self, end: Event) -> float:
        if not (self.is_timed and end.is_timed):
            raise ValueError("both events are needed with enable_timing=True")
        if self.mark is None or end.mark is None:
            raise ValueError("both events must be recorded")
        if not (self.mark.done and end.mark.done):
            raise RuntimeError("device not ready")
        return end.mark.milliseconds - self.mark.milliseconds


@dataclass
class Block:
    """Memory of the device: the data of one storage while that lives."""

    storage: StorageWeakRef
    data: Tensor
    stream: Stream
    num_bytes: int


class SimDevice(TorchDispatchMode):
    """One device, for the thread that enters it; it stands for torch.cuda, too."""

    activity = 0  # of all devices: calls and moves

    def __init__(self, seed: int = 0, policy: str = "") -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.order = POLICIES[policy or ORDERS[seed % len(ORDERS)]]
        self.keeps_up = policy == "keeps up"
        self.eagerness = self.random.choice([1, 4, 30])  # how much moves at a look
        self.streams: list[Stream] = []
        self.blocks: dict[int, Block] = {}
        self.free: dict[tuple[Stream, int], list[Tensor]] = defaultdict(list)
        self.pinned: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = self.peak_bytes = self.peak_pinned_bytes = 0
        self.looks = 0  # since a queue has moved
        self.num_computed = 0  # calls of operators
        self.num_run = 0  # of these, by the device
        self.num_synchronized = 0  # waits of the host for an event
        self.current = Stream(self)

    # ------------------------------------------- what torch.cuda has

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        return Stream(self)

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802
        return Event(self, enable_timing)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # --------------------------------------------------- the queues

    def move(self) -> None:
        """Run the head of one queue that may run."""
        able = [n for n, stream in enumerate(self.streams) if stream.can_move]
        if not able:
            raise RuntimeError("the device waits for ever")
        first = [n for n in self.order if n in able]
        number = first[0] if first else self.random.choice(able)
        self.streams[number].move()
        self.looks = 0
        SimDevice.activity += 1

    def move_some(self) -> None:
        """Run a little: the host has looked."""
        self.looks += 1
        if self.looks > MOST_LOOKS:
            raise RuntimeError("the host looks at an idle device for ever")
        for _ in range(self.random.randint(1, self.eagerness)):
            if any(stream.can_move for stream in self.streams):
                self.move()

    # --------------------------------------------------- the memory

    def collect(self) -> None:
        """Take back the blocks of storages that are gone."""
        gone = [key for key, block in self.blocks.items() if block.storage.expired()]
        for key in gone:
            block = self.blocks.pop(key)
            data = block.data
            self.bytes -= block.num_bytes
            block.stream.queue.append(lambda data=data: data.fill_(NAN))
            self.free[block.stream, len(data)].append(data)

    def allot(self, tensor: Tensor) -> Tensor:
        """Make a fresh tensor one of the device, with a block of the current stream."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.blocks:
            size = -(-max(storage.nbytes(), 1) // GRAIN) * GRAIN
            free = self.free[self.current, size]
            data = free.pop() if free else torch.full((size,), NAN, dtype=torch.uint8)
            reference = StorageWeakRef(storage)
            block = Block(reference, data, self.current, storage.nbytes())
            self.blocks[storage._cdata] = block
            self.bytes += block.num_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(NAN)
        return self.wrapped(tensor)

    def wrapped(self, tensor: Tensor) -> Tensor:
        return torch.Tensor._make_subclass(DeviceTensor, tensor)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.blocks

    def data_of(self, tensor: Tensor) -> Tensor:
        """Return a device tensor's data, where they are."""
        block = self.blocks[tensor.untyped_storage()._cdata]
        result = torch.empty(0, dtype=tensor.dtype).set_(
            block.data.untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        result = result.conj() if tensor.is_conj() else result
        return torch._neg_view(result) if tensor.is_neg() else result

    def is_pinned(self, tensor: Tensor) -> bool:
        known = self.pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and not known[0].expired()

    def pin(self, tensor: Tensor) -> None:
        """Make fresh memory of the host pinned; queued copies keep it, too."""
        storage = tensor.untyped_storage()
        alive = [pair for pair in self.pinned.items() if not pair[1][0].expired()]
        self.pinned = dict(alive)
        self.pinned[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        num_bytes = sum(size for _, size in self.pinned.values())
        self.peak_pinned_bytes = max(self.peak_pinned_bytes, num_bytes)
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(NAN)

    # ------------------------------------------------ the operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        SimDevice.activity += 1
        result = self._called(func, args, dict(kwargs or {}))
        while self.keeps_up and any(stream.can_move for stream in self.streams):
            self.move()
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.collect()
        tensors = list(tensors_in((args, kwargs)))
        is_here = kwargs.get("device") == DEVICE
        if func is aten.set_.source_Storage_storage_offset:
            return func(*args, **kwargs)
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if not is_here and not any(map(self.owns, tensors)):
            return self._on_host(func, args, kwargs)
        if func is aten._to_copy.default:
            return self._to_copy(args[0], **kwargs)
        if func is aten.copy_.default and self.owns(args[0]) != self.owns(args[1]):
            return self._copy(*args, **kwargs)
        return self._on_device(func, args, kwargs, tensors)

    def _on_device(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        if kwargs.get("pin_memory"):
            raise RuntimeError("only memory of the host can be pinned")
        if kwargs.get("device") == DEVICE:
            kwargs["device"] = HOST
            if func is aten.empty_like.default and not self.owns(args[0]):
                return self.allot(func(*args, **kwargs))
        if func is aten._unsafe_view.default or is_view(func):
            return mapped(self.wrapped, func(*args, **kwargs))
        for tensor in tensors:
            if not self.owns(tensor) and tensor.dim():
                raise RuntimeError(f"{func} gets tensors of two devices")
        return self._enqueue(func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pinned:
            self.pin(result)
        return result

    def _enqueue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of an operator, which runs later."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if draws else None
        like_args, like_kwargs = mapped(self._example, (args, kwargs))
        example = func(*like_args, **like_kwargs)
        real_args, real_kwargs = mapped(self._real, (args, kwargs))
        is_number = not func._schema.is_mutable and not list(tensors_in(example))
        if is_number:  # the host waits for it
            self.current.synchronize()
            return func(*real_args, **real_kwargs)
        written = written_arguments(func, args, kwargs)
        is_tuple = isinstance(example, (tuple, list))
        examples = list(example) if is_tuple else [example]
        results: list[Any] = []
        fresh: list[tuple[int, Tensor]] = []  # number of a result, and where it goes
        for number, sample in enumerate(examples):
            name = returned_argument(func, number)
            if name is not None:
                results.append(written[name])
            elif isinstance(sample, Tensor):
                results.append(self.allot(sample))
                fresh.append((number, self.data_of(results[-1])))
            else:
                results.append(sample)

        def run() -> None:
            self.num_run += 1
            drawn = self._drawn(state, func, real_args, real_kwargs)
            for number, data in fresh:
                data.copy_(drawn[number] if is_tuple else drawn)

        if func not in (aten.empty.memory_format, aten.new_empty.default):
            self.current.queue.append(run)
            self.num_computed += 1
        if not is_tuple:
            return results[0]
        return tuple(results) if isinstance(example, tuple) else results

    def _drawn(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Call with the random numbers that were due when the host called."""
        if state is None:
            return func(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            return func(*args, **kwargs)

    def _example(self, tensor: Tensor) -> Tensor:
        """Return something of the same shape, which the call for shapes may change."""
        if self.owns(tensor):
            return torch.zeros_like(self.data_of(tensor))
        return tensor.clone()

    def _real(self, tensor: Tensor) -> Tensor:
        """Return the data of a device tensor; a number of the host's as it is now."""
        return self.data_of(tensor) if self.owns(tensor) else tensor.clone()

    # ---------------------------------------------------- the copies

    def _to_copy(self, source: Tensor, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        non_blocking = kwargs.pop("non_blocking", False)
        kwargs.pop("pin_memory", None)
        if device in (None, DEVICE) and self.owns(source):
            return self._enqueue(aten._to_copy.default, (source,), kwargs)
        if not self.owns(source):  # converted on the host
            source = aten._to_copy.default(source, **kwargs) if kwargs else source
            target = self.allot(torch.empty_like(source))
        else:
            if kwargs.get("dtype") not in (None, source.dtype):
                source = self._enqueue(aten._to_copy.default, (source,), kwargs)
            target = torch.empty_like(self.data_of(source))
        return self._copy(target, source, non_blocking)

    def _copy(
        self, target: Tensor, source: Tensor, non_blocking: bool = False
    ) -> Tensor:
        """Copy between host and device; only pinned memory is touched later.

        Where the memory is pageable, the host waits for all that is queued before.
        """
        host = source if self.owns(target) else target
        is_late = non_blocking and self.is_pinned(host)
        to, from_ = self._memory(target), self._memory(source)
        if host is source and not is_late:
            from_ = source.clone()
        self.current.queue.append(lambda: to.copy_(from_))
        if not is_late:
            self.current.synchronize()
        return target

    def _memory(self, tensor: Tensor) -> Tensor:
        return self.data_of(tensor) if self.owns(tensor) else tensor.detach()


class DirectTransport:
    """A library that reads and writes blocks, at once: in messages, and in sums."""

    cuda_aware = True
    sums_on_device = True

    def __init__(self, inner: LocalTransport, device: SimDevice) -> None:
        self._inner = inner
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, tensor: Tensor, dest: int, tag: int) -> Any:
        return self._inner.send(self._raw(tensor), dest, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self._inner.receive(self._raw(tensor), source, tag)

    def group(self, ranks: tuple[int, ...], key: str = "") -> DirectGroup:
        return DirectGroup(self._inner.group(ranks, key), self._raw)

    def _raw(self, tensor: Tensor) -> Tensor:
        return self._device.data_of(tensor) if self._device.owns(tensor) else tensor


class DirectGroup:
    """Sums of blocks; only of groups that all members have connected."""

    def __init__(self, inner: LocalGroup, raw: Callable[[Tensor], Tensor]) -> None:
        self.ranks = inner.ranks
        self._inner = inner
        self._raw = raw
        self._is_connected = False

    def connect(self) -> None:
        self._is_connected = True

    def all_reduce(self, tensor: Tensor) -> Any:
        return self._inner.all_reduce(self._block(tensor))

    def reduce_scatter(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Any:
        return self._inner.reduce_scatter(
            self._block(tensor), sizes, self._block(result)
        )

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], result: Tensor) -> Any:
        return self._inner.all_gather(self._block(tensor), sizes, self._block(result))

    def _block(self, tensor: Tensor) -> Tensor:
        raw = self._raw(tensor)
        assert raw is tensor or self._is_connected
        return raw


@contextmanager
def on_device(seed: int, policy: str = "") -> Iterator[SimDevice]:
    """Give this thread a device."""
    device = SimDevice(seed, policy)
    with device:
        yield device
