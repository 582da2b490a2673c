"""The cores of this rank: it binds itself to them, whoever started it."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import torch

from gemsc.base.cores import Cores, Topology, bind, share_of
from gemsc.base.process import (
    is_started_by_torch,
    threads_are_chosen,
    usable_cores,
)
from gemsc.errors import GemscError
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.transport.waiting import spin

BOOT = Path("/proc/sys/kernel/random/boot_id")


def share_cores(
    transport: Transport, how: str = "none", *, num_helpers: int = 0
) -> None:
    """Let each rank use its part of its machine's cores; all ranks call this.

    `how` is that of `--bind`. A rank has as many threads as cores in shares, unless the
    user chose. One that "numa" or "core" gives more cores than there are processes that
    help it waits without a pause.

    Raises:
        GemscError: the ranks cannot be bound so.
    """
    machine, usable = _machine(), usable_cores()
    everyone = transport.all_gather_object((machine, usable))
    here = [rank for rank, (where, _) in enumerate(everyone) if where == machine]
    me = here.index(transport.rank)
    allowed = [everyone[rank][1] for rank in here]
    cores = bind(allowed, Topology.read(), how)
    if cores[me] != usable and not _bind(cores[me]):
        if how != "auto":
            raise GemscError(
                f"--bind {how}: the system does not let this rank use the cores "
                f"{','.join(map(str, sorted(cores[me])))}",
                help="leave out --bind, or let the launcher bind the ranks",
            )
        cores = allowed
    share = share_of(me, cores)
    if not threads_are_chosen():
        torch.set_num_threads(max(1, share))
    # who asked for it has told that nobody else needs the cores, quotas of containers
    # among them; gloo has threads that do, MPI moves data when it is asked
    is_asked = how in ("numa", "core")
    if is_asked and share > num_helpers and not is_started_by_torch():
        spin()


def _machine() -> tuple[str, str]:
    """Return what tells this machine from all others, containers and namespaces too."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT.read_text()
    return platform.node(), boot


def _bind(cores: Cores) -> bool:
    """Bind all threads of this process; whether it could be done."""
    if hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended, or what is found below
                os.sched_setaffinity(int(thread), cores)
    return usable_cores() == cores
