"""Warns of what a run does with no error: labels, digits, rates, unread inputs."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    OneCycleLR,
    ReduceLROnPlateau,
)

from gemsc.base.dtypes import is_real, within
from gemsc.base.nests import named_place, tensor_leaves
from gemsc.errors import GemscError, warn
from gemsc.runtime.training.callbacks import Callback
from gemsc.runtime.training.trainer import Trainer


class LabelsThatCount(Callback):
    """Warns, once, where a step is not the mean over the labels that its loss counts.

    A step takes the mean of the losses of its micro-batches. Where these are means over
    100 labels and over 7, each of the 7 weighs fourteen times as much. The 1st, 2nd,
    4th, 8th, ... batch of the first rank that computes losses is looked at.
    """

    def __init__(self) -> None:
        self._count, self._said = 0, False

    def on_batch(
        self, trainer: Trainer, what: str, sources: Mapping[str, Any], window: Any
    ) -> None:
        """Count the labels of each micro-batch."""
        plan = trainer.plan
        self._count += what == "step"
        is_due = what == "step" and not self._count & (self._count - 1)
        is_mine = trainer.transport.rank == plan.members[plan.places[0][-1]][0]
        if self._said or not is_due or not is_mine:
            return
        size, *others = {*plan.micro_batch_sizes}
        leaves: dict[Any, Tensor] = dict(tensor_leaves(dict(sources)))
        for loss in plan.ignored if not others else ():
            labels = leaves.get(tuple(loss["path"]))
            if labels is None or len(labels) % size:
                continue
            parts = (labels != loss["label"]).reshape(len(labels) // size, -1)
            least, most = (int(part) for part in parts.sum(1).aminmax())
            if least != most:
                self._said = True
                warn(
                    f"the micro-batches of step {trainer.step_number + 1} have "
                    f"{least} to {most} labels that are not {loss['label']}, which the "
                    f"loss {loss['at']} leaves out. A step takes the mean of their "
                    "means, in which a label weighs more where there are few",
                    help="return a sum and a count from loss(output, target): the sum "
                    "of the losses of all labels, and how many count",
                )
                return


class SameNumbers(Callback):
    """Refuses a batch in which a number is not that of the examples.

    A program has numbers that are no tensors as they were when it was compiled: the
    weights of two targets, which a loop draws for each batch (mixup), would not change.
    """

    def on_batch(
        self, trainer: Trainer, what: str, sources: Mapping[str, Any], window: Any
    ) -> None:
        """Look at each batch.

        Raises:
            GemscError: a number is another one.
        """
        for number in trainer.plan.numbers:
            value: Any = sources
            try:
                for part in number["path"]:
                    value = value[part]
            except (KeyError, IndexError, TypeError):  # left out
                continue
            if value is None or _is_everywhere(number["value"], value):
                continue
            shown, advice = value, f"torch.tensor({number['value']})"
            if isinstance(value, Tensor):
                shown, advice = "a tensor", "of a micro-batch's samples"
            place = named_place(number["path"])
            raise GemscError(
                f"{place} is {shown}, but the program was compiled with "
                f"{number['value']}, which is a constant there",
                help="let example_inputs(), or the target of the example, have a "
                f"tensor there, {advice}, compile again, and give such tensors; or "
                "leave it out of batches, if nothing uses it",
            )


def _is_everywhere(number: float, value: Any) -> bool:
    try:
        given = torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError):
        return False
    if given.is_floating_point():  # 0.7 in float32 is that number, and 0 is not
        return bool((given == torch.tensor(number, dtype=given.dtype)).all())
    return bool((given == number).all())


class RoundedNumbers(Callback):
    """Warns, once, where numbers of the data have more digits than those of examples.

    A program reads them in the dtype of the examples: times in float64, 1.7e9 seconds,
    are multiples of 128 in float32.
    """

    def __init__(self) -> None:
        self._said = False

    def on_batch(
        self, trainer: Trainer, what: str, sources: Mapping[str, Any], window: Any
    ) -> None:
        """Look at the first batch, on all ranks."""
        if self._said or what != "step":
            return
        self._said = True
        leaves: dict[Any, Tensor] = dict(tensor_leaves(dict(sources)))
        mine = {}
        for item in trainer.worker.variants.inputs:
            dtype = within(item.dtype, trainer.worker.float_dtype)
            dtype = torch.promote_types(dtype, item.dtype)  # less was asked for
            given = leaves[item.path].dtype if item.path in leaves else dtype
            if is_real(given) and torch.promote_types(given, dtype) != dtype:
                mine[item.name] = (given, dtype)
        everyone = trainer.transport.all_gather_object(mine)
        wide = {name: pair for of_rank in everyone for name, pair in of_rank.items()}
        for name, (given, dtype) in wide.items() if trainer.transport.rank == 0 else ():
            warn(
                f"{name} is {given} in the data, and rounded to {dtype}, as in the "
                "examples that the program was compiled for",
                help=f"convert it to {dtype} in the dataset; if that loses too much, "
                f"let the examples have {given}, and forward or the loss convert it",
            )


class StepsOfScheduler(Callback):
    """Warns, once, where others step the scheduler, too: rates change twice as fast.

    It comes before all that may do so after a step.
    """

    def __init__(self) -> None:
        self._known: tuple[int, object] = (-1, None)
        self._said = False

    def on_step(self, trainer: Trainer, report: Any) -> None:
        """Remember where the scheduler is."""
        self._known = trainer.step_number, getattr(trainer.scheduler, "last_epoch", 0)

    def on_batch(
        self, trainer: Trainer, what: str, sources: Mapping[str, Any], window: Any
    ) -> None:
        """Look whether it is still there; a checkpoint is of another step."""
        scheduler, (step, place) = trainer.scheduler, self._known
        if self._said or what != "step" or step != trainer.step_number:
            return
        is_paced = isinstance(scheduler, ReduceLROnPlateau)  # by a figure
        if getattr(scheduler, "last_epoch", 0) != place and not is_paced:
            self._said = True
            if trainer.transport.rank == 0:
                warn(
                    f"{type(scheduler).__name__} was stepped after step {step}, and "
                    "trainer.step() steps it after each update, too",
                    help="leave out scheduler.step(), and let scheduler() count in "
                    "updates, not in epochs",
                )


def warn_of_length(trainer: Trainer, steps: int | None) -> None:
    """Warn of a scheduler that is made for fewer updates than so many steps make.

    OneCycleLR fails after its last one; a cosine rises again, which may be meant.
    """
    every = trainer.phases[-1].every if trainer.phases else 1
    count = -(-(steps or 0) // every) // trainer.worker.steps.accumulate
    scheduler = trainer.scheduler  # of the last phase
    then = {OneCycleLR: ": it fails then", CosineAnnealingLR: ": it rises again then"}
    for name in "total_steps", "T_max":
        length = getattr(scheduler, name, count)
        is_short = isinstance(length, Real) and length < count
        if is_short and trainer.transport.rank == 0:
            warn(
                f"{type(scheduler).__name__} has {name}={length}, and this run makes "
                f"{count} updates{then.get(type(scheduler), '')}",
                help="unless that is meant, let scheduler() count in updates, not in "
                "epochs",
            )


class UnreadInputs(Callback):
    """Warns, once, of inputs that one's own loop gives and no rank reads.

    A program has the inputs of `example_inputs()` that forward uses: a mask that is not
    among them is not used.
    """

    def __init__(self) -> None:
        self._said = False

    def on_batch(
        self, trainer: Trainer, what: str, sources: Mapping[str, Any], window: Any
    ) -> None:
        """Look at the first batch, on all ranks."""
        if self._said:
            return
        self._said = True
        given = [path for path, _ in tensor_leaves({"input": sources["input"]})]
        mine = {item.path for item in trainer.worker.variants.inputs}
        everyone = trainer.transport.all_gather_object((given, mine))
        read = set[Any]().union(*(paths for _, paths in everyone))
        unread = {p: None for paths, _ in everyone for p in paths if p not in read}
        if unread and trainer.transport.rank == 0:
            warn(
                f"no rank reads {', '.join(map(named_place, unread))} of a batch: "
                "example_inputs() does not have it, or forward does not use it",
                help="add it to example_inputs() and compile again, or leave it out",
            )
