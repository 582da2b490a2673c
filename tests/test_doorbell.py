"""A ring ends a sleep, also one that begins later, if the sleeper expects it."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gemsc.runtime.transport.doorbell import SENT, TAKEN, Doorbell

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bells are for Linux")

LONG = 20.0  # seconds; a test that waits so long has failed


@pytest.fixture
def bells() -> tuple[Doorbell, Doorbell]:
    return hang(2)


def hang(count: int) -> tuple[Doorbell, ...]:
    """Return the bells of so many ranks of a job, which have met and expect rings."""
    job = Doorbell.new_job()
    others = [set(range(count)) - {rank} for rank in range(count)]
    bells = tuple(Doorbell(job, rank, others[rank]) for rank in range(count))
    with ThreadPoolExecutor(count) as ranks:
        list(ranks.map(Doorbell.meet, reversed(bells)))
    for bell in bells:
        bell.expect(None)
    return bells


def test_a_ring_before_the_sleep_is_not_lost(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    second.ring(0, SENT)
    second.ring(0, SENT)
    assert first.sleep(LONG)
    assert not first.sleep(0.001)  # both rings were heard


def test_a_ring_ends_a_sleep(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    timer = threading.Timer(0.05, second.ring, [0, SENT])
    timer.start()
    assert first.sleep(LONG)
    timer.join()


def test_only_who_is_expected_wakes_a_rank() -> None:
    sleeper, *others = hang(4)
    sleeper.expect_nothing()
    sleeper.expect({2: TAKEN, 3: SENT | TAKEN})
    for rank, why, wakes in (
        (1, SENT, False),
        (1, TAKEN, False),
        (2, SENT, False),
        (2, TAKEN, True),
        (3, SENT, True),
        (3, TAKEN, True),
    ):
        others[rank - 1].ring(0, why)
        assert sleeper.sleep(0.001) == wakes, (rank, why)
    sleeper.expect_nothing()
    others[2].ring(0, SENT)
    assert not sleeper.sleep(0.001)


def test_only_neighbours_are_reached(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    assert first.reaches(1)
    assert not first.reaches(2)
    first.ring(2, SENT)
    second.close()
    first.ring(1, SENT)  # nobody hears it


def test_many_ranks_meet() -> None:
    *others, last = hang(24)  # a socket keeps about ten letters
    for rank, bell in enumerate(others):
        last.ring(rank, SENT)
        assert bell.sleep(LONG)
        assert not last.sleep(0)
        bell.ring(23, SENT)
        assert last.sleep(LONG)


def test_many_rings_never_block(bells: tuple[Doorbell, Doorbell]) -> None:
    first, second = bells
    for _ in range(5000):
        second.ring(0, SENT)
    assert first.sleep(LONG)


def test_other_jobs_are_not_disturbed() -> None:
    mine, other = hang(2), hang(2)
    other[1].ring(0, SENT)
    assert not mine[0].sleep(0.001)
