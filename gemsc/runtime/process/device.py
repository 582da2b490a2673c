"""Which GPU a rank computes on: its own, or one that it shares."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemsc.base.process import is_started_by_mpirun, return_large_blocks
from gemsc.errors import GemscError, say_note
from gemsc.runtime.process.sharing import (
    LocalPlace,
    check_sharing,
    local_place,
    shared_device,
    use_mps,
)
from gemsc.runtime.transport.launcher import is_first_started
from gemsc.runtime.transport.transport import Transport

# the only one with which cuBLAS gives the same bits each time; read when it starts
BYTES_OF_RSS = 1 if sys.platform == "darwin" else 1024
CONTEXT_BYTES = 2**29  # of CUDA itself, in each process
CUBLAS_SETTING = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# NCCL adds in another order with another algorithm, and takes what looks fastest
NCCL_SETTINGS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
# PyTorch then counts GPUs without starting CUDA, which has to come after MPS
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def require_gpu() -> None:
    """Refuse to go on without a GPU.

    Raises:
        GemscError: PyTorch finds none.
    """
    if not torch.cuda.is_available():
        raise GemscError(
            "--device cuda: PyTorch does not find a GPU",
            help="run it on a machine with a GPU, with a PyTorch that is built for "
            "CUDA",
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


def num_gpus(kind: str) -> int:
    """Return how many GPUs there are for ranks on "cpu", "cuda" or what is there."""
    if kind == "cpu" or not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


def claim_device(
    wanted: torch.device | None = None,
    *,
    deterministic: bool = False,
    per_device: int | None = None,
    copy_ranks: int = 1,
) -> torch.device | None:
    """Make this rank's GPU the current one, if the launcher tells the rank's number.

    Call it before MPI starts: CUDA-aware libraries set themselves up on the device that
    is current then. `choose_device` has the last word on what is returned: the GPU that
    `per_device` ranks share, of copies of the model with `copy_ranks` each, or else
    what is `wanted`.

    Raises:
        GemscError: the ranks of this machine are not `per_device` for each of its GPUs.
    """
    if deterministic:  # before CUDA starts
        os.environ.setdefault(*CUBLAS_SETTING)
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    place, gpus = local_place(), num_gpus("auto" if wanted is None else wanted.type)
    is_open = wanted is None or wanted.index is None
    if per_device is not None and is_open:
        return _share(per_device, copy_ranks, gpus) or wanted
    if gpus and place is not None:
        torch.cuda.set_device(_gpu(wanted, place.rank))
        if is_open and place.size > gpus and is_first_started():
            say_note(
                f"{place.size} ranks take turns on {gpus} GPU{'s' * (gpus > 1)}; "
                "--per-device lets them share"
            )
    return wanted


def _share(per_device: int, copy_ranks: int, gpus: int) -> torch.device | None:
    """Return the GPU that this rank shares, now the current one; None on a CPU."""
    place = local_place()
    if place is None and not is_started_by_mpirun():
        place = LocalPlace(0, 1)
    if place is None or not place.size:
        raise GemscError(
            f"--per-device {per_device}: the launcher does not say which ranks are on "
            "this machine",
            help="start the ranks with `gemsc run`, mpirun or srun, or leave out "
            "--per-device",
        )
    check_sharing(per_device, place.size, gpus)
    if not gpus:
        return None
    if per_device > 1 and (reason := use_mps()) and is_first_started():
        say_note(
            f"no MPS ({reason}): the {per_device} ranks on a GPU take turns; expect no "
            "gain over one"
        )
    index = shared_device(place.rank, per_device, copy_ranks, place.size)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(1 / per_device, device)
    return device


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


def cap_memory(device: torch.device, cap: int | None) -> None:
    """Let PyTorch refuse what goes beyond the bytes that a rank was compiled for.

    CUDA's context is part of them, but not of what PyTorch hands out. On a CPU nothing
    is refused, but what is freed is not kept. Without a cap nothing changes.
    """
    if cap is None:
        return
    if device.type != "cuda":
        return_large_blocks()
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = max(cap - CONTEXT_BYTES, cap // 2) / total
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(share, before), device)


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has used so far, on its device."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_OF_RSS


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
