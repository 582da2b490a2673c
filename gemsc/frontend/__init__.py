"""From the user's model to a Program: the ways to trace."""

from __future__ import annotations

from gemsc.frontend.export import export
from gemsc.frontend.record import record

__all__ = ["FRONTENDS", "export", "record"]

FRONTENDS = {"record": record, "export": export}
