"""Classify a node by the ATen operators that it runs: element by element, or a view."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemsc.ir import meta
from gemsc.ir.fake import fake_copy
from gemsc.ir.interpret import run_node
from gemsc.ir.program import Program

_ATEN = torch.ops.aten
# Element by element, though PyTorch does not tag them so.
_POINTWISE = frozenset(
    {
        _ATEN._to_copy,
        _ATEN.alias,
        _ATEN.clone,
        _ATEN.detach,
        _ATEN.elu,
        _ATEN.hardsigmoid,
        _ATEN.hardswish,
        _ATEN.hardtanh,
        _ATEN.leaky_relu,
        _ATEN.log_sigmoid_forward,
        _ATEN.masked_fill,
        _ATEN.scalar_tensor,  # the number of torch.where(x > 0, x, 0.0)
        _ATEN.softplus,
        _ATEN.threshold,
        _ATEN.where,
        _ATEN.zeros_like,
        _ATEN.ones_like,
        _ATEN.full_like,
    }
)

_RESHAPES = frozenset({_ATEN.view, _ATEN._unsafe_view, _ATEN._reshape_alias})


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The ATen operators that ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []
        self.numbers: list[Any] = []  # that stand among their arguments

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "prim":  # queries, of fake tensors for instance
            self.seen.append(func)
            if func._overloadpacket not in _RESHAPES:
                leaves = pytree.tree_leaves((args, kwargs))
                self.numbers += [n for n in leaves if isinstance(n, int | float)]
        return func(*args, **(kwargs or {}))


_Ran = tuple[list[Any], dict[fx.Node, Any], Any]  # operators, inputs, result


class Probe:
    """Runs single nodes on fake tensors that are contiguous.

    `module` is a copy of the program's module whose tensors are fake.
    """

    def __init__(self, mode: FakeTensorMode, module: nn.Module) -> None:
        self._mode = mode
        self._module = module
        self._known: dict[fx.Node, _Ran] = {}

    def is_pointwise(self, node: fx.Node) -> bool:
        """Whether each element depends on the same element of broadcast inputs."""
        operators, _, _ = self._run(node)
        return bool(operators) and all(map(_is_pointwise, operators))

    def is_pointwise_both_ways(self, node: fx.Node) -> bool:
        """Whether that is so in the backward too, whatever the sizes are."""
        try:
            first, second = self._run_both_ways(node, 1), self._run_both_ways(node, 2)
        except Exception:  # the user's code is for these sizes only
            return False
        return (first.seen, first.numbers) == (second.seen, second.numbers) and all(
            _is_pointwise(func) or func._overloadpacket in _RESHAPES
            for func in first.seen
        )

    def is_reshape(self, node: fx.Node) -> bool:
        """Whether the result has all elements of its input, in the same order."""
        operators, _, _ = self._run(node)
        return all(func._overloadpacket in _RESHAPES for func in operators)

    def kept_dims(self, node: fx.Node, source: fx.Node) -> dict[int, int] | None:
        """Return where a view keeps whole dimensions of its source; None if no view.

        A dimension of the result with the same stride and size as one of the source is
        that one: both walk the same memory, in bytes, as pairs of real numbers may be
        one complex number. Of a tuple, all tensors must agree.
        """
        operators, values, result = self._run(node)
        if not all(map(_is_view, operators)):
            return None
        given = values[source]
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if not isinstance(given, Tensor) or not outputs:
            return None
        kept: dict[int, int] = {}
        for dim, (size, stride) in enumerate(
            zip(given.shape, given.stride(), strict=True)
        ):
            length = stride * given.itemsize
            places = {_place(output, size, length) for output in outputs}
            place = places.pop()
            if size > 1 and not places and place is not None:
                kept[dim] = place
        return kept

    def _run_both_ways(self, node: fx.Node, times: int) -> _Operators:
        """Run a node forward and backward, on inputs `times` as long."""
        recorder = _Operators()
        with self._mode, torch.enable_grad():
            sources = node.all_input_nodes
            values = {n: _contiguous(meta.value(n), times) for n in sources}
            with recorder:
                result = run_node(node, values, self._module)
            leaves = pytree.tree_leaves(result)
            learning = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            gradients = [torch.empty_like(leaf) for leaf in learning]
            with recorder:
                torch.autograd.backward(learning, gradients)
        return recorder

    def _run(self, node: fx.Node) -> _Ran:
        if node not in self._known:
            recorder = _Operators()
            with self._mode, torch.no_grad():
                values = {n: _contiguous(meta.value(n)) for n in node.all_input_nodes}
                result = None
                with recorder, suppress(DataDependentOutputException):
                    result = run_node(node, values, self._module)
            self._known[node] = recorder.seen, values, result
        return self._known[node]


_PROBES: WeakKeyDictionary[nn.Module, Probe] = WeakKeyDictionary()


def probe_of(program: Program) -> Probe:
    """Return the probe of a program's nodes, the same for all tiles."""
    if program.module not in _PROBES:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        _PROBES[program.module] = Probe(mode, fake_copy(program.module, mode))
    return _PROBES[program.module]


def _place(output: Tensor, size: int, length: int) -> int | None:
    lengths = (stride * output.itemsize for stride in output.stride())
    pairs = list(zip(output.shape, lengths, strict=True))
    return pairs.index((size, length)) if (size, length) in pairs else None


def _is_view(func: Any) -> bool:
    """Return whether an operator is a view; as_strided counts all of the memory."""
    return bool(func.is_view) and func._overloadpacket is not _ATEN.as_strided


def _is_pointwise(func: Any) -> bool:
    """Return whether an operator is so, or if in place, the same without the change.

    Which of the two has a tag differs among versions of PyTorch.
    """
    packets = [func._overloadpacket]
    space, _, name = func._schema.name.partition("::")
    if space == "aten" and name.endswith("_"):
        packets.append(getattr(_ATEN, name[:-1], None))
    overloads = [getattr(packet, func._overloadname, None) for packet in packets]
    tagged = any(torch.Tag.pointwise in op.tags for op in overloads if op is not None)
    return tagged or not _POINTWISE.isdisjoint(packets)


def _contiguous(value: Any, times: int = 1) -> Any:
    """Return new tensors, with so many `times` the elements along each dimension."""

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [size * times if size > 1 else size for size in leaf.shape]
        made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        return made.requires_grad_(leaf.is_floating_point())

    return pytree.tree_map(fresh, value)
