"""Several ranks on one device: which ranks share it, on one machine.

Two copies of a pipeline of four stages, --per-device 2: a GPU holds stages s and 3 - s

    copy 0  stages 0 1 2 3  on GPUs 0 1 2 3
    copy 1  stages 0 1 2 3  on GPUs 3 2 1 0
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from gemsc.errors import GemscError

# A rank's number on its machine, and how many there are, as launchers tell it; the
# first that is set counts. A job step's own come before those of the job that it may
# run in.
LOCAL_RANKS = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALRANKID": "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "PMI_LOCAL_RANK": "PMI_LOCAL_SIZE",
    "SLURM_LOCALID": "SLURM_STEP_TASKS_PER_NODE",  # 4(x2),3: of each node
}
OF_NODES = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class LocalPlace(NamedTuple):
    """A rank among those of its machine; `size` is 0 where the launcher is silent."""

    rank: int
    size: int


def local_place(environment: Mapping[str, str] = os.environ) -> LocalPlace | None:
    """Return what the launcher tells of this rank; None if it tells nothing."""
    for rank, size in LOCAL_RANKS.items():
        if environment.get(rank, "").isdecimal():
            sizes = [
                int(number)
                for number, times in OF_NODES.findall(environment.get(size, ""))
                for _ in range(int(times or 1))
            ]
            node = int(environment.get("SLURM_NODEID", "0")) if len(sizes) > 1 else 0
            return LocalPlace(int(environment[rank]), sizes[node] if sizes else 0)
    return None


def check_sharing(per_device: int, num_ranks: int, num_gpus: int) -> None:
    """Make sure that so many ranks of a machine fill its GPUs, or groups of its cores.

    Raises:
        GemscError: they do not.
    """
    option = f"--per-device {per_device}"
    if num_gpus == 0:
        if num_ranks % per_device:
            fits = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
            raise GemscError(
                f"{option} does not divide the {num_ranks} ranks on this machine",
                help=f"use --per-device {' or '.join(map(str, fits))}",
            )
        return
    wanted = per_device * num_gpus
    if num_ranks == wanted:
        return
    ways = []
    if num_ranks % num_gpus == 0:
        ways.append(f"use --per-device {num_ranks // num_gpus}")
    if num_ranks % per_device == 0 and num_ranks < wanted:
        few = ",".join(map(str, range(num_ranks // per_device)))
        ways.append(f"set CUDA_VISIBLE_DEVICES={few}")
    ways.append(f"compile for {wanted} ranks, with more --data")
    raise GemscError(
        f"{option} on {_gpus(num_gpus)} is for {wanted} ranks, and {num_ranks} are on "
        "this machine",
        help=", or ".join(ways),
    )


def shared_device(
    local_rank: int, per_device: int, copy_ranks: int, num_ranks: int
) -> int:
    """Return the number of the GPU of one of `num_ranks` ranks on a machine.

    `per_device` copies of `copy_ranks` ranks each share that many GPUs, every second
    one in reverse order: stages that hold much lie beside stages that hold little, and
    work while these wait. Where the ranks are no such copies, neighbours share.
    """
    if num_ranks % (per_device * copy_ranks):
        return local_rank // per_device
    copy, place = divmod(local_rank, copy_ranks)
    if copy % per_device % 2:
        place = copy_ranks - 1 - place
    return copy // per_device * copy_ranks + place


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"
