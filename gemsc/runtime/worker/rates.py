"""Whether a scheduler does the same on a rank, which may have some groups only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from io import StringIO
from typing import Any
from warnings import catch_warnings

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gemsc.base.elementwise import OptimizerFactory, values_of_group
from gemsc.base.rng import generator_lock, preserve_rng
from gemsc.errors import GemscError

SchedulerFactory = Callable[[Optimizer], Any]
Kinds = Mapping[str, tuple[torch.Size, torch.dtype, bool]]  # is it trained?
ALL_GROUPS = (
    "let optimizer() make all groups on each rank, some of them without parameters"
)
UPDATES = *range(200), *(10**n for n in range(3, 7))  # that are tried


def check_rates(
    names: Collection[str],
    all: Kinds,
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory,
) -> None:
    """Make sure that a scheduler does with a rank's groups what it does with all.

    It may go by their numbers, and a rank may have fewer than the parameters of `all`
    ranks give. That is tried on tensors without memory, or small ones; what is printed
    meanwhile is not shown.

    Raises:
        GemscError: a parameter gets another rate, or the like.
    """
    if all.keys() <= {*names}:
        return  # it has all groups
    for device in "meta", "cpu":  # some want a device that exists
        most = 2 if device == "cpu" else sys.maxsize  # of an optimizer that copies them
        parameters = {
            name: nn.Parameter(
                torch.zeros((), dtype=dtype, device=device).expand(
                    [min(length, most) for length in size]
                ),
                is_trained,
            )
            for name, (size, dtype, is_trained) in all.items()
        }
        mine = {name: parameters[name] for name in names}
        silent = catch_warnings(action="ignore")  # no optimizer steps
        with generator_lock, preserve_rng(), suppress(Exception), silent:
            with redirect_stdout(StringIO()):
                other = _first_other(mine, parameters, optimizer, scheduler)
            break
    else:  # its first real step will say why
        return
    if other:
        raise GemscError(
            "optimizer() or scheduler() goes by the numbers of groups: this rank has "
            f"fewer of them, and '{other}' gets other rates than where a process has "
            "all",
            help=f"{ALL_GROUPS}, or let scheduler() go by what a group says "
            '(group["depth"]), not by its number',
        )


def _first_other(
    held: Mapping[str, nn.Parameter],
    all: Mapping[str, nn.Parameter],
    make: OptimizerFactory,
    scheduler: SchedulerFactory,
) -> str:
    """Return the name of a parameter with other rates, or ""."""
    mine, whole = make(held.items()), make(all.items())
    numbers, of_all = _numbers(held, mine), _numbers(all, whole)
    is_same = len(mine.param_groups) == len(whole.param_groups)
    if is_same and numbers.items() <= of_all.items():
        return ""
    pairs: dict[tuple[int, int], str] = {}  # each with its first name
    for name, number in numbers.items():
        pairs.setdefault((number, of_all[name]), name)
    ours = _paced(mine, scheduler, [number for number, _ in pairs])
    theirs = _paced(whole, scheduler, [number for _, number in pairs])
    for update in zip(ours, theirs, strict=False):
        for name, one, other in zip(pairs.values(), *update, strict=True):
            if one != other:
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


def _paced(
    optimizer: Optimizer, make: SchedulerFactory, numbers: Iterable[int]
) -> Iterator[list[str]]:
    """Yield what changes in groups by each update, as long as the scheduler goes on."""
    keys = {key for group in optimizer.param_groups for key in group} - {"params"}
    taken = [{k: g[k] for k in keys & g.keys()} for g in optimizer.param_groups]
    for group, values in zip(optimizer.param_groups, deepcopy(taken), strict=True):
        group |= values  # a rate may be a tensor, which the real optimizer has, too
    groups = [optimizer.param_groups[number] for number in numbers]
    before = [values_of_group(group) for group in groups]
    scheduler = make(optimizer)
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    for update in UPDATES:
        yield [_changes(*pair) for pair in zip(groups, before, strict=True)]
        scheduler.last_epoch = update  # of a far one
        try:
            scheduler.step(*[0.0] * is_plateau)
        except Exception:  # it has no more
            return


def _changes(group: Mapping[str, Any], before: Mapping[str, object]) -> str:
    """Return what a group says otherwise than before; NaN is like NaN."""
    other = {key: value for key, value in group.items() if value is not before.get(key)}
    return repr(values_of_group(other))
