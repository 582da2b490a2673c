"""Watch one real call of a module: what it takes, gives, does and keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemsc.base.nests import (
    dense_leaves,
    map_tensors,
    named_tuple,
    storage_of,
    storages_of,
    tensor_leaves,
)
from gemsc.base.rng import seeded, torch_state
from gemsc.base.visible import forgetting
from gemsc.costs.operators import draws, runs_a_kernel, work_of
from gemsc.errors import GemscError
from gemsc.frontend.counters import AnyDraw, differ, drawn, numbers_in, other_generators
from gemsc.frontend.eager import detached
from gemsc.ir.meta import TensorSpec
from gemsc.ir.opaque import Given, OpaqueCall, givens, what_is_taken
from gemsc.ir.operators.work import Work

_CONSTANTS = (type(None), str, torch.dtype, torch.device)
_NO_GRADIENT = "does not require grad and does not have a grad_fn"  # says autograd
_OF_A_LEAF = "leaf Variable that requires grad is being used in an in-place operation"
_OVERWRITES = "it changes its input in place: begin with x = x.clone()"
_WHERE_GRADIENTS = (
    "evaluation and recomputing run without gradients; put what it differentiates, and "
    "torch.autograd.grad, into `with torch.enable_grad():`"
)
_DRAWS_IN_PYTHON = (
    "it draws from Python's or NumPy's random numbers, which no rank seeds: use torch's"
    ", for example torch.rand(()) < 0.1, or items[torch.randint(len(items), ())]"
)


class _UnfitError(Exception):
    """Why a module cannot be one node."""


@dataclass
class Watch:
    """Stands for a module's forward: runs it, and writes down what it does.

    `problem` says why the module cannot be one node; `changed` are the parameters and
    buffers that it changed, and the buffers of its layers with running statistics;
    `kept` are those that autograd keeps.
    """

    module: nn.Module
    forward: Callable[..., Any]
    calls: dict[str, OpaqueCall] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    problem: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; measure it at its first call with such shapes."""
        takes = what_is_taken(args, kwargs)
        if takes in self.calls or self.problem is not None:
            return self.forward(*args, **kwargs)
        if any(map(callable, (*args, *kwargs.values()))):  # as those of Keras' layers
            self.problem = "it is called with a function"
            return self.forward(*args, **kwargs)
        try:
            with self._put_back():
                before = other_generators()
                with forgetting(self.module) as forget:
                    measured = self._measure(takes, args, kwargs)
                    if other_generators() != before:
                        self._refuse_draws(args, kwargs)
                    numbers = _numbers(self.module)
                    forget()  # what others would keep is the same
                    for seed, change in enumerate((Tensor.neg, _random, _random), 1):
                        with seeded(seed):  # the same answer in every run
                            given = (_changed(nest, change) for nest in (args, kwargs))
                            self._compare(measured, *given)
                    _refuse_counters(numbers, _numbers(self.module))
            self.calls[takes] = measured
        except _UnfitError as error:
            self.problem = str(error)
        return self.forward(*args, **kwargs)

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Put tensors and the generator back; note which tensors have changed."""
        state = torch_state()
        tensors = [
            (path, module, slots, name, tensor, tensor.detach().clone())
            for path, module in self.module.named_modules()
            for slots in (module._parameters, module._buffers)
            for name, tensor in slots.items()
            if tensor is not None
        ]
        yield
        for path, module, slots, name, tensor, before in tensors:
            tracks = isinstance(module, _NormBase) and module.training
            is_statistic = tracks and slots is module._buffers
            is_new = slots[name] is not tensor
            if is_statistic or is_new or not torch.equal(tensor, before):
                self.changed.add(f"{path}.{name}".lstrip("."))
                with torch.no_grad():
                    tensor.copy_(before)
                slots[name] = tensor
        torch.set_rng_state(state)

    def _statistics(self) -> Iterator[str]:
        """Yield the names of what BatchNorm updates, and its backward does not need."""
        for path, module in self.module.named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                names = (name for name, _ in module.named_buffers(recurse=False))
                yield from (f"{path}.{name}".lstrip(".") for name in names)

    def _measure(
        self, takes: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpaqueCall:
        _check_taken((*args, *kwargs.values()))
        args, kwargs = detached(args), detached(kwargs)
        inputs = [tensor for _, tensor in tensor_leaves((args, kwargs))]
        versions = [tensor._version for tensor in inputs]
        parameters = [*self.module.parameters()]
        learns = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*inputs, *parameters)
        )
        state = storages_of(self.module)
        log = _Log(state)
        with log, saved_tensors_hooks(log.save, log.use):
            try:
                result = self.forward(*args, **kwargs)
            except RuntimeError as error:
                if _OF_A_LEAF in str(error):  # here alone its inputs are leaves
                    raise _UnfitError(_OVERWRITES) from error
                raise
        self.kept |= log.kept - ({*self._statistics()} - log.read)
        if [tensor._version for tensor in inputs] != versions:
            raise _UnfitError(_OVERWRITES)
        gives = _structure(result, learns)
        outputs = [tensor for _, tensor in tensor_leaves(result)]
        if not outputs:
            raise _UnfitError("it returns no tensor")
        call = log.summary(OpaqueCall(takes=takes, gives=gives), inputs, outputs)
        ends = [tensor for tensor in outputs if tensor.requires_grad]
        if ends:
            log.begin()
            # a checkpoint runs its forward again, and then needs what is saved there
            with log, saved_tensors_hooks(lambda t: t, lambda t: t):
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            call = replace(
                call, backward=tuple(log.works), backward_operators=log.operators
            )
        for name, parameter in self.module.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout is not torch.strided:
                raise _UnfitError(f"the gradient of '{name}' is sparse")
        return call

    def _refuse_draws(self, args: Any, kwargs: Any) -> None:
        """Refuse draws that decide something: no seed of a rank's is for these.

        Raises:
            _UnfitError: there is one.
        """
        results = []
        for number in AnyDraw.LOW, AnyDraw.HIGH:
            with seeded(0), torch.no_grad(), drawn((number,)):
                before = other_generators()
                with suppress(GemscError):  # it decides something
                    results.append(dense_leaves(self.forward(*args, **kwargs)))
                if other_generators() != before:
                    results.clear()
        if len(results) < 2 or not all(map(torch.equal, *results)):
            raise _UnfitError(_DRAWS_IN_PYTHON)

    def _compare(self, measured: OpaqueCall, args: Any, kwargs: Any) -> None:
        """Run once more on other values: shapes must not depend on them."""
        with torch.no_grad():
            try:
                result = self.forward(*args, **kwargs)
            except Exception as error:
                if _NO_GRADIENT in str(error):
                    raise _UnfitError(_WHERE_GRADIENTS) from error
                return  # made-up values that the user's code does not accept
        now = [given.spec for given in givens(_structure(result, learns=False))]
        before = [given.spec for given in givens(measured.gives)]
        if now != before:
            one, other = (", ".join(map(str, specs)) for specs in (before, now))
            raise _UnfitError(
                f"it returns {one} for one batch and {other} for another; a "
                "module that also holds what follows, up to tensors of one shape, can"
            )


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a real run does: kernels, bytes, random numbers, what is kept."""

    def __init__(self, persistent: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.persistent = persistent  # the names of parameters and buffers by storage
        self.kept: set[str] = set()
        self.read: set[str] = set()  # a BatchNorm that trains keeps what it never reads
        self.saved: dict[int, int] = {}
        self.alive: list[Tensor] = []  # an address must not be used twice
        self.random = self.uses = False
        self.begin()

    def begin(self) -> None:
        """Start to count anew."""
        self.works: list[Work] = []
        self.operators = self.flops = self.moved_bytes = 0

    def save(self, tensor: Tensor) -> Tensor:
        """Book a tensor that autograd keeps."""
        if (name := self.persistent.get(storage_of(tensor))) is not None:
            self.kept.add(name)
        else:
            self.alive.append(tensor.detach())
            self.saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def use(self, tensor: Tensor) -> Tensor:
        """Note that a backward begins within forward."""
        self.uses = True
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _trains_a_batchnorm(func, args):
            places = map(storage_of, dense_leaves((args, kwargs)))
            self.read |= {self.persistent[p] for p in places if p in self.persistent}
        if not runs_a_kernel(func, result):
            return result
        flops, works = work_of(func, args, kwargs or {}, result)
        moved = dense_leaves((args, kwargs, result))
        self.random |= draws(func, args, kwargs or {})
        self.operators += 1
        self.flops += flops
        self.moved_bytes += sum(tensor.nbytes for tensor in moved)
        self.works += works
        return result

    def summary(
        self, call: OpaqueCall, inputs: list[Tensor], outputs: list[Tensor]
    ) -> OpaqueCall:
        """Return the call with what the forward did."""
        ours = {storage_of(tensor) for tensor in (*inputs, *outputs)}
        kept = self.saved.keys()
        from_inputs = [i for i, t in enumerate(inputs) if storage_of(t) in kept]
        known = {storage_of(tensor) for tensor in inputs}
        from_outputs = [
            i for i, t in enumerate(outputs) if storage_of(t) in kept - known
        ]
        return replace(
            call,
            forward=tuple(self.works),
            forward_operators=self.operators,
            flops=self.flops,
            moved_bytes=self.moved_bytes,
            saved_inputs=tuple(from_inputs),
            saved_outputs=tuple(from_outputs),
            saved_bytes=tuple(n for key, n in self.saved.items() if key not in ours),
            random=self.random,
            differentiates=self.uses,
        )


def _trains_a_batchnorm(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call normalizes by the mean and variance of its own batch."""
    names = (argument.name for argument in func._schema.arguments)
    given = dict(zip(names, args, strict=False))
    return "batch_norm" in str(func) and given.get("training") is True


def _check_taken(value: Any) -> None:
    """Raise an error if a call in a graph could not give a module what it takes.

    Raises:
        _UnfitError: it would get a dict instead, without attributes.
    """
    if isinstance(value, (tuple, list)) or type(value) in (dict, OrderedDict):
        for item in value.values() if isinstance(value, dict) else value:
            _check_taken(item)
    elif isinstance(value, dict) or is_dataclass(value):
        raise _UnfitError(
            f"it takes a value of type {type(value).__name__}: let a submodule take "
            "the tensors in it"
        )


def _structure(value: Any, learns: bool) -> Any:
    """Return a nest with a `Given` for each tensor.

    Raises:
        _UnfitError: it holds something that may differ from step to step.
    """
    if isinstance(value, Tensor):
        spec = TensorSpec(tuple(value.shape), value.dtype)
        floats = value.is_floating_point() or value.is_complex()
        return Given(spec, value.device, learns and floats)
    if isinstance(value, _CONSTANTS):
        return value
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _structure(item, learns) for key, item in value.items()}
    if isinstance(value, dict) and type(value) in pytree.SUPPORTED_NODES:
        # a class with a way to take it apart, as transformers' ModelOutput
        return pytree.tree_map(lambda item: _structure(item, learns), value)
    if isinstance(value, list):
        return [_structure(item, learns) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return named_tuple(value, [_structure(item, learns) for item in value])
    if is_dataclass(value):
        _register(value)
        return pytree.tree_map(lambda item: _structure(item, learns), value)
    raise _UnfitError(
        f"it returns a value of type {type(value).__name__}, which may differ from "
        "step to step: return tensors, in tuples, lists, dicts or dataclasses"
    )


def _register(value: Any) -> None:
    """Let torch take values of a dataclass apart, and put them together as they were.

    Neither runs code of the class: `__init__` may compute, which the real run did.

    Raises:
        _UnfitError: it holds more than its fields, which nothing would compute anew.
    """
    cls = type(value)
    names = [f.name for f in fields(cls)]
    for other in vars(value).keys() - names if hasattr(value, "__dict__") else ():
        raise _UnfitError(
            f"it returns a value of type {cls.__name__}, which holds '{other}' beside "
            "its fields: make that a field, or a property"
        )
    if cls in pytree.SUPPORTED_NODES:
        return

    def rebuild(values: Iterable[Any], context: Any) -> Any:
        made = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)  # it may be frozen
        return made

    def apart(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    pytree.register_pytree_node(cls, apart, rebuild)


def _random(tensor: Tensor) -> Tensor:
    spread = tensor.std() if tensor.numel() > 1 else tensor.abs().sum() + 1
    return torch.randn_like(tensor) * spread + tensor.mean()


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return other numbers of the same kind; what is no float is only mixed."""

    def new(path: object, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.is_floating_point() and tensor.numel():
            return change(tensor)
        order = torch.randperm(tensor.numel(), device=tensor.device)
        return tensor.reshape(-1)[order].reshape(tensor.shape)

    return map_tensors(value, new)


def _refuse_counters(before: dict[str, object], after: dict[str, object]) -> None:
    """Refuse numbers that later calls change, too: each rank would count its own."""
    for name, number in after.items():
        if differ(before.get(name), number):
            advice = ": return it instead" if isinstance(number, _Numbers) else ""
            raise _UnfitError(f"forward changes {name} at each call{advice}")


class _Numbers(tuple[Any]):
    """Those in a tensor."""


def _numbers(module: nn.Module) -> dict[str, object]:
    """Return the numbers that are attributes; of tensors, those in them."""
    return {
        name: _Numbers([value.tolist()]) if isinstance(value, Tensor) else value
        for name, value in numbers_in(module, Tensor).items()
    }
