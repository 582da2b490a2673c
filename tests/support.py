"""Run compiled programs on threads."""

from __future__ import annotations

from gemsc.verify.on_threads import steps_on_threads as run_on_threads

__all__ = ["run_on_threads"]
