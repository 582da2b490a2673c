"""Ranks that share cores take longer turns; nice values and policies stay."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from gemsc.base.cores import num_cores

LINUX = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
GRANTS = sys.platform == "linux" and LINUX >= (6, 12)

PROGRAM = """
import os
from gemsc.base.cores import set_time_slice
{before}
print(set_time_slice(0.05), os.nice(0), os.sched_getscheduler(0))
"""


def in_a_process(before: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(not GRANTS, reason="time slices are granted by Linux 6.12 and up")
def test_a_longer_slice_is_granted_and_the_nice_value_stays() -> None:
    assert in_a_process("os.nice(3)") == ["0.05", str(os.nice(0) + 3), "0"]


@pytest.mark.skipif(sys.platform != "linux", reason="policies of Linux")
def test_a_policy_of_the_users_own_stays() -> None:
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    assert in_a_process(idle) == ["None", str(os.nice(0)), "5"]


def test_other_systems_are_left_alone() -> None:
    other = "import platform; platform.machine = lambda: 'riscv64'"
    assert in_a_process(other)[0] == "None"


def test_there_is_a_core() -> None:
    assert num_cores() >= 1
