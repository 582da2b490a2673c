"""The hosts of a job: what is read, what is refused, and a job on two of them."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import MODEL, is_alive
from host_pair import Pair, two_hosts
from safetensors.torch import load_file

from gemsc.errors import GemscError
from gemsc.launch import hosts as of_hosts
from gemsc.launch import mpirun
from gemsc.launch.hosts import (
    Host,
    check_hosts,
    is_here,
    parse_hosts,
    read_hostfile,
    share_out,
    that_answer,
)
from gemsc.launch.mpirun import mpirun_command

A, B = Host("a", 2), Host("b.c-d", 1)


# what is read


def test_hosts_are_names_with_numbers_of_ranks():
    assert parse_hosts("a:2, b.c-d") == (A, B)


def test_a_hostfile_is_one_of_open_mpi_or_of_mpich(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2  # big\n\nb.c-d\nc:3\n 10.0.0.1 slots = 4\n")
    assert read_hostfile(path) == (A, B, Host("c", 3), Host("10.0.0.1", 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--hosts is empty"),
        ("a,", "'' is not a host"),
        ("a b", "'a b' is not a host"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("a;reboot", "'a;reboot' is not a host"),
        ("a:", "'a:' has no number of ranks above 0"),
        ("a:0", "'a:0' has no number of ranks above 0"),
        ("a:two", "'a:two' has no number of ranks above 0"),
        ("a:-1", "'a:-1' is not a host"),
        ("a,b,a:2", "host a is listed twice\nhelp: add up its numbers: a:3"),
    ],
)
def test_wrong_hosts_are_refused(text, message):
    with pytest.raises(GemscError) as caught:
        parse_hosts(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("# none\n", "names no host"),
        ("a\nb slots=0\n", "hosts:2: error: --hostfile: 'b slots=0' has no number"),
        ("a\nb slots=2 x\n", "hosts:2: error: --hostfile: 'b slots=2 x' is not a host"),
        ("a\n\na\n", "hosts:3: error: host a is listed twice"),
    ],
)
def test_wrong_hostfiles_are_refused_with_their_line(text, message, tmp_path):
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(GemscError) as caught:
        read_hostfile(path)
    assert message in str(caught.value)


def test_hosts_are_filled_in_their_order():
    c = Host("c", 4)
    assert share_out((A, B, c), 4) == (A, B, Host("c", 1))
    assert share_out((c, A), 3) == (Host("c", 3),)
    with pytest.raises(
        GemscError, match=r"a:2,b\.c-d:1 has room for 3 ranks, .* has 4"
    ):
        share_out((A, B), 4)


WRONG = {
    "--hosts localhost": "localhost:1 has room for 1 ranks, but the program has 2",
    "--hosts ,": "'' is not a host",
    "--hosts": "argument --hosts: expected one argument",
    "--hosts a --hostfile b": "--hosts and --hostfile are given",
    "--hostfile nowhere": "--hostfile nowhere: No such file",
    "--restarts -1": "'-1' is not a whole number from 0",
}


def test_what_cannot_be_started_is_refused(command):
    assert command("compile", "model.py", "-o", "program").code == 0
    for words, message in WRONG.items():
        done = command("run", "program", *words.split())
        assert done.code == (2 if words in ("--hosts", "--restarts -1") else 1)
        assert message in done.err


# hosts that answer, or do not: `ssh NAME SCRIPT` is a shell in a folder of that name


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    script = (
        "#!/bin/sh\nfor word; do host=$script; script=$word; done\n"
        f'cd "{tmp_path}/$host" 2>/dev/null || '
        '{ echo "ssh: connect to host $host: No route" >&2; exit 255; }\n'
        'exec sh -c "$script"\n'
    )
    (tmp_path / "ssh").write_text(script)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr(of_hosts, "SSH", (str(tmp_path / "ssh"),))
    monkeypatch.setattr(of_hosts, "is_here", lambda host: False)
    for name in ("a", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "plan.toml").write_text("a plan\n")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_hosts_that_answer(ssh):
    assert that_answer((A, B)) == (A,)


def test_hosts_are_checked(ssh, monkeypatch):
    here = ssh / "here"
    check_hosts((A,), here)
    (here / "plan.toml").unlink()
    (here / "plan.toml").mkdir()
    with pytest.raises(GemscError, match=r"host a has no .*plan\.toml"):
        check_hosts((A,), here)
    monkeypatch.setattr(of_hosts.sys, "executable", "/nowhere/python")
    with pytest.raises(GemscError, match="host a has no /nowhere/python"):
        check_hosts((A,), here)
    here.rename(ssh / "moved")
    monkeypatch.setattr(of_hosts.Path, "cwd", lambda: here)
    with pytest.raises(GemscError, match=r"host a has no folder .*here"):
        check_hosts((A,), ssh / "moved")
    with pytest.raises(GemscError, match=r"b\.c-d cannot be reached: .*: No route"):
        check_hosts((B, A), ssh / "moved")


def test_a_host_with_another_plan_is_refused(ssh, monkeypatch):
    monkeypatch.setattr(of_hosts, "_ask", lambda hosts, script: [(0, b"older\n", "")])
    with pytest.raises(GemscError, match=r"host a has a different .*plan\.toml"):
        check_hosts((A,), ssh / "here")


def test_only_an_address_of_its_own_is_this_machine():
    assert is_here(Host("localhost", 1))
    assert not is_here(Host("192.0.2.1", 1))  # for documentation only


# the command


@pytest.fixture
def use_mpirun(tmp_path, monkeypatch):
    def use(version: str) -> None:
        path = tmp_path / "mpirun"
        path.write_text(f'#!/bin/sh\necho "{version}"\n')
        path.chmod(0o755)
        monkeypatch.setattr(mpirun, "find_mpirun", lambda: path)

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("MY_DATA", "/data")
    return use


def test_open_mpi_uses_networks_and_carries_the_environment(use_mpirun, tmp_path):
    use_mpirun("mpirun (Open MPI) 5.0.11")
    words = mpirun_command(3, ["python"], scratch=tmp_path, hosts=(A, B), env={"X": ""})
    command, settings = words
    assert command[1:7] == ["-n", "3", "--host", "a:2,b.c-d:1", "--bind-to", "none"]
    carried = {n for x, n in itertools.pairwise(command) if x == "-x"}
    assert {"MY_DATA", "PATH", "GLIBC_TUNABLES", "GEMSC_NUM_RANKS", "X"} <= carried
    assert not {"HOME", "PWD", "OMPI_ALLOW_RUN_AS_ROOT"} & carried
    # each host divides its own cores, and has files and networks of its own
    assert not {"OMP_NUM_THREADS", "OMPI_MCA_btl", "OMPI_MCA_pml"} & settings.keys()
    assert not [name for name in settings if "tmpdir" in name or "backing" in name]


def test_hydra_uses_ssh(use_mpirun):
    use_mpirun("HYDRA build details:")
    command, _ = mpirun_command(3, ["python"], hosts=(A, B))
    assert command[1:] == [
        *("-n", "3", "-launcher", "ssh", "-hosts", "a:2,b.c-d:1"),
        *("-bind-to", "none", "python"),
    ]


# two hosts

TELLS = """

def tell():
    import os, socket
    text = f"{os.environ['MY_DATA']} {os.environ.get('OMP_NUM_THREADS')}"
    text += f" {'GLIBC_TUNABLES' in os.environ}"
    open(f"on-{socket.gethostname()}-{os.getpid()}", "w").write(text)


tell()
"""


@pytest.fixture
def compile_for(command, monkeypatch) -> Callable[..., tuple[str, ...]]:
    """Compile a program whose ranks say where they are, and return how to run it."""

    def compile_for(pair: Pair, slots: int) -> tuple[str, ...]:
        Path("model.py").write_text(MODEL)
        monkeypatch.setenv("MY_DATA", "x y")
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        words = "compile", "model.py", "--data", slots, "-o", "program"
        assert command(*words).code == 0
        add_to_ranks(TELLS)
        hosts = ",".join(f"{address}:{slots}" for address in pair.addresses)
        return "gemsc", "run", "program", "--steps", "1", "--hosts", hosts

    return compile_for


def add_to_ranks(text: str) -> None:
    for path in Path("program").glob("rank*.py"):
        path.write_text(path.read_text() + text)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_job_on_two_hosts(compile_for, tmp_path):
    with two_hosts(tmp_path) as pair:
        code, out, err = pair.run(0, *compile_for(pair, 1))
        assert (code, err) == (0, "")
        assert "accuracy" in out
        for space in pair.spaces:
            told = [path.read_text() for path in Path().glob(f"on-{space}-*")]
            assert told == ["x y None True"]


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.parametrize("slots", [1, 2])
def test_a_job_of_torchrun_on_two_hosts(compile_for, tmp_path, slots):
    """Names that nobody knows: ranks find the address in the network of the first."""
    with two_hosts(tmp_path) as pair:
        compile_for(pair, slots)
        words = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2")
        words += ("--nproc-per-node", slots, "--rdzv-backend", "c10d")
        words += ("--rdzv-endpoint", f"{pair.addresses[0]}:29400")
        what = ("program", "--steps", "2", "--save", "saved")
        jobs = []
        for index, address in enumerate(pair.addresses):
            local = ("--local-addr", address, "--rdzv-conf", f"is_host={1 - index}")
            jobs.append(pair.popen(index, "timeout", 100, *words, *local, *what))
        said = [job.communicate() for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], said
        assert ["accuracy" in out for out, _ in said] == [True, False]
        for space in pair.spaces:
            assert len(list(Path().glob(f"on-{space}-*"))) == slots
        again = ("gemsc", "run", "program", "--steps", "2", "--save", "alone")
        assert pair.run(0, *again)[0] == 0
        weights = [load_file(f"{run}/model.safetensors") for run in ("saved", "alone")]
        for name, tensor in weights[0].items():
            assert torch.allclose(tensor, weights[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["gemsc", "mpirun"])
def test_ranks_on_another_host_end_with_the_command(compile_for, tmp_path, victim):
    with two_hosts(tmp_path) as pair:
        words = compile_for(pair, 2)
        add_to_ranks("import time\ntime.sleep(100)\n")
        with pair.popen(0, *words) as process:
            until(lambda: len(list(Path().glob("on-*"))) == 4)
            ranks = [int(path.name.split("-")[-1]) for path in Path().glob("on-*")]
            assert all(map(is_alive, ranks))
            assert os.listdir(pair.memory(1))
            number = process.pid
            if victim == "mpirun":
                words = "pgrep", "-P", str(number), "-f", "prterun|mpirun"
                number = int(subprocess.check_output(words))
            os.kill(number, signal.SIGKILL)
            until(lambda: not any(map(is_alive, ranks)))
            until(lambda: not os.listdir(pair.memory(1)))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
