"""What every part uses: boxes, nests, units, files, random numbers, threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def loads(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and a `__getattr__` (PEP 562) for names in modules of gemsc."""
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"gemsc.{homes[name]}"), name)

    return [*homes], get
