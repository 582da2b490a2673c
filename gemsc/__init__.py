"""gemsc compiles PyTorch models into one readable training program per MPI rank.

The names below are loaded when they are first used, so that a rank at run time loads
nothing of the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemsc.base import loads

if TYPE_CHECKING:
    from gemsc.base.phase import Phase as Phase
    from gemsc.compiler import CompiledProgram as CompiledProgram
    from gemsc.compiler import compile as compile
    from gemsc.datasets.stream import Stream as Stream
    from gemsc.errors import GemscError as GemscError
    from gemsc.options import CompileOptions as CompileOptions
    from gemsc.runtime.training.callbacks import Callback as Callback
    from gemsc.runtime.training.callbacks import Ema as Ema
    from gemsc.runtime.training.train import load as load
    from gemsc.runtime.training.trainer import Trainer as Trainer
    from gemsc.slides.slide import Slide as Slide
    from gemsc.verify.steps import verify_compiled as verify_compiled
    from gemsc.weights.keras_model import KerasModel as KerasModel
    from gemsc.weights.load import load_weights as load_weights

_HOMES = {
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
}
__all__ = [*_HOMES]
__getattr__ = loads(__name__, _HOMES)
