"""The user's model as it is: copies, modes, failures, its precision and optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gemsc.base.dtypes import Autocast, is_real
from gemsc.base.elementwise import NO_PARAMETERS, OF_A_RANK
from gemsc.base.nests import map_tensors
from gemsc.base.plain_forward import enter_training
from gemsc.base.rng import preserve_rng
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.user_code import at_line_of, failing_line

KEEP_WEIGHTS = (
    "let eval() leave weights as they are (loralib: merge_weights=False), or keep a "
    "new tensor (self.merged = self.weight + ...) that forward uses"
)
_NO_HOOKS = "yet support saved tensor hooks"  # says torch.func.grad

_DEPEND_ON_MODE = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.RReLU,
)


def in_mode(training: bool) -> str:
    """Return how the model runs, in words: many fail in evaluation only."""
    return "in eager mode" if training else "in evaluation mode (model.eval())"


def set_training(
    model: nn.Module, loss: Any, training: bool, copy_of: nn.Module | None = None
) -> None:
    """Set the mode of a model and a loss; layers that the user froze stay frozen.

    What a copy's own `train()` freezes is frozen in the model that it is a copy of.
    """
    try:
        if training:
            enter_training(model)
        else:
            model.train()  # drops what some models keep from an earlier evaluation
        named = dict(copy_of.named_parameters()) if copy_of is not None else {}
        for name, parameter in model.named_parameters():  # eval() may freeze all
            if name in named and not parameter.requires_grad:
                named[name].requires_grad_(False)
        if not training:
            model.eval()
    except GemscError as error:
        if "assigns to .data" in error.message and not training:
            error.message = error.message.replace("forward", "train() or eval()")
            error.help = KEEP_WEIGHTS
        raise
    if isinstance(loss, nn.Module):
        if not training:
            loss.eval()
        elif loss.training:  # no loop calls train() of a loss
            enter_training(loss)


def kept_in_eval(
    called: list[tuple[str, nn.Module, bool]], opaque: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the layers in eval mode, where that makes a difference.

    Raises:
        GemscError: one is called in both modes.
    """
    modes = {(path, is_training) for path, _, is_training in called}
    for path, layer, is_training in called:
        if path in opaque:
            inside = layer.named_modules(prefix=path)
            yield from (inner for inner, module in inside if not module.training)
        elif not is_training and _depends_on_mode(layer):
            if (path, True) in modes:
                raise GemscError(
                    f"'{path}' is called in training mode and in evaluation mode",
                    help="let it be in one mode in all of a step, or call its function "
                    "(F.batch_norm, F.dropout), which takes the mode",
                )
            yield path


def reject_trained(
    called: list[tuple[str, nn.Module, bool]], opaque: Mapping[str, Any]
) -> None:
    """Refuse layers that are in training mode in evaluation: ranks have one mode.

    Raises:
        GemscError: one is, such as a dropout that always drops.
    """
    for path, layer, is_training in called:
        if is_training and path not in opaque and _depends_on_mode(layer):
            raise GemscError(
                f"'{path}' is called in training mode in evaluation, too",
                help="call its function, which takes the mode: F.dropout(x, p, True); "
                "or use --frontend export",
            )


@contextmanager
def called_in_eval(model: nn.Module) -> Iterator[set[str]]:
    """Collect the layers that are called in eval mode, if it makes a difference."""
    names = {layer: name for name, layer in model.named_modules()}
    in_eval: set[str] = set()

    def note(layer: nn.Module, _: Any) -> None:
        if layer in names and not layer.training and _depends_on_mode(layer):
            in_eval.add(names[layer])

    with register_module_forward_pre_hook(note):
        yield in_eval


def reject_moved(first: Set[str], second: Set[str]) -> None:
    """Refuse a layer that is in eval mode in one of two calls of forward alone.

    Raises:
        GemscError: there is one; names it.
    """
    for name in sorted(first ^ second):
        raise GemscError(
            f"forward calls '{name}' and then puts it in another mode, in which "
            "the next call finds it",
            help="call train() and eval() before the layer, or put it back",
        )


def _depends_on_mode(layer: nn.Module) -> bool:
    """Whether a layer computes something else in eval mode: it drops, or averages."""
    drops = getattr(layer, "p", True) and getattr(layer, "dropout", True)
    averages = getattr(layer, "running_mean", drops) is not None
    return bool(drops and averages and isinstance(layer, _DEPEND_ON_MODE))


@contextmanager
def failures(what: str, boundary: CodeType, help: str = "") -> Iterator[None]:
    """Report an exception at the user's line below the frame of `boundary`.

    Raises:
        GemscError: in place of what the user's code raised.
    """
    try:
        yield
    except GemscError:
        raise
    except (Exception, SystemExit) as error:
        at = failing_line(error.__traceback__, boundary)
        if _NO_HOOKS in str(error):
            raise transformed(at) from error
        text = " ".join(str(error).split())
        message = f"{what}: {type(error).__name__}: {text}"
        raise GemscError(message, at=at, help=help) from error


def transformed(at: SourceLocation | None = None) -> GemscError:
    """Return the error of a forward that calls a transform of torch.func."""
    return GemscError(
        "forward calls torch.vmap or another transform of torch.func, which a graph "
        "cannot contain",
        at=at,
        help="write out the dimension: torch.einsum, torch.bmm, x.unsqueeze(0); for "
        "gradients, call torch.autograd.grad in a submodule; torch.vmap alone may also "
        "move into a submodule, which then stays whole on one rank (not with "
        "--frontend export)",
    )


def deep_copy(objects: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a deep copy of a tuple of modules, functions and others.

    Raises:
        GemscError: names the attribute that cannot be copied.
    """
    try:
        return copy.deepcopy(objects, memo)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for path, attribute, value in _attributes(objects):
            try:
                copy.deepcopy(value)
            except Exception as its_own:
                what, help_text = _problem(path, attribute, value, its_own)
                raise GemscError(
                    f"the model cannot be copied: {what}", help=help_text
                ) from its_own
        raise GemscError(
            f"the model cannot be copied: {text}",
            help="gemsc works on copies: keep locks, files and generators out of "
            "modules",
        ) from error


def snapshot(value: Any) -> Any:
    """Return a nest as it is now: in-place calls may change shapes and gradients."""
    return map_tensors(value, lambda _, t: t.detach().requires_grad_(t.requires_grad))


def detached(value: Any) -> Any:
    """Return a nest with tensors of its own that require gradients as these do."""

    def clone(path: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return map_tensors(value, clone)


def _attributes(objects: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield all attributes of modules: path, name, value."""
    for owner in (o for o in objects if isinstance(o, nn.Module)):
        for path, module in owner.named_modules():
            stored = {k: v for k, v in vars(module).items() if k != "_modules"}
            held = (stored.pop("_parameters", {}), stored.pop("_buffers", {}), stored)
            for attribute, value in (item for group in held for item in group.items()):
                yield path, attribute, value


def _problem(
    path: str, attribute: str, value: Any, error: Exception
) -> tuple[str, str]:
    """Return what is wrong with an attribute, and what helps."""
    name = f"{path}.{attribute}".lstrip(".")
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        what = f"'{name}' is a {type(value).__name__}: {type(error).__name__}: {error}"
        return what, (
            "gemsc works on copies: keep locks, files and generators out of modules, "
            "or give their class a __deepcopy__"
        )
    what = f"'{name}' is a tensor that was computed with gradients"
    return what, "compute it in forward, or keep it with .detach()"


_NEEDED = "param_groups", "state_dict", "load_state_dict"  # to log and to save


def check_optimizer(
    parameters: Mapping[str, nn.Parameter],
    factory: Callable[[Iterable[tuple[str, nn.Parameter]]], Any],
) -> str:
    """Make an optimizer of the parameters that are trained, and drop it.

    Returns the name of its class if `fused=True` would make it faster on a CPU, or "".

    Raises:
        GemscError: that fails, at which of the user's lines; or nothing can step.
    """
    with at_line_of(factory):
        return _check_optimizer(parameters, factory)


def _check_optimizer(parameters: Mapping[str, nn.Parameter], factory: Any) -> str:
    trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
    help = (
        "it gets (name, parameter) pairs, as torch.optim's classes take them; "
        "pick out parameters with `for name, p in pairs`"
    )
    before = [_first_number(p) for _, p in trained]
    with failures("optimizer() fails", _check_optimizer.__code__, help):
        made = factory(trained) if trained else None
    for (name, parameter), number in zip(trained, before, strict=True):
        if _first_number(parameter) != number:
            raise GemscError(
                f"optimizer() changes {name}: it is called more than once, and also "
                "where a run resumes",
                help="change weights in model(); or after each update, in a "
                "register_step_post_hook of the optimizer",
            )
    step = getattr(made, "step", None)
    lacks = [name for name in _NEEDED if not hasattr(made, name)]
    if trained and (lacks or not callable(step)):
        wrong = f"has no {lacks[0]}" if callable(step) else "cannot step"
        raise GemscError(
            f"optimizer() returns {type(made).__name__}, which {wrong}",
            help="return one torch.optim.Optimizer of all the parameters that it gets; "
            "derive a class of your own from it",
        )
    if callable(step) and _needs_closure(step, trained, factory):
        raise GemscError(
            f"{type(made).__name__} computes the loss several times per step and needs "
            "a closure for it, but ranks compute it once",
            help="return an optimizer whose step() needs no closure",
        )
    if all(callable(getattr(made, name, None)) for name in ("train", "eval")):
        raise GemscError(
            f"{type(made).__name__} has different weights in training and in "
            "evaluation, and gemsc does not call its train() and eval()",
            help="use AdamW with a schedule; `gemsc run --ema 0.999` averages",
        )
    if trained:
        # those of ranks have names and numbers, and nothing else of the model's
        theirs = [(name, nn.Parameter(p.detach())) for name, p in trained]
        _check_groups(_groups(made, trained), _groups(factory(theirs), theirs))
    return type(made).__name__ if _could_be_fused(made) else ""


def _first_number(parameter: nn.Parameter) -> str:
    """Return the first number of a parameter, as text: NaN is as it was, too."""
    numbers = parameter.detach().reshape(-1)[:1]
    return "" if parameter.is_meta else str(numbers.tolist())


def try_optimizer(
    parameters: Mapping[str, nn.Parameter],
    factory: Any,
    names: Iterable[str],
    *,
    frozen: bool = True,
) -> None:
    """Make an optimizer of what a rank has, perhaps with what is frozen, and drop it.

    Raises:
        GemscError: that fails, at which of the user's lines.
    """
    held = [(name, parameters[name]) for name in names if name in parameters]
    given = [(name, p) for name, p in held if frozen or p.requires_grad]
    if factory is None or not given:
        return
    what = f"optimizer() fails for those parameters that one rank has ({given[0][0]}, "
    with failures(f"{what}...)", try_optimizer.__code__, OF_A_RANK):
        try:
            factory(given)
        except ValueError as error:
            if NO_PARAMETERS not in str(error):
                raise


def _check_groups(model: list[Any], ranks: list[Any]) -> None:
    if any(None in names for names, _ in ranks):
        raise GemscError(
            "optimizer() takes other parameters than it gets, such as those of a model "
            "at the top of the file: these are not trained",
            help="use the (name, parameter) pairs that it gets",
        )
    if model != ranks:
        raise GemscError(
            "optimizer() goes by the model's own parameters, or by their attributes "
            "(p.no_decay): ranks have others, of the same names",
            help="go by names; NO_DECAY = {name for name, p in Net().named_parameters()"
            ' if hasattr(p, "no_decay")} at the top of the file has them',
        )


def _groups(made: Any, pairs: Iterable[tuple[str, nn.Parameter]]) -> list[Any]:
    """Return the groups of an optimizer: names (None if not among them), and values."""
    names = {id(p): name for name, p in pairs}
    plain = int | float | str | tuple | None  # type: ignore[type-arg]
    return [
        (
            {names.get(id(p)) for p in group["params"]},
            {key: value for key, value in group.items() if isinstance(value, plain)},
        )
        for group in getattr(made, "param_groups", ())
    ]


def _could_be_fused(made: Any) -> bool:
    """Whether an optimizer would take `fused=True`, and has it not.

    On a CPU, 9.5 million parameters took Adam and AdamW 63 and 65 ms, fused 11 (torch
    2.13, one thread); SGD gains little or nothing.
    """
    if type(made) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    others = ("fused", "foreach", "differentiable")
    return all(
        not any(group.get(name) for name in others)
        and group.get("fused") is None
        and not isinstance(group["lr"], torch.Tensor)
        and all(p.is_floating_point() for p in group["params"])
        for group in made.param_groups
    )


def _needs_closure(
    step: Callable[..., Any],
    trained: list[tuple[str, nn.Parameter]],
    factory: Callable[[Iterable[tuple[str, nn.Parameter]]], Any],
) -> bool:
    """Whether a step takes a closure, or fails without one, as many of SAM do."""
    try:
        given = inspect.signature(step).parameters.values()
    except ValueError:  # it is not written in Python
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.default is inspect.Parameter.empty and p.kind in kinds for p in given):
        return True
    like = [(name, torch.zeros([min(2, n) for n in p.shape])) for name, p in trained]

    def fails(*closure: Callable[[], torch.Tensor]) -> bool:
        small = [(name, nn.Parameter(tensor.clone())) for name, tensor in like]
        for _, parameter in small:
            parameter.grad = torch.ones_like(parameter)
        try:
            with preserve_rng():
                factory(small).step(*closure)
        except Exception:  # its first real step will say why
            return True
        return False

    return fails() and not fails(lambda: torch.zeros(()))


def autocast_of(model: nn.Module, precision: str) -> Autocast | None:
    """Return what a model runs within: nothing in "float32".

    Raises:
        GemscError: autocast leaves weights of this dtype as they are.
    """
    if precision == "float32":
        return None
    device = "cpu"
    for name, parameter in model.named_parameters():
        device = parameter.device.type
        if parameter.dtype is torch.complex64 and precision == "bfloat16":
            continue  # computed with as it is
        if is_real(parameter.dtype) and parameter.dtype is not torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise GemscError(
                f"--precision {precision}: parameter {name} is in {dtype}, and "
                "autocast computes in another precision than float32 only",
                help="use --precision bfloat16: float16 scales real gradients only"
                if dtype == "complex64"
                else "leave out --precision"
                + ("" if dtype.startswith("complex") else ", or return model.float()"),
            )
    return "cpu" if device == "meta" else device, getattr(torch, precision)
