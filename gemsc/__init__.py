"""gemsc compiles PyTorch models into one readable training program per MPI rank.

The names below are loaded when they are first used, so that a rank at run time loads
nothing of the compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemsc.compiler import CompiledProgram, compile
    from gemsc.errors import GemscError
    from gemsc.options import CompileOptions
    from gemsc.runtime.load import load
    from gemsc.runtime.trainer import Trainer

__all__ = [
    "CompileOptions",
    "CompiledProgram",
    "GemscError",
    "Trainer",
    "compile",
    "load",
]

HOMES = {
    "CompileOptions": "gemsc.options",
    "CompiledProgram": "gemsc.compiler",
    "GemscError": "gemsc.errors",
    "Trainer": "gemsc.runtime.trainer",
    "compile": "gemsc.compiler",
    "load": "gemsc.runtime.load",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'gemsc' has no attribute '{name}'")
    return getattr(import_module(HOMES[name]), name)
