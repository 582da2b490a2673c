"""Phase: one of several updates of a step, with a loss and an optimizer of its own.

phases = [
Phase("d", loss=d_loss, train="discriminator", optimizer=adam),
Phase("g", loss=g_loss, train="generator", optimizer=adam),
]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemsc.errors import GemscError

if TYPE_CHECKING:  # what starts ranks loads no PyTorch
    from torch import nn

    from gemsc.base.nests import Inputs

LOSS_OF = "loss_"  # before the name of a phase: what a log calls its loss


@dataclass(frozen=True)
class Phase:
    """One of several updates of a step, in the order in which a model file has them.

    name: an identifier, such as "d"; it is in the names of rank files and in the log.
    loss: `loss(model, *inputs, target)`, or with inputs by name as `example_inputs()`
        gives them; returns the loss of a micro-batch as any loss does. The model is in
        training mode.
    train: the paths of what this phase trains, "generator" or ["a", "b.head"]; the
        rest of the model has no gradients meanwhile. Each parameter is trained in one
        phase, or in none.
    optimizer, scheduler: as those of a model file; the optimizer gets what is trained.
    every: it is done in the first of so many steps.
    """

    name: str
    loss: Callable[..., Any]
    train: str | Sequence[str]
    optimizer: Callable[..., Any] | None = None
    scheduler: Callable[..., Any] | None = None
    every: int = 1

    def __deepcopy__(self, _: Any) -> Phase:
        """Return it as it is, whatever its functions hold."""
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of what it trains."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train)

    def trains(self, name: str) -> bool:
        """Whether the phase trains a parameter."""
        return any(f"{name}.".startswith(f"{path}.") for path in self.paths)

    def trained(self, model: nn.Module) -> dict[int, str]:
        """Return the `id` and a name of each parameter that it trains.

        One that the model has at several places goes by any of their names.
        """
        named = model.named_parameters(remove_duplicate=False)
        return {id(p): name for name, p in named if self.trains(name)}

    def is_due(self, step: int) -> bool:
        """Whether a step, counted from 0, has this phase."""
        return step % self.every == 0

    def call(self, model: nn.Module, inputs: Inputs, target: Any) -> Any:
        """Return what the loss gives."""
        if isinstance(inputs, Mapping):
            return self.loss(model, **inputs, target=target)
        return self.loss(model, *inputs, target)


def as_phases(value: object) -> tuple[Phase, ...]:
    """Return what a model file calls its phases.

    Raises:
        GemscError: it is no list of phases.
    """
    phases = tuple(value) if isinstance(value, list | tuple) else ()
    if not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise GemscError(
            "phases is not a list of gemsc.Phase",
            help='write phases = [gemsc.Phase("d", loss=..., train="...", '
            "optimizer=...), ...]",
        )
    return phases


def check_phases(phases: Sequence[Phase], model: nn.Module) -> None:
    """Make sure that phases can be those of a model.

    Raises:
        GemscError: names are no names or equal, what they train is not there, or two
            of them train it.
    """
    names: set[str] = set()
    trained: dict[int, str] = {}
    for phase in phases:
        if not phase.name.isidentifier() or phase.name in names:
            wrong = "twice" if phase.name in names else "which is not a name in Python"
            raise GemscError(
                f"phases has {phase.name!r}, {wrong}",
                help='give each phase its own short name: Phase("d", ...)',
            )
        if type(phase.every) is not int or phase.every < 1:
            raise GemscError(
                f"phase {phase.name}: every={phase.every!r} is not a number of steps",
                help="leave it out, or give 2 for every second step",
            )
        names.add(phase.name)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for path in phase.paths:
            if not any(f"{name}.".startswith(f"{path}.") for name in parameters):
                there = ", ".join(dict.fromkeys(n.split(".")[0] for n in parameters))
                raise GemscError(
                    f"phase {phase.name} trains {path!r}, of which the model has no "
                    "parameters",
                    help=f"name a part of the model by its path; it has {there}",
                )
        for key, name in phase.trained(model).items():
            if key in trained:
                raise GemscError(
                    f"phases {trained[key]} and {phase.name} both train '{name}'",
                    help="train each parameter in one phase only, or add up the losses "
                    "in one phase",
                )
            trained[key] = phase.name
    if all(phase.every > 1 for phase in phases):
        raise GemscError(
            "phases: some steps have no phase",
            help="leave out every= in one phase",
        )
