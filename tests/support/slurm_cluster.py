"""A Slurm of one machine, with a key, ports and files of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Cluster", "slurm"]

SECONDS = 240  # no job takes as long; one that goes back waits two minutes
DAEMONS = ("munged", "slurmctld", "slurmd")
PLACES = os.environ["PATH"] + ":/usr/sbin:/sbin"

CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={next_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
MinJobAge=300
NodeName=localhost NodeAddr=127.0.0.1 NodeHostname=localhost CPUs=8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=first Nodes=ALL PriorityTier=2 MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """What talks to the daemons."""

    conf: Path

    def ask(self, *words: object) -> str:
        """Run a command of Slurm and return what it says."""
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm."""
        return subprocess.run(
            [str(word) for word in words],
            env=os.environ | {"SLURM_CONF": str(self.conf)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def submit(self, script: Path, *arguments: object) -> str:
        """Submit a job that writes into out-<its number>."""
        words = "sbatch", "--parsable", "-o", "out-%j", script, *arguments
        return self.ask(*words)

    def state(self, job: str) -> str:
        """Return RUNNING, COMPLETED, ..."""
        return self.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def wait_for(self, job: str, text: str) -> str:
        """Return what a job has written once that is in it."""
        deadline = time.monotonic() + SECONDS
        path = Path(f"out-{job}")
        while text not in (said := path.read_text() if path.exists() else ""):
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
        return said

    def end_of(self, job: str) -> str:
        """Return how a job has ended."""
        deadline = time.monotonic() + SECONDS
        while (state := self.state(job)) in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, state
            time.sleep(0.2)
        return state


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """Start a cluster and end it; skip the test where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm")
    for tool in (*DAEMONS, "sbatch"):
        if shutil.which(tool, path=PLACES) is None:
            pytest.skip(f"Slurm needs {tool}")
    port = 20000 + os.getpid() % 10000 * 2
    folder.mkdir(mode=0o711)  # munged asks for it
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, port=port, next_port=port + 1))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    for name in ("spool", "state"):
        (folder / name).mkdir()
    files = (f"--{n}-file={folder}/{n}" for n in ("key", "pid", "log", "seed"))
    with ExitStack() as stack:
        for words in (
            ["munged", "-F", "--force", "-S", folder / "munge.socket", *files],
            ["slurmctld", "-D", "-c", "-f", conf],
            ["slurmd", "-D", "-N", "localhost", "-f", conf],
        ):
            stack.enter_context(_running(folder, [str(word) for word in words]))
        cluster = Cluster(conf)
        deadline = time.monotonic() + SECONDS
        while cluster.run("sinfo", "-h", "-o", "%T").stdout.strip() != "idle":
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.2)
        if "pmix" not in (listed := cluster.run("srun", "--mpi=list")).stdout:
            pytest.skip(f"this Slurm has no PMIx: {listed.stderr}")
        yield cluster


@contextmanager
def _running(folder: Path, words: list[str]) -> Iterator[None]:
    with (folder / f"{words[0]}.out").open("w") as out:
        path = shutil.which(words[0], path=PLACES)
        process = subprocess.Popen([str(path), *words[1:]], stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":  # a cluster to try things with
    with slurm(Path(sys.argv[1])) as cluster:
        print(f"export SLURM_CONF={cluster.conf}", flush=True)  # noqa: T201
        time.sleep(3600)
