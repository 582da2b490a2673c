"""Whether a job hangs, and who is to blame: from what the watches of its ranks saw.

A job hangs when no rank has gone on for some time. Going on is to begin another action
(a receive, a micro-batch's forward, the update) or to come out of a wait: a rank that
waits long for one that works does not hang, nor does a slow job. Whose turn it is, is
where the chain of waits ends:

    rank 2 waits for rank 1, which waits for rank 0, which has been in forward of ...
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from gemsc.base.units import show_long
from gemsc.runtime.process.status import RankState

START_SECONDS = 600.0  # the least limit until the first step: weights are read, ...
LOST = 3.0  # seconds: a watch that has not looked for so long could not
LONGEST = 9  # lines about ranks, of which one may say that there are more
_CIRCLE = "no message comes of this circle"

States = Mapping[int, RankState]


def _silence(states: States, now: float) -> float:
    """Return for how long no rank has gone on."""
    return now - max(state.changed for state in states.values()) if states else 0.0


def limit_of(states: States) -> float:
    """Return after how many seconds of silence the job is stopped; 0 for never."""
    limit = max((state.limit for state in states.values()), default=0.0)
    is_early = any(state.is_starting for state in states.values())
    return max(limit, START_SECONDS) if limit and is_early else limit


def is_hanging(states: States, now: float, share: float = 1.0) -> bool:
    """Whether no rank has gone on for as long as the limit, or a share of it.

    Ranks that are all in the user's own loop, between two steps, may take their time.
    """
    limit = limit_of(states)
    if not limit or all(state.is_idle for state in states.values()):
        return False
    return _silence(states, now) >= limit * share


def hang_report(states: States, now: float) -> str:
    """Return the report of a job that hangs."""
    first, *notes = explain_hang(states, now)
    silence = show_long(_silence(states, now))
    longer = show_long(10 * limit_of(states)).replace(" ", "")
    help = f"if it may take this long, use --timeout {longer}; `never` waits forever"
    if first.endswith(_CIRCLE):
        help = "in your own loop, make all calls of the trainer on all ranks, in the "
        help += "same order; the notes have the lines that wait for each other"
    text = [f"error: no rank has made progress for {silence}: {first}", *notes]
    return "\n".join([*text, f"help: {help}"])


def explain_hang(states: States, now: float) -> list[str]:
    """Return the chain of waits in one line, then what each rank does in one each.

    What a watch saw that cannot look any more may be over: such a rank waits for none.
    """
    states = {
        rank: dataclasses.replace(state, needs=()) if _is_lost(state, now) else state
        for rank, state in states.items()
    }
    lines = [f"note: rank {rank}: {_doing(state)}" for rank, state in states.items()]
    if len(lines) > LONGEST:
        lines[LONGEST - 1 :] = [f"note: and {len(lines) - LONGEST + 1} more ranks"]
    return [_chain(states, now), *lines]


def _chain(states: States, now: float) -> str:
    """Return who waits for whom, from a rank that waits to the one whose turn it is."""
    waiting = [state.rank for state in states.values() if state.needs]
    if not waiting:
        first = max(states.values(), key=lambda state: _is_lost(state, now))
        return f"rank {first.rank} {_since(first, now)}"
    chain = [waiting[0]]
    while (others := _awaited(states[chain[-1]], states)) and others[0] not in chain:
        chain.append(others[0])
        if others[0] not in states:
            break
    text = f"rank {chain[0]} "
    text += "".join(f"waits for rank {rank}, which " for rank in chain[1:])
    last = chain[-1]
    if last not in states:
        return text + "has said nothing here (another machine, or not started)"
    if others:
        return text + f"waits for rank {others[0]}: {_CIRCLE}"
    if states[last].needs:
        what, _ = states[last].needs[0]
        return text + f"waits for {what}, as do all ranks that it takes"
    return text + _since(states[last], now)


def _awaited(state: RankState, states: States) -> list[int]:
    """Return the ranks that one waits for: those not at the same point themselves."""
    awaited: dict[int, None] = {}
    for need in state.needs:
        for rank in _members(need[1]):
            other = states.get(rank)
            is_there = other is not None and need in other.needs
            if rank != state.rank and not is_there:
                awaited[rank] = None
    # whose turn it is, rather than one that waits, too
    return sorted(awaited, key=lambda rank: bool(rank in states and states[rank].needs))


def _members(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


def _since(state: RankState, now: float) -> str:
    """Return what a rank that does not wait has been doing for how long."""
    how = _why_silent(state, now)
    seconds = f"for {now - state.changed:.0f} s"
    return f"has been in {state.doing} {seconds}{f' ({how})' if how else ''}"


def _doing(state: RankState) -> str:
    parts = [state.doing]
    if state.needs:
        more = f" and {len(state.needs) - 1} more" if len(state.needs) > 1 else ""
        parts.append(f"waits for {state.needs[0][0]}{more}")
    if state.place:
        parts.append(state.place)
    return "; ".join(parts)


def _is_lost(state: RankState, now: float) -> bool:
    """Whether the rank's watch has not looked for so long that it could not."""
    return now - state.seen >= LOST


def _why_silent(state: RankState, now: float) -> str:
    """Return what keeps the rank's process, or not even lets its watch look, or ""."""
    letter, parent = _process(state.pid)
    processes = {
        "its process": [state.pid],
        "a process that it started": _children(state.pid),
        "the process that started it": [parent],
    }
    for what, pids in processes.items():
        for pid in pids:
            if _process(pid)[0] in ("T", "t"):
                return f"{what} is stopped: kill -CONT {pid} continues it"
    if not _is_lost(state, now):
        return ""
    if not letter:
        return "its process has ended"
    if letter == "D":
        return "its process waits for a disk or a network drive"
    return "its Python cannot run: something holds the interpreter's lock"


def _process(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state and its parent; "" if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], int(words[1])
    except (OSError, ValueError, IndexError):  # or the system has no /proc
        return "", 0


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    return children
