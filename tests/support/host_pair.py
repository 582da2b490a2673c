"""Two hosts on one machine: a network, a name and a /dev/shm of its own for each.

    a (10.77.<n>.1) ----- b (10.77.<n>.2)      each with an sshd

Network namespaces joined by a pair of virtual interfaces. `ssh` on the path of what
runs there knows keys and port; files are shared, as on a cluster. A shell that is not
the first (SHLVL) does not read ~/.bashrc, which may say anything.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Pair", "two_hosts"]

PORT = 7723
TOOLS = ("ip", "unshare", "ssh", "ssh-keygen", "sshd")
PLACES = os.environ["PATH"] + ":/usr/sbin:/sbin"

QDISC = ("qdisc", "replace", "dev", "wire", "root")

SSHD = """\
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
PidFile none
SetEnv SHLVL=1
"""
SSH = """\
#!/bin/sh
exec {ssh} -F none -p {port} -i {folder}/user -o StrictHostKeyChecking=no \
 -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""


@dataclass(frozen=True)
class Pair:
    """What two hosts are called, and the path that has their ssh."""

    folder: Path
    spaces: tuple[str, str]
    addresses: tuple[str, str]
    servers: list[subprocess.Popen[bytes]]

    def command(self, index: int, *words: object) -> tuple[list[str], dict[str, str]]:
        """Return what runs a command on a host, and in which environment."""
        path = f"{self.folder}:{Path(sys.executable).parent}:{PLACES}"
        return _on(self.spaces[index], map(str, words)), os.environ | {"PATH": path}

    def popen(self, index: int, *words: object) -> subprocess.Popen[str]:
        """Start a command on a host, with the gemsc of this environment."""
        command, environment = self.command(index, *words)
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, index: int, *words: object) -> tuple[int, str, str]:
        """Run a command on a host: exit code, output and errors."""
        process = self.popen(index, "timeout", 100, *words)
        out, err = process.communicate()
        return process.returncode, out, err

    def memory(self, index: int) -> Path:
        """Return the /dev/shm of what ssh starts on a host."""
        return Path(f"/proc/{self.servers[index].pid}/root/dev/shm")

    def slow_down(self, rate: str, delay: str) -> str:
        """Limit the wire to `rate`, with `delay` each way; return what the kernel can.

        Both are in the words of tc; a kernel without netem has no delays.
        """
        delayed = ["netem", "delay", delay, "rate", rate, "limit", "100000"]
        limited = ["tbf", "rate", rate, "burst", "1m", "latency", "50ms"]
        for how, words in ((f"{rate}, {delay}", delayed), (rate, limited)):
            try:
                for space in self.spaces:
                    _run("tc", "-n", space, *QDISC, *words)
            except subprocess.CalledProcessError:
                continue
            return how
        return "as fast as the kernel"

    def lose(self, index: int) -> None:
        """Cut a host off: ssh finds nobody, and no message arrives any more."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.spaces[index]],
            capture_output=True,
            text=True,
            check=True,
        )
        for pid in listed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        _ip("-n", self.spaces[index], "link", "set", "wire", "down")


def _on(space: str, words: Iterator[str]) -> list[str]:
    """Return a command in a namespace: a process there is all that a host is."""
    script = f'hostname {space}; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
    separate = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
    return ["ip", "netns", "exec", space, *separate, *words]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Pair]:
    """Make two hosts and remove them; skip the test where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can make two hosts")
    for tool in TOOLS:
        if shutil.which(tool, path=PLACES) is None:
            pytest.skip(f"two hosts need {tool}")
    number = os.getpid() % 250 + 1
    spaces = f"gemsc-a{os.getpid()}", f"gemsc-b{os.getpid()}"
    addresses = f"10.77.{number}.1", f"10.77.{number}.2"
    with ExitStack() as stack:
        for space in spaces:
            try:
                _ip("netns", "add", space)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace: {error.stderr.decode().strip()}")
            stack.callback(_ip, "netns", "delete", space)
        one, other = spaces
        peer = ("type", "veth", "peer", "name", "wire", "netns", other)
        _ip("link", "add", "name", "wire", "netns", one, *peer)
        for space, address in zip(spaces, addresses, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "wire")
            _ip("-n", space, "link", "set", "wire", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        _write_keys(folder)
        servers = [stack.enter_context(_sshd(folder, space)) for space in spaces]
        yield Pair(folder, spaces, addresses, servers)


def _write_keys(folder: Path) -> None:
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(words, check=True)
    (folder / "sshd_config").write_text(SSHD.format(port=PORT, folder=folder))
    ssh = shutil.which("ssh", path=PLACES)
    (folder / "ssh").write_text(SSH.format(ssh=ssh, port=PORT, folder=folder))
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it


@contextmanager
def _sshd(folder: Path, space: str) -> Iterator[subprocess.Popen[bytes]]:
    sshd = shutil.which("sshd", path=PLACES)
    log = folder / f"{space}.log"
    words = [sshd, "-D", "-f", folder / "sshd_config", "-E", log]
    with subprocess.Popen(_on(space, map(str, words))) as server:
        try:
            for _ in range(100):
                if log.exists() and "listening" in log.read_text():
                    break
                time.sleep(0.1)
            yield server
        finally:
            server.kill()
