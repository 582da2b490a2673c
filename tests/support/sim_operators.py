"""What an operator takes, gives and writes, as its schema says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["is_view", "mapped", "returned_argument", "tensors_in", "written_arguments"]


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Change the tensors in what an operator takes or gives."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = [mapped(change, part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what an operator takes or gives."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def is_view(func: Any) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def written_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return what an operator writes, by the name that its results have for it."""
    written = {}
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for name in argument.alias_info.before_set:
                written[name] = value
    return written


def returned_argument(func: Any, number: int) -> str | None:
    """Return which written argument a result is, if it is one."""
    if number >= len(func._schema.returns):
        return None
    alias = func._schema.returns[number].alias_info
    return next(iter(alias.before_set)) if alias is not None else None
