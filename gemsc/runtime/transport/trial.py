"""Whether MPI carries memory of the device: one message tells, before the first step.

What a library says of itself (MPIX_Query_cuda_support) is how it was built. Whether it
works here depends on more: its settings, its drivers, and how the memory was allotted.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from gemsc.errors import GemscError
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.transport.waiting import wait

CUDA_AWARE_VARIABLE = "GEMSC_CUDA_AWARE"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NUM_ELEMENTS = 2**19  # 2 MiB, more than libraries send along with a header
TAG = 0


def may_carry(device: torch.device) -> tuple[bool, str]:
    """Return whether to try messages of this device's memory; if not, perhaps a note.

    GEMSC_CUDA_AWARE=0 forbids it, 1 asks for it whatever the library says.

    Raises:
        GemscError: the variable has another value.
    """
    setting = os.environ.get(CUDA_AWARE_VARIABLE, "")
    if setting not in ("", "0", "1"):
        raise GemscError(f"{CUDA_AWARE_VARIABLE} is {setting!r}, not 0 or 1")
    if device.type != "cuda" or setting == "0":
        return False, ""
    if setting == "" and not library_takes_cuda():
        return False, ""
    for name in ALLOCATOR_VARIABLES:
        if setting == "" and "expandable_segments:True" in os.environ.get(name, ""):
            return False, (
                f"{name} has expandable_segments:True, and other processes cannot map "
                "such memory: messages go through the host"
            )
    return True, ""


def try_message(transport: Transport, streams: Streams) -> bool:
    """Send memory of the device around all ranks; whether what came here is right.

    The transport takes such memory already. All ranks call this.
    """
    rank, size = transport.rank, transport.size
    before, after = (rank - 1) % size, (rank + 1) % size
    numbers = torch.arange(NUM_ELEMENTS, dtype=torch.int32, device=streams.device)
    sent = streams.in_place(numbers + rank)
    room = streams.device_buffer((NUM_ELEMENTS,), torch.int32)
    while not (sent.ready() and room.ready()):
        pass
    wait(
        transport.receive(room.tensor, before, TAG),
        transport.send(sent.tensor, after, TAG),
    )
    return bool((room.tensor == numbers + before).all())


def library_takes_cuda() -> bool:
    """Ask the MPI library in this process; Open MPI and MPICH have this function."""
    for path in _libraries_of_mpi():
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def _libraries_of_mpi() -> list[str]:
    """Paths of the shared libraries of MPI in this process."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux: no CUDA either
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith("libmpi"))
