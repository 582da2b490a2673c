"""A breakpoint in a rank, which has no terminal: it waits until one connects."""

from __future__ import annotations

import os
import socket
import sys
from pdb import Pdb


class Breakpoints:
    """What `breakpoint()` does on a rank; all of them share one connection."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._debugger: Pdb | None = None

    @classmethod
    def install(cls, rank: int) -> None:
        """Let `breakpoint()` wait, unless the rank has a terminal or another debugger.

        The environment may name one (PYTHONBREAKPOINT), and so may a program.
        """
        is_set = "PYTHONBREAKPOINT" in os.environ
        is_set = is_set or sys.breakpointhook is not sys.__breakpointhook__
        if not (is_set or (sys.stdin is not None and sys.stdin.isatty())):
            sys.breakpointhook = cls(rank)

    def __call__(self) -> None:
        """Say where to connect, and give the debugger to whom does."""
        if self._debugger is None:
            with socket.create_server(("localhost", 0)) as server:
                host, port = socket.gethostname(), server.getsockname()[1]
                where = f"rank {self.rank} on {host} waits at a breakpoint"
                sys.stderr.write(f"{where}: nc localhost {port}\n")
                sys.stderr.flush()
                terminal = server.accept()[0]
            # apart: a file that is written forgets what it has read ahead
            files = terminal.makefile("r"), terminal.makefile("w")
            self._debugger = Pdb(stdin=files[0], stdout=files[1])
        self._debugger.set_trace(sys._getframe(1))
