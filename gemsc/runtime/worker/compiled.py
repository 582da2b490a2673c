"""Stages whose forward goes through torch.compile, with Inductor's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemsc.base.draws import are_draws_same, outside_draws
from gemsc.errors import GemscError
from gemsc.runtime.worker.program import Run
from gemsc.runtime.worker.stages import Stages

__all__ = ["forwards"]


def forwards(stages: Stages) -> dict[Run, Callable[..., Any]]:
    """Return what runs each stage forward, compiled at its first call.

    It is one graph: messages, streams and the update stay outside. Random numbers are
    those that the stage draws without it. In `same_draws` a stage that draws runs as it
    is: Inductor asks for other sizes.

    Raises:
        GemscError: at the call: a stage cannot be compiled.
    """
    from torch._inductor import config  # takes a second

    config.compile_threads = 1  # no processes beside those that MPI has started
    config.fallback_random = True
    return {run: _forward(run, stages) for run in stages}


def _forward(run: Run, stages: Stages) -> Callable[..., Any]:
    stage: nn.Module = stages[run]
    compiled = torch.compile(stage.forward, fullgraph=True, dynamic=False)

    def forward(*inputs: Any) -> Any:
        if are_draws_same() and run in stages.drawing:
            return stage(*inputs)
        try:
            with outside_draws():
                return compiled(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            lines = str(error).strip().splitlines()
            raise GemscError(
                f"torch.compile cannot take {run}: {lines[0] if lines else error!r}",
                help="compile the model again without --torch-compile",
            ) from error

    return forward
