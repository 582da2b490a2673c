"""Objects of the user's own code that a generated file refers to."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from gemsc.plan import Plan
from gemsc.source import RENAMED, ConstantsLoader

T = TypeVar("T")


def user_object(rank_file: str, module: str, qualname: str) -> Any:
    """Return `qualname` of the user's module, loaded from the model file if it is new.

    plan.toml, beside the rank's file, says where the model file is; its folder is where
    the user's other modules are found.
    """
    if module not in sys.modules:
        plan = Plan.read(Path(rank_file).parent / "plan.toml")
        _load(module, _model_file(plan), plan.constants)
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def user_module(cls: type[T], /, **parts: Any) -> T:
    """Return an object of the user's class that holds these parts.

    Its `__init__` does not run. Parameters, buffers and modules are registered in their
    order; everything else is an attribute.
    """
    made: Any = cls.__new__(cls)
    if not isinstance(made, nn.Module):
        vars(made).update(parts)
        return cast("T", made)
    nn.Module.__init__(made)
    for name, part in parts.items():
        if isinstance(part, nn.Parameter):
            made._parameters[name] = part
        elif isinstance(part, nn.Buffer):
            made._buffers[name] = part
            if not part.persistent:
                made._non_persistent_buffers_set.add(name)
        elif isinstance(part, nn.Module):
            made._modules[name] = part
        else:
            vars(made)[name] = part
    return cast("T", made)


def _model_file(plan: Plan) -> Path | None:
    """Return the file of `path/model.py:name`; None if the model came from Python."""
    spec = plan.spec
    return Path(spec.partition(".py:")[0]).with_suffix(".py") if spec else None


def _load(module: str, path: Path | None, constants: Mapping[str, str]) -> None:
    if path is not None:
        for folder in {str(path.parent), str(_outside_packages(path.parent))}:
            if folder not in sys.path:
                sys.path.insert(0, folder)
    if path is None or path.stem != module.removeprefix(RENAMED):
        importlib.import_module(module)
        return
    loader = ConstantsLoader(module, path, constants)
    spec = importlib.util.spec_from_file_location(module, path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)


def _outside_packages(folder: Path) -> Path:
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder
