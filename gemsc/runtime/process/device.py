"""Which device a rank computes on: one GPU each, chosen before MPI starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemsc.errors import GemscError
from gemsc.runtime.transport.transport import Transport

__all__ = [
    "choose_device",
    "claim_device",
    "device_named",
    "exact_arithmetic",
    "require_gpu",
]

# A rank's number on its machine, as launchers tell it; the first that is set counts.
# A job step's own variable comes before those of the job that it may run in.
LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "MPI_LOCALRANKID",  # MPICH, Intel MPI
    "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
)
# the only one with which cuBLAS gives the same bits each time; read when it starts
CUBLAS_SETTING = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def require_gpu() -> None:
    """Refuse to go on without a GPU.

    Raises:
        GemscError: PyTorch finds none.
    """
    if not torch.cuda.is_available():
        raise GemscError(
            "--device cuda: PyTorch finds no GPU here",
            help="run it on the machine with the GPU, with a PyTorch for CUDA",
        )


def device_named(kind: str) -> torch.device:
    """Return the CPU, or the GPU that this process would take.

    Raises:
        GemscError: it is neither "cpu" nor "cuda", or there is no GPU.
    """
    if kind not in ("cpu", "cuda"):
        raise GemscError(f"unknown device '{kind}'", help="choose cpu or cuda")
    if kind == "cuda":
        require_gpu()
    return torch.device(kind)


def claim_device(
    wanted: torch.device | None = None, *, deterministic: bool = False
) -> None:
    """Make this rank's GPU the current one, if the launcher tells the rank's number.

    Call it before MPI starts: CUDA-aware libraries set themselves up on the device that
    is current then. `choose_device` has the last word.
    """
    if deterministic:  # before CUDA starts
        os.environ.setdefault(*CUBLAS_SETTING)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if torch.cuda.is_available() and (wanted is None or wanted.type == "cuda"):
        numbers = [os.environ.get(name, "") for name in LOCAL_RANK_VARIABLES]
        known = next((text for text in numbers if text.isdecimal()), None)
        if known is not None:
            torch.cuda.set_device(_gpu(wanted, int(known)))


def choose_device(
    transport: Transport, wanted: torch.device | None = None
) -> torch.device:
    """Return the device of this rank; a GPU becomes the current one.

    It is the `wanted` one. A GPU without a number is the one of the rank's number on
    its machine, and so is what nobody chose, where there are GPUs.

    Raises:
        GemscError: a GPU is wanted, and PyTorch finds none.
    """
    if wanted is None:
        wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.type != "cuda":
        return wanted
    require_gpu()
    device = _gpu(wanted, transport.local_rank)
    torch.cuda.set_device(device)  # of pinned memory and libraries, too
    return device


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Let two runs on a GPU be comparable, until the end.

    float32 is not rounded to TF32, and what has deterministic algorithms uses them;
    what has none only warns. On a CPU nothing changes.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault(*CUBLAS_SETTING)
    backends: Any = torch.backends
    places = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
    before = [place.fp32_precision for place in places]
    mode = torch.get_deterministic_debug_mode()
    benchmark = backends.cudnn.benchmark
    for place in places:
        place.fp32_precision = "ieee"
    torch.use_deterministic_algorithms(True, warn_only=True)
    backends.cudnn.benchmark = False
    try:
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
        torch.set_deterministic_debug_mode(mode)
        backends.cudnn.benchmark = benchmark


def _gpu(wanted: torch.device | None, local_rank: int) -> torch.device:
    if wanted is not None and wanted.index is not None:
        return wanted
    return torch.device("cuda", local_rank % torch.cuda.device_count())
