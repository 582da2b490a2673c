"""The hosts of a job: `--hosts a:2,b:2`, or a file with one on each line.

a slots=2    # as Open MPI has them
b:2          # as MPICH does; `b` alone takes one rank
"""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemsc.errors import GemscError, SourceLocation

ENTRY = re.compile(
    r"(?P<name>\w[\w.-]*)(?::(?P<number>\w*)|\s+slots\s*=\s*(?P<slots>\w*))?"
)
FORMS = "write `a:2` for two ranks on host a"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
NO_FOLDER, NO_PYTHON, NO_PLAN = 41, 42, 43  # exit codes of what is run on a host
UNREACHED = 255  # that of ssh itself


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `a:2,b:2`.

    Raises:
        GemscError: it is empty, a name or number is none, or a host is listed twice.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not text.strip():
        raise GemscError("--hosts is empty", help="give --hosts a:2,b:2")
    return _distinct((_host(entry, f"--hosts {text}"), None) for entry in entries)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a file with a host on each line; # begins a comment.

    Raises:
        GemscError: it cannot be read, has no host, or a wrong line, which it names.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise GemscError(
            f"--hostfile {path}: {why}", help="give a file with lines `a slots=2`"
        ) from None
    listed = []
    for number, line in enumerate(lines, 1):
        if entry := line.partition("#")[0].strip():
            at = SourceLocation(str(path), number)
            listed.append((_host(entry, "--hostfile", at), at))
    if not listed:
        raise GemscError(
            f"--hostfile {path} names no host", help="write lines `a slots=2`"
        )
    return _distinct(listed)


def _host(entry: str, where: str, at: SourceLocation | None = None) -> Host:
    match = ENTRY.fullmatch(entry)
    if match is None:
        raise GemscError(f"{where}: '{entry}' is not a host", at=at, help=FORMS)
    number = match["number"] if match["slots"] is None else match["slots"]
    if number is not None and not (number.isdecimal() and int(number) > 0):
        raise GemscError(
            f"{where}: '{entry}' has no number of ranks above 0", at=at, help=FORMS
        )
    return Host(match["name"], int(number or 1))


def _distinct(
    listed: Iterable[tuple[Host, SourceLocation | None]],
) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for host, at in listed:
        if host.name in hosts:
            raise GemscError(
                f"host {host.name} is listed twice",
                at=at,
                help="add up its numbers: "
                f"{host.name}:{hosts[host.name].slots + host.slots}",
            )
        hosts[host.name] = host
    return tuple(hosts.values())


def listed(hosts: Iterable[Host]) -> str:
    """Return `a:2,b:2`."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def share_out(hosts: Sequence[Host], num_ranks: int) -> tuple[Host, ...]:
    """Return the hosts that get ranks, in their order, with how many each gets.

    Raises:
        GemscError: there are more ranks than they take.
    """
    used, left = [], num_ranks
    for host in hosts:
        if left:
            used.append(replace(host, slots=min(host.slots, left)))
            left -= used[-1].slots
    if left:
        raise GemscError(
            f"{listed(hosts)} has room for {num_ranks - left} ranks, but the program "
            f"has {num_ranks}",
            help="add hosts, or more ranks on each, or compile for --ranks "
            f"{num_ranks - left}",
        )
    return tuple(used)


def is_here(host: Host) -> bool:
    """Whether a host is this machine: only an address of its own can be bound."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host.name, 0)[0]
        with socket.socket(kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def check_hosts(hosts: Sequence[Host], directory: Path) -> None:
    """Make sure that ranks of a program can be started on all hosts, from this folder.

    Raises:
        GemscError: a host does not answer, or this folder, this Python or the program
            is not there.
    """
    plan = directory.resolve() / "plan.toml"
    folder = Path.cwd()
    script = (
        f"cd {shlex.quote(str(folder))} || exit {NO_FOLDER}; "
        f"test -x {shlex.quote(sys.executable)} || exit {NO_PYTHON}; "
        f"cat {shlex.quote(str(plan))} || exit {NO_PLAN}"
    )
    share = "put it into a folder that all hosts share, or at the same path on each"
    for host, (code, output, said) in zip(hosts, _ask(hosts, script), strict=True):
        name = host.name
        if code == UNREACHED:
            raise GemscError(
                f"host {name} cannot be reached: {said or 'ssh failed'}",
                help=f"make `ssh {name} true` work without a prompt: check the name, "
                f"set up a key (ssh-copy-id {name}), accept the host's key once",
            )
        if code == NO_FOLDER:
            raise GemscError(f"host {name} has no folder {folder}", help=share)
        if code == NO_PYTHON:
            raise GemscError(
                f"host {name} has no {sys.executable}",
                help="install gemsc there at the same path, or share the environment",
            )
        if code != 0:
            raise GemscError(f"host {name} has no {plan}", help=share)
        if output != plan.read_bytes():
            raise GemscError(f"host {name} has a different {plan}", help=share)


def that_answer(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts that ssh reaches."""
    answers = zip(hosts, _ask(hosts, "true"), strict=True)
    return tuple(host for host, (code, _, _) in answers if code == 0)


def _ask(hosts: Sequence[Host], script: str) -> list[tuple[int, bytes, str]]:
    """Run a script on all hosts at once: exit code, output, last line of stderr."""
    command = shlex.join(["sh", "-c", script])
    asked = [
        subprocess.Popen(
            ["sh", "-c", script] if is_here(host) else [*SSH, host.name, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for host in hosts
    ]
    answers = []
    for process in asked:
        output, errors = process.communicate()
        lines = errors.decode(errors="replace").strip().splitlines()
        answers.append((process.returncode, output, lines[-1] if lines else ""))
    return answers
