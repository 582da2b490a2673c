"""Refused: why a node cannot be computed on tiles."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(Exception):  # noqa: N818 - no error: the caller gathers instead
    """A rule cannot compute a node on tiles; says why, for the report."""
