"""What users give: nests (tuples, lists, dicts, dataclasses) of tensors; models."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from gemsc.errors import GemscError

Path = tuple[str | int, ...]
Inputs = tuple[Any, ...] | dict[str, Any]

# in place of the dimension of samples in what a model returns (`Plan.sample_dims`):
ONCE, OF_ALL = -1, -2  # it needs no samples; it is made of a whole micro-batch


class Fields(dict[Any, Any]):
    """A dict whose values are attributes, too, and have numbers if they are not None.

    It stands for what a model returns, so that a loss or metrics can take it apart as
    they do a dataclass, or a ModelOutput of transformers.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the output has no '{name}', but {', '.join(self)}")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) or (isinstance(key, int) and key not in self):
            return tuple(value for value in self.values() if value is not None)[key]
        return super().__getitem__(key)


pytree.register_pytree_node(
    Fields,
    lambda fields: (list(fields.values()), list(fields)),
    lambda values, keys: Fields(zip(keys, values, strict=True)),
)


def named_output(**items: Any) -> Any:
    """Return a named tuple: it stands for one of the user's that a model returns."""
    return _named_class(tuple(items))(*items.values())


@functools.cache
def _named_class(names: tuple[str, ...]) -> Any:
    made: Any = namedtuple("Output", names)  # type: ignore[misc]
    copyreg.pickle(made, _apart)  # another rank finds no such class by its name
    return made


def _apart(value: Any) -> tuple[Callable[[], Any], tuple[()]]:
    return functools.partial(named_output, **value._asdict()), ()


def with_attributes(value: Any) -> Any:
    """Return a nest with `Fields` in place of each dict."""
    if isinstance(value, dict):
        return Fields({key: with_attributes(item) for key, item in value.items()})
    if isinstance(value, list):
        return [with_attributes(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return named_tuple(value, [with_attributes(item) for item in value])
    return value


def normalize_inputs(inputs: object) -> Inputs:
    """Return a tuple of positional or a dict of keyword inputs, checked."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if not isinstance(inputs, (tuple, dict)):
        raise GemscError(
            f"example_inputs is of type {type(inputs).__name__}",
            help="return a tuple of positional or a dict of keyword inputs",
        )
    if not any(True for _ in tensor_leaves(inputs)):
        raise GemscError(
            "example_inputs holds no tensor",
            help="return the tensors of one micro-batch, as forward takes them",
        )
    return inputs


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Return what a model gives for a tuple of positional or a dict of named inputs."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def call_loss(loss: Callable[..., Any], output: Any, target: Any) -> Any:
    """Return the loss of an output; a target of None means that it takes none."""
    return loss(output) if target is None else loss(output, target)


def as_loss(returned: Any) -> torch.Tensor:
    """Return the loss that a user's function has returned.

    That is a scalar, or a pair of a sum and of how many terms it has: the loss of
    several micro-batches is then the sum of the sums, divided by the sum of the counts.
    The pair becomes one tensor of both, of which no gradient flows to the count.

    Raises:
        GemscError: it is something else.
    """
    advice = "return one scalar tensor: take the mean; or return total, count"
    value, count = returned, None
    if isinstance(returned, tuple | list) and len(returned) == 2:
        value, count = returned
        advice = "return total, count: the sum of all terms, and how many they are"
    if not isinstance(value, torch.Tensor):
        raise GemscError(f"the loss is of type {type(value).__name__}", help=advice)
    if value.shape != ():
        raise GemscError(
            f"the loss has shape {list(value.shape)}; it must be a scalar", help=advice
        )
    if count is None:
        return value
    if value.dtype.itemsize < 4:  # its numbers are too few to count with
        value = value.float()
    if isinstance(count, int | float):
        count = value.new_full((), count)
    if not isinstance(count, torch.Tensor) or count.shape != ():
        kind = f"of type {type(count).__name__}"
        if isinstance(count, torch.Tensor):
            kind = f"a tensor of shape {list(count.shape)}"
        raise GemscError(f"the loss's count is {kind}, not a number", help=advice)
    if count.requires_grad:
        raise GemscError(
            "the loss's count depends on parameters",
            help="count terms; or return one scalar, the loss of a micro-batch",
        )
    return torch.stack((value, count.type_as(value)))


class Mean:
    """The mean of losses, of micro-batches or of whole batches; see `as_loss`."""

    def __init__(
        self, total: float = 0, count: float = 0, counted: float = 0, number: float = 0
    ) -> None:
        """Begin with the sums of earlier losses: `sums` of another one."""
        self.total, self.count = total, count
        self.counted, self.number = counted, number

    @property
    def sums(self) -> tuple[float, float, float, float]:
        """The sum of the losses, of their counts, how many have one, and how many."""
        return self.total, self.count, self.counted, self.number

    @property
    def loss(self) -> torch.Tensor:
        """The mean as one loss, of float64."""
        sums = (self.total, self.count) if self.counted else self.value
        return torch.tensor(sums, dtype=torch.float64)

    def add(self, loss: torch.Tensor, weight: int = 1) -> torch.Tensor:
        """Take a loss; return what to go backward from.

        One without a count has a `weight`. Its gradients still have to be divided by
        `divisor`, once all are added.
        """
        self.number += weight
        if not loss.dim():
            self.total += float(loss.detach().double()) * weight
            return loss
        total, count = loss.detach().double().tolist()
        self.total, self.count = self.total + total, self.count + count
        self.counted += 1
        return loss[0]

    @property
    def divisor(self) -> float:
        """What makes a mean of the sum: the terms, or the losses without counts."""
        return self.count if self.counted else self.number

    @property
    def value(self) -> float:
        """The mean; not a number if there are no terms."""
        return self.total / self.divisor if self.divisor else float("nan")


def on_device(nest: Any, device: torch.device) -> Any:
    """Return a nest with its tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), nest)


def tensor_leaves(
    value: object, path: Path = (), kind: Any = torch.Tensor
) -> Iterator[tuple[Path, Any]]:
    """Yield (path, tensor) for each tensor of a nest, or other `kind`, in order."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensor_leaves(item, (*path, index), kind)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensor_leaves(item, (*path, _key(key)), kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            yield from tensor_leaves(item, (*path, field.name), kind)


def detach_hooked(module: nn.Module) -> None:
    """Detach the weights that torch.nn.utils computes in a hook, before each forward.

    As they are made, they have a graph, with which no module can be copied.
    """
    for submodule in module.modules():
        for hook in submodule._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                name = hook._tensor_name
            elif isinstance(hook, WeightNorm | SpectralNorm):
                name = hook.name
            else:
                continue
            if isinstance(value := vars(submodule).get(name), torch.Tensor):
                vars(submodule)[name] = value.detach()


def named_place(path: Path) -> str:
    """Return how a message to the user calls a tensor: `input['mask']`."""
    first, *parts = path
    return str(first) + "".join(f"[{part!r}]" for part in parts)


def dense_leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nest that have a memory: sparse ones have several."""
    return [
        leaf
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells the memory of a tensor, which its views share."""
    return int(tensor.untyped_storage()._cdata)


def all_named(
    module: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters, then its buffers, under all names that they have."""
    yield from module.named_parameters(prefix, remove_duplicate=False)
    yield from module.named_buffers(prefix, remove_duplicate=False)


def saved_named(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, as `state_dict` names them by itself.

    A module may give its `state_dict` others, by hooks or methods of its own.
    """
    return {
        f"{path}.{name}".lstrip("."): tensor
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None and name not in owner._non_persistent_buffers_set
    }


def storages_of(module: nn.Module) -> dict[int, str]:
    """Return the name of each storage of a module's parameters and buffers."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {storage_of(tensor): name for name, tensor in named}


def as_kind(value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a parameter, trained or not, where the old one is such."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(value, requires_grad=old.requires_grad)
    return value


def map_tensors(
    value: Any, change: Callable[[Path, torch.Tensor], Any], path: Path = ()
) -> Any:
    """Return the nest with `change(path, tensor)` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [map_tensors(v, change, (*path, i)) for i, v in enumerate(value)]
        return items if isinstance(value, list) else named_tuple(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value)]
        changed = {
            f: map_tensors(getattr(value, f), change, (*path, f)) for f in fields
        }
        return dataclasses.replace(value, **changed)
    if isinstance(value, Mapping):
        return {
            key: map_tensors(item, change, (*path, _key(key)))
            for key, item in value.items()
        }
    return value


def copied(target: Any) -> Any:
    """Return a target for a loss, which may change what it is given."""
    return map_tensors(target, lambda _, tensor: tensor.clone())


def unbound(output: Any, buffers: Iterable[torch.Tensor]) -> Any:
    """Return what a model gave, copied where later calls change it with a buffer."""
    changing = {*map(storage_of, buffers)}
    if changing.isdisjoint(storage_of(tensor) for _, tensor in tensor_leaves(output)):
        return output
    return with_attributes(copied(output))


def nest_text(nest: Any, show: Callable[[Any], str]) -> str:
    """Return a tuple, list or dict as Python text, of what `show` says of its items."""
    if isinstance(nest, dict):
        return f"{{{', '.join(f'{show(k)}: {show(v)}' for k, v in nest.items())}}}"
    inside = ", ".join(map(show, nest))
    if isinstance(nest, list):
        return f"[{inside}]"
    return f"({inside},)" if len(nest) == 1 else f"({inside})"


def named_tuple(like: Any, items: list[Any]) -> Any:
    """Return the items as a tuple, a named one if `like` is, as that of `x.topk(1)`."""
    if hasattr(like, "_fields"):
        return type(like)(*items)
    if hasattr(like, "n_fields"):
        return _named_class(type(like).__match_args__)(*items)
    return tuple(items)


def stored_items(
    value: list[Any] | tuple[Any, ...] | dict[Any, Any],
) -> Iterable[tuple[Any, Any]]:
    """Return the pairs of key, or index, and item that are there now.

    A dict of transformers imports a class for each item when its own `items` is asked.
    """
    if isinstance(value, dict):
        return dict.items(value)
    if isinstance(value, list):
        return enumerate(list.__iter__(value))
    return enumerate(tuple.__iter__(value))


def stored_attributes(value: Any) -> Mapping[str, Any]:
    """Return those that an object stores itself; its class's code is not called."""
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _key(key: object) -> str | int:
    return key if isinstance(key, (str, int)) else str(key)


def reject_lazy(model: nn.Module) -> None:
    """Raise a GemscError for a parameter or buffer that has no shape yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise GemscError(
                f"the model's '{name}' has no shape yet",
                help="call the model once on example inputs before you return it",
            )
