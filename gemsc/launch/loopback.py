"""A job on one machine listens on its loopback interface, and nowhere else.

Open MPI's prterun listens for daemons of other hosts on all addresses, whatever its
settings say (PRRTE 3 and 4 bind to INADDR_ANY). On one machine there are none: what it
listens with is tied to the loopback interface, from outside.

    before   0.0.0.0:36455        *:54679
    after    0.0.0.0%lo:36455     *%lo:54679
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

LOOK_SECONDS = 5e-3  # from one look to the next
MORE_SECONDS = 0.2  # for what is opened after the first one
LONGEST_SECONDS = 10.0  # a mpirun that listens on nothing
ANYWHERE = ("0.0.0.0", "::")
_PIDFD_GETFD = 438  # the number of the system call, on every processor


def keep_to_loopback(pid: int) -> None:
    """Tie what a child process comes to listen with to the loopback interface.

    It returns at once, and a thread does it. A system that does not allow it (Linux
    before 5.7, a container without ptrace) leaves the process as it is.
    """
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        threading.Thread(target=_watch, args=(pid,), daemon=True).start()


def _watch(pid: int) -> None:
    begin = time.monotonic()
    end = begin + LONGEST_SECONDS
    with contextlib.suppress(OSError):  # it has ended, or it is not allowed
        process = os.pidfd_open(pid)
        try:
            while time.monotonic() < end:
                for listener in _open_to_all(pid, process):
                    listener.setsockopt(
                        socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo"
                    )
                    end = min(end, time.monotonic() + MORE_SECONDS)
                time.sleep(LOOK_SECONDS)
        finally:
            os.close(process)


def _open_to_all(pid: int, process: int) -> Iterator[socket.socket]:
    """Yield the sockets with which a process listens on all addresses."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed
            if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                continue
            with _copy(process, int(name)) as sock:
                if _is_open_to_all(sock):
                    yield sock


def _is_open_to_all(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    interface = sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
    return sock.getsockname()[0] in ANYWHERE and not interface.strip(b"\0")


def _copy(process: int, number: int) -> socket.socket:
    """Return a socket of another process, with a number of this one."""
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.syscall(_PIDFD_GETFD, process, number, 0)
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return socket.socket(fileno=descriptor)
