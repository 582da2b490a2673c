"""A ring ends a sleep, also one that begins later; sums travel in a tree."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from gemsc.runtime.doorbell import Doorbell
from gemsc.runtime.local import LocalTransport, run_local
from gemsc.runtime.total import total

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bells are for Linux")

LONG = 20.0  # seconds; a test that waits so long has failed


@pytest.fixture
def bells() -> tuple[Doorbell, Doorbell]:
    job = Doorbell.new_job()
    return Doorbell(job, 0, [1]), Doorbell(job, 1, [0])


def test_a_ring_before_the_sleep_is_not_lost(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    second.ring(0)
    second.ring(0)
    assert first.sleep(LONG)
    assert not first.sleep(0.001)  # both rings were heard


def test_a_ring_ends_a_sleep(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    timer = threading.Timer(0.05, second.ring, [0])
    timer.start()
    assert first.sleep(LONG)
    timer.join()


def test_only_neighbours_are_reached(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    assert first.reaches(1)
    assert not first.reaches(2)
    first.ring(2)
    second.close()
    first.ring(1)
    assert not first.reaches(1)  # it is gone


def test_many_rings_never_block(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    for _ in range(5000):
        second.ring(0)
    assert first.sleep(LONG)


def test_other_jobs_are_not_disturbed() -> None:
    mine, other = Doorbell(Doorbell.new_job(), 0, [1]), Doorbell("other", 1, [0])
    other.ring(0)
    assert not mine.sleep(0.001)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
def test_the_total_is_the_same_on_all_ranks(size: int) -> None:
    def rank(transport: LocalTransport) -> float:
        part = torch.tensor(0.1 * 3**transport.rank, dtype=torch.float64)
        return float(total(transport, part))

    found = run_local(size, rank)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(sum(0.1 * 3**r for r in range(size)), rel=1e-14)
