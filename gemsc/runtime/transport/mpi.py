"""The transport of real jobs: MPI, through mpi4py."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import pickle
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy
from torch import Tensor

from gemsc.base.process import end_with_launcher
from gemsc.errors import say_note
from gemsc.runtime.transport.launcher import check_size, start_mpi
from gemsc.runtime.transport.mpi_group import MpiGroup
from gemsc.runtime.transport.mpi_messages import InSteps, Lane, TestRequest
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.transport.transport import check_message, members
from gemsc.runtime.transport.trial import may_carry, try_message
from gemsc.runtime.transport.waiting import (
    Awaited,
    Request,
    Wait,
    check_in_waits,
    check_no_more,
    is_gone,
    wait,
)

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

LEFT_SECONDS = 2.0  # for what a rank has sent before it left
LAST_SECONDS = 5.0  # for the library to end all ranks
SHORTEST_SLEEP = 1e-3
LONGEST_SLEEP = 20e-3
COPY_SECONDS = 100e-6  # a turn as long has moved data


class MpiTransport:
    """One rank's end of the messages.

    Messages, control data and every group have a communicator of their own, apart from
    whatever else uses MPI in this process.
    """

    sums_on_device = False

    def __init__(self) -> None:
        end_with_launcher()
        self._mpi = start_mpi()
        world: MPI.Intracomm = self._mpi.COMM_WORLD
        self.rank = world.Get_rank()
        self.size = world.Get_size()
        check_size(self.size, self._mpi.Get_library_version())
        self._messages = world.Dup()
        self._control = world.Dup()
        self._turns = InSteps()
        self._lane = Lane(self._mpi, self._messages, self._turns)
        self._groups: dict[tuple[tuple[int, ...], str], MpiGroup] = {}
        self._is_open = True
        self._left: dict[int, float] = {}  # when this rank has heard of it
        check_in_waits(self._check_left)
        self.cuda_aware = False
        machine = self._control.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        self.local_rank = machine.Get_rank()
        machine.Free()
        self._progress = Progress(self._mpi) if self.size > 1 else None

    def try_device(self, streams: Streams) -> None:
        """Send memory of the device from each rank to the next; see `cuda_aware`."""
        may, note = may_carry(streams.device)
        self.cuda_aware = self.size > 1 and all(self.all_gather_object(may))
        if self.cuda_aware:
            arrived = self.all_gather_object(try_message(self, streams))
            self.cuda_aware = all(arrived)
            if not self.cuda_aware:
                note = "MPI changes messages of GPU memory: they go through the host"
        if note and self.rank == 0:
            say_note(note)

    def send(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Start to send the tensor's bytes."""
        check_message(self, tensor, dest, tag)
        what = f"message {tag} from rank {self.rank} to rank {dest}"
        return self._lane.send(tensor, dest, tag, Awaited(what, (dest,)))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Request:
        """Start to receive into the tensor's bytes."""
        check_message(self, tensor, source, tag)
        what = f"message {tag} from rank {source} to rank {self.rank}"
        return self._lane.receive(tensor, source, tag, Awaited(what, (source,)))

    def wait(self, *requests: Request) -> None:
        """Return when all requests are complete."""
        wait(*requests)

    def progress(self) -> None:
        """Give the library one turn: about 1 us, more if data is there to be moved."""
        self._turns.take()
        self._control.Iprobe()

    def group(self, ranks: tuple[int, ...], key: str = "") -> MpiGroup:
        """Return the group of these ranks."""
        ranks = members(ranks, self.rank)
        if (ranks, key) not in self._groups:
            comm = self._mpi.COMM_SELF
            if len(ranks) > 1:
                included = self._control.Get_group().Incl(ranks)
                comm = self._control.Create_group(included)
            self._groups[ranks, key] = MpiGroup(
                self._mpi, comm, ranks, key, self._turns
            )
        return self._groups[ranks, key]

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        what = "what each rank tells all others"
        data = numpy.frombuffer(bytearray(pickle.dumps(value)), numpy.uint8)
        sizes = numpy.zeros(self.size, numpy.int64)
        self._finish(self._control.Iallgather(numpy.array([data.size]), sizes), what)
        everything = numpy.empty(sizes.sum(), numpy.uint8)
        self._finish(self._control.Iallgatherv(data, [everything, sizes]), what)
        parts = numpy.split(everything, numpy.cumsum(sizes)[:-1])
        return [pickle.loads(part.tobytes()) for part in parts]

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._finish(self._control.Ibarrier(), "all to come to one point")

    def _finish(self, request: MPI.Request, what: str) -> None:
        need = Awaited(what, tuple(range(self.size)))
        wait(TestRequest(self._turns, request, need))

    def leave(self) -> None:
        """Tell all ranks that this one takes part in nothing more; see `_check_left`.

        Nobody answers, and ranks that end, too, never read it.
        """
        for rank in range(self.size if self._is_open else 0):
            if rank != self.rank:
                self._control.Isend([b"", self._mpi.BYTE], rank)

    def _check_left(self, waiting: Wait) -> None:
        """Raise an error if what a wait takes is of a rank that has left."""
        status = self._mpi.Status()
        while self._is_open and self._control.Iprobe(status=status):
            rank = status.Get_source()
            self._control.Recv([bytearray(), self._mpi.BYTE], rank)
            self._left[rank] = time.monotonic()
        for need in waiting.needs:
            for rank in need.ranks:
                if time.monotonic() - self._left.get(rank, math.inf) > LEFT_SECONDS:
                    raise is_gone(need, f"rank {rank} has left its loop", self.rank)

    def abort(self, code: int) -> NoReturn:
        """End all ranks of the job with this exit code; what was printed is kept."""
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # it ends even if mpirun does not answer
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=nowhere)
        self._mpi.COMM_WORLD.Abort(code)
        raise SystemExit(code)

    def close(self) -> None:
        """Wait for the others politely, so that MPI's own end need not."""
        self.barrier()
        self._is_open = False
        if self._progress is not None:
            self._progress.stop()
        check_no_more(self._check_left)
        for group in self._groups.values():
            group.free()
        self._groups.clear()
        self._messages.Free()
        self._control.Free()


class Progress:
    """A thread that gives MPI a turn now and then while a rank computes, until `stop`.

    MPI moves data only while it is called. What is larger than a few KiB waits for its
    receiver, who is in a layer of the model:

        without    compute --------------------- | receive ==== | compute
        with       compute -.---.---===---.---.- | compute            . a turn, = data

    PyTorch lets other threads run while an operation computes. A turn that finds
    nothing takes 60 to 75 us of a busy core (of which 40 are to wake up), so that 50 in
    a second take 0.4 % of it. There is none where MPI may not be called by two threads.
    """

    def __init__(self, mpi: Any) -> None:
        self._ends = False
        self._comm: MPI.Intracomm | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        if mpi.Query_thread() == mpi.THREAD_MULTIPLE:
            self._comm = mpi.COMM_SELF.Dup()  # of its own: it takes nothing from others
            self._thread.start()
            atexit.register(self.stop)  # before MPI ends, which was registered earlier

    def _run(self) -> None:
        assert self._comm is not None
        seconds = LONGEST_SLEEP
        while not self._ends:
            time.sleep(seconds)  # half as dear as to wait for an event
            begin = time.thread_time()
            self._comm.Iprobe()
            moved = time.thread_time() - begin > COPY_SECONDS
            seconds = SHORTEST_SLEEP if moved else min(2 * seconds, LONGEST_SLEEP)

    def stop(self) -> None:
        """End the thread, before MPI ends."""
        if self._comm is not None:
            self._ends = True
            self._thread.join()
            self._comm.Free()
            self._comm = None
            atexit.unregister(self.stop)
