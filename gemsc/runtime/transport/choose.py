"""Which library this rank's messages go by: that of whoever started it."""

from __future__ import annotations

from typing import Protocol

from gemsc.base.process import is_started_by_torch
from gemsc.errors import GemscError
from gemsc.runtime.transport.launcher import check_launcher
from gemsc.runtime.transport.mpi import MpiTransport
from gemsc.runtime.transport.torch_distributed import TorchTransport
from gemsc.runtime.transport.transport import Transport


class JobTransport(Transport, Protocol):
    """The transport of a process of its own, which may leave before the others."""

    def leave(self) -> None:
        """Tell all ranks that this one takes part in nothing more."""


def check_engine(wanted: str | None) -> None:
    """Make sure that this rank can talk to others, by the engine that is wanted.

    Raises:
        GemscError: its launcher starts ranks of the other one, or of none.
    """
    actual = engine()
    if actual == "mpi":
        check_launcher()
    if wanted is not None and wanted != actual:
        by = {"mpi": "no torchrun", "torch": "torchrun"}[actual]
        starts = {"mpi": "mpirun -n RANKS python", "torch": "torchrun"}[wanted]
        raise GemscError(
            f"--engine {wanted} does not match the launcher: {by} started this rank",
            help=f"start it with {starts} or `gemsc run`, or leave out --engine",
        )


def engine() -> str:
    """Return "torch" where torchrun or gemsc started this for it, or else "mpi"."""
    return "torch" if is_started_by_torch() else "mpi"


def start_transport() -> JobTransport:
    """Return this rank's end of the messages.

    Raises:
        GemscError: the library is not there, or its launcher is another one's.
    """
    if engine() == "torch":
        return TorchTransport()
    return MpiTransport()
