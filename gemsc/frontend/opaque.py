"""Modules whose forward depends on data, one node each, and what is said of others."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.autograd.graph import saved_tensors_hooks

from gemsc.base.dtypes import cast, cast_module, default_dtype
from gemsc.base.nests import Inputs, call_loss, call_model
from gemsc.base.visible import forgetting
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.eager import (
    deep_copy,
    detached,
    failures,
    in_mode,
    set_training,
    transformed,
)
from gemsc.frontend.observe import Watch
from gemsc.frontend.user_code import failing_line
from gemsc.ir.holder import LOSS
from gemsc.ir.opaque import Opaque


class AsksForGradientsError(Exception):
    """Forward calls torch.autograd.grad: what it is of has to be on one rank."""


class TransformsError(Exception):
    """Forward calls `torch.vmap` or the like: a graph cannot contain what it maps."""


DATA_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    AsksForGradientsError,
    TransformsError,
)
# what a tensor without numbers says where Python or NumPy ask for its value
_ASKED = re.compile(
    r"\.numpy\(\) is not supported for tensor subclasses|FakeTensor\.__format__"
)


class DependsOnDataError(GemscError):
    """Forward needs data. `path` is the innermost module that runs ("" the model)."""

    def __init__(self, message: str, *, path: str, **parts: Any) -> None:
        """Keep the path beside the parts of the message."""
        super().__init__(message, **parts)
        self.path = path


class FailsOnFakesError(DependsOnDataError):
    """PyTorch cannot compute something without numbers; perhaps it cannot at all.

    `otherwise` is the error in that case.
    """

    def __init__(self, message: str, otherwise: GemscError, **parts: Any) -> None:
        """Keep what to say of a model that does not run."""
        super().__init__(message, **parts)
        self.otherwise = otherwise


# What to write in place of an operator whose result has a size of its own.
_OF_FIXED_SIZE = {
    "repeat_interleave": "if the sum of the repeats never changes, give it: "
    "output_size=...",
    "_unique2": "count each value that there can be: F.one_hot(values, number).sum(0)",
}


def data_error(
    error: BaseException, at: SourceLocation | None, path: str
) -> GemscError:
    """Return what is said where forward needs data; `path` is the module that runs."""
    if isinstance(error, DynamicOutputShapeException):
        operator = str(getattr(error.func, "_overloadpacket", error.func))
        ways = (text for name, text in _OF_FIXED_SIZE.items() if name in operator)
        way = next(ways, "keep the size fixed: multiply by the mask, use torch.where")
        return DependsOnDataError(
            "the size of this tensor depends on the data",
            path=path,
            at=at,
            help=f"{way}, or move it into a submodule, which then stays whole on one "
            "rank",
        )
    if isinstance(error, AsksForGradientsError):
        return DependsOnDataError(
            "forward needs gradients, and a graph cannot contain a backward",
            path=path,
            at=at,
            help="move all that it differentiates into a submodule, which then stays "
            "whole on one rank",
        )
    if isinstance(error, TransformsError):
        problem = transformed(at)
        return DependsOnDataError(
            problem.message,
            path=path,
            at=at,
            help=problem.help,
        )
    return DependsOnDataError(
        "forward needs the value of a tensor, which differs from step to step",
        path=path,
        at=at,
        help=f"{_no_checks()}leave it out if it is only printed or logged, compute it "
        "with torch.where, make the choice a setting of the model, or move it into a "
        "submodule, which then stays whole on one rank",
    )


def _no_checks() -> str:
    """Return what helps first, if a distribution looks at its arguments now."""
    frame: FrameType | None = sys._getframe()
    while frame := frame and frame.f_back:
        if frame.f_globals.get("__name__", "").startswith("torch.distributions."):
            return "give the distribution validate_args=False, "
    return ""


def of_a_loss(
    problem: GemscError, function: object, error: BaseException, boundary: CodeType
) -> GemscError:
    """Return the error, of a loss that is a function at the user's own line."""
    if isinstance(function, nn.Module) or not isinstance(problem, DependsOnDataError):
        return problem
    at = failing_line(error.__traceback__, boundary, own_first=True)
    if at != problem.at:
        problem.at, problem.notes_at = at, ((problem.at, "here"),)
    problem.message = problem.message.replace("forward needs", "the loss needs")
    problem.path = LOSS
    problem.help = (
        "leave it out if it is only printed or logged (a run logs the loss), make the "
        "loss a torch.nn.Module with what depends on data as a submodule, which then "
        "stays whole on one rank, or compute it with torch.where"
    )
    return problem


class WholeLoss(nn.Module):
    """A loss that is a function, as a module that can be one node."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.function(*arguments)


def user_error(what: str, error: BaseException, boundary: CodeType) -> GemscError:
    """Return what is said of an error of the user's code below the frame of `boundary`.

    `what` says which code fails.
    """
    at = failing_line(error.__traceback__, boundary)
    path = vars(error).get("gemsc_path", "")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DATA_ERRORS) or _ASKED.search(str(cause)):
            return data_error(cause, at, path)
        cause = cause.__cause__ or cause.__context__
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    fails = GemscError(
        f"{what}: {text}",
        at=at,
        help="the model and its loss must run as plain PyTorch on example_inputs(), "
        "whose first dimension counts samples, and on a target for each of these",
    )
    if not isinstance(error, RuntimeError):
        return fails
    return FailsOnFakesError(
        f"PyTorch computes this, but not without numbers: {text}",
        fails,
        path=path,
        at=at,
        help="move it into a submodule, which then stays whole on one rank",
    )


@dataclass
class Leaves:
    """The modules of one model that become one node each, found one by one.

    `opaque` maps their paths to what is known of them. A loss that is a function
    becomes a module where it is one of them. With a `dtype`, the model runs in that
    floating-point type.
    """

    model: nn.Module
    inputs: Inputs
    loss: Any
    target: Any
    training: bool
    dtype: torch.dtype | None = None
    opaque: dict[str, Opaque] = field(default_factory=dict)
    _seen: dict[str, Watch] = field(default_factory=dict)
    _keeps: bool = False  # what a backward needs

    def take(self, given: Mapping[str, Opaque]) -> None:
        """Take what depends on data in another mode of the model."""
        for path, known in given.items():
            self._observe(path)
            watch = self._seen[path]
            if watch.problem is None and watch.calls:
                self._add(path, watch, known.why, known.at)

    def add(self, error: DependsOnDataError) -> None:
        """Take the innermost module around the line that can be one node.

        Raises:
            GemscError: there is none but the whole model.
        """
        path, problem = error.path, ""
        if isinstance(error, FailsOnFakesError):
            self._run_for_real(error)
        while path:
            self._observe(path)
            watch = self._seen[path]
            if watch.problem is None:
                self._add(path, watch, error.message, error.at)
                return
            problem = problem or f"'{path}' cannot stay whole: {watch.problem}"
            path = self._around(path)
        if problem:
            error.notes_at = ((None, problem),)
        raise error

    def _run_for_real(self, error: FailsOnFakesError) -> None:
        try:
            self._watched([])
        except GemscError:
            raise error.otherwise from error.__cause__

    def _add(
        self, path: str, watch: Watch, why: str, at: SourceLocation | None
    ) -> None:
        module, calls = self._real(path), tuple(watch.calls.values())
        inside = [other for other in self.opaque if other.startswith(f"{path}.")]
        for other in inside:
            del self.opaque[other]
        changes, keeps = sorted(watch.changed), sorted(watch.kept)
        self.opaque[path] = Opaque(module, calls, why, at, (*changes,), (*keeps,))

    def _real(self, path: str) -> nn.Module:
        return _submodule(self.model, self.loss, path)

    def _around(self, path: str) -> str:
        """Return the next module outwards that has a forward; "" is the model."""
        path = path.rpartition(".")[0]
        while path and type(self._real(path)).forward is nn.Module.forward:
            path = path.rpartition(".")[0]
        return path

    def _observe(self, path: str) -> None:
        """Run the model once and watch a module, and all others of its class."""
        if path in self._seen:
            return
        if path == LOSS and not isinstance(self.loss, nn.Module):
            self.loss = WholeLoss(self.loss)
        kind = type(self._real(path))
        owners = [("", self.model)]
        if isinstance(self.loss, nn.Module):
            owners.append((LOSS, self.loss))
        alike = [
            other
            for prefix, owner in owners
            for other, module in owner.named_modules(prefix=prefix)
            if type(module) is kind and other and other not in self._seen
        ]
        nested = [p for p in alike if any(p.startswith(f"{o}.") for o in alike)]
        watched = [p for p in alike if p not in nested and not _related(p, path)]
        self._seen |= self._watched([path, *watched])

    def _watched(self, paths: list[str]) -> dict[str, Watch]:
        try:
            return self._run(paths)
        except _NeededError:  # for a backward within forward
            self._keeps = True
            return self._run(paths)

    def _run(self, paths: list[str]) -> dict[str, Watch]:
        model, loss = deep_copy((self.model, self.loss))
        set_training(model, loss, self.training)
        inputs, target = detached(self.inputs), detached(self.target)
        if self.dtype is not None:
            inputs, target = cast((inputs, target), self.dtype)
            for owner in (model, loss):
                if isinstance(owner, nn.Module):
                    cast_module(owner, self.dtype)
        watches = {}
        for path in paths:
            module: Any = _submodule(model, loss, path)
            watches[path] = watch = Watch(module, module.forward)
            module.forward = watch
        torch.manual_seed(0)
        drop = saved_tensors_hooks(_drop, _never)
        with (
            failures(f"the model fails {in_mode(self.training)}", Leaves._run.__code__),
            default_dtype(self.dtype or torch.get_default_dtype()),
            torch.enable_grad(),
            nullcontext() if self._keeps else drop,
            forgetting(model, loss),
        ):
            output = call_model(model, inputs)
            asked = not paths or any(_related(p, LOSS) for p in paths)
            if loss is not None and asked:
                _call_alone(loss, output, target)
        return watches


def _call_alone(loss: Any, output: Any, target: Any) -> None:
    """Call a loss without the graph of the model, which other ranks have.

    Raises:
        GemscError: the loss needs it.
    """
    try:
        call_loss(loss, output, target)
    except RuntimeError as error:
        if "not have been used in the graph" not in str(error):
            raise
        raise GemscError(
            "the loss calls torch.autograd.grad of what the model has computed",
            at=failing_line(error.__traceback__, _call_alone.__code__),
            help="let a submodule of the model compute what is differentiated and "
            "return the gradients, too: it stays whole on one rank",
        ) from error


def _related(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def _submodule(model: nn.Module, loss: Any, path: str) -> nn.Module:
    first, _, inner = path.partition(".")
    if first == LOSS and isinstance(loss, nn.Module):
        return loss.get_submodule(inner)
    return model.get_submodule(path)


def _drop(tensor: Tensor) -> None:
    """Keep nothing for a backward that never comes."""


def _never(packed: None) -> Tensor:
    raise _NeededError("no backward runs while shapes are looked for")


class _NeededError(GemscError):
    """What has been dropped is needed."""
