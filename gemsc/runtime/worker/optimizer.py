"""Make the optimizer of what a rank updates, which steps without torch._dynamo."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch import _compile as compile_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gemsc.base.elementwise import (
    NO_PARAMETERS,
    OF_A_RANK,
    OptimizerFactory,
    Size,
    others_by_size,
)
from gemsc.errors import GemscError, user_place
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.rates import ALL_GROUPS, Kinds, SchedulerFactory


def optimizer_of(
    parameters: Mapping[str, nn.Parameter],
    make: OptimizerFactory,
    transport: Transport,
    whole: Mapping[str, Size],
) -> tuple[Optimizer | None, Kinds]:
    """Return the optimizer of this rank, and what those of all ranks get.

    It is None if it takes other ranks' parameters only. `whole` are the shapes of the
    parameters, of which the rank may have parts.

    Raises:
        GemscError: it takes no parameters of any rank, or others than the program's; or
            it goes by sizes, which parts have not.
    """
    optimizer: Any = None
    wrong: GemscError | None = None
    _check_makes("optimizer", make, "parameters")
    if parameters:
        without_dynamo()
        Optimizer.add_param_group = _add_group  # type: ignore[assignment,method-assign]
        here = {name: parameter.shape for name, parameter in parameters.items()}
        if others := others_by_size(parameters, whole, here, make):
            raise GemscError(
                f"optimizer() treats a part of '{others[0]}' otherwise than the whole",
                help="choose by names or numbers of dimensions, not by sizes: this "
                "rank has a part",
            )
        try:
            optimizer = _made(make, parameters)
        except ValueError as error:
            wrong = GemscError(
                "the optimizer has none of the parameters",
                at=user_place(error.__traceback__),
                help="optimizer(params) gets pairs; select parameters with [p for "
                'name, p in params if name.startswith("head")]',
            )
        else:
            if optimizer is None:  # as it may be on a rank whose part is not trained
                help = "return an optimizer of the parameters that it gets"
                wrong = GemscError("optimizer() returns None", help=help)
            elif not callable(getattr(optimizer, "step", None)):
                kind = type(optimizer).__name__
                raise GemscError(
                    f"optimizer() returns {kind}, which cannot step",
                    help="return one optimizer, with several groups if need be",
                )
        if _others(optimizer, parameters.values()):
            raise GemscError(
                "the optimizer has a parameter that is not one of the program's",
                help="give it the parameters that optimizer() gets, and no others",
            )
    mine = {n: (p.shape, p.dtype, p.requires_grad) for n, p in parameters.items()}
    gathered = transport.all_gather_object((optimizer is not None, wrong, mine))
    has_one, errors, kinds = zip(*gathered, strict=True)
    if not any(has_one) and (first := next(filter(None, errors), None)):
        raise first
    return optimizer, {name: kind for theirs in kinds for name, kind in theirs.items()}


def _made(make: OptimizerFactory, parameters: Mapping[str, nn.Parameter]) -> Any:
    """Return what the user's function gives.

    Raises:
        GemscError: it fails; a ValueError, if it chooses no parameters.
    """
    try:
        return make(parameters.items())
    except GemscError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and NO_PARAMETERS in text:
            raise
        raise GemscError(
            f"optimizer() fails: {type(error).__name__}: {text}",
            at=user_place(error.__traceback__),
            help=OF_A_RANK,
        ) from error


def _check_makes(name: str, make: Any, given: str) -> None:
    if not callable(make):
        kind = type(make).__name__
        raise GemscError(
            f"{name} is an object of type {kind}: each rank makes its own",
            help=f"{name}=lambda {given}: {kind}({given}, ...)",
        )


def _others(optimizer: Any, parameters: Iterable[nn.Parameter]) -> bool:
    known = {id(param) for param in parameters}
    groups = getattr(optimizer, "param_groups", ())
    return any(id(param) not in known for group in groups for param in group["params"])


def _paced_groups(optimizer: Optimizer) -> int:
    """Return how many groups have a scheduler, which notes the rate that it found."""
    groups = getattr(optimizer, "param_groups", ())
    return sum("initial_lr" in group for group in groups)


def scheduler_of(optimizer: Optimizer, make: SchedulerFactory) -> Any:
    """Return what steps the learning rates of an optimizer; None if nothing does.

    Raises:
        GemscError: it cannot step, or is not returned.
    """
    _check_makes("scheduler", make, "optimizer")
    paced = _paced_groups(optimizer)
    try:
        made = make(optimizer)
    except ValueError as error:
        if re.search(r"param_groups|[Ee]xpected \d+", str(error)):
            error.add_note(
                f"note: optimizer() gets the parameters of one rank; {ALL_GROUPS}"
            )
        raise
    if made is None:
        if _paced_groups(optimizer) > paced:
            raise GemscError(
                "scheduler() makes what changes learning rates, but returns None: they "
                "would stay as they are",
                help="return it: return torch.optim.lr_scheduler.StepLR(optimizer, 30)",
            )
        return None
    if not callable(getattr(made, "step", None)):
        raise GemscError(
            f"scheduler() returns {type(made).__name__}, which cannot step",
            help="return one object whose step() is called after each update; combine "
            "several with torch.optim.lr_scheduler.SequentialLR or ChainedScheduler",
        )
    if not (isinstance(made, ReduceLROnPlateau) or _is_called_bare(made.step)):
        raise GemscError(
            f"step() of {type(made).__name__}, which scheduler() returns, wants "
            "arguments, and is called after each update without any",
            help="derive a class whose step() has none; of timm's: self.count += 1; "
            "self.step_update(self.count), made with t_in_epochs=False",
        )
    if lacks := [n for n in ("state_dict", "load_state_dict") if not hasattr(made, n)]:
        raise GemscError(
            f"scheduler() returns {type(made).__name__}, which has no {lacks[0]}(): a "
            "run that resumes would begin it anew",
            help="derive it from torch.optim.lr_scheduler.LRScheduler, or give it "
            "state_dict() and load_state_dict()",
        )
    return made


def _is_called_bare(method: Callable[..., Any]) -> bool:
    """Return whether a method can be called without arguments, as far as is known."""
    try:
        signature(method).bind()
    except TypeError:
        return False
    except ValueError:  # it says nothing of its arguments
        return True
    return True


_add_group_of_torch = Optimizer.add_param_group


@wraps(_add_group_of_torch)
def _add_group(self: Optimizer, group: dict[str, Any]) -> None:
    """Let a group that is empty on this rank stand beside one of (name, parameter).

    PyTorch refuses that: all groups must have names, or none.
    """
    if not isinstance(group["params"], Tensor | set):
        group["params"] = [*group["params"]]
        groups = [*self.param_groups, group]
        pairs = any(isinstance(param, tuple) for param in group["params"])
        if pairs or any("param_names" in other for other in groups):
            for other in groups:
                if not other["params"]:
                    other.setdefault("param_names", [])
    _add_group_of_torch(self, group)


def without_dynamo() -> None:
    """Let torch.optim work without torch._dynamo, from now on in this process.

    Its methods load that for a step that torch.compile traces, which no step of ours
    is: 1.4 s of a process, 40 % of a rank's start (torch 2.13). What they compute is
    the same, and torch.compile may still load it. Call this before an optimizer is
    made; where a PyTorch is built in another way, nothing is changed.
    """
    disable = getattr(compile_hooks, "_disable_dynamo", None)
    use_grad = getattr(of_torch, "_use_grad_for_differentiable", None)
    if disable is None or use_grad is None:
        return
    untraced = disable(_example).__code__
    for method in vars(Optimizer).values():
        if getattr(method, "__code__", None) is untraced:
            # what it looks for before it asks torch._dynamo, and gets the same
            method.__wrapped__.__dynamo_disable = method.__wrapped__
    step_of_torch = use_grad(_example).__code__
    for kind in vars(torch.optim).values():
        step: Any = vars(kind).get("step") if isinstance(kind, type) else None
        if getattr(step, "__code__", None) is step_of_torch:
            kind.step = _step(step.__wrapped__)


def _example(optimizer: Any) -> None:
    """Stand for a method: the functions around two of them have the same code."""


def _step(step: Any) -> Any:
    """Return a step with gradients only if the optimizer is to be differentiable."""

    @wraps(step)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return call
