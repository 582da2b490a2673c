"""What one rank asks for and all do after the same step: to stop, to save, to leave.

ask("stop", "enough")       on any rank, at any time, also in a signal handler
numbers, agree              around the next sum of the losses, which carries them
agreed("stop")              after that sum, the same on every rank
"""

from __future__ import annotations

from collections.abc import Sequence

KINDS = ("stop", "save", "leave")


class Requests:
    """The requests of this rank, and those that all ranks know of."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}
        self._agreed: set[str] = set()

    def ask(self, kind: str, reason: str = "") -> None:
        """Ask all ranks for "stop", "save" or "leave"; the first reason stays."""
        self._asked.setdefault(kind, reason)

    def reason(self, kind: str) -> str:
        """Return why this rank asks, "" if it does not or gave no reason."""
        return self._asked.get(kind, "")

    def numbers(self) -> list[float]:
        """Return what to add up over all ranks, one number for each kind."""
        return [float(kind in self._asked) for kind in KINDS]

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' `numbers`."""
        self._agreed |= {kind for kind, sum in zip(KINDS, sums, strict=True) if sum > 0}

    def agreed(self, kind: str) -> bool:
        """Whether all ranks know of such a request."""
        return kind in self._agreed

    def done(self, kind: str) -> None:
        """Forget the request: all ranks have done what was asked for."""
        self._agreed.discard(kind)
        self._asked.pop(kind, None)
