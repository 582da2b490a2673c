"""A real Slurm, of this machine alone: ranks of srun, and the job that is written."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import MODEL
from slurm_cluster import Cluster, slurm

from gemsc.launch.start import last_step

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm") / "s") as started:
        yield started


@pytest.fixture
def program(cluster, command) -> Path:
    Path("model.py").write_text(MODEL)
    assert command("compile", "model.py", "-o", "program").code == 0
    return Path("program")


@pytest.mark.slow
def test_a_job_trains_under_slurm(cluster, program):
    job = cluster.submit(program / "job.sbatch", "--steps", "2")
    assert cluster.end_of(job) == "COMPLETED", Path(f"out-{job}").read_text()
    saved = program / "runs" / f"job-{job}"
    assert f"saved {saved.absolute()}" in Path(f"out-{job}").read_text()
    assert (saved / "latest").is_symlink()


@pytest.mark.nightly
def test_ranks_that_srun_does_not_connect_say_so_once(cluster, program):
    done = cluster.run("srun", "--mpi=none", "-n", "2", sys.executable, program)
    assert done.returncode == 1
    assert done.stderr.count("srun started 2 processes, and MPI cannot") == 1
    assert done.stderr.count("help: use srun --mpi=pmix -n 2") == 1


@pytest.mark.nightly
def test_a_task_may_be_torchrun(cluster, program):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    words = (*torchrun, program, "--steps", "2", "--save", "saved")
    done = cluster.run("srun", "--mpi=pmix", "-n", "1", *words)
    assert done.returncode == 0, done.stderr
    assert last_step(Path("saved")) == 2


@pytest.mark.nightly
def test_a_job_that_is_told_to_stop_goes_on_after_a_requeue(cluster, program):
    job = cluster.submit(program / "job.sbatch", "--epochs", "60")
    cluster.wait_for(job, "epoch 3/60")
    cluster.ask("scancel", "--signal=USR1", job)
    said = cluster.wait_for(job, "stopped on request at step")
    assert cluster.end_of(job) == "COMPLETED", Path(f"out-{job}").read_text()
    step = int(said.partition("stopped on request at step ")[2].partition(";")[0])
    assert 6 <= step < 180
    assert last_step(program / "runs" / f"job-{job}") == 180
    assert "Restarts=1 " in cluster.ask("scontrol", "show", "job", job)


@pytest.mark.nightly
def test_a_job_that_is_preempted_goes_on_where_it_was(cluster, program):
    job = cluster.submit(program / "job.sbatch", "--epochs", "60")
    cluster.wait_for(job, "epoch 3/60")
    takes_all = "-p", "first", "-n", "8", "-o", "first", "--wrap", "sleep 1"
    first = cluster.ask("sbatch", "--parsable", *takes_all)
    assert cluster.end_of(first) == "COMPLETED"
    assert cluster.end_of(job) == "COMPLETED", Path(f"out-{job}").read_text()
    assert "Restarts=1 " in cluster.ask("scontrol", "show", "job", job)
    run = program / "runs" / f"job-{job}"
    begun = [
        start["step"] for start in json.loads((run / "run.json").read_text())["starts"]
    ]
    assert len(begun) == 2
    assert begun[1] >= 6
    steps = [line.split(",")[0] for line in (run / "log.csv").read_text().splitlines()]
    assert steps[1:] == [str(step) for step in range(1, 181)]
