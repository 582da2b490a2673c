"""Start ranks that talk by torch.distributed on this machine: what mpirun is for MPI.

    python -m gemsc.launch.torch_ranks FILE RANKS COMMAND ...

The ranks find each other by the file: nothing listens for that. What is said of a rank
that failed is said as Open MPI's mpirun does, so that one reader knows both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from gemsc.base.process import (
    ABORTED,
    OF_MPI,
    STORE_VARIABLE,
    TORCHRUN,
    end_with_parent,
    rank_settings,
)
from gemsc.errors import GemscError
from gemsc.launch.hosts import Host
from gemsc.runtime.process.stop import STOPPED

STORE = "torch-store"  # file in a job's scratch folder
LOOK_SECONDS = 0.02
KILL_SECONDS = 1.0  # from asking ranks to end to killing them, as Open MPI does
RULE = "-" * 76
OF_ANOTHER = {*OF_MPI, TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE"}


def torch_command(
    num_ranks: int,
    argv: Sequence[str],
    *,
    scratch: Path,
    hosts: Sequence[Host] = (),
    env: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts `argv` on every rank, and its environment.

    The user's own environment wins over ours, and `env` over it.

    Raises:
        GemscError: there are `hosts`.
    """
    check_one_machine(hosts)
    settings = rank_settings(num_ranks, is_alone=True)
    given = {n: v for n, v in os.environ.items() if n not in OF_ANOTHER}
    module = "gemsc.launch.torch_ranks"
    words = [sys.executable, "-m", module, str(scratch / STORE), str(num_ranks)]
    return [*words, *argv], settings | given | dict(env or {})


def check_one_machine(hosts: Sequence[Host]) -> None:
    """Make sure that no other host is to take ranks.

    Raises:
        GemscError: one is.
    """
    if hosts:
        raise GemscError(
            "--engine torch starts ranks only on this machine",
            help=f"on each host type torchrun --nnodes {len(hosts)} --nproc-per-node "
            f"{hosts[0].slots} --rdzv-backend c10d --rdzv-endpoint "
            f"{hosts[0].name}:29400 PROGRAM, or leave --engine out",
        )


@dataclass
class _Ranks:
    """The processes of a job."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    asked: int = 0  # the signal that ends all
    deadline: float = 0.0  # for those that were asked

    def signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Give the ranks a signal; all but SIGUSR1 end them a little later."""
        if number != signal.SIGUSR1 and not self.asked:
            self.asked, self.deadline = number, time.monotonic() + KILL_SECONDS
        self.signal(number if number == signal.SIGUSR1 else signal.SIGTERM)

    def wait(self, aborted: Path) -> int:
        """Wait for the end of all, and return the exit code; one that fails ends all.

        Where it could not say why, that is said here.
        """
        code, left = 0, dict(enumerate(self.processes))
        while left:
            ended = {rank: p for rank, p in left.items() if p.poll() is not None}
            for rank, process in ended.items():
                del left[rank]
                if code in (0, STOPPED) and process.returncode != 0:
                    code = process.returncode
                    if code != STOPPED and not self.asked:
                        if not aborted.exists():
                            _tell(rank, process)
                        self.signal(signal.SIGKILL)
            if self.asked and time.monotonic() > self.deadline:
                self.signal(signal.SIGKILL)
            if not ended:
                time.sleep(LOOK_SECONDS)
        if self.asked and code not in (0, STOPPED):
            code = -self.asked
        return 128 - code if code < 0 else code


def _tell(rank: int, process: subprocess.Popen[bytes]) -> None:
    """Say how a rank ended."""
    code = process.returncode
    if code < 0:
        text = (
            f"mpirun noticed that process rank {rank} with PID {process.pid} on node "
            f"localhost exited on signal {-code} ({signal.strsignal(-code)})."
        )
    else:
        text = (
            "mpirun detected that one or more processes exited with non-zero status:\n"
            f"  Process name: [torch,{rank}]\n  Exit code: {code}"
        )
    sys.stderr.write(f"{RULE}\n{text}\n{RULE}\n")
    sys.stderr.flush()


def main(store: str, num_ranks: str, *argv: str) -> int:
    """Start the ranks and return the exit code of all."""
    ranks = _Ranks()
    caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    for number in caught:
        signal.signal(number, ranks.pass_on)
    for rank in range(int(num_ranks)):
        place = {"RANK": str(rank), "WORLD_SIZE": num_ranks}
        place |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": num_ranks}
        process = subprocess.Popen(
            argv,
            env=os.environ | place | {STORE_VARIABLE: store},
            stdin=subprocess.DEVNULL,
            process_group=0,  # a signal for the group goes to this process alone
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGKILL),
        )
        ranks.processes.append(process)
        if ranks.asked:
            break
    return ranks.wait(Path(store + ABORTED))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
