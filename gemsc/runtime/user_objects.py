"""Objects of the user's own code that a generated file refers to."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["user_object"]


def user_object(path: str, module: str, qualname: str) -> Any:
    """Return `qualname` of the user's module, which is loaded from `path` if it is new.

    The folder of `path` is where the user's other modules are found.
    """
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if module not in sys.modules:
        if Path(path).stem == module or importlib.util.find_spec(module) is None:
            spec = importlib.util.spec_from_file_location(module, path)
            assert spec is not None
            assert spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[module] = loaded
            spec.loader.exec_module(loaded)
        else:
            importlib.import_module(module)
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
