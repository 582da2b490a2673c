"""Whether a scheduler does the same on a rank, which may have some groups only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from warnings import catch_warnings

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gemsc.base.elementwise import OptimizerFactory, values_of_group
from gemsc.base.rng import fork_torch, generator_lock
from gemsc.errors import GemscError

SchedulerFactory = Callable[[Optimizer], Any]
Kinds = Mapping[str, tuple[torch.Size, torch.dtype, bool]]  # is it trained?
ALL_GROUPS = (
    "let optimizer() make all groups on each rank, some of them without parameters"
)
UPDATES = *range(200), *(10**n for n in range(3, 8))  # that are tried


def check_rates(
    own: Iterable[str],
    all: Kinds,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory,
) -> None:
    """Make sure that a scheduler does with a rank's groups what it does with all.

    It may go by their numbers, and a rank may have fewer than the parameters of `all`
    ranks give. That is tried on tensors without memory.

    Raises:
        GemscError: a parameter gets another rate, or the like.
    """
    for device in "meta", "cpu":  # some want a device that exists
        parameters = {
            name: nn.Parameter(
                torch.zeros((), dtype=dtype, device=device).expand(size), is_trained
            )
            for name, (size, dtype, is_trained) in all.items()
        }
        mine = {name: parameters[name] for name in own}
        context = catch_warnings(action="ignore")  # no optimizer steps
        with generator_lock, fork_torch(), suppress(Exception), context:
            found = _first_other(mine, parameters, optimizer, scheduler)
            break
    else:  # its first real step will say why
        return
    if found:
        raise GemscError(
            f"scheduler() goes by the numbers of groups: this rank has fewer of them, "
            f"and '{found}' gets other rates than where a process has all",
            help=f"{ALL_GROUPS}, or let scheduler() go by what a group says "
            '(group["depth"]), not by its number',
        )


def _first_other(
    own: Mapping[str, nn.Parameter],
    all: Mapping[str, nn.Parameter],
    make: OptimizerFactory,
    scheduler: SchedulerFactory,
) -> str:
    """Return the name of a parameter with other rates, or ""."""
    mine, whole = make(own.items()), make(all.items())
    numbers, of_all = _numbers(own, mine), _numbers(all, whole)
    is_same = len(mine.param_groups) == len(whole.param_groups)
    if is_same and numbers.items() <= of_all.items():
        return ""
    steps = zip(_paced(mine, scheduler), _paced(whole, scheduler), strict=False)
    for ours, theirs in steps:
        for name, number in numbers.items():
            if ours[number] != theirs[of_all[name]]:
                return name
    return ""


def _numbers(named: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, int]:
    """Return the number of the group that each parameter is in."""
    names = {id(parameter): name for name, parameter in named.items()}
    return {
        names[id(parameter)]: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def _paced(optimizer: Optimizer, make: SchedulerFactory) -> Iterator[list[Any]]:
    """Yield what groups say in each update, as long as the scheduler goes on."""
    scheduler = make(optimizer)
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    for update in UPDATES:
        yield [values_of_group(group) for group in optimizer.param_groups]
        scheduler.last_epoch = update  # of a far one
        try:
            scheduler.step(*[0.0] * is_plateau)
        except ValueError:  # it has no more
            return
