"""What listens while a job runs on one machine, and for whom."""

import shutil
import subprocess
import sys

import pytest

from gemsc.launch.launch import launch
from gemsc.launch.loopback import keep_to_loopback

LISTENER = """
import socket, time
held = [socket.create_server(("127.0.0.1", 0)), socket.socket()]
time.sleep(0.1)
held.append(socket.create_server(("", 0)))
held.append(socket.create_server(("::", 0), family=socket.AF_INET6))
held[1].bind(("", 0))
def interface(each):
    name = each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
    return name.strip(b"\\0").decode() or "any"
end = time.monotonic() + 5
while interface(held[-1]) == "any" and time.monotonic() < end:
    time.sleep(0.01)
print(*map(interface, held))
"""

LISTS = """
import os, subprocess, sys, time
end = time.monotonic() + 5
while os.environ["OMPI_COMM_WORLD_RANK"] == "0" and time.monotonic() < end:
    listed = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout
    own = [line for line in listed.splitlines() if f"pid={os.getppid()}," in line]
    addresses = [line.split()[3].rpartition(":")[0] for line in own]
    if addresses and not {"0.0.0.0", "*", "[::]"} & set(addresses):
        break
    time.sleep(0.02)
else:
    sys.exit()
print(*sorted(addresses))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ties sockets to interfaces")
def test_only_what_listens_on_all_addresses_is_tied():
    words = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        keep_to_loopback(process.pid)
        assert process.communicate()[0].split() == ["any", "any", "lo", "lo"]


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("ss") is None, reason="ss lists what listens")
def test_a_job_on_one_machine_listens_on_loopback_only(tmp_path):
    with (tmp_path / "out").open("w+") as out:
        assert launch(2, [sys.executable, "-c", LISTS], stdout=out, timeout=60) == 0
        out.seek(0)
        addresses = out.read().split()
    assert addresses  # it listens, or this test sees nothing
    assert {a.rpartition("%")[2] for a in addresses} <= {"lo", "127.0.0.1"}
