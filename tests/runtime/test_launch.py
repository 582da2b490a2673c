"""Starting ranks: the command, its environment, output, signals and exit codes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import is_alive
from nightly import at_night

from gemsc.errors import GemscError
from gemsc.launch import mpirun
from gemsc.launch.hosts import Host
from gemsc.launch.launch import TIMED_OUT, launch
from gemsc.launch.mpirun import find_mpirun, in_our_words, mpirun_command
from gemsc.runtime.process import scratch
from gemsc.runtime.process.status import STATUS_VARIABLE

RULE = b"-" * 74 + b"\n"
ABORT = (
    RULE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n"
    b"  Proc: [[46500,1],1]\n  Errorcode: 1\n\nNOTE: invoking MPI_ABORT causes\n" + RULE
)
KILLED = (
    RULE + b"prterun noticed that process rank 1 with PID 3960 on node vm exited on\n"
    b"signal 9 (Killed).\n" + RULE
)
EXIT_CODE = (
    RULE + b"prterun detected that one or more processes exited with non-zero status,\n"
    b"thus causing the job to be terminated. The first process to do so was:\n\n"
    b"   Process name: [prterun-vm-3970@1,1]\n   Exit code:    3\n" + RULE
)

LOST = (
    RULE + b"PRTE has lost communication with a remote daemon.\n\n"
    b"  HNP daemon   : [prterun-a-1@0,0] on node a\n"
    b"  Remote daemon: [prterun-a-1@0,1] on node b\n\nThis is usually due to\n" + RULE
)
LEFT = (
    RULE
    + b"prterun has exited due to process rank 1 with PID 19838 on node vm exiting\n"
    b"improperly. There are three reasons this could occur:\n\n1. this process\n" + RULE
)


def fake_mpirun(folder: Path, version: str) -> Path:
    path = folder / "mpirun"
    path.write_text(f'#!/bin/sh\necho "{version}"\n')
    path.chmod(0o755)
    return path


def use_mpirun(monkeypatch, folder: Path, version: str) -> Path:
    path = fake_mpirun(folder, version)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: path)
    return path


def filtered(text: bytes, piece: int) -> bytes:
    pieces = (text[begin : begin + piece] for begin in range(0, len(text), piece))
    return b"".join(in_our_words(pieces, lambda rank, how: f"rank {rank} {how}"))


# finding and asking mpirun


def test_the_mpirun_beside_this_python_comes_before_the_path(tmp_path, monkeypatch):
    beside, path = tmp_path / "beside", tmp_path / "path"
    beside.mkdir()
    path.mkdir()
    fake_mpirun(path, "Open MPI")
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(path))
    assert find_mpirun() == path / "mpirun"
    fake_mpirun(beside, "Open MPI")
    assert find_mpirun() == beside / "mpirun"


def test_no_mpirun_is_told_with_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GemscError, match=r"help: pip install 'gemsc\[mpi\]'"):
        find_mpirun()


def test_open_mpi_gets_its_settings(tmp_path, monkeypatch):
    path = use_mpirun(monkeypatch, tmp_path, "mpirun (Open MPI) 5.0.11")
    command, env = mpirun_command(4, ["python", "x.py"], scratch=tmp_path)
    assert command == [
        *(str(path), "-n", "4", "--host", "localhost:4", "--bind-to", "none"),
        *("python", "x.py"),
    ]
    assert env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert env["PRTE_MCA_prte_tmpdir_base"] == str(tmp_path)
    assert env["GEMSC_NUM_RANKS"] == "4"


def test_open_mpi_has_a_home_where_the_caller_has_none(tmp_path, monkeypatch):
    use_mpirun(monkeypatch, tmp_path, "mpirun (Open MPI) 5.0.11")
    monkeypatch.delenv("HOME")
    assert Path(mpirun_command(2, ["python"])[1]["HOME"]).is_dir()


def test_hydra_gets_its_own_options(tmp_path, monkeypatch):
    path = use_mpirun(monkeypatch, tmp_path, "HYDRA build details:")
    command, env = mpirun_command(2, ["python"])
    assert command == [
        *(str(path), "-n", "2", "-launcher", "fork", "-bind-to", "none", "python")
    ]
    assert not any(name.startswith("PRTE_MCA_prte") for name in env)


def test_settings_of_the_user_win(tmp_path, monkeypatch):
    use_mpirun(monkeypatch, tmp_path, "mpirun (Open MPI) 5.0.11")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert mpirun_command(2, ["python"])[1]["OMP_NUM_THREADS"] == "7"


# what mpirun says


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (ABORT, b""),
        (KILLED, b"rank 1 was ended by signal 9 (Killed)\n"),
        (EXIT_CODE, b"rank 1 ended with exit code 3\n"),
        (LOST, b"rank None host b was lost\n"),
        (LEFT, b"rank 1 left before the others had ended\n"),
        (
            b"a\n" + ABORT + KILLED + b"\0",
            b"a\nrank 1 was ended by signal 9 (Killed)\n",
        ),
        (RULE + b"a table\n" + RULE, RULE + b"a table\n" + RULE),
        (RULE + RULE + b"a\n", RULE + RULE + b"a\n"),
        (RULE, RULE),
        (KILLED[:-80], KILLED[:-80]),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_only_paragraphs_of_mpirun_itself_are_summarized(text, shown, piece):
    assert filtered(text, piece) == shown


# with a program in the part of mpirun: `-n 2 --host ... --bind-to none` come first


@pytest.fixture
def shell_mpirun(tmp_path, monkeypatch):
    """An mpirun that runs the command once."""
    path = tmp_path / "mpirun"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Open MPI" && exit\n'
        'shift 6\nexec "$@"\n'
    )
    path.chmod(0o755)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: path)
    return path


def run(script: str, folder: Path, **options) -> tuple[int, str]:
    with (folder / "stderr").open("w+", newline="") as stderr:
        code = launch(2, ["sh", "-c", script], stderr=stderr, **options)
        stderr.seek(0)
        return code, stderr.read()


@pytest.mark.parametrize(
    ("has_gpu", "answer", "pml"),
    [(True, "true", None), (True, "false", "ob1"), (False, "true", "ob1")],
)
def test_a_library_for_gpus_chooses_its_own_parts(
    has_gpu, answer, pml, monkeypatch, tmp_path
):
    path = use_mpirun(monkeypatch, tmp_path, "mpirun (Open MPI) 5.0.8")
    info = path.with_name("ompi_info")
    text = f"mca:opal:base:param:opal_built_with_cuda_support:value:{answer}"
    info.write_text(f'#!/bin/sh\necho "{text}"\n')
    info.chmod(0o755)
    driver = tmp_path if has_gpu else tmp_path / "none"
    monkeypatch.setattr(mpirun, "NVIDIA_DRIVER", driver)
    monkeypatch.delenv("OMPI_MCA_pml", raising=False)
    assert mpirun_command(2, ["python"])[1].get("OMPI_MCA_pml") == pml


def test_exit_code_folder_and_environment_are_passed_on(shell_mpirun, tmp_path):
    code, text = run(
        "pwd >&2; echo $ADDED >&2; exit 7", tmp_path, cwd=tmp_path, env={"ADDED": "yes"}
    )
    assert (code, text) == (7, f"{tmp_path}\nyes\n")


def test_a_signal_that_ends_mpirun_is_an_exit_code(shell_mpirun, tmp_path):
    says = "error: mpirun was ended by signal 9 (Killed)\n"
    assert run("kill -9 $$", tmp_path) == (137, says)


def test_ranks_that_left_with_a_checkpoint_are_heard_though_mpirun_ends_first(
    shell_mpirun, tmp_path
):
    script = "printf 'stopped at step 3' > $GEMSC_STATUS_FOLDER/reported; exit 1"
    assert run(script, tmp_path) == (75, "stopped at step 3\n")
    killed = f"{script.removesuffix('exit 1')} cat {tmp_path}/text >&2; exit 137"
    (tmp_path / "text").write_bytes(KILLED)
    says = "rank 1 was ended by signal 9 (Killed)\n"
    assert run(killed, tmp_path) == (137, says)


@pytest.mark.parametrize(
    ("code", "reported", "says"),
    [
        (1, "touch", ""),
        (1, "printf 'stopped at step 3' >", "rank 1 ended with exit code 1\n"),
        (1, "true", "rank 1 ended with exit code 1\n"),
        (3, "touch", "rank 1 ended with exit code 3\n"),
    ],
)
def test_what_was_reported_is_not_told_again(
    code, reported, says, shell_mpirun, tmp_path
):
    text = EXIT_CODE.replace(b" 3", f" {code}".encode())
    (tmp_path / "text").write_bytes(text)
    script = f"{reported} $GEMSC_STATUS_FOLDER/reported; cat {tmp_path}/text >&2"
    assert run(f"{script}; exit {code}", tmp_path) == (code, says)


@pytest.mark.parametrize(
    ("hosts", "why"),
    [((), "it may be by a signal"), ((Host("a", 2),), "as ssh when a host is lost")],
)
def test_a_connection_that_mpirun_lost_without_a_word_is_told(
    shell_mpirun, tmp_path, monkeypatch, hosts, why
):
    monkeypatch.setattr(mpirun, "_open_mpi_options", lambda *given: [""] * 4)
    script = "printf 'step 7\\0' > $GEMSC_STATUS_FOLDER/rank0; exit 255"
    says = (
        f"error: mpirun ended with exit code 255, {why}\nnote: rank 0 was in step 7\n"
    )
    assert run(script, tmp_path, hosts=hosts) == (255, says)


def test_a_job_under_nohup_goes_on_when_the_terminal_closes(
    shell_mpirun, tmp_path, monkeypatch
):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, text = run(f"kill -HUP {os.getpid()}; sleep 0.2; exit 3", tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, text) == (3, "")


def test_what_the_ranks_did_is_told_of_a_job_that_is_stopped(shell_mpirun, tmp_path):
    script = (
        "cd $GEMSC_STATUS_FOLDER; for rank in 0 1; do printf 'step %d\\0' $rank > "
        f"rank$rank; done; kill -TERM {os.getpid()}; sleep 30"
    )
    assert run(script, tmp_path) == (
        128 + signal.SIGTERM,
        "error: stopped by signal 15 (Terminated)\n"
        "note: rank 0 was in step 0\nnote: rank 1 was in step 1\n",
    )


def test_a_line_without_an_end_is_shown_as_it_comes(shell_mpirun, tmp_path):
    _, text = run("printf '50%%\\r' >&2; printf '100%%' >&2", tmp_path)
    assert text == "50%\r100%"


def test_what_mpirun_says_of_a_rank_becomes_a_line(shell_mpirun, tmp_path):
    (tmp_path / "text").write_bytes(KILLED)
    script = f"cat {tmp_path}/text >&2"
    assert run(script, tmp_path)[1] == "rank 1 was ended by signal 9 (Killed)\n"


def test_a_job_that_takes_too_long_is_ended(shell_mpirun, tmp_path):
    started = time.monotonic()
    assert run("sleep 30", tmp_path, timeout=0.3)[0] == TIMED_OUT
    assert time.monotonic() - started < 5


def test_the_scratch_folder_is_gone_after_the_job(shell_mpirun, tmp_path):
    _, text = run("echo $PRTE_MCA_prte_tmpdir_base >&2", tmp_path)
    folder = Path(text.strip())
    assert folder.name.startswith("gemsc-")
    assert len(str(folder)) < 30
    assert not folder.exists()


KILLED_JOB = """
import os, sys
from pathlib import Path
from gemsc.runtime.process import scratch
scratch.SHARED_MEMORY, scratch.SWEEP = Path(sys.argv[1]), sys.argv[2]
with scratch.scratch_folder(2) as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


def killed_job(folder: Path, sweep: str) -> Path:
    """Return the scratch folder of a process that was killed."""
    command = [sys.executable, "-c", KILLED_JOB, str(folder), sweep]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return Path(killed.stdout.strip())


@pytest.mark.slow
def test_the_folder_of_a_killed_job_is_removed_at_once(tmp_path):
    left = killed_job(tmp_path, scratch.SWEEP)
    assert left.parent == tmp_path
    wait(lambda: not left.exists())


LOADER = """
import os
from gemsc.runtime.process.status import note_worker
note_worker()
open(f"/dev/shm/torch_{os.getpid()}_1_2", "w").close()
print(os.getpid(), flush=True)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory")
def test_what_killed_data_loaders_share_is_removed(tmp_path):
    with scratch.scratch_folder(1) as folder:
        (folder / "status").mkdir()
        environment = os.environ | {STATUS_VARIABLE: str(folder / "status")}
        loader = subprocess.run(
            [sys.executable, "-c", LOADER],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        left = Path(f"/dev/shm/torch_{loader.stdout.strip()}_1_2")
        assert left.exists()
    assert not left.exists()


def test_what_nobody_removed_is_removed_by_the_next(
    shell_mpirun, tmp_path, monkeypatch
):
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path)  # no other job looks there
    left = killed_job(tmp_path, "exit")
    assert left.is_dir()
    run("exit", tmp_path)
    assert not left.exists()


# real jobs

SLEEPER = """
import os, sys, time
from mpi4py import MPI
from gemsc.base.process import end_with_launcher
from gemsc.runtime.process.status import Status
end_with_launcher()
Status(MPI.COMM_WORLD.rank).enter("backward", "stage 1", 3)
MPI.COMM_WORLD.Barrier()
pids = MPI.COMM_WORLD.gather(os.getpid())
if MPI.COMM_WORLD.rank == 0:
    folder = os.environ["OMPI_MCA_orte_tmpdir_base"]
    print(folder, os.getppid(), *pids, file=sys.stderr, flush=True)
MPI.COMM_WORLD.Barrier()  # nobody leaves before it is printed
time.sleep(60)
"""

STARTER = """
import sys
from gemsc.launch.launch import launch
sys.exit(launch(2, [sys.executable, "-c", sys.argv[1]]))
"""


def needs_mpirun() -> None:
    pytest.importorskip("mpi4py")
    try:
        find_mpirun()
    except GemscError as error:
        pytest.skip(str(error))


@contextmanager
def sleeping_job() -> Iterator[tuple[subprocess.Popen[str], Path, list[int]]]:
    """Start a job; give it, its folder, and mpirun's and the ranks' numbers."""
    needs_mpirun()
    command = [sys.executable, "-c", STARTER, SLEEPER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        folder, *pids = process.stderr.readline().split()
        assert Path(folder).is_dir()
        assert len(pids) == 3
        yield process, Path(folder), list(map(int, pids))


def wait_until_gone(pids: list[int]) -> None:
    wait(lambda: not any(map(is_alive, pids)))


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.05)


@pytest.mark.slow(1)
@pytest.mark.mpi
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", *at_night("SIGHUP", "SIGQUIT")])
def test_a_signal_ends_all_ranks(name):
    number = signal.Signals[name]
    with sleeping_job() as (process, folder, pids):
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        wait_until_gone(pids)
        assert process.stderr.read().startswith(f"error: stopped by signal {number} (")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_and_mpirun_end_when_the_command_is_killed(tmp_path):
    with sleeping_job() as (process, folder, pids):
        process.kill()
        wait_until_gone(pids)
    wait(lambda: not folder.exists())


@pytest.mark.mpi
def test_ranks_end_when_mpirun_is_killed():
    with sleeping_job() as (process, folder, pids):
        os.kill(pids[0], signal.SIGKILL)
        assert process.wait(20) == 137
        wait_until_gone(pids)
        assert process.stderr.read() == (
            "error: mpirun was ended by signal 9 (Killed)\n"
            "note: rank 0 was in backward of stage 1, micro-batch 3, step 0\n"
            "note: rank 1 was in backward of stage 1, micro-batch 3, step 0\n"
        )
    assert not folder.exists()


@pytest.mark.slow(1)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("act", "code", "how"),
    [
        ("os.kill(os.getpid(), 9)", 137, "was ended by signal 9 (Killed)"),
        ("os._exit(3)", 3, "ended with exit code 3"),
        ("os._exit(0)", 1, "left before the others had ended"),
    ],
)
def test_a_rank_that_leaves_without_a_word_ends_the_job_and_is_named(
    act, code, how, tmp_path, monkeypatch
):
    needs_mpirun()
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 30)))
    act = f"if MPI.COMM_WORLD.Get_rank(): {act}\ntime.sleep(60)"
    program = SLEEPER.replace("time.sleep(60)", act)
    with (tmp_path / "stderr").open("w+") as stderr:
        words = [sys.executable, "-c", program]
        assert launch(2, words, stderr=stderr, timeout=30) == code
        stderr.seek(0)
        lines = stderr.read().splitlines()
    assert any("gemsc-" in line for line in lines)  # all were there
    where = "backward of stage 1, micro-batch 3, step 0"
    assert f"error: rank 1 {how} in {where}" in lines
    assert not any("prterun" in line for line in lines)
