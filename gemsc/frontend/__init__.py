"""From the user's model to a Program: the ways to trace."""

from __future__ import annotations

from gemsc.frontend.record import record

__all__ = ["FRONTENDS", "record"]

FRONTENDS = {"record": record}
