"""A ring ends a sleep, also one that begins later; sums travel in a tree."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gemsc.runtime.doorbell import Doorbell
from gemsc.runtime.local import LocalTransport, run_local
from gemsc.runtime.total import total

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bells are for Linux")

LONG = 20.0  # seconds; a test that waits so long has failed


@pytest.fixture
def bells() -> tuple[Doorbell, Doorbell]:
    return hang(2)


def hang(count: int) -> tuple[Doorbell, ...]:
    """Return the bells of so many ranks of a job, after they have met."""
    job = Doorbell.new_job()
    others = [set(range(count)) - {rank} for rank in range(count)]
    bells = tuple(Doorbell(job, rank, others[rank]) for rank in range(count))
    with ThreadPoolExecutor(count) as ranks:
        list(ranks.map(Doorbell.meet, reversed(bells)))
    return bells


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
    first.ring(1)  # nobody hears it


def test_many_ranks_meet() -> None:
    *others, last = hang(24)  # a socket keeps about ten letters
    for rank, bell in enumerate(others):
        last.ring(rank)
        assert bell.sleep(LONG)
        assert not last.sleep(0)
        bell.ring(23)
        assert last.sleep(LONG)


def test_many_rings_never_block(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    for _ in range(5000):
        second.ring(0)
    assert first.sleep(LONG)


def test_other_jobs_are_not_disturbed() -> None:
    mine, other = hang(2), hang(2)
    other[1].ring(0)
    assert not mine[0].sleep(0.001)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
def test_the_total_is_the_same_on_all_ranks(size: int) -> None:
    def rank(transport: LocalTransport) -> float:
        part = torch.tensor(0.1 * 3**transport.rank, dtype=torch.float64)
        return float(total(transport, part))

    found = run_local(size, rank)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(sum(0.1 * 3**r for r in range(size)), rel=1e-14)
