"""Whether an optimizer steps element by element, so that weights may be cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.base.rng import fork_torch, generator_lock
from gemsc.errors import GemscError

STEPS, ALIKE = 2, 8  # of gradients that have nothing in common, and that nearly agree
NOISE = 0.3  # of the latter
SIZES = (4, 6, 2, 2, 2)  # of what is tried, along each dimension
LARGE = (36, 34, 2, 2, 2)  # of the first of a kind: some treat small tensors otherwise
SCALES = 1.0, 100.0  # of what is tried: a bound of a norm may hold for small ones alone
NUMBERS = "step", "mu_product", "eta", "mu"  # torch's, of a parameter as a whole
ROUNDING = 1e-9  # in float64, relative to the largest step

Size = Sequence[int]
NO_PARAMETERS = "empty parameter list"  # what torch.optim says
OF_A_RANK = (
    "it gets the (name, parameter) pairs of one rank, also of frozen parameters: pick "
    "out those that are there with `for name, p in pairs`"
)
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def updated_whole(
    parameters: Mapping[str, nn.Parameter], factory: OptimizerFactory | None
) -> dict[str, float]:
    """Return the parameters that an optimizer does not update element by element.

    Halves of them step otherwise than the whole does: by how much, relative to the
    largest step. That is tried on small random tensors, cut both ways, in float64; what
    is found holds for all of as many dimensions in a group. An optimizer that cannot
    step there may do anything. Without a factory it is plain SGD. Where it goes by
    sizes, halves may be in another group than the whole.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if factory is None or not trained:
        return {}
    worst = dict[str | tuple[int, int], float]()  # of names, and of kinds
    with generator_lock, fork_torch():
        torch.manual_seed(0)
        kinds = _kinds(trained, factory)
        large = {kind: name for name, kind in reversed(kinds.items())}.values()
        try:
            for drawn in _scaled(trained, set(large)):
                for name, error in _differences(drawn, factory).items():
                    worst[kinds[name]] = max(worst.get(kinds[name], 0.0), error)
        except Exception:  # its first real step will say why
            return dict.fromkeys(trained, math.inf)
        worst |= dict.fromkeys(_grouped_by_size(trained, factory), 1.0)
    errors = {n: max(worst.get(n, 0.0), worst.get(k, 0.0)) for n, k in kinds.items()}
    return {name: error for name, error in errors.items() if error}


def _kinds(
    parameters: Mapping[str, Tensor], factory: OptimizerFactory
) -> dict[str, tuple[int, int]]:
    """Return the group of each parameter, -1 if none is known, and its dimensions."""
    groups = _groups_of(
        parameters, {n: p.shape for n, p in parameters.items()}, factory
    )
    return {n: (groups.get(n, (-1,))[0], p.dim()) for n, p in parameters.items()}


def updated_together(
    parameters: Mapping[str, nn.Parameter],
    factory: OptimizerFactory | None,
    sets: Iterable[Collection[str]] = (),
) -> dict[str, float]:
    """Return the parameters that step otherwise without others, and by how much.

    Relative to the largest step; tried as `updated_whole` is, with those in each of the
    `sets`, and with each one alone where there are none. So it is where an optimizer
    clips by the norm of all gradients, or has one trust for several.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    errors = dict[str, float]()
    if factory is None or len(trained) < 2:
        return errors
    sets = [[n for n in names if n in trained] for names in sets or zip(trained)]
    with generator_lock, fork_torch(), suppress(Exception):  # a real step will say why
        torch.manual_seed(0)
        for drawn in _scaled(trained):
            whole = _after_steps(drawn, factory)
            step = max(float((whole[n] - drawn[0][n]).abs().max()) for n in trained)
            for names in sets:
                apart = {}
                with suppress(Exception):  # it may want a parameter that is not there
                    some = [{n: draw[n] for n in names} for draw in drawn]
                    apart = _after_steps(some, factory)
                for name, tensor in apart.items():
                    error = float((whole[name] - tensor).abs().max())
                    if not error <= ROUNDING * step:
                        errors[name] = max(errors.get(name, 0.0), error / (step or 1.0))
    return errors


def _grouped_by_size(
    parameters: Mapping[str, Tensor], factory: OptimizerFactory
) -> set[str]:
    """Return the names of those of which halves are in another group."""
    whole = {name: tuple(p.shape) for name, p in parameters.items()}
    blanks = {n: torch.empty(p.shape, device="meta") for n, p in parameters.items()}
    names = set[str]()
    for way in (0, 1):
        halves = {n: tuple(_half(t, way, 0).shape) for n, t in blanks.items()}
        names.update(others_by_size(parameters, whole, halves, factory))
    return names


def others_by_size(
    like: Mapping[str, Tensor],
    one: Mapping[str, Size],
    other: Mapping[str, Size],
    factory: OptimizerFactory,
) -> list[str]:
    """Return the parameters that an optimizer treats otherwise where shapes differ.

    They are in another group then, or its numbers are others.
    """
    if one == other:
        return []
    first, second = (_groups_of(like, shapes, factory) for shapes in (one, other))
    is_known = first and second
    return [n for n in other if is_known and first.get(n) != second.get(n)]


def _groups_of(
    like: Mapping[str, Tensor], shapes: Mapping[str, Size], factory: OptimizerFactory
) -> dict[str, Any]:
    """Return number and values of the group that each parameter of a shape is in.

    None is known where the optimizer cannot be made of tensors without memory.
    """
    for device in (torch.device("meta"), None):  # some want a device that exists
        numbers = {
            n: torch.zeros((), dtype=like[n].dtype, device=device or like[n].device)
            for n in shapes
        }
        blanks = {
            name: nn.Parameter(numbers[name].expand(shape), like[name].requires_grad)
            for name, shape in shapes.items()
        }
        names = {id(parameter): name for name, parameter in blanks.items()}
        with suppress(Exception):
            groups = enumerate(factory(blanks.items()).param_groups)
            return {
                names[id(parameter)]: (number, values_of_group(group))
                for number, group in groups
                for parameter in group["params"]
            }
    return {}


def values_of_group(group: Mapping[str, Any]) -> dict[str, object]:
    """Return what a group says of steps, as far as it can be compared."""
    values = {
        key: value.item() if isinstance(value, Tensor) and _is_number(value) else value
        for key, value in group.items()
    }
    return {
        key: value
        for key, value in values.items()
        if all(
            part is None or isinstance(part, Number | str)
            for part in (value if isinstance(value, tuple) else (value,))
        )
    }


def _is_number(value: Tensor) -> bool:
    return value.numel() == 1 and not value.is_meta


def check_elementwise(differences: Mapping[str, float], *stages: Iterable[str]) -> None:
    """Make sure that parameters may be cut; `differences` are from `updated_whole`.

    `stages` are the names of those that are cut in each stage.

    Raises:
        GemscError: the optimizer does not update one of them element by element.
    """
    cut = [dict.fromkeys(names) for names in stages]
    wrong = {n: differences[n] for names in cut for n in names if n in differences}
    if not wrong:
        return
    name, difference = next(iter(wrong.items()))
    text = f"looks across '{name}' (its halves step differently, by {difference:.0e})"
    if math.isinf(difference):
        text = f"cannot be tried on parts of '{name}'"
    modules = dict.fromkeys(map(_module_of, wrong))
    others = [
        any(_module_of(n) not in modules for n in names) for names in cut if names
    ]
    remedy = f"--whole {','.join(modules)}" if all(others) else "leave out --shards"
    raise GemscError(
        f"optimizer() {text}", help=f"use an elementwise optimizer, or {remedy}"
    )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def _differences(
    drawn: Sequence[Mapping[str, Tensor]], factory: OptimizerFactory
) -> dict[str, float]:
    """Return by how much halves step otherwise, of the first tensors, where they do."""
    whole, errors = _after_steps(drawn, factory), dict[str, float]()
    for way in (0, 1):
        halves = [
            _after_steps(
                [{n: _half(t, way, half) for n, t in draw.items()} for draw in drawn],
                factory,
            )
            for half in (0, 1)
        ]
        for name, before in drawn[0].items():
            step = float((whole[name] - before).abs().max())
            error = max(
                float((_half(whole[name], way, half) - part[name]).abs().max())
                for half, part in enumerate(halves)
            )
            if not error <= ROUNDING * step:
                errors[name] = max(errors.get(name, 0.0), error / (step or 1.0))
    return errors


def _scaled(
    parameters: Mapping[str, Tensor], large: Collection[str] = ()
) -> Iterator[list[dict[str, Tensor]]]:
    """Yield what is tried, of all sizes in turn."""
    drawn = _drawn(parameters, large)
    for scale in SCALES:
        yield [{name: t * scale for name, t in draw.items()} for draw in drawn]


def _drawn(
    parameters: Mapping[str, Tensor], large: Collection[str]
) -> list[dict[str, Tensor]]:
    """Return small random tensors, and their gradients for some steps.

    A step uses what the one before has left. Prodigy and D-Adaptation go by the norm of
    all gradients, too, but not before several of them have led the same way.
    """

    def small() -> dict[str, Tensor]:
        return {
            name: _small(parameter, LARGE if name in large else SIZES)
            for name, parameter in parameters.items()
        }

    drawn = [small() for _ in range(1 + STEPS)]
    way = drawn[-1]
    for _ in range(ALIKE):
        drawn.append({n: way[n] + NOISE * noise for n, noise in small().items()})
    return drawn


def _small(parameter: Tensor, sizes: Size) -> Tensor:
    """Return random numbers of a parameter's kind, of as many dimensions."""
    shape = [sizes[min(dim, len(sizes) - 1)] for dim in range(parameter.dim())]
    dtype = torch.promote_types(parameter.dtype, torch.float64)
    return torch.randn(shape, dtype=dtype)


def _half(tensor: Tensor, way: int, half: int) -> Tensor:
    """Return a half of the rows or columns; numbers have none and lists no columns."""
    if not tensor.dim():
        return tensor
    return tensor.chunk(2, min(way, tensor.dim() - 1))[half]


def _after_steps(
    drawn: Sequence[Mapping[str, Tensor]], factory: OptimizerFactory
) -> dict[str, Tensor]:
    """Let an optimizer step: first there are the tensors, then their gradients."""
    copies = {n: nn.Parameter(t.clone().contiguous()) for n, t in drawn[0].items()}
    optimizer = factory(copies.items())
    for gradients in drawn[1:]:
        for name, copy in copies.items():
            copy.grad = gradients[name].clone().contiguous()
        optimizer.step()
    return {name: copy.detach() for name, copy in copies.items()}
