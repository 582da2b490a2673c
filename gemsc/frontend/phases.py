"""A phase of a step as a model: its forward is the loss of the phase.

The model in it shares the memory of the user's one; what the phase does not train has
no gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from torch import nn

from gemsc.base.nests import Inputs, Path, tensor_leaves
from gemsc.base.phase import Phase
from gemsc.errors import GemscError
from gemsc.frontend.closures import reject_closures
from gemsc.frontend.eager import deep_copy
from gemsc.frontend.user_code import line_of_function
from gemsc.frontend.values import unchanged
from gemsc.ir import meta
from gemsc.ir.program import Program

TARGET = "target"
Modes = dict[str, bool]  # whether a module is in training mode, by its path


class PhaseModel(nn.Module):
    """Has the modules, parameters and buffers of a model under the same names.

    Its forward takes inputs and target and returns the phase's loss.
    """

    def __init__(self, model: nn.Module, phase: Phase) -> None:
        """Take a model as it is; what the loss of the phase uses can be seen in it."""
        super().__init__()
        for name in ("_modules", "_parameters", "_buffers"):
            vars(self)[name] = vars(model)[name]
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        vars(self)["whole"] = model  # not as a module: it would have other names
        vars(self)["phase"] = phase


def phase_model(
    model: nn.Module, phase: Phase, *, is_last: bool = True
) -> tuple[nn.Module, list[Modes]]:
    """Return the model of a phase, of which only that has gradients that it trains.

    And, for each call of the loss, the modes of modules that it leaves in another one.
    If it is not the last phase, it refuses to change the batch of those behind it.

    Raises:
        GemscError: the loss finds the model by a variable.
    """
    reject_closures(model, phase.loss, "use the model that the loss gets instead")
    wrong = f"the loss of phase '{phase.name}' changes the batch of later phases"
    left: list[Modes] = []
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    trained = phase.trained(model)
    for parameter in model.parameters():
        trains = parameter.requires_grad and id(parameter) in trained
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=trains)

    takes = inspect.signature(phase.loss)

    def forward(self: PhaseModel, *inputs: Any, **named: Any) -> Any:
        whole: nn.Module = vars(self)["whole"]
        whole.training = self.training
        before = [module.training for module in whole.modules()]
        try:
            takes.bind(whole, *inputs, **named)
        except TypeError as error:
            raise GemscError(
                f"the loss of phase '{phase.name}' takes other arguments: {error}",
                at=line_of_function(phase.loss),
                help="it gets the model, each of its inputs, and the target: "
                "def loss(model, x, y, target)",
            ) from None
        given = [] if is_last else [t for _, t in tensor_leaves((inputs, named))]
        with unchanged(given, phase.loss, wrong):
            loss = phase.loss(whole, *inputs, **named)
        pairs = zip(whole.named_modules(), before, strict=True)
        left.append(
            {path: was for (path, m), was in pairs if path and m.training != was}
        )
        return loss

    # its inputs have the names that the loss gives them
    forward.__signature__ = takes  # type: ignore[attr-defined]
    methods: dict[str, Any] = {"forward": forward}
    if type(model).train is not nn.Module.train:  # it may freeze layers there
        methods["train"] = _train
    name = f"{type(model).__name__}, phase {phase.name}"
    made: nn.Module = type(name, (PhaseModel,), methods)(deep_copy(model, memo), phase)
    made.training = model.training  # and its layers are in the modes of the user's
    return made, left


def reject_left(
    left: Mapping[str, Sequence[Modes]], phases: Mapping[str, Program]
) -> None:
    """Refuse a loss that leaves a module in a mode in which another phase uses it.

    The first call of each was for its graph, in training mode.

    Raises:
        GemscError: names the module, and who leaves it so.
    """
    for (phase, (modes, *_)), (other, program) in product(left.items(), phases.items()):
        for node in program.graph.nodes if other != phase else ():
            called = str(node.target) if node.op == "call_module" else ""
            for inner in {called, meta.module_path(node)} & modes.keys():
                above = (path for path in modes if f"{inner}.".startswith(f"{path}."))
                path = min(above, key=len)
                was = modes[path]
                raise GemscError(
                    f"the loss of phase '{phase}' leaves '{path}' in "
                    f"{'evaluation' if was else 'training'} mode, in which phase "
                    f"'{other}' would find it",
                    help=f"call train({was}) for it before the loss returns",
                )


def _train(self: PhaseModel, mode: bool = True) -> PhaseModel:
    self.training = mode
    vars(self)["whole"].train(mode)
    return self


def phase_inputs(inputs: Inputs, target: Any) -> Inputs:
    """Return what the model of a phase takes: inputs, and the target behind them."""
    if isinstance(inputs, Mapping):
        return {**inputs, TARGET: target}
    return (*inputs, target)


def own_loss(output: Any) -> Any:
    """Return what the model of a phase returns: it is the loss."""
    return output


def with_target(program: Program, inputs: Inputs) -> Program:
    """Return the program of a phase, which finds the target where batches have it."""
    last = TARGET if isinstance(inputs, Mapping) else len(inputs)

    def moved(path: Path) -> Path:
        return (TARGET, *path[2:]) if path[:2] == ("input", last) else path

    items = (replace(item, path=moved(item.path)) for item in program.inputs)
    return replace(program, inputs=tuple(items))
