"""How often a rank asks for what it waits for, by a clock that only sleeps move."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gemsc.runtime.transport import mpi_messages, waiting
from gemsc.runtime.transport.waiting import Awaited, wait

TURN = 1e-6  # seconds that a question takes


class Clock:
    """The time as `waiting` sees it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        self.now += TURN
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


class Message:
    """What comes after some seconds; counts how often it is asked for."""

    def __init__(self, clock: Clock, seconds: float, *, is_lone: bool = True) -> None:
        self.need = Awaited("message 3 from rank 1 to rank 0", (1,))
        self.is_lone = is_lone
        self.asked = 0
        self._clock, self._due = clock, clock.now + seconds

    def done(self) -> bool:
        self.asked += 1
        return self._clock.now >= self._due

    @property
    def late(self) -> float:
        """The seconds since it has come."""
        return self._clock.now - self._due


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    time = SimpleNamespace(perf_counter=fake.perf_counter, sleep=fake.sleep)
    monkeypatch.setattr(waiting, "time", time)
    monkeypatch.setattr(waiting, "_lasted", {})
    return fake


def waited(clock, seconds, **how):
    message = Message(clock, seconds, **how)
    wait(message)
    return message


def test_the_first_wait_sleeps_an_eighth_of_what_it_has_lasted(clock):
    message = waited(clock, 0.15)
    assert message.late <= waiting.LONGEST_SLEEP + 10 * TURN
    assert max(clock.sleeps) == waiting.LONGEST_SLEEP


def test_a_wait_like_an_earlier_one_asks_half_as_often_and_is_not_later(clock):
    waited(clock, 0.15)
    first = len(clock.sleeps)
    second = waited(clock, 0.15)
    assert 2 * (len(clock.sleeps) - first) < first
    assert second.late <= waiting.LONGEST_SLEEP + 10 * TURN
    assert max(clock.sleeps) == pytest.approx(waiting.KNOWN_SLEEP)


def test_what_comes_early_is_seen_after_one_sleep_and_expected_early_from_then(clock):
    waited(clock, 0.15)
    assert waited(clock, 0.05).late <= waiting.KNOWN_SLEEP + 10 * TURN
    assert waited(clock, 0.05).late <= waiting.LONGEST_SLEEP + 10 * TURN


def test_one_long_wait_is_not_expected_again(clock):
    for seconds in (0.05, 5.0, 0.05):
        message = waited(clock, seconds)
    assert message.late <= waiting.LONGEST_SLEEP + 10 * TURN


def test_waits_that_get_longer_are_expected_longer(clock):
    waited(clock, 0.01)
    for _ in range(20):
        waited(clock, 0.15)
    first = len(clock.sleeps)
    waited(clock, 0.15)
    assert len(clock.sleeps) - first < 60


def test_no_long_sleep_where_other_operations_need_its_turns(clock):
    first, second = (waited(clock, 0.15, is_lone=False) for _ in range(2))
    assert second.asked == first.asked
    assert max(clock.sleeps) == waiting.LONGEST_SLEEP


def test_other_waits_are_not_like_it(clock):
    waited(clock, 0.15)
    other = Message(clock, 0.01)
    other.need = Awaited("message 4 from rank 1 to rank 0", (1,))
    wait(other)
    assert other.late <= waiting.LONGEST_SLEEP + 10 * TURN


def test_a_wait_for_several_is_known_by_all_of_them(clock):
    counts = []
    for _ in range(2):
        messages = Message(clock, 0.02), Message(clock, 0.15)
        messages[0].need = Awaited("message 2 from rank 1 to rank 0", (1,))
        clock.sleeps.clear()
        wait(*messages)
        counts.append(len(clock.sleeps))
    assert 2 * counts[1] < counts[0]
    assert messages[1].late <= waiting.LONGEST_SLEEP + 10 * TURN


def test_no_long_sleep_once_data_has_moved(clock):
    """A turn that takes longer has moved some: the next ones follow at once."""

    class InPieces(Message):
        def done(self):
            if clock.now < 0.01:
                clock.now += 2 * waiting.COPY_SECONDS
            return super().done()

    waited(clock, 0.15)
    clock.now = 0.0
    clock.sleeps.clear()
    wait(InPieces(clock, 0.15))
    assert max(clock.sleeps) == waiting.LONGEST_SLEEP


def test_a_message_of_mpi_is_alone_until_an_operation_in_steps_is_open(clock):
    turns, need = mpi_messages.InSteps(), Awaited("the sum 'all'", (0, 1))
    message = mpi_messages.MessageRequest(None, turns, [], None, None, need)
    other = mpi_messages.TestRequest(turns, None, need)
    assert message.is_lone
    assert other.is_lone
    part = Message(clock, 1.0)
    turns.add(mpi_messages.ChainedRequest(turns, need, [part]))
    assert not message.is_lone
    assert not other.is_lone
    clock.now += 2.0
    turns.take()
    assert message.is_lone
