"""MPI moves large messages while a rank computes: a thread gives it turns.

MPI moves data only while it is called. What is larger than a few KiB waits for its
receiver, who is in a layer of the model:

    without    compute --------------------- | receive ==== | compute
    with       compute -.---.---===---.---.- | compute            . a turn, = data

PyTorch lets other threads run while an operation computes. A turn that finds nothing
takes 60 to 75 us of a busy core (of which 40 are to wake up), so that 50 in a second
take 0.4 % of it.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

SHORTEST_SLEEP = 1e-3
LONGEST_SLEEP = 20e-3
COPY_SECONDS = 100e-6  # a turn as long has moved data


class Progress:
    """A thread that gives MPI a turn now and then, until `stop`.

    There is none where MPI may not be called by two threads.
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
