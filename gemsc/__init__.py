"""gemsc compiles PyTorch models into one readable training program per MPI rank.

The names below are loaded when they are first used, so that a rank at run time loads
nothing of the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemsc.base import loads

if TYPE_CHECKING:
    from gemsc.base.phase import Phase
    from gemsc.compiler import CompiledProgram, compile
    from gemsc.datasets.stream import Stream
    from gemsc.errors import GemscError
    from gemsc.options import CompileOptions
    from gemsc.runtime.training.callbacks import Callback, Ema
    from gemsc.runtime.training.train import load
    from gemsc.runtime.training.trainer import Trainer
    from gemsc.slides.slide import Slide
    from gemsc.verify.steps import verify_compiled
    from gemsc.weights.keras_model import KerasModel
    from gemsc.weights.load import load_weights

__all__ = [
    "Callback",
    "CompileOptions",
    "CompiledProgram",
    "Ema",
    "GemscError",
    "KerasModel",
    "Phase",
    "Slide",
    "Stream",
    "Trainer",
    "compile",
    "load",
    "load_weights",
    "verify_compiled",
]

__getattr__ = loads(
    __name__,
    {
        "Callback": "gemsc.runtime.training.callbacks",
        "CompileOptions": "gemsc.options",
        "CompiledProgram": "gemsc.compiler",
        "Ema": "gemsc.runtime.training.callbacks",
        "GemscError": "gemsc.errors",
        "KerasModel": "gemsc.weights.keras_model",
        "Phase": "gemsc.base.phase",
        "Slide": "gemsc.slides.slide",
        "Stream": "gemsc.datasets.stream",
        "Trainer": "gemsc.runtime.training.trainer",
        "compile": "gemsc.compiler",
        "load": "gemsc.runtime.training.train",
        "load_weights": "gemsc.weights.load",
        "verify_compiled": "gemsc.verify.steps",
    },
)
