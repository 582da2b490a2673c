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

_MODULES = {
    "base.phase": ("Phase",),
    "compiler": ("CompiledProgram", "compile"),
    "datasets.stream": ("Stream",),
    "errors": ("GemscError",),
    "options": ("CompileOptions",),
    "runtime.training.callbacks": ("Callback", "Ema"),
    "runtime.training.train": ("load",),
    "runtime.training.trainer": ("Trainer",),
    "slides.slide": ("Slide",),
    "verify.steps": ("verify_compiled",),
    "weights.keras_model": ("KerasModel",),
    "weights.load": ("load_weights",),
}
__all__, __getattr__ = loads(__name__, _MODULES)
