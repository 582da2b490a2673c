"""Refuse functions that hold the model itself: no copy of the model has another.

Example:
    self.act = lambda x: F.dropout(x, 0.1, self.training)

In a copy of this module, which evaluates, `self` is still the one that trains. So is a
global `model` to which a loss refers. One to which `metrics` refer has other weights
than the stages, which train.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gemsc.base.nests import stored_attributes
from gemsc.base.visible import all_in, content, is_users_own
from gemsc.errors import GemscError, SourceLocation

_OF_COMPILE = str(Path(torch.__file__).with_name("_dynamo"))
_HELP = (
    "make it a method of the class, as in self.method or "
    "register_forward_hook(self.method), or give it what it needs by "
    "functools.partial(function, {0}): copies follow these"
)
HELP_OF_LOSS = (
    "let the model return what the loss needs of it; what all weights add to the loss "
    "can be the optimizer's weight_decay"
)
_OF_TRAINER = (
    "trainer.state_dict() has a rank's weights, trainer.save(folder) saves, "
    "trainer.freeze(path) freezes; what changes weights can be a "
    "register_step_post_hook in optimizer(), with the pairs that it gets"
)
_CALLED_FIRST = ("optimizer", "scheduler")
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_PLAIN = (int, float, str, tuple, torch.dtype, torch.device)  # such as a shape
HELP_OF_HOOKS = {
    "metrics": "let the model return what metrics need of it",
    "optimizer": "use the (name, parameter) pairs that it gets, in its hooks, too",
    "scheduler": "go by the param_groups of the optimizer that it gets",
    "on_step": _OF_TRAINER,
    "on_epoch": _OF_TRAINER,
    "predict_input": "let the model do this",
    "predict_output": "let the model do this",
}


def reject_closures(
    model: nn.Module, loss: Any, help_of_loss: str = HELP_OF_LOSS
) -> None:
    """Refuse a function in a model, a hook or another, that holds a part of the model.

    Or the loss, or a method, that refers to it by a global variable.

    Raises:
        GemscError: at the function's first line.
    """
    part_ids = {id(module) for module in model.modules()}
    part_ids |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    functions = [(*pair, _HELP) for pair in all_in(model)]
    functions += [(*pair, help_of_loss) for pair in all_in(loss)]
    anew = {id(made) for made in (*_made_anew(model), *_made_anew(loss))}
    for name, member, help_text in functions:
        function = stored_attributes(member).get("_torchdynamo_orig_callable", member)
        if not isinstance(function, FunctionType) or "state_dict" in name:
            continue
        code = function.__code__
        if code.co_filename.startswith(_OF_COMPILE) or id(member) in anew:
            continue
        if function.__name__ == "__init__":  # forward does not call it
            continue
        is_called = name.partition(".")[0] == "self"
        for variable, value in chain(_held(function), _named(function, is_called)):
            if isinstance(value, (nn.Module, torch.Tensor)) and id(value) in part_ids:
                shown = "the loss" if name == "self" else name
                raise GemscError(
                    f"{shown} refers to the model, or a part of it, by the variable "
                    f"'{variable}': in a copy, on which gemsc works, it is the same",
                    at=SourceLocation(code.co_filename, code.co_firstlineno),
                    help=help_text.format(variable),
                )
    for variable, value, at in _read_by(loss) if isinstance(loss, MethodType) else ():
        is_tensor = isinstance(value, torch.Tensor)
        if id(value) in part_ids and (
            is_tensor or [*value.parameters(), *value.buffers()]
        ):
            raise GemscError(
                f"the loss is a method of the model, which uses '{variable}': ranks "
                "also call it where the model has its first weights",
                at=at,
                help=help_of_loss,
            )


def reject_model_in_hooks(
    hooks: Mapping[str, Any],
    model: nn.Module,
    line_of: Callable[[str], SourceLocation | None],
) -> None:
    """Refuse a hook of a file that refers to the model by a variable of the file.

    A number that it reads so is the same on all ranks, and so is what is frozen, and
    what `optimizer` itself, which is called first, reads of the model.

    Raises:
        GemscError: at that line; at that of the hook where an object holds the model.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    trained |= {
        id(module)
        for module in model.modules()
        if any(p.requires_grad for p in module.parameters())
    }
    for hook, help in HELP_OF_HOOKS.items():
        owner = getattr(hooks.get(hook), "__self__", hooks.get(hook))  # of a method
        members = [*all_in(owner)]
        if any(_loads(member) for _, member in members):
            continue  # into the model of the file, what was trained
        for name, member in members:
            uses: Iterable[tuple[str, Any, SourceLocation | None]] = ()
            if name.startswith("self.") and id(member) in trained:
                uses = [(name, member, line_of(hook))]
            elif isinstance(member, FunctionType) and is_users_own(member):
                uses = _uses(member, first=hook in _CALLED_FIRST and member is owner)
            for variable, value, at in uses:
                if id(value) in trained:
                    raise GemscError(
                        f"{hook} refers to the model, or a part of it, by the variable "
                        f"'{variable}', which keeps its first weights: ranks have "
                        "their own",
                        at=at,
                        help=help,
                    )


def _loads(member: Any) -> bool:
    """Whether it is a function of the user's that loads weights."""
    if not isinstance(member, FunctionType) or not is_users_own(member):
        return False
    return bool({"load_state_dict", "load_weights"} & {*member.__code__.co_names})


def _uses(
    function: FunctionType, first: bool
) -> Iterator[tuple[str, Any, SourceLocation | None]]:
    """Yield the outer variables that a function uses, with what of them, and where.

    Of `net.layer.scale.norm()` that is the scale, of `net.parameters()` the network.
    One that is called `first` is looked into for functions that are called later.
    """
    known = {**function.__globals__, **dict(_held(function))}
    codes: list[CodeType] = [function.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        if first and (code is function.__code__ or code.co_name in _COMPREHENSIONS):
            continue
        line, steps = code.co_firstlineno, [*dis.get_instructions(code)]
        for number, step in enumerate(steps):
            line = (step.positions and step.positions.lineno) or line
            if step.opname not in ("LOAD_GLOBAL", "LOAD_DEREF"):
                continue
            value = known.get(step.argval)
            for then in steps[number + 1 :]:
                is_read = then.opname in ("LOAD_ATTR", "LOAD_METHOD")
                if not is_read or not isinstance(value, (nn.Module, torch.Tensor)):
                    break
                part: Any = None
                with suppress(Exception):  # of a property
                    part = getattr(value, then.argval)
                if isinstance(value, torch.Tensor) and not isinstance(part, _PLAIN):
                    break  # `data` or a method, not its shape
                value = part
            owner = getattr(value, "__self__", value)  # of a method
            yield step.argval, owner, SourceLocation(code.co_filename, line)


def _read_by(method: MethodType) -> Iterator[tuple[str, Any, SourceLocation]]:
    """Yield what a method, and methods that it calls, read of their object."""
    owner, codes = method.__self__, [method.__func__.__code__]
    for code in codes:
        line, steps = code.co_firstlineno, [*dis.get_instructions(code)]
        for step, then in pairwise(steps):
            line = (step.positions and step.positions.lineno) or line
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            is_self = "LOAD_FAST" in step.opname and loaded[-1] == code.co_varnames[0]
            if not is_self or then.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                continue
            value = getattr(owner, then.argval, None)
            if isinstance(value, MethodType) and value.__self__ is owner:
                called = value.__func__.__code__
                codes += [] if called in codes else [called]
            yield f"self.{then.argval}", value, SourceLocation(code.co_filename, line)


def _made_anew(owner: Any) -> Iterator[Any]:
    """Yield what modules leave out of their state: each copy makes its own.

    A metric of torchmetrics does so with its `update`.
    """
    modules: Iterable[Any] = owner.modules() if isinstance(owner, nn.Module) else ()
    for module in modules:
        state: Any = None
        with suppress(Exception):  # a parametrized module has none
            state = module.__getstate__()
        if isinstance(state, dict):
            yield from (v for k, v in vars(module).items() if k not in state)


def _held(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables around a function."""
    cells = function.__closure__ or ()
    for variable, cell in zip(function.__code__.co_freevars, cells, strict=True):
        value = content(cell)
        yield variable, getattr(value, "__self__", value)  # of a method


def _named(function: FunctionType, is_called: bool) -> Iterator[tuple[str, Any]]:
    """Yield the global variables that a function names, and functions within it."""
    codes: list[CodeType] = [function.__code__] if is_called else []
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                yield step.argval, function.__globals__.get(step.argval)
