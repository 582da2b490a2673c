"""A breakpoint on a rank waits for a terminal, and gives it the debugger."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time

import pytest

from gemsc.runtime.process.breakpoints import Breakpoints


def waits_at(capfd: pytest.CaptureFixture[str]) -> int:
    said, end = "", time.monotonic() + 60
    while time.monotonic() < end:
        said += capfd.readouterr().err
        if match := re.search(r"rank 3 on \S+ waits .*: nc localhost (\d+)\n", said):
            return int(match[1])
        time.sleep(0.01)
    raise AssertionError(said)


def test_it_waits_for_a_terminal_once_and_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stop, seen = Breakpoints(3), list[int]()

    def work() -> None:
        for number in (20, 30):
            stop()
            seen.append(number)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    with socket.create_connection(("localhost", waits_at(capfd)), 60) as connection:
        assert seen == []
        connection.sendall(b"p number + 1\nc\np number + 2\nc\n")
        thread.join(60)
        assert not thread.is_alive()
        connection.settimeout(60)
        text = ""
        while "32\n" not in text:
            text += connection.recv(4096).decode()
    assert "work()" in text
    assert "21\n" in text
    assert seen == [20, 30]


@pytest.mark.parametrize("kept", ["", "another hook", "PYTHONBREAKPOINT", "a terminal"])
def test_what_is_there_stays(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr(sys, "stdin", None)
    if kept == "another hook":
        monkeypatch.setattr(sys, "breakpointhook", print)
    elif kept == "PYTHONBREAKPOINT":
        monkeypatch.setenv(kept, "0")
    elif kept == "a terminal":
        monkeypatch.setattr(
            sys, "stdin", type("Terminal", (), {"isatty": lambda _: 1})()
        )
    before = sys.breakpointhook
    Breakpoints.install(0)
    assert (sys.breakpointhook is before) == bool(kept)
