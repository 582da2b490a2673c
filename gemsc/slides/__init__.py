"""Pictures and volumes that are read, computed and written in windows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gemsc.errors import GemscError


def needed(package: str, files: str, extra: str) -> Any:
    """Return the package that reads some files.

    Raises:
        GemscError: it is not installed; says how to install it.
    """
    try:
        return import_module(package)
    except ImportError:
        raise GemscError(
            f"{files} files need {package}", help=f"pip install 'gemsc[{extra}]'"
        ) from None
