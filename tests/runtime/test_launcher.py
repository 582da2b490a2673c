"""Whether a process is one rank of a job: its launcher and MPI must agree."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import MODEL, run_words, start

from gemsc.base.process import SCRATCH_VARIABLE
from gemsc.errors import GemscError
from gemsc.runtime.process.sharing import local_place
from gemsc.runtime.transport import launcher
from gemsc.runtime.transport.choose import engine
from gemsc.runtime.transport.launcher import (
    check_launcher,
    check_size,
    is_first_started,
)

OF_TORCH = {"TORCHELASTIC_RUN_ID", "GEMSC_TORCH_STORE", "GEMSC_ENGINE"}
NAMES = {
    *OF_TORCH,
    *launcher.RANKS,
    launcher.SLURM_TASKS,
    "GEMSC_NUM_RANKS",
    "PMI_SIZE",
}
OPEN_MPI, MPICH = "Open MPI v5.0.11, package: x", "MPICH Version:\t4.3.2\nMore"


@pytest.fixture
def started(monkeypatch):
    """Return a function that sets what a launcher sets."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def started(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return started


def test_tasks_that_cannot_find_each_other_are_refused_before_mpi_starts(started):
    check_launcher()
    started(SLURM_STEP_NUM_TASKS=1)
    check_launcher()
    started(SLURM_STEP_NUM_TASKS=4)
    with pytest.raises(GemscError, match=r"started 4 processes.*\n.*srun --mpi=pmix"):
        check_launcher()
    started(PMIX_RANK=0)
    check_launcher()


@pytest.mark.parametrize(
    ("version", "variables", "cure"),
    [
        (OPEN_MPI, {"PMI_RANK": 0}, r"Open MPI v5\.0\.11\n.*srun --mpi=pmix"),
        (MPICH, {"OMPI_COMM_WORLD_RANK": 0, "PMIX_RANK": 0}, "MPICH.*\n.*--mpi=pmi2"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": 0, "PMIX_RANK": 0}, None),
        (OPEN_MPI, {"PMIX_RANK": 0}, None),
        (MPICH, {"PMIX_RANK": 0}, None),  # it may be built with PMIx
        (MPICH, {"PMI_RANK": 0}, None),
        (MPICH, {}, None),
    ],
)
def test_a_launcher_of_another_library_is_found_before_mpi_starts(
    started, monkeypatch, version, variables, cure
):
    begun = []
    library = SimpleNamespace(
        Is_initialized=lambda: False,
        Get_library_version=lambda: version,
        Init_thread=lambda: begun.append(os.environ.get(launcher.TRANSPORTS)),
    )
    package = SimpleNamespace(rc=lambda **options: None, MPI=library)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delenv(launcher.TRANSPORTS, raising=False)
    started(**variables)
    if cure is None:
        assert launcher.start_mpi() is library
        assert begun == [None if variables else "^sm"]
        assert launcher.TRANSPORTS not in os.environ
        return
    with pytest.raises(GemscError, match=cure):
        launcher.start_mpi()
    assert not begun


def test_what_mpi_leaves_lies_with_the_files_of_the_job(started, monkeypatch, tmp_path):
    seen = []
    library = SimpleNamespace(
        Is_initialized=lambda: False,
        Get_library_version=lambda: "Open MPI v5",
        Init_thread=lambda: seen.append(os.environ.get("TMPDIR")),
    )
    package = SimpleNamespace(rc=lambda **options: None, MPI=library)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started(OMPI_COMM_WORLD_RANK=0, **{SCRATCH_VARIABLE: scratch})
    launcher.start_mpi()
    assert seen == [str(scratch)]
    assert os.environ["TMPDIR"] == "/elsewhere"
    scratch.rmdir()
    with pytest.raises(SystemExit):  # the job has ended meanwhile
        launcher.start_mpi()
    assert len(seen) == 1


def test_mpi_must_count_as_many_ranks_as_were_started(started):
    check_size(1, MPICH)
    started(PMI_SIZE=2)
    check_size(2, MPICH)
    with pytest.raises(GemscError, match="2 ranks were started, but MPI counts 1"):
        check_size(1, MPICH)
    started(GEMSC_NUM_RANKS=3)
    with pytest.raises(GemscError, match=r"3 ranks .*\n.*MPICH Version:\t4\.3\.2: "):
        check_size(2, MPICH)


def test_one_process_speaks_for_all(started):
    assert is_first_started()
    started(SLURM_PROCID=0)
    assert is_first_started()
    started(PMI_RANK=1)
    assert not is_first_started()


@pytest.mark.slow
def test_ranks_started_by_hand_say_so_and_leave_nothing(command):
    Path("model.py").write_text(MODEL)
    assert command("compile", "model.py", "-o", "program").code == 0
    memory = Path("/dev/shm")
    before = set(memory.glob("sm_segment.*"))
    done = run_words(sys.executable, "program")
    assert done.code == 1
    assert "program has 2 ranks, but no mpirun started this one\nhelp: " in done.err
    assert set(memory.glob("sm_segment.*")) <= before


@pytest.mark.slow
def test_an_engine_that_the_launcher_does_not_start_is_refused_once(command):
    Path("model.py").write_text(MODEL)
    assert command("compile", "model.py", "-o", "program").code == 0
    says = (
        "error: --engine mpi does not match the launcher: torchrun started this rank\n"
        "help: start it with mpirun -n RANKS python or `gemsc run`, or leave out "
        "--engine\n"
    )
    for rank, said in enumerate((says, "")):
        by_torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": str(rank)}
        words = sys.executable, "program", "--engine", "mpi"
        done = run_words(*words, **by_torchrun)
        assert (done.code, done.err) == (1, said)
    done = run_words(sys.executable, "program", "--engine", "torch")
    assert done.code == 1
    says = (
        "error: --engine torch does not match the launcher: no torchrun started this "
    )
    assert done.err.startswith(says)
    done = start("run", "program", GEMSC_ENGINE="nccl")
    assert done.code == 1
    assert done.err == "error: GEMSC_ENGINE is 'nccl', not mpi or torch\n"
    done = start("run", "program", "--engine", "torch", "--hosts", "far:1,away:1")
    assert done.code == 1
    assert "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d" in done.err


BY_MPIRUN, BY_SRUN = {"OMPI_COMM_WORLD_RANK": "0"}, {"SLURM_PROCID": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, "mpi"),
        (TORCHRUN, "torch"),
        ({"GEMSC_TORCH_STORE": "file"}, "torch"),
        (BY_MPIRUN, "mpi"),
        (BY_SRUN | {"PMIX_RANK": "0"}, "mpi"),
        (TORCHRUN | BY_MPIRUN, "mpi"),  # mpirun in a rank of torchrun's
        (TORCHRUN | BY_MPIRUN | BY_SRUN, "mpi"),
        (TORCHRUN | BY_SRUN, "torch"),
        (TORCHRUN | BY_SRUN | {"PMIX_RANK": "0"}, "torch"),  # srun torchrun
        (TORCHRUN | BY_SRUN | {"PMI_RANK": "0"}, "torch"),
        (TORCHRUN | {"PMI_RANK": "0"}, "mpi"),  # MPICH's mpirun
    ],
)
def test_who_started_a_rank_last_chooses_its_engine(started, environment, found):
    started(**environment)
    assert engine() == found


def test_the_place_of_a_rank_is_that_of_the_nearest_launcher(started):
    """Under `srun torchrun` each task of Slurm's is torchrun, on a node of its own."""
    started(**BY_SRUN, **TORCHRUN, SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE="1(x2)")
    assert local_place({**os.environ, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}) == (
        3,
        4,
    )


def test_a_library_of_mpi_that_is_not_there_is_one_line(started, tmp_path):
    """As under srun, which does not load what the site's mpirun would."""
    pytest.importorskip("mpi4py")
    (tmp_path / "libmpi.so").touch()
    code = "from gemsc.runtime.transport.launcher import start_mpi\nstart_mpi()"
    given = {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    done = run_words(sys.executable, "-c", code, **given)
    says = "error: no MPI library for Python: cannot load MPI library\nhelp: "
    assert f"GemscError: {says}" in done.err
