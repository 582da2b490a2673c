"""How many cores a process may use."""

from __future__ import annotations

import os
import sys

import pytest

from gemsc.base.process import num_cores


@pytest.mark.skipif(sys.platform != "linux", reason="affinities of Linux")
def test_a_process_that_is_bound_to_a_core_has_one() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert num_cores() == len(before)
