"""The watch: a thread of each rank that looks, once a second, whether the job goes on.

At half of the limit one rank warns, at the limit one reports what every rank waits for
or computes, and all stop. A rank that is stopped, or whose interpreter is held, cannot
look: the others, and `gemsc run`, read what its watch saw last.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

from gemsc.base.units import show_long
from gemsc.errors import warn
from gemsc.runtime.process.failure import end_job, is_first, line_of
from gemsc.runtime.process.hang import explain_hang, hang_report, is_hanging, limit_of
from gemsc.runtime.process.scratch import scratch_folder
from gemsc.runtime.process.status import (
    STATUS_VARIABLE,
    RankState,
    Status,
    read_states,
)
from gemsc.runtime.process.stop import GRACE_SECONDS, StopSignal, signal_name
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.transport.waiting import wait_of

LONGEST_INTERVAL = 1.0  # seconds from look to look
PAUSE = 3.0  # a look that comes so late: the process was stopped, the job may not hang


class HangWatch:
    """Looks after the thread that makes it, and after the other ranks of its machine.

    `limit` is in seconds, 0 for never.
    """

    def __init__(self, transport: Transport, folder: Path, limit: float) -> None:
        self._transport = transport
        self._folder = folder
        self._limit = limit
        self._interval = min(LONGEST_INTERVAL, limit / 8 or LONGEST_INTERVAL)
        self._thread = threading.get_ident()
        self._marker: object = None
        self._changed = self._seen = time.monotonic()

    def start(self) -> None:
        """Look from now on; a rank that is stopped before the first look is known."""
        self._publish(time.monotonic())
        threading.Thread(target=self._run, name="gemsc watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._interval)
            with contextlib.suppress(OSError):  # the folder is gone: the job ends
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Note what the rank does; if nobody has gone on for long, say so, and stop."""
        self._publish(now)
        stop = StopSignal.current
        if stop is not None and stop.number is not None and stop.is_overdue(now):
            states = read_states(self._folder)
            text = f"error: {signal_name(stop.number)} came, and {GRACE_SECONDS:.0f} s "
            text += "later the step has not ended: "
            lines = "\n".join(explain_hang(states, now))
            end_job(text + lines, self._transport, 128 + stop.number)
        if not self._limit or now - self._changed < self._limit / 2:
            return
        states = read_states(self._folder)
        if is_hanging(states, now):
            end_job(hang_report(states, now), self._transport)
        elif is_hanging(states, now, share=0.5):
            since = max(state.changed for state in states.values())
            if is_first(f"warned-{since:.3f}"):
                warn(
                    f"no rank has made progress for {show_long(now - since)}: "
                    f"{explain_hang(states, now)[0]}; the job is stopped after "
                    f"{show_long(limit_of(states))} (--timeout)"
                )

    def _publish(self, now: float) -> None:
        status = Status.current
        if status is None:
            return
        wait = wait_of(self._thread)
        marker = (status.changes, wait and (wait.begin, len(wait.pending)))
        late = now - self._seen - self._interval
        if marker != self._marker:
            self._marker, self._changed = marker, now
        elif late > PAUSE:
            self._changed += late
        self._seen = now
        is_over = now - self._changed < self._interval  # no place is worth the time
        needs = wait.needs if wait is not None else []
        state = RankState(
            rank=self._transport.rank,
            pid=os.getpid(),
            limit=self._limit,
            seen=now,
            changed=self._changed,
            doing=str(status),
            place="" if is_over else self._place(),
            is_idle=status.is_idle and wait is None,
            needs=tuple((n.what, sum(1 << rank for rank in n.ranks)) for n in needs),
        )
        status.publish_state(state)

    def _place(self) -> str:
        """Return the line that runs: the user's, or that of the rank's file."""
        frame = sys._current_frames().get(self._thread)
        return line_of(traceback.extract_stack(frame)) if frame is not None else ""


def start_watch(transport: Transport, limit: float) -> None:
    """HangWatch over this rank from now on; all ranks call it.

    Where no launcher gave the ranks of a machine a folder for their states, the first
    of them makes one, which is gone when that process ends.
    """
    folder = os.environ.get(STATUS_VARIABLE, "")
    is_given = Path(folder).is_dir() if folder else False
    if is_given:  # what follows is watched, too
        _start(transport, folder, limit)
    elif transport.local_rank == 0:
        kept = ExitStack()
        folder = str(kept.enter_context(scratch_folder(0)))
        atexit.register(kept.close)
    node = platform.node()
    everyone = transport.all_gather_object((node, folder))
    if not is_given:
        folders = (path for its_node, path in everyone if its_node == node and path)
        _start(transport, next(folders), limit)


def _start(transport: Transport, folder: str, limit: float) -> None:
    os.environ[STATUS_VARIABLE] = folder
    Status(transport.rank)
    HangWatch(transport, Path(folder), limit).start()
