"""Names for what goes into a model, and the structure of what comes out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import autocasting, same_bits
from gemsc.base.examples import num_rows
from gemsc.base.nests import (
    OF_ALL,
    ONCE,
    Inputs,
    Path,
    call_model,
    map_tensors,
    named_tuple,
    saved_named,
    storage_of,
    tensor_leaves,
)
from gemsc.base.plain_forward import plain_forward
from gemsc.base.rng import may_draw, preserve_rng
from gemsc.base.units import show_some
from gemsc.base.visible import forgetting
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.fake_copy import copy_on_fakes
from gemsc.frontend.user_code import line_of_function
from gemsc.ir.meta import facts, spec
from gemsc.ir.program import DataclassValue, Program, Slot

# what is no tensor
PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def input_names(model: nn.Module, inputs: Inputs) -> Callable[[Path], str]:
    """Return the function that names the tensor at a path ("input", 0, "mask")."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]

    def name(path: Path) -> str:
        kind, *keys = path
        if kind == "input" and isinstance(inputs, tuple):
            index = int(keys[0])
            if index < len(named):
                keys[0] = named[index]
            else:
                keys[:1] = [variadic[0] if variadic else "input", index]
            return "_".join(map(str, keys))
        return "_".join(map(str, keys if kind == "input" else path))

    return name


@dataclass
class Returned:
    """What the model returned.

    `structure` has a `Slot` for each of the `tensors`, and None for each object of
    another kind, which `left_out` names with its type.
    """

    structure: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def take(self, value: Any, name: str = "") -> Any:
        """Return the structure of a part of it."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return Slot(len(self.tensors) - 1)
        if isinstance(value, (*PLAIN, torch.Size)):
            return value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            fields = ((n, self.take(getattr(value, n), n)) for n in names)
            return DataclassValue(type(value), tuple(fields))
        if isinstance(value, Mapping):
            return {key: self.take(item, str(key)) for key, item in value.items()}
        if isinstance(value, tuple):
            return named_tuple(value, [self.take(item, name) for item in value])
        if isinstance(value, list) or type(value) in pytree.SUPPORTED_NODES:
            items = value if isinstance(value, list) else _children(value)
            return [self.take(item, name) for item in items]
        kind = type(value).__name__
        self.left_out.append(f"{name}, of type {kind}" if name else f"a {kind}")
        return None


def returned(output: object) -> Returned:
    """Return what the model returned, in its parts.

    Raises:
        GemscError: there is no tensor in it.
    """
    result = Returned()
    result.structure = result.take(output)
    if not result.tensors:
        raise GemscError(
            "the model returns no tensor"
            + "".join(f", but {what}" for what in result.left_out[:1]),
            help="return tensors in tuples, lists, dicts or dataclasses",
        )
    return result


def sample_dims(
    model: nn.Module, inputs: Inputs, evaluation: Program
) -> tuple[int, ...]:
    """Return in which dimension of each tensor that the model returns samples count.

    It is the one that twice as many samples make larger. Of what has none, it is ONCE
    where it needs no samples, and OF_ALL of a whole micro-batch. () where all are 0,
    it is not one, or a model does not run on fake tensors, or on more samples.
    """
    shapes, rows = [spec(node).shape for node in evaluation.outputs], num_rows(inputs)
    if [shape[:1] for shape in shapes] == [(rows,)] and rows not in shapes[0][1:]:
        return ()

    def doubled(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        sizes = tensor.shape
        if sizes[:1] == (rows,):
            sizes = torch.Size((2 * rows, *sizes[1:]))
        return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    precision = autocasting(evaluation.autocast)
    try:
        copied = copy_on_fakes(model, None, fake).model.eval()
        with fake, preserve_rng(), torch.no_grad(), plain_forward(), precision:
            with forgetting(model):
                output = call_model(copied, map_tensors(inputs, doubled))
            given = returned(output).tensors
        pairs = zip(shapes, given, strict=True)
        grown = [_grown(shape, tensor.shape) for shape, tensor in pairs]
    except Exception:  # whatever a model says of so many samples
        return ()
    chosen = tuple(
        (dims[0] if len(dims) == 1 else 0) if dims else _without_samples(node, rows)
        for dims, node in zip(grown, evaluation.outputs, strict=True)
    )
    return chosen if any(chosen) and (any(grown) or rows > 1) else ()


def _grown(shape: Sequence[int], larger: Sequence[int]) -> list[int]:
    """Return the dimensions in which one is larger."""
    sizes = enumerate(zip(shape, larger, strict=True))
    return [dim for dim, (size, other) in sizes if size != other]


def _without_samples(output: fx.Node, rows: int) -> int:
    """Return ONCE of what is made of no input that has a row for each sample."""
    needed = {output: None}
    for node in (way := [output]):
        way += [source for source in node.all_input_nodes if source not in needed]
        needed |= dict.fromkeys(node.all_input_nodes)
    names = [str(getattr(n.target, "__name__", n.target)) for n in needed]
    draws = any(facts(n).random for n in needed) or any(map(may_draw, names))
    given = [spec(n).shape[:1] for n in needed if n.op == "placeholder"]
    return OF_ALL if draws or (rows,) in given else ONCE


def output_notes(output: Returned) -> tuple[str, ...]:
    """Return what a user should know of what the model returned."""
    return tuple(
        f"the model returns {what}, in which gemsc sees no tensors: evaluation returns "
        "None in its place"
        for what in output.left_out
    )


def state_notes_of(model: nn.Module) -> tuple[str, ...]:
    """Say that files of weights are not what the model's own `state_dict` gives."""
    saved = saved_named(model)
    try:
        state = model.state_dict()
    except Exception:  # it is not ready, say: no file depends on it
        return ()
    other = [n for n, t in state.items() if n not in saved or not _is_same(t, saved[n])]
    other += [name for name in saved if name not in state]
    if not other:
        return ()
    return (
        f"state_dict() of the model gives {show_some(other, 1)}, by a hook, "
        "get_extra_state() or a method of its own. Files of weights, also those that a "
        "program starts from, have its parameters and buffers as they are: "
        "gemsc.load_weights(model, file) loads them",
    )


def _is_same(value: object, saved: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != saved.shape:
        return False
    if value.stride() == saved.stride() and storage_of(value) == storage_of(saved):
        return True
    return not saved.is_meta and same_bits(value, saved)


def _children(value: Any) -> list[Any]:
    """Return the parts of a container of a class that torch's pytree knows."""
    return list(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])


@contextmanager
def unchanged(
    tensors: Sequence[torch.Tensor],
    loss: Any,
    what: str = "the loss changes what the model returns",
) -> Iterator[None]:
    """Refuse a loss that changes in place what others get, too: what it returned."""
    before = [tensor._version for tensor in tensors]
    yield
    if before != [tensor._version for tensor in tensors]:
        raise GemscError(
            f"{what}, in place",
            at=line_of_function(loss),
            help="let it begin with a copy of what it changes: x = x.clone()",
        )


def loss_fails_on(*arguments: Any) -> str:
    """Return that it does, and on which dtypes and shapes: `float32 [8, 4] and ...`."""
    return f"the loss fails on {' and '.join(map(_shown, arguments))}"


def _shown(nest: Any) -> str:
    leaves = [leaf for _, leaf in tensor_leaves(nest)]
    if not leaves:
        return type(nest).__name__
    parts = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in leaves)
    return ", ".join(parts)


def checkpoint_notes(lines: list[SourceLocation], model: nn.Module) -> Iterator[str]:
    """Say what becomes of activation checkpoints."""
    if not lines:
        return
    more = f" and {len(lines) - 1} more have" if len(lines) > 1 else " has"
    note = f"{lines[0].short}: this activation checkpoint{more} no effect (choose "
    note += "blocks with --recompute)"
    if any(getattr(m, "running_mean", None) is not None for m in model.modules()):
        note += ": running statistics in it are updated once, while PyTorch alone "
        note += "updates them again in the backward"
    yield note
