"""How the ranks of a job ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """The exit code, and what is known beside it.

    how: what became of the rank that ended the others, "" if it said so itself.
    is_asked: whether this process was asked to end.
    step: the last step that any rank was in, None if no rank could say.
    """

    code: int
    how: str = ""
    is_asked: bool = False
    step: int | None = None

    @property
    def reason(self) -> str:
        """What the ranks ended with."""
        return self.how or f"the ranks ended with exit code {self.code}"
