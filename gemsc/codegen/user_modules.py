"""A user's own module as text: its class, with all that it holds, and no `__init__`."""

from __future__ import annotations

import enum
import keyword
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import nn

from gemsc.base.dtypes import lying_of
from gemsc.base.nests import nest_text
from gemsc.codegen.expressions import (
    NAMESPACES,
    UserObject,
    is_attribute,
    literal,
)
from gemsc.errors import GemscError, InternalError
from gemsc.ir.layers import HOOKS, empty_source, layer_source
from gemsc.ir.opaque import Opaque

_INTERNAL = frozenset(vars(nn.Module()))
_HOOKS = (*HOOKS, "_state_dict_hooks", "_load_state_dict_pre_hooks")
MOST_NUMBERS = 64  # of a tensor that is written as text
_BUILTIN = (list, dict, tuple, set, slice, range, int, float, complex, str)

NamedObject = Callable[[UserObject], str]


def user_module_source(path: str, opaque: Opaque, named: NamedObject) -> str:
    """Return the expression that makes a user's module, without its tensors' values.

    Example: `user_module(Gate, scale=2.0, up=nn.Linear(8, 8))`. The class is imported;
    children are written in the same way, layers of torch.nn as their constructors.

    Raises:
        GemscError: it holds something that has no text; names the attribute.
    """
    try:
        return _Source(opaque, named).module(path, opaque.module)
    except GemscError as error:
        error.add_note(f"'{path}' stays whole, for {opaque.at}: {opaque.why}")
        raise


def tensor_source(tensor: torch.Tensor) -> str:
    """Return the parameter or tensor without values: `nn.Parameter(torch.empty(4))`."""
    empty = empty_source(tensor)
    if isinstance(tensor, nn.Parameter):
        fixed = "" if tensor.requires_grad else ", requires_grad=False"
        return f"nn.Parameter({empty}{fixed})"
    if isinstance(order := lying_of(tensor), tuple):
        dtype = "" if tensor.dtype is torch.float32 else f", dtype={tensor.dtype}"
        return f"torch.empty_permuted({tuple(tensor.shape)}, {order}{dtype})"
    return empty


class _Source:
    def __init__(self, opaque: Opaque, named: NamedObject) -> None:
        self.opaque = opaque
        self.named = named
        self.within: list[object] = []  # objects that are being written

    def refuse(self, path: str, what: str, help_text: str) -> GemscError:
        return GemscError(f"'{path}' {what}", at=self.opaque.at, help=help_text)

    # -------------------------------------------------------- modules

    def module(self, path: str, module: nn.Module) -> str:
        """Return a module's expression."""
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            raise self.refuse(
                path,
                f"({type(module).__name__}) has hooks, which a rank's file cannot hold",
                "do in forward what the hooks do",
            )
        layer = layer_source(module)
        if layer is not None:
            return layer
        attrs = {k: v for k, v in vars(module).items() if k not in _INTERNAL}
        plain = self._container(path, module) if not attrs else None
        if plain is not None:
            return plain
        parts = [
            (name, self.value(f"{path}.{name}", value)) for name, value in attrs.items()
        ]
        return self._made(path, type(module), [*parts, *self._held(path, module)])

    def _container(self, path: str, module: nn.Module) -> str | None:
        """Return `nn.Sequential(...)` and the like; None for any other class."""
        children = list(module._modules.items())
        if module._parameters or module._buffers or not children:
            return None
        if any(child is None for _, child in children):
            return None
        texts = [self.module(f"{path}.{n}", c) for n, c in children if c is not None]
        numbered = [name for name, _ in children] == [*map(str, range(len(children)))]
        if type(module) is nn.Sequential and numbered:
            return f"nn.Sequential({', '.join(texts)})"
        if type(module) is nn.ModuleList and numbered:
            return f"nn.ModuleList([{', '.join(texts)}])"
        return None

    def _held(self, path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield parameters, buffers and children by name."""
        for name, parameter in module._parameters.items():
            yield name, "None" if parameter is None else tensor_source(parameter)
        for name, buffer in module._buffers.items():
            lost = name in module._non_persistent_buffers_set
            yield name, "None" if buffer is None else _buffer_source(buffer, lost)
        for name, child in module._modules.items():
            inside = f"{path}.{name}"
            yield name, "None" if child is None else self.module(inside, child)

    def _made(self, path: str, cls: type, parts: list[tuple[str, str]]) -> str:
        plain = [f"{n}={text}" for n, text in parts if _is_keyword_argument(n)]
        odd = [f"{n!r}: {t}" for n, t in parts if not _is_keyword_argument(n)]
        packed = [f"**{{{', '.join(odd)}}}"] if odd else []
        head = self._class(path, cls)
        return f"user_module({', '.join([head, *plain, *packed])})"

    def _class(self, path: str, cls: type) -> str:
        if getattr(nn, cls.__name__, None) is cls:
            return f"nn.{cls.__name__}"
        return self._imported(path, cls)

    def _imported(self, path: str, item: Any) -> str:
        """Return the name under which a file imports a class or a function."""
        module, qualname = item.__module__, item.__qualname__
        bound: Any = sys.modules.get(module)
        for part in qualname.split("."):
            bound = getattr(bound, part, None)
        if bound is not item and module in sys.modules:  # perhaps `name = lambda ...`
            known = vars(sys.modules[module])
            qualname = next((n for n in known if known[n] is item), qualname)
            bound = known.get(qualname)
        if bound is not item or module == "__main__":
            raise self.refuse(
                path,
                f"needs {qualname}, which no rank can import from {module}",
                "define it at the top of a module that can be imported",
            )
        return self.named(UserObject(module, qualname))

    # --------------------------------------------------------- values

    def value(self, path: str, value: Any) -> str:
        """Return the text of an attribute."""
        if any(value is outer for outer in self.within):
            raise self._unknown(path, value)
        self.within.append(value)
        try:
            return self._value(path, value)
        finally:
            self.within.pop()

    def _value(self, path: str, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{self._imported(path, type(value))}.{value.name}"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if type(value) in (list, tuple, set, dict) or isinstance(value, torch.Size):
            return self._collection(path, value)
        if (text := self._of_libraries(path, value)) is not None:
            return text
        if type(value) is torch.Tensor and value.numel() <= MOST_NUMBERS:
            numbers = self.value(path, value.tolist())
            return f'torch.tensor({numbers}, dtype={value.dtype}, device="cpu")'
        if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
            return self._callable(path, value)
        if _is_plain_object(value):
            cls = type(value)
            args = [(k, self.value(f"{path}.{k}", v)) for k, v in vars(value).items()]
            return self._made(path, cls, args)
        if type(value).__module__ != "builtins" and isinstance(value, _BUILTIN):
            raise self._unknown(path, value)  # a subclass of them
        try:
            return literal(value)
        except InternalError:
            raise self._unknown(path, value) from None

    def _of_libraries(self, path: str, value: Any) -> str | None:
        """Return the text of what Python's own modules make; None of other values."""
        if type(value) is partial:
            made = self.named(UserObject("functools", "partial"))
            given = [self.value(path, part) for part in (value.func, *value.args)]
            named = [f"{k}={self.value(path, v)}" for k, v in value.keywords.items()]
            return f"{made}({', '.join([*given, *named])})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            made = self._imported(path, type(value))
            return f"{made}({', '.join(self.value(path, part) for part in value)})"
        if type(value) is OrderedDict:
            made = self.named(UserObject("collections", "OrderedDict"))
            return f"{made}({self._collection(path, dict(value))})"
        if get_origin(value) in (Union, UnionType):  # Optional[Tensor], int | str
            made = self.named(UserObject("typing", "Union"))
            kinds = [self.value(path, kind) for kind in get_args(value)]
            return f"{made}[{', '.join(kinds)}]"
        if value is type(None):  # builtins do not have it
            return self.named(UserObject("types", "NoneType"))
        return None

    def _collection(self, path: str, value: Any) -> str:
        if isinstance(value, set):
            items = sorted(self.value(path, item) for item in value)
            return f"{{{', '.join(items)}}}" if items else "set()"
        text = nest_text(value, lambda item: self.value(path, item))
        return f"torch.Size({text})" if isinstance(value, torch.Size) else text

    def _callable(self, path: str, value: Any) -> str:
        """Return a function or a class: torch's by its name, others imported."""
        name = str(value.__name__)
        for space, module in NAMESPACES[:2]:
            if getattr(module, name, None) is value:
                return f"{space}.{name}"
        if getattr(value, "__self__", None) is not None or not value.__module__:
            raise self._unknown(path, value)  # a method of some object
        return self._imported(path, value)

    def _unknown(self, path: str, value: Any) -> GemscError:
        if isinstance(value, torch.Tensor):
            help_text = "keep it with register_buffer(..., persistent=False)"
        elif isinstance(value, nn.Module):
            help_text = "register it: as an attribute, or in an nn.ModuleList"
        else:
            help_text = "keep numbers, strings, functions and modules as attributes"
        return self.refuse(
            path, f"is of type {type(value).__name__}, which has no text", help_text
        )


def _buffer_source(buffer: torch.Tensor, lost: bool) -> str:
    suffix = ", persistent=False" if lost else ""
    return f"nn.Buffer({tensor_source(buffer)}{suffix})"


def _is_keyword_argument(name: str) -> bool:
    return is_attribute(name) and not keyword.issoftkeyword(name)


def _is_plain_object(value: object) -> bool:
    """Whether an object of a Python class is no more than its attributes."""
    cls: Any = type(value)
    return (
        hasattr(value, "__dict__")
        and cls.__new__ is object.__new__
        and not any("__slots__" in vars(base) for base in cls.__mro__[:-1])
        and not isinstance(value, nn.Module | torch.Tensor)
    )
