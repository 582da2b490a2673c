"""Cases of a table that take long, and run with `--nightly` only."""

from __future__ import annotations

from typing import Any

import pytest


def at_night(*values: object) -> list[Any]:
    """Return values of one parameter, each a case that runs at night."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
