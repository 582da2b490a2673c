"""Modules whose forward depends on data: one node each, known from one real run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from gemsc.base.nests import map_tensors, tensor_leaves
from gemsc.errors import GemscError, SourceLocation
from gemsc.ir.fake import Listener
from gemsc.ir.holder import called_layer
from gemsc.ir.meta import TensorSpec
from gemsc.ir.operators.work import Work

stand_ins = Listener()  # hears of each call that a stand-in stood in for


@dataclass(frozen=True, slots=True)
class Given:
    """One tensor that a module gave; `learns` says whether it had a gradient."""

    spec: TensorSpec
    device: torch.device
    learns: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueCall:
    """What one real call of a module took, gave and did.

    `takes` is `what_is_taken` of its arguments; `gives` the nest that it returned, with
    a `Given` for each tensor. `forward` and `backward` are the kernels that ran. Kept
    for backward were the inputs and outputs of these numbers, and `saved_bytes` of
    other storages. `differentiates` says whether forward had a backward of its own.
    """

    takes: str
    gives: Any
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    forward_operators: int = 0
    backward_operators: int = 0
    flops: int = 0
    moved_bytes: int = 0
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    random: bool = False
    differentiates: bool = False


@dataclass(frozen=True, slots=True)
class Opaque:
    """A user's module that is not looked into, and why.

    `at` is the user's line that needs data; `changes` are the parameters and buffers
    that its calls change, `keeps` those that autograd keeps for its backward.
    """

    module: nn.Module
    calls: tuple[OpaqueCall, ...]
    why: str
    at: SourceLocation | None = None
    changes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()

    @property
    def differentiates(self) -> bool:
        """Whether forward calls torch.autograd.grad."""
        return any(call.differentiates for call in self.calls)

    def call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpaqueCall:
        """Return what is known of a call with such arguments.

        Raises:
            GemscError: the real run had no call of these shapes.
        """
        takes = what_is_taken(args, kwargs)
        for call in self.calls:
            if call.takes == takes:
                return call
        raise GemscError(
            f"{type(self.module).__name__} was never called like this when the model "
            f"ran on example_inputs: {takes}",
            at=self.at,
            help="call it with the same shapes in every step",
        )


class OpaqueLeaf(nn.Module):
    """Stands in a graph for a user's module: runs it, or on fake tensors its shapes.

    Children, parameters and buffers are the user's, under the same names. What else is
    known hides behind `opaque_of`, so that no name of a child is taken.
    """

    def __init__(self, opaque: Opaque) -> None:
        super().__init__()
        module = opaque.module
        self._modules = module._modules
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.__dict__["_gemsc_opaque"] = opaque
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward; on fake tensors give what it gave."""
        opaque: Opaque = self.__dict__["_gemsc_opaque"]
        tensors = [tensor for _, tensor in tensor_leaves((args, kwargs))]
        parameters = list(self.parameters())
        if any(isinstance(tensor, FakeTensor) for tensor in (*tensors, *parameters)):
            return stand_in(opaque, parameters, args, kwargs)
        opaque.module.training = self.training
        return opaque.module(*args, **kwargs)


def opaque_of(module: nn.Module | None) -> Opaque | None:
    """Return what is known of a module that is not looked into; else None."""
    held = {} if module is None else vars(module)
    opaque: Opaque | None = held.get("_gemsc_opaque")
    return opaque


def changed_inside(node: fx.Node, module: nn.Module) -> list[str]:
    """Return what a module that is not looked into changes of its own, if one runs."""
    opaque = opaque_of(called_layer(node, module))
    return [] if opaque is None else [f"{node.target}.{n}" for n in opaque.changes]


def has_state(layer: nn.Module) -> bool:
    """Whether a layer may remember what it saw: it has buffers, or is opaque."""
    return opaque_of(layer) is not None or any(True for _ in layer.buffers())


_OF_TORCH = ("aten", "prim", "prims")  # namespaces of operators


def has_own_backward(node: fx.Node, module: nn.Module) -> bool:
    """Whether code of the user's computes a node's gradients.

    That need not be linear in the gradient that comes in, as torch's own operations
    are: it may clip it, for instance.
    """
    target: Any = node.target
    if node.op == "call_module":
        return opaque_of(module.get_submodule(target)) is not None
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).partition(".")[0] not in _OF_TORCH
    owner = getattr(target, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def opaques(module: nn.Module) -> dict[str, Opaque]:
    """Return path -> what is known, for all such modules inside."""
    pairs = ((path, opaque_of(layer)) for path, layer in module.named_modules())
    return {path: opaque for path, opaque in pairs if opaque is not None}


def what_is_taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return arguments as text, with shape and dtype in place of each tensor."""

    def spec(path: object, tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(map(int, tensor.shape)), tensor.dtype)

    shown = [str(map_tensors(value, spec)) for value in args]
    shown += [f"{key}={map_tensors(v, spec)}" for key, v in sorted(kwargs.items())]
    return ", ".join(shown)


def stand_in(
    opaque: Opaque,
    parameters: Sequence[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return what a call gives, on fake tensors: shapes, gradients, saved bytes.

    Gradients of whatever learns flow to all inputs and to `parameters`.
    """
    call = opaque.call_of(args, kwargs)
    inputs = [tensor for _, tensor in tensor_leaves((args, kwargs))]
    made: Any = _StandIn.apply(call, givens(call.gives), *inputs, *parameters)  # type: ignore[no-untyped-call]
    if stand_ins.tell is not None:
        stand_ins.tell(call)
    outputs = iter(made)
    return pytree.tree_map(
        lambda leaf: next(outputs) if isinstance(leaf, Given) else leaf,
        call.gives,
        is_leaf=lambda leaf: isinstance(leaf, Given),
    )


def givens(value: Any) -> list[Given]:
    """Return the tensors of a nest, in order."""
    leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, Given))
    return [leaf for leaf in leaves if isinstance(leaf, Given)]


class _StandIn(torch.autograd.Function):
    """Computes nothing: tensors without values, as many bytes kept as there were."""

    @staticmethod
    def forward(
        ctx: Any, call: OpaqueCall, given: list[Given], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = [
            torch.empty(leaf.spec.shape, dtype=leaf.spec.dtype, device=leaf.device)
            for leaf in given
        ]
        others = [torch.empty(n, dtype=torch.uint8) for n in call.saved_bytes]
        ctx.save_for_backward(
            *(tensors[i] for i in call.saved_inputs),
            *(outputs[i] for i in call.saved_outputs),
            *others,
        )
        pairs = zip(outputs, given, strict=True)
        ctx.mark_non_differentiable(*(t for t, leaf in pairs if not leaf.learns))
        ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return (
            *(None, None),
            *(
                torch.empty(shape, dtype=dtype, device=device) if needs else None
                for (shape, dtype, device), needs in zip(ctx.like, needed, strict=True)
            ),
        )
