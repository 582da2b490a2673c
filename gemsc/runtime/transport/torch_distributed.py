"""The second transport of real jobs: torch.distributed, with gloo and NCCL.

gloo carries control data, messages, and sums on the host; where every rank has a GPU of
its own, NCCL sums what is there. gloo moves data in threads of its own, and honours
tags. That a message is there it tells only who waits for it: each message in flight has
a thread that does, at no cost.

    receive  ---->  gloo  ---->  its thread: wait()  ---->  done

It takes a message that is too short for one that fits. So before the first message to a
rank with a tag goes another one, with its size.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import platform
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from gemsc.base.dtypes import HALF
from gemsc.base.process import (
    ABORTED,
    STORE_VARIABLE,
    TORCHRUN,
    end_with_launcher,
)
from gemsc.errors import GemscError, InternalError, say_note
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.transport.torch_meeting import dist, meet, network
from gemsc.runtime.transport.torch_requests import (
    AwaitedWork,
    OwnMessage,
    TorchRequest,
    Waiters,
)
from gemsc.runtime.transport.transport import (
    add_in_order,
    check_memory,
    check_message,
    check_sum,
    members,
    shape_text,
)
from gemsc.runtime.transport.waiting import (
    Awaited,
    Request,
    Wait,
    check_in_waits,
    check_no_more,
    is_gone,
    wait,
)

T = TypeVar("T")

NO_LIMIT = timedelta(days=365)  # the hang watch has the limit that the user chose
MANY_ON_A_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARED = (
    "ranks share a GPU, which NCCL takes from 2.30 on and with "
    f"{MANY_ON_A_GPU}=1: sums go through the host"
)
SHARE_OF_GPU = 1 / 4  # for one sum of all ranks on a GPU: several may be in flight
LEFT_SECONDS = 2.0  # for a rank's last messages, and for a launcher to end the others
OF_SIZES = 2**16  # tags of messages that tell the size of another one

_count = itertools.count()  # of this process's transports: each meets others anew


class TorchGroup:
    """Some of the ranks, with connections of their own; `name` is for reports."""

    def __init__(
        self, transport: TorchTransport, ranks: tuple[int, ...], name: str
    ) -> None:
        self.ranks = ranks
        self._name = name
        self._transport = transport
        self._me = ranks.index(transport.rank)
        members = ",".join(map(str, ranks))
        self._place = f"group {members} {name}"
        self._gloo: Any = None
        self._nccl: Any = None
        if len(ranks) > 1:
            self._gloo = transport.connect(self._place, ranks)

    def connect(self) -> None:
        """Make what sums on GPUs need; it takes until all members have come."""
        is_alone = len(self.ranks) == 1
        if self._transport.sums_on_device and self._nccl is None and not is_alone:
            self._nccl = self._transport.connect_gpus(self._place, self.ranks)

    def close(self) -> None:
        """Let NCCL end what it has on the GPU; all members do so."""
        if self._nccl is not None:
            self._nccl.shutdown()

    def _library(self, tensor: Tensor) -> Any:
        """Return what sums such a tensor; None if there is no other member."""
        if not tensor.is_cuda or len(self.ranks) == 1:
            return self._gloo
        if self._nccl is None:
            raise InternalError(f"the group '{self._name}' was not connected")
        return self._nccl

    def all_reduce(self, tensor: Tensor) -> Request:
        """Start the sum; 16 bit numbers travel and are added as 32 bit ones."""
        check_sum(tensor, on_device=self._transport.sums_on_device)
        tensor = tensor.detach()
        library = self._library(tensor)
        if library is None:
            return self._request(None, "sum")
        wide = {**dict.fromkeys(HALF, torch.float32), torch.int16: torch.int32}
        staged = tensor.to(wide.get(tensor.dtype, tensor.dtype))
        try:
            work = library.allreduce([staged])
        except RuntimeError as error:
            raise InternalError(f"no sum of {shape_text(tensor)}: {error}") from error
        then = partial(tensor.copy_, staged) if staged is not tensor else None
        return self._request(work, "sum", (tensor, staged), then)

    def reduce_scatter(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start the sum: all members exchange their terms, each adds up its own part.

        So the order of its terms is that of the members.
        """
        what = "sum of shares"
        tensor, result = tensor.detach(), result.detach()
        part = torch.split(tensor, list(sizes))[self._me]
        library = self._library(tensor)
        if library is None:
            result.copy_(part)
            return self._request(None, what)
        arrived = tensor.new_empty(part.numel() * len(sizes))
        work = library.alltoall_base(
            _bytes(arrived),
            _bytes(tensor),
            [part.nbytes] * len(sizes),
            [size * tensor.itemsize for size in sizes],
        )
        terms = list(torch.split(arrived, part.numel())) if part.numel() else [part]
        then = partial(add_in_order, terms, result)
        return self._request(work, what, (tensor, arrived, result), then)

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int], result: Tensor
    ) -> Request:
        """Start to bring all members' tensors together; they travel in equal sizes."""
        tensor, result = tensor.detach(), result.detach()
        library = self._library(tensor)
        if library is None:
            result.copy_(tensor)
            return self._request(None, "gathering")
        longest = max(sizes)
        brought = tensor.new_zeros(longest)
        brought[: tensor.numel()] = tensor
        arrived = tensor.new_empty(longest * len(sizes))
        work = library._allgather_base(_bytes(arrived), _bytes(brought))

        def put_together() -> None:
            rows = arrived.view(len(sizes), longest)
            torch.cat([row[:n] for row, n in zip(rows, sizes, strict=True)], out=result)

        tensors = (brought, arrived, result)
        return self._request(work, "gathering", tensors, put_together)

    def _request(
        self,
        work: Any,
        what: str,
        tensors: tuple[Tensor, ...] = (),
        then: Callable[[], object] | None = None,
    ) -> Request:
        need = Awaited(f"the {what} '{self._name}'", self.ranks)
        return TorchRequest(work, need, self._transport.is_lost, tensors, then)


class TorchTransport:
    """One rank's end of the messages.

    Messages, control data and every group have connections of their own, apart from
    whatever else uses torch.distributed in this process.

    Raises:
        GemscError: this PyTorch has none.
    """

    cuda_aware = False  # NCCL has no tags: messages of GPUs go through the host

    def __init__(self) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise GemscError(
                "this PyTorch has no torch.distributed with gloo",
                help="use mpirun, or another build of PyTorch",
            )
        end_with_launcher()
        store, self.rank, self.size = meet()
        self._store = dist.PrefixStore(f"gemsc {next(_count)}", store)
        self.local_rank = int(os.environ["LOCAL_RANK"])
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self._device = network(is_alone=local_size == self.size)
        everyone = tuple(range(self.size))
        self._messages = self.connect("messages", everyone)
        self._control = self.connect("control", everyone)
        self._waiters = Waiters()
        self._to_self: defaultdict[int, tuple[deque[OwnMessage], deque[OwnMessage]]]
        self._to_self = defaultdict(lambda: (deque(), deque()))
        self._sized: set[tuple[int, int, bool]] = set()  # what was sent and received
        self._groups: dict[tuple[tuple[int, ...], str], TorchGroup] = {}
        self.sums_on_device = False
        self._gpu: torch.device | None = None
        self._blocks_of_nccl: int | None = None  # of a sum, where ranks share a GPU
        self._is_open = True
        self._left: dict[int, float] = {}  # when this rank has heard of it
        check_in_waits(self._check_left)

    def connect(self, name: str, ranks: tuple[int, ...]) -> Any:
        """Return connections of some ranks, who all ask for them."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = NO_LIMIT
        store = dist.PrefixStore(name, self._store)
        me = ranks.index(self.rank)
        return dist.ProcessGroupGloo(store, me, len(ranks), options)

    def connect_gpus(self, name: str, ranks: tuple[int, ...]) -> Any:
        """Return connections of some ranks' GPUs; waits until all have asked."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NO_LIMIT
        if self._blocks_of_nccl is not None:
            options.config.max_ctas = self._blocks_of_nccl
        store = dist.PrefixStore(f"gpus of {name}", self._store)
        me = ranks.index(self.rank)
        made = dist.ProcessGroupNCCL(store, me, len(ranks), options)
        made.eager_connect_single_device(self._gpu)
        return made

    def try_device(self, streams: Streams) -> None:
        """Let NCCL sum what is on the GPUs, if it takes them; see `sums_on_device`."""
        everyone = self.all_gather_object(_gpu_of(streams.device))
        if self.size == 1 or None in everyone:
            return
        sharing = max(Counter(everyone).values())
        if sharing > 1 and MANY_ON_A_GPU not in os.environ:
            if self.rank == 0:
                say_note(SHARED)
            return
        if sharing > 1:  # blocks wait for those of other ranks: all have to fit
            gpu = torch.cuda.get_device_properties(streams.device)
            blocks = SHARE_OF_GPU * gpu.multi_processor_count / sharing
            self._blocks_of_nccl = max(1, int(blocks))
        self.sums_on_device, self._gpu = True, streams.device

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send the tensor's bytes."""
        return self._post(tensor, dest, tag, is_send=True)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Request:
        """Start to receive into the tensor's bytes."""
        return self._post(tensor, source, tag, is_send=False)

    def _post(self, tensor: Tensor, peer: int, tag: int, *, is_send: bool) -> Request:
        check_message(self, tensor, peer, tag)
        tensor = tensor.detach()
        if peer == self.rank:
            return self._post_own(tensor, tag, is_send=is_send)
        source, dest = (self.rank, peer) if is_send else (peer, self.rank)
        need = Awaited(f"message {tag} from rank {source} to rank {dest}", (peer,))
        start = self._messages.send if is_send else self._messages.recv
        parts, then = [(tensor, tag)], None
        if (peer, tag, is_send) not in self._sized:
            self._sized.add((peer, tag, is_send))
            size = torch.tensor([tensor.nbytes if is_send else -1])
            parts.insert(0, (size, tag + OF_SIZES))
            then = None if is_send else partial(_check_size, tensor, size, need)
        try:
            work = AwaitedWork([start([_bytes(t.view(-1))], peer, n) for t, n in parts])
        except RuntimeError as error:
            self.is_lost(need, error)
        self._waiters.start(work.await_it)
        return TorchRequest(work, need, self.is_lost, tuple(t for t, _ in parts), then)

    def _post_own(self, tensor: Tensor, tag: int, *, is_send: bool) -> Request:
        """Start one end of a message to this rank itself."""
        mine, others = self._to_self[tag] if is_send else reversed(self._to_self[tag])
        message = OwnMessage(tensor)
        if not others:
            mine.append(message)
            return message
        other = others.popleft()
        source, target = (message, other) if is_send else (other, message)
        _bytes(target.tensor.view(-1)).copy_(_bytes(source.tensor.view(-1)))
        message.is_there = other.is_there = True
        return message

    def wait(self, *requests: Request) -> None:
        """Return when all requests are complete."""
        wait(*requests)

    def progress(self) -> None:
        """Do nothing: gloo has threads."""

    def group(self, ranks: tuple[int, ...], key: str = "") -> TorchGroup:
        """Return the group of these ranks."""
        ranks = members(ranks, self.rank)
        if (ranks, key) not in self._groups:
            self._groups[ranks, key] = TorchGroup(self, ranks, key)
        return self._groups[ranks, key]

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        what = "what each rank tells all others"
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length, sizes = torch.tensor([data.numel()]), torch.empty(self.size).long()
        self._finish(self._control._allgather_base(sizes, length), what)
        longest = int(sizes.max())
        brought = torch.zeros(longest, dtype=torch.uint8)
        brought[: data.numel()] = data
        everything = torch.empty(self.size * longest, dtype=torch.uint8)
        self._finish(self._control._allgather_base(everything, brought), what)
        rows = everything.view(self.size, longest)
        pairs = zip(rows, sizes.tolist(), strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in pairs]

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._finish(self._control.barrier(), "all to come to one point")

    def _finish(self, work: Any, what: str) -> None:
        wait(
            TorchRequest(work, Awaited(what, tuple(range(self.size))), self.is_lost, ())
        )

    def leave(self) -> None:
        """Tell all ranks that this one takes part in nothing more; see `_check_left`.

        Who waits for it looks once a second, or loses the connection.
        """
        with contextlib.suppress(RuntimeError):  # who keeps the store has ended
            if self._is_open:
                self._store.set(_left(self.rank), "")

    def _check_left(self, waiting: Wait) -> None:
        """Raise an error if what a wait takes is of a rank that has left."""
        for need in waiting.needs:
            for rank in need.ranks:
                if self._has_left(rank):
                    raise is_gone(need, f"rank {rank} has left its loop", self.rank)

    def _has_left(self, rank: int) -> bool:
        """Whether a rank has left long ago: what it has sent is here."""
        with contextlib.suppress(RuntimeError):  # who keeps the store has ended
            if rank not in self._left and self._store.check([_left(rank)]):
                self._left[rank] = time.monotonic()
        return time.monotonic() - self._left.get(rank, math.inf) > LEFT_SECONDS

    def is_lost(self, need: Awaited, error: Exception) -> NoReturn:
        """Raise an error: a connection broke, for a rank has ended.

        Its launcher, if it still can, ends this one, too, and says more.
        """
        for rank in need.ranks:
            self._has_left(rank)
        time.sleep(2 * LEFT_SECONDS)
        for rank in filter(self._has_left, need.ranks):
            how = f"rank {rank} has left its loop"
            raise is_gone(need, how, self.rank) from error
        others = [rank for rank in need.ranks if rank != self.rank]
        who = f"rank {others[0]} has" if len(others) == 1 else "a rank has"
        raise is_gone(need, f"{who} ended before the others", self.rank) from error

    def abort(self, code: int) -> NoReturn:
        """End all ranks of the job with this exit code; what was printed is kept."""
        sys.stdout.flush()
        sys.stderr.flush()
        if TORCHRUN not in os.environ:
            with contextlib.suppress(OSError):
                Path(os.environ[STORE_VARIABLE] + ABORTED).touch()
        os._exit(code)  # its launcher ends the others

    def close(self) -> None:
        """Wait for the others."""
        self.barrier()
        self._is_open = False
        check_no_more(self._check_left)
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def _gpu_of(device: torch.device) -> tuple[str, str] | None:
    """Return the machine and the number of a GPU that NCCL may use; else None."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return platform.node(), str(torch.cuda.get_device_properties(device).uuid)


def _left(rank: int) -> str:
    return f"left {rank}"


def _check_size(tensor: Tensor, size: Tensor, need: Awaited) -> None:
    """Raise an InternalError unless as many bytes were sent as the tensor has."""
    if int(size) != tensor.nbytes:
        raise InternalError(f"{need.what}: {int(size)} bytes came, not {tensor.nbytes}")


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a flat tensor."""
    check_memory(tensor, cuda_aware=True)
    return tensor.view(torch.uint8)
