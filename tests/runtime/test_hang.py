"""What is a hang and what is not, whose turn it is, and how it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from program_support import WIDTH
from training_support import pairs, program, run, user_of

from gemsc.base.units import parse_seconds, show_long
from gemsc.errors import GemscError
from gemsc.runtime.process.hang import (
    START_SECONDS,
    _process,
    explain_hang,
    hang_report,
    is_hanging,
    limit_of,
)
from gemsc.runtime.process.status import (
    ACTION_BYTES,
    STATUS_BYTES,
    STATUS_VARIABLE,
    RankState,
    Status,
    read_states,
    read_status,
)
from gemsc.runtime.process.stop import STOPPING, StopSignal
from gemsc.runtime.process.watch import HangWatch
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.transport.waiting import Awaited, wait, wait_of

SUM = ("the sum 'losses'", 0b111)


def state(rank: int, doing: str = "forward", *needs: tuple[str, int]) -> RankState:
    return RankState(
        rank=rank,
        pid=1,
        limit=60,
        seen=100,
        changed=40 + rank,
        doing=doing,
        needs=needs,
    )


def states(*listed: RankState) -> dict[int, RankState]:
    return {state.rank: state for state in listed}


# whose turn it is


def test_the_chain_of_waits_ends_at_the_rank_that_waits_for_nobody():
    seen = states(
        state(0, "reading the dataset"),
        state(1, "receive of 'x'", ("message 0", 0b001)),
        state(2, "receive of 'y'", ("message 2", 0b010)),
    )
    assert explain_hang(seen, 100) == [
        "rank 1 waits for rank 0, which has been in reading the dataset for 60 s",
        "note: rank 0: reading the dataset",
        "note: rank 1: receive of 'x'; waits for message 0",
        "note: rank 2: receive of 'y'; waits for message 2",
    ]
    del seen[1]
    assert "rank 2 waits for rank 1, which has said nothing" in explain_hang(seen, 1)[0]


def test_of_a_sum_the_rank_is_named_that_has_not_come():
    seen = states(state(0, "a", SUM), state(1, "optimizer step"), state(2, "a", SUM))
    first = "rank 0 waits for rank 1, which has been in optimizer step for 59 s"
    assert explain_hang(seen, 100)[0] == first
    seen[1] = state(1, "a", SUM)
    assert explain_hang(seen, 100)[0].endswith("as do all ranks that it takes")


def test_a_lost_message_leaves_a_circle():
    seen = states(state(0, "a", ("message 1", 0b10)), state(1, "b", ("message 0", 1)))
    first = "rank 0 waits for rank 1, which waits for rank 0: no message comes"
    assert explain_hang(seen, 100)[0].startswith(first)
    assert "make all calls of the trainer on all ranks" in hang_report(seen, 100)


def test_a_rank_that_cannot_speak_is_told_of():
    gone = replace(state(0, "forward"), seen=90, pid=2**22 + 1)
    seen = states(gone, state(1, "receive", ("message 0", 1)))
    assert "in forward for 60 s (its process has ended)" in explain_hang(seen, 100)[0]


def test_what_was_seen_of_a_rank_that_cannot_look_is_over():
    """A thread in C has the interpreter's lock: the message has come long ago."""
    held = replace(state(1, "receive", ("message 0", 1)), seen=90, pid=os.getpid())
    seen = states(state(0, "receive", ("message 1", 0b10)), held)
    first, zero, one = explain_hang(seen, 100)
    assert first.startswith("rank 0 waits for rank 1, which has been in receive for 59")
    assert "holds the interpreter's lock" in first
    assert zero == "note: rank 0: receive; waits for message 1"
    assert one == "note: rank 1: receive"
    seen = states(state(0), held)
    assert explain_hang(seen, 100)[0].startswith("rank 1 has been in receive for 59 s")


@pytest.fixture
def stopped() -> Iterator[Callable[[str], tuple[int, int]]]:
    """Start a shell that tells of a process that it starts; stop that or itself."""
    started: list[tuple[Any, int]] = []

    def begin(what: str) -> tuple[int, int]:
        command = ["sh", "-c", "sleep 60 & echo $!; wait"]
        shell = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        started.append((shell, child))
        pid = child if what == "child" else shell.pid
        os.kill(pid, signal.SIGSTOP)
        while _process(pid)[0] != "T":
            time.sleep(0.01)
        return shell.pid, child

    yield begin
    for shell, child in started:
        for pid in (child, shell.pid):
            os.kill(pid, signal.SIGKILL)
        shell.wait()
        shell.stdout.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_a_process_that_is_stopped_is_named_with_what_lets_it_go_on(stopped):
    """Of a rank that looks on: the one that reads for it, or its mpirun."""
    cases = [("child", 0, 1, "a process that it started is stopped")]
    cases += [("shell", 1, 0, "the process that started it is stopped")]
    cases += [("shell", 0, 0, "its process is stopped")]
    for what, rank, culprit, words in cases:
        pids = stopped(what)
        seen = states(replace(state(0, "reading the dataset"), pid=pids[rank]))
        text = f"({words}: kill -CONT {pids[culprit]} continues it)"
        assert explain_hang(seen, 100)[0].endswith(text)


def test_of_many_ranks_some_are_listed():
    lines = hang_report(states(*map(state, range(40))), 200).splitlines()
    assert len(lines) == 11
    assert lines[-2] == "note: and 32 more ranks"
    assert lines[-1].startswith("help: if it may take this long, use --timeout 10min")


# what is a hang


def test_a_job_hangs_when_no_rank_has_gone_on():
    waits = state(1, "receive", ("message 0", 1))
    seen = states(state(0), waits)
    assert not is_hanging(seen, 100)
    assert is_hanging(seen, 101)
    assert is_hanging(seen, 71, share=0.5)
    assert not is_hanging(states(replace(state(0), changed=90), waits), 110)
    assert not is_hanging({0: replace(state(0), limit=0)}, 1e9)


def test_ranks_that_are_all_in_the_users_loop_may_take_their_time():
    idle = {rank: replace(state(rank), is_idle=True) for rank in range(3)}
    assert not is_hanging(idle, 1e9)
    idle[2] = state(2, "receive", ("message 0", 1))
    assert is_hanging(idle, 1e9)


class StoppedError(Exception):
    pass


class Ranks:
    """The transport of one rank of two, and both ranks' watches on a fake clock."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def abort(self, code: int) -> NoReturn:
        raise StoppedError(code)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A status and its watch, whose `look` gets the time since the start."""
    monkeypatch.setenv(STATUS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Status, "current", None)
    begin = time.monotonic()
    watch = HangWatch(Ranks(0), tmp_path, 60.0)
    status = Status.of(0)
    status.enter("forward", "stage 0", 1)

    def look(seconds: float, *, ticks: bool = True) -> None:
        last = watch._seen - begin
        while ticks and last + 1 < seconds:
            last += 1
            watch.look(begin + last)
        watch.look(begin + seconds)

    return SimpleNamespace(status=status, look=look, folder=tmp_path)


def test_a_slow_job_that_works_goes_on(watched, capfd):
    for step in range(20):  # each 1.4 times half the limit
        watched.look(42.0 * step + 41)
        watched.status.enter("forward", "stage 0", step)
    warnings = capfd.readouterr().err.count("warning: no rank has made progress for 3")
    assert warnings == 20  # after 30 s, or 31 as this clock rounds


def test_a_silent_job_is_warned_of_once_and_stopped(watched, capfd):
    watched.look(59)
    warning = capfd.readouterr().err
    assert warning.count("\n") == 1
    assert warning.startswith(
        "warning: no rank has made progress for 30 s: rank 0 has been "
    )
    with pytest.raises(StoppedError, match="1"):
        watched.look(63)
    report = capfd.readouterr().err
    assert report.startswith(
        "error: no rank has made progress for 61 s: rank 0 has been in "
    )
    assert "forward of stage 0, micro-batch 1, step 0" in report
    assert "test_hang.py:" in report  # the line that runs


def test_time_in_which_the_process_was_stopped_does_not_count(watched, capfd):
    watched.look(20)
    watched.look(4000, ticks=False)
    watched.look(4005)
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_until_the_first_step_a_job_may_take_longer(watched):
    watched.status.enter("the start")
    watched.look(START_SECONDS - 2)
    with pytest.raises(StoppedError):
        watched.look(START_SECONDS + 2)


def test_the_start_ends_with_the_first_action_not_with_the_next_look(watched):
    watched.status.enter("the start")
    watched.look(1)
    assert limit_of(read_states(watched.folder)) == START_SECONDS
    watched.status.enter("reading the dataset")  # and then the process is stopped
    assert limit_of(read_states(watched.folder)) == 60


def test_the_end_of_a_wait_is_progress(watched, capfd):
    class Late:
        need = Awaited("message 5 from rank 1 to rank 0", (1,))
        is_done = False

        def done(self) -> bool:
            return self.is_done

    requests = [Late(), Late()]
    me = threading.get_ident()
    waits = []

    def others() -> None:
        for request in requests:
            time.sleep(0.05)
            waits.append(wait_of(me))
            request.is_done = True

    helper = threading.Thread(target=others)
    helper.start()
    wait(*requests)
    helper.join()
    assert wait_of(me) is None
    first, second = waits
    assert len(first.pending) == 2
    assert len(second.pending) == 1
    assert first.begin == second.begin
    assert second.needs == [Late.need]


# the files


def test_a_state_fits_its_file_and_is_void_once_the_action_is_over(watched):
    needs = tuple((f"message {tag}", 1 << 900) for tag in range(20))
    published = replace(state(0, str(watched.status)), needs=needs, place="x" * 400)
    watched.status.publish_state(published)
    (seen,) = read_states(watched.folder).values()
    assert 0 < len(seen.needs) < 20
    assert seen.needs[0] == needs[0]
    watched.status.enter("backward", "stage 0", 1)
    (seen,) = read_states(watched.folder).values()
    assert seen.doing == "backward of stage 0, micro-batch 1, step 0"
    assert (seen.needs, seen.place) == ((), "")


def test_damaged_files_are_passed_over(tmp_path):
    (tmp_path / "rank0").write_bytes(b"forward\0" + bytes(STATUS_BYTES))
    (tmp_path / "rank1").write_bytes(bytes(ACTION_BYTES) + b'{"rank": 1, "x": 2}\0')
    assert read_states(tmp_path) == {}
    assert read_status(tmp_path, 0) == "forward"
    assert read_status(tmp_path, 7) is None


# times that users give


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("5", 5), ("1.5 min", 90), ("2h", 7200), ("500ms", 0.5), ("0", 0)],
)
def test_times(text, seconds):
    assert parse_seconds(text) == seconds
    assert parse_arguments(["--timeout", text]).timeout == seconds


@pytest.mark.parametrize("text", ["abc", "-5", "5 parsecs", "", "1e3", "s", "5min3s"])
def test_what_is_no_time_is_refused_with_advice(text):
    with pytest.raises(GemscError, match=r"is not a time.*60s, 10min or never"):
        parse_arguments([f"--timeout={text}"])


def test_times_as_people_say_them():
    assert [*map(show_long, (5, 119, 600, 9000))] == ["5 s", "119 s", "10 min", "2.5 h"]
    assert parse_arguments(["--timeout", "never"]).timeout == 0
    assert parse_arguments([]).timeout == 600


# a signal to one rank, on threads


@pytest.mark.slow
def test_all_ranks_leave_after_the_step_in_which_one_was_asked_to(tmp_path, capfd):
    class Asks:
        calls = 0

        def __call__(self, trainer: Any, report: Any) -> None:
            if trainer.transport.rank == 1 and report.step == 2:
                trainer.requests.ask("leave", "signal 10 came")

    folder = tmp_path / "saved"
    directory = program(tmp_path / "program")
    words = ("--epochs", "4", "--save", str(folder))
    user = user_of(dataset=pairs, on_step=Asks())
    steps = run(directory, user, *words, result=lambda t: (t.step_number, t.is_leaving))
    assert steps == [(3, True), (3, True)]
    assert "stopped on request at step 3; checkpoint in " in capfd.readouterr().out
    whole = run(directory, user_of(dataset=pairs), "--epochs", "4")
    gone_on = run(directory, user_of(dataset=pairs), *words, "--resume", str(folder))
    for one, other in zip(whole, gone_on, strict=True):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), (name, WIDTH)


@pytest.mark.slow(1)
@pytest.mark.parametrize("words", [("--epochs", "1"), ("--steps", "2")])
def test_a_run_that_is_asked_to_leave_in_its_last_step_ends_as_ever(
    words: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def on_step(trainer: Any, report: Any) -> None:
        if trainer.transport.rank == 1 and report.step == last:
            trainer.requests.ask("leave", "signal 10 came")

    last = {"--epochs": 3, "--steps": 2}[
        words[0]
    ] - 1  # the losses of the next carry it
    user = user_of(dataset=pairs, eval_dataset=pairs, on_step=on_step)
    words = (*words, "--save", str(tmp_path / "saved"))
    program(tmp_path / "program")
    ends = run(tmp_path / "program", user, *words, result=lambda t: t.is_leaving)
    assert ends == [True, True]
    out = capfd.readouterr().out
    assert "stopped" not in out
    assert "held-out after epoch 1" in out
    assert (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.slow(1)
@pytest.mark.parametrize("step", [1, 2])
def test_a_run_that_a_hook_stops_has_ended_even_if_a_signal_comes(
    step: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Resumed, it would go on: the hook is not called again."""

    def on_step(trainer: Any, report: Any) -> None:
        if report.step == 1:
            trainer.requests.ask("leave", "signal 10 came")
        if report.step == step:
            trainer.stop("enough")

    words = ("--epochs", "4", "--save", str(tmp_path / "saved"))
    program(tmp_path / "program")
    run(tmp_path / "program", user_of(dataset=pairs, on_step=on_step), *words)
    out = capfd.readouterr().out
    assert "stopped after step 2: enough" in out
    assert "on request" not in out
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_an_interrupt_that_is_swallowed_comes_after_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, *STOPPING)}
    monkeypatch.setattr(StopSignal, "current", None)
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        StopSignal.catch(lambda reason: None)
        StopSignal.check()
        with contextlib.suppress(KeyboardInterrupt):  # as some code in C does
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        with pytest.raises(KeyboardInterrupt):
            StopSignal.check()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
