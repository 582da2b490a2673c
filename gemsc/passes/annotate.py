"""Annotate: operations, bytes, seconds and exact saved-for-backward bytes of each node.

Example, one line of `--print-after annotate`:
    %conv = call_module conv1(x)                        # before
    %conv = call_module conv1(x)  9.4 MFLOP, 1.0 MiB saved, 0.4 ms + 0.8 ms   # after
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gemsc.ir import meta
from gemsc.ir.fake import fake_copy, fake_like
from gemsc.ir.holder import with_graph
from gemsc.ir.interpret import run_nodes
from gemsc.ir.program import Program
from gemsc.ir.tile_ops import kept_of
from gemsc.passes.base import Pass
from gemsc.planner.device import CPU_CORE, Device

__all__ = ["Annotate", "annotate"]

_ATEN = torch.ops.aten
_FREE = frozenset(
    {_ATEN._unsafe_view, _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided}
)
# torch.utils.flop_counter knows the attention of CUDA only
_SAME_FORMULA = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: (
        _ATEN._scaled_dot_product_efficient_attention
    )
}


@dataclass(frozen=True)
class Annotate(Pass):
    """Run the graph once on fake tensors and attach `Facts` to each node.

    1. Operations come from PyTorch's own FLOP formulas, bytes from the sizes of what
       each ATen operator reads and writes, seconds from the device's roofline.
    2. Saved bytes are counted by `saved_tensors_hooks`: the same storages that a real
       run keeps, each once, parameters and buffers left out.
    3. A fake backward tells which values a gradient of the loss flows back into.
    """

    name: ClassVar[str] = "annotate"
    requires: ClassVar[tuple[str, ...]] = ()

    device: Device = CPU_CORE
    training: bool = True

    def apply(self, program: Program) -> Program:
        """Return the program with facts on every node (of a copied graph)."""
        module = with_graph(program.module, _copied(program.graph))
        program = program.with_module(module)
        annotate(program, device=self.device, training=self.training)
        return program


def annotate(
    program: Program, *, device: Device = CPU_CORE, training: bool = True
) -> dict[fx.Node, Any]:
    """Attach facts to the nodes of a program's own graph; return their fake values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(program.module, mode)
    fake.train(training)
    for path in program.frozen:
        fake.get_submodule(path).eval()
    ledger = _Ledger(device, _storages(fake))
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = fake_like(meta.value(node), mode)
    with mode, ledger, torch.random.fork_rng(devices=[]):
        run_nodes(program.graph.nodes, values, fake, observe=ledger.observe)
        reached = _gradient_reaches(program, values)
    seen: set[int] = set()
    for node in program.compute_nodes:
        meta.set_facts(node, ledger.facts(node, values[node], fake, seen))
        meta.set_needs_gradient(node, node in reached)
    return values


def _copied(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(graph, mapping))
    for old, new in mapping.items():
        meta.copy_meta(old, new)
    return copied


def _storages(module: nn.Module) -> set[int]:
    tensors = (*module.parameters(), *module.buffers())
    return {tensor.untyped_storage()._cdata for tensor in tensors}


@dataclass
class _Count:
    flops: int = 0
    moved_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    random: bool = False
    saved: dict[int, int] = field(default_factory=dict)


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Book every ATen operator and every saved tensor on the node that is running."""

    def __init__(self, device: Device, persistent: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.persistent = persistent
        self.counts: dict[fx.Node | None, _Count] = defaultdict(_Count)
        self.node: fx.Node | None = None

    @contextmanager
    def observe(self, node: fx.Node) -> Iterator[None]:
        self.node = node
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda t: t):
            yield
        self.node = None

    def _save(self, tensor: Tensor) -> Tensor:
        for part in kept_of(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in self.persistent:
                self.counts[self.node].saved[storage._cdata] = storage.nbytes()
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.node is not None and _computes(func, result):
            self._book(func, args, kwargs or {}, result)
        return result

    def _book(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = self.counts[self.node]
        packet = func._overloadpacket
        formula = flop_registry.get(_SAME_FORMULA.get(packet, packet))
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
        leaves = pytree.tree_leaves((args, kwargs, result))
        moved = sum(t.nbytes for t in leaves if isinstance(t, Tensor))
        forward = self.device.seconds(flops, moved)
        count.random |= _draws(func, args, kwargs)
        count.flops += flops
        count.moved_bytes += moved
        count.forward_seconds += forward
        # the gradients of both operands of a product cost a product each; an
        # elementwise operator reads and writes about as much as in forward
        count.backward_seconds += 2 * forward if flops else forward

    def facts(
        self, node: fx.Node, value: Any, module: nn.Module, seen: set[int]
    ) -> meta.Facts:
        count = self.counts[node]
        outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        fresh = {key: size for key, size in count.saved.items() if key not in seen}
        seen.update(fresh)
        return meta.Facts(
            flops=count.flops,
            moved_bytes=count.moved_bytes,
            output_bytes=sum(t.nbytes for t in outputs),
            parameter_bytes=sum(p.nbytes for p in _parameters(node, module)),
            saved_bytes=sum(fresh.values()),
            saved=tuple(count.saved.items()),
            storages=tuple({t.untyped_storage()._cdata for t in outputs}),
            heavy=count.flops > 0
            or any(p.dim() > 1 for p in _parameters(node, module)),
            random=count.random,
            forward_seconds=count.forward_seconds,
            backward_seconds=count.backward_seconds,
        )


def _computes(func: Any, result: Any) -> bool:
    """Whether an operator runs a kernel: views, allocations and queries do not."""
    has_tensors = any(isinstance(t, Tensor) for t in pytree.tree_leaves(result))
    return has_tensors and not func.is_view and func._overloadpacket not in _FREE


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _parameters(node: fx.Node, module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a node brings: its layer's, or those it reads."""
    if node.op == "call_module":
        return list(module.get_submodule(str(node.target)).parameters())
    found = []
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            owner, _, name = str(source.target).rpartition(".")
            tensor = getattr(module.get_submodule(owner), name)
            if isinstance(tensor, nn.Parameter):
                found.append(tensor)
    return found


def _gradient_reaches(program: Program, values: dict[fx.Node, Any]) -> set[fx.Node]:
    """Return the nodes whose value takes part in the gradient of the loss."""
    candidates: list[tuple[fx.Node, Tensor]] = []
    for node in program.compute_nodes:
        for tensor in pytree.tree_leaves(values[node]):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                candidates.append((node, tensor))
    if program.loss is None or not candidates:
        return set()
    loss = values[program.loss]
    if not loss.requires_grad:
        return set()
    gradients = torch.autograd.grad(
        loss, [tensor for _, tensor in candidates], allow_unused=True
    )
    pairs = zip(candidates, gradients, strict=True)
    return {node for (node, _), gradient in pairs if gradient is not None}
