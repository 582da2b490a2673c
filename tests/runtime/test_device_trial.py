"""Messages of device memory are tried before they are relied on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sim_cuda import DEVICE, DirectTransport, SimDevice, on_device

from gemsc.errors import GemscError
from gemsc.runtime.transport import mpi, trial
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.transport.mpi import MpiTransport
from gemsc.runtime.transport.streams import CudaStreams, Streams
from gemsc.runtime.transport.trial import may_carry, try_message

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Lossy(DirectTransport):
    """A library that says it takes device memory and reads something else."""

    def send(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        return super().send(tensor.clone() * 0, dest, tag)


def tried(
    make: Callable[[LocalTransport, SimDevice], Any], ranks: int, seed: int
) -> list[bool]:
    def rank(inner: LocalTransport) -> bool:
        with on_device(seed + inner.rank) as device:
            return try_message(make(inner, device), CudaStreams(DEVICE, device))

    return run_local(ranks, rank)


@pytest.mark.parametrize("seed", range(4))
def test_what_arrives_tells_whether_device_memory_travels(seed: int) -> None:
    assert tried(DirectTransport, 3, seed) == [True] * 3
    assert tried(Lossy, 2, seed) == [False] * 2


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that says it takes GPU memory."""
    monkeypatch.setattr(trial, "library_takes_cuda", lambda: True)
    for name in (trial.CUDA_AWARE_VARIABLE, *trial.ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("claims")
def test_what_cannot_work_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_carry(GPU) == (True, "")
    assert may_carry(CPU) == (False, "")
    monkeypatch.setenv("GEMSC_CUDA_AWARE", "0")
    assert may_carry(GPU) == (False, "")
    monkeypatch.setenv("GEMSC_CUDA_AWARE", "yes")
    with pytest.raises(GemscError, match="GEMSC_CUDA_AWARE is 'yes', not 0 or 1"):
        may_carry(GPU)
    monkeypatch.delenv("GEMSC_CUDA_AWARE")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    may, note = may_carry(GPU)
    assert not may
    assert note.startswith("PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True")
    monkeypatch.setenv("GEMSC_CUDA_AWARE", "1")
    assert may_carry(GPU) == (True, "")
    monkeypatch.setattr(trial, "library_takes_cuda", lambda: False)
    assert may_carry(GPU) == (True, "")
    monkeypatch.delenv("GEMSC_CUDA_AWARE")
    assert may_carry(GPU) == (False, "")


@pytest.mark.parametrize(
    ("here", "there", "result", "note"),
    [
        ((True, True), (True, True), True, ""),
        ((True, False), (True, True), False, "go through the host"),
        ((True, True), (True, False), False, "go through the host"),
        ((True, True), (False, True), False, ""),
        ((False, True), (True, True), False, ""),
    ],
)
def test_all_ranks_send_in_one_way(
    here: tuple[bool, bool],
    there: tuple[bool, bool],
    result: bool,
    note: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each rank says whether it may, and then whether its message was right."""
    answers = iter(there)
    monkeypatch.setattr(mpi, "may_carry", lambda device: (here[0], ""))
    monkeypatch.setattr(mpi, "try_message", lambda transport, streams: here[1])
    transport: Any = object.__new__(MpiTransport)
    transport.rank, transport.size = 0, 2
    transport.all_gather_object = lambda value: [value, next(answers)]
    transport.try_device(Streams())
    assert transport.cuda_aware is result
    said = capsys.readouterr().err
    assert note in said if note else not said
