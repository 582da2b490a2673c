"""What every part uses: boxes, nests, units, files, random numbers, threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loads(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` (PEP 562) for names that are in these modules."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(homes[name]), name)

    return get
