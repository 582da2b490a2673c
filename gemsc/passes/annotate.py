"""Annotate: operations, bytes, seconds and exact saved-for-backward bytes of each node.

Example, one line of `--print-after annotate`:
    %conv = call_module conv1(x)                        # before
    %conv = call_module conv1(x)  9.4 MFLOP, 1.0 MiB saved, 0.4 ms + 0.8 ms   # after
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemsc.base.nests import dense_leaves, storages_of
from gemsc.base.rng import fork_torch
from gemsc.base.visible import forgetting
from gemsc.base.weighted import WeightedCall, WeightedCalls
from gemsc.costs.gradients import GradientFlow
from gemsc.costs.hardware import Device, read_hardware
from gemsc.costs.operators import (
    draws,
    least_seconds,
    runs_a_kernel,
    seconds,
    work_of,
)
from gemsc.costs.signature import signature
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.fake import LSTM, MaskCounts, fake_copy, fake_like, with_workspace
from gemsc.ir.flow import is_exchange
from gemsc.ir.holder import attribute, attributes_of, copied_graph
from gemsc.ir.interpret import run_nodes
from gemsc.ir.opaque import OpaqueCall, stand_ins
from gemsc.ir.operators.work import Work
from gemsc.ir.program import Program
from gemsc.ir.shape_grid import sums
from gemsc.ir.staged import moved
from gemsc.passes.base import Pass
from gemsc.runtime import tiles
from gemsc.runtime.tiles.saving import decomposed, saved_parts

_LEAF = "torch::autograd::AccumulateGrad"
Known = dict[Hashable, Any]  # facts of graphs, by what these depend on


@dataclass(frozen=True)
class Annotate(Pass):
    """Run the graph once on fake tensors and attach `Facts` to each node.

    1. Operations come from PyTorch's own FLOP formulas, bytes from the sizes of what
       each ATen operator reads and writes, seconds from what the device takes for it.
    2. Saved bytes are counted by `saved_tensors_hooks`: the same storages that a real
       run keeps, each once, parameters and buffers left out.
    3. A fake backward tells which values a gradient of the loss flows back into. Its
       operators are those of a real one: their seconds are booked on the node whose
       forward recorded them, and so is the memory of the gradients that they make.

    `device` None is that of the shipped default. `known` are facts that were found
    before: graphs that run the same operators on the same sizes, as most tiles do,
    share them.
    """

    provides = ("facts",)

    device: Device | None = field(default=None, hash=False)
    training: bool = True
    known: Known = field(default_factory=dict, repr=False, compare=False)

    def apply(self, program: Program) -> Program:
        """Return the program with facts on every node (of a copied graph)."""
        program = moved(program, *copied_graph(program.graph))
        graph = program.graph
        # a rank whose branches do not use a value sends a gradient of zeros
        learning = set(filter(meta.needs_gradient, _travelling(program)))
        key = str(self.device), self.training, signature(program)
        if key not in self.known:
            annotate(program, device=self.device, training=self.training)
            self.known[key] = tuple(map(meta.learnt, graph.nodes))
        for node, learnt in zip(graph.nodes, self.known[key], strict=True):
            meta.learn(node, learnt)
            meta.needs_gradient.set(node, node in learning or meta.needs_gradient(node))
        return replace(program, facts=True)


def _travelling(program: Program) -> Iterator[fx.Node]:
    """Yield what goes from rank to rank, and from stage to stage, also in vain."""
    for stage in program.stages or ():
        inside = set(stage.nodes)
        for node in stage.nodes:
            is_tied = any(user.target is tiles.tied for user in node.users)
            if is_tied or is_exchange(node) or node.users.keys() - inside:
                yield node


def annotate(
    program: Program, *, device: Device | None = None, training: bool = True
) -> None:
    """Attach facts and fake values to the nodes of a program's own graph."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(program.module, mode)
    fake.train(training)
    for path in program.frozen:
        fake.get_submodule(path).eval()
    ledger = _Ledger(device or read_hardware().device, storages_of(fake))
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = {n: fake_like(meta.value(n), mode) for n in inputs}
    owners = [getattr(node.target, "__self__", None) for node in program.graph.nodes]
    with (
        forgetting(*(owner for owner in owners if isinstance(owner, type))),
        mode,
        ledger,
        sums.told(ledger.book_tiles),
        stand_ins.told(ledger.book_call),
        fork_torch(),
    ):
        with WeightedCalls(ledger.note_weights), torch.set_grad_enabled(training):
            run_nodes(program.graph.nodes, values, fake, observe=ledger.observe)
        reached = _gradient_reaches(program, values, fake, ledger)
    seen: set[int] = set()
    for node in program.compute_nodes:
        meta.facts.set(node, ledger.facts(node, values[node], fake, seen))
        meta.needs_gradient.set(node, node in reached)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            meta.facts.set(node, _facts_of_input(values[node]))
    if program.stages is not None:  # tiles have sizes of their own
        for node, value in values.items():
            meta.set_value(node, pytree.tree_map_only(Tensor, Tensor.detach, value))


def _storage_sizes(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return tuple({s._cdata: s.nbytes() for s in storages}.items())


def _facts_of_input(value: Tensor) -> meta.Facts:
    sizes = _storage_sizes([value])
    return meta.Facts(output_bytes=value.nbytes, storages=sizes)


@dataclass
class _Count:
    flops: int = 0
    moved_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_least: float = 0.0
    backward_least: float = 0.0
    forward_operators: int = 0
    backward_operators: int = 0
    random: bool = False
    saved: dict[int, int] = field(default_factory=dict)
    saved_state: dict[str, None] = field(default_factory=dict)
    backward_writes: dict[str, None] = field(default_factory=dict)
    rebuilt: int = 0  # bytes of what is kept in parts, and whole in its backward
    sums: list[meta.TileSum] = field(default_factory=list)
    weights: dict[int, Tensor] = field(default_factory=dict)  # whose gradients can wait
    casts: set[int] = field(default_factory=set)  # storages of weights under autocast
    weight_seconds: float = 0.0
    gradients: dict[int, int] = field(default_factory=dict)  # that the node itself gets

    @property
    def weight_shapes(self) -> set[tuple[int, ...]]:
        return {tuple(tensor.shape) for tensor in self.weights.values()}


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Book every ATen operator and every saved tensor on the node that is running.

    Autograd numbers what it records. In backward, the number of what is running tells
    in which node's forward it was recorded.
    """

    def __init__(self, device: Device, persistent: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.least = cache(partial(least_seconds, device))
        self.persistent = persistent
        self.counts: dict[fx.Node | None, _Count] = defaultdict(_Count)
        self.gradients = GradientFlow()
        self.node: fx.Node | None = None
        self.is_backward = False
        self.masks = MaskCounts()
        self.ran: list[fx.Node] = []
        self.first_numbers: list[int] = []

    @contextmanager
    def observe(self, node: fx.Node) -> Iterator[None]:
        self.node = node
        self.ran.append(node)
        self.first_numbers.append(torch._C._autograd._get_sequence_nr())
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda t: t):
            yield
        self.node = None

    def note_weights(self, call: WeightedCall, x: Tensor) -> Tensor:
        """Compute a call, and note that its weight gradients can wait."""
        tensors = [call.weight] if call.bias is None else [call.weight, call.bias]
        count = self.counts[self.node]
        count.weights |= {id(tensor): tensor for tensor in tensors}
        cast = call.within(x.dtype)
        if cast is not call:
            count.casts.add(cast.weight.untyped_storage()._cdata)
        return cast.run(x)

    @contextmanager
    def backward(self) -> Iterator[None]:
        self.is_backward = True
        yield
        self.is_backward = False

    def _save(self, tensor: Tensor) -> Tensor:
        count = self.counts[self.node]
        if decomposed(tensor) is not None:
            count.rebuilt += tensor.untyped_storage().nbytes()
        for part in dense_leaves(saved_parts(tensor)):
            storage = part.untyped_storage()
            name = self.persistent.get(storage._cdata)
            if name is None:
                count.saved[storage._cdata] = storage.nbytes()
            else:
                count.saved_state[name] = None
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.masks.note(func, args)
        result = func(*self.masks.numbered(func, args), **(kwargs or {}))
        if func is LSTM:
            result = with_workspace(args, result)
        runs = runs_a_kernel(func, result)
        if self.is_backward:
            self._book_backward(func, args, kwargs or {}, result, runs=runs)
        elif runs and self.node is not None:
            self._book(func, args, kwargs or {}, result)
        return result

    def _book(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = self.counts[self.node]
        flops, works = work_of(func, args, kwargs, result)
        moved = dense_leaves((args, kwargs, result))
        count.random |= draws(func, args, kwargs)
        count.flops += flops
        count.moved_bytes += sum(tensor.nbytes for tensor in moved)
        count.forward_operators += 1
        count.forward_seconds += self._seconds(works)
        count.forward_least += self._least(works)

    def book_call(self, call: OpaqueCall) -> None:
        """Book what a module that is not looked into did in its real run."""
        count = self.counts[self.node]
        count.flops += call.flops
        count.moved_bytes += call.moved_bytes
        count.random |= call.random
        count.forward_operators += call.forward_operators
        count.forward_seconds += self._seconds(call.forward)
        count.backward_operators += call.backward_operators
        count.backward_seconds += self._seconds(call.backward)

    def _seconds(self, works: Iterable[Work]) -> float:
        return sum(seconds(self.device, work) for work in works)

    def _least(self, works: Iterable[Work]) -> float:
        return sum(self.least(work.kind) for work in works)

    def book_tiles(self, num_bytes: int) -> None:
        """Book a sum over the tiles of a grid."""
        tile_sum = meta.TileSum(num_bytes, self.is_backward)
        self.counts[self.node].sums.append(tile_sum)

    def book_gradient(self, node: fx.Node, gradient: Tensor) -> None:
        """Book the gradient that a node gets, if it is dense."""
        if gradient.layout is not torch.strided:
            return
        number, num_bytes = self.gradients.storage(gradient)
        self.counts[node].gradients[number] = num_bytes

    def book_sum(self, node: fx.Node, gradient: Tensor | None) -> None:
        """Book adding a parameter's gradient to that of earlier micro-batches.

        Raises:
            GemscError: the gradient is sparse.
        """
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise GemscError(
                "a parameter has a sparse gradient here, which cannot be added up "
                "over micro-batches and ranks",
                at=meta.location(node),
                help="use sparse=False and a dense optimizer: Adam instead of "
                "SparseAdam",
            )
        add = torch.ops.aten.add_.Tensor
        _, works = work_of(add, (gradient, gradient), {}, gradient)
        count = self.counts[node]
        spent = sum(seconds(self.device, work) for work in works)
        count.backward_seconds += spent
        if tuple(gradient.shape) in count.weight_shapes:
            count.weight_seconds += spent

    def _book_backward(
        self, func: Any, args: Any, kwargs: Any, result: Any, *, runs: bool
    ) -> None:
        running = torch._C._current_autograd_node()
        if running is not None and running.name() == _LEAF:
            return  # what adds up gradients: see book_sum
        if running is not None:
            place = bisect_right(self.first_numbers, running._sequence_nr()) - 1
            self.node = self.ran[place] if place >= 0 else None
        self.gradients.run(self.node)
        self.gradients.see((args, kwargs), result)
        count = self.counts[self.node]
        if func._schema.is_mutable:
            for tensor in dense_leaves((kwargs or {}).get("out", args[:1])):
                if name := self.persistent.get(tensor.untyped_storage()._cdata):
                    count.backward_writes[name] = None
        if not runs:
            return
        count.random |= draws(func, args, kwargs)  # in a backward of the user's
        _, works = work_of(func, args, kwargs, result)
        count.backward_operators += 1
        count.backward_seconds += self._seconds(works)
        count.backward_least += self._least(works)
        if count.weights:
            of_weight = tuple(getattr(result, "shape", ())) in count.weight_shapes
            count.weight_seconds += self._seconds(
                [w for w in works if of_weight or w.kind.endswith("-weight")]
            )

    def facts(
        self, node: fx.Node, value: Any, module: nn.Module, seen: set[int]
    ) -> meta.Facts:
        count, flow = self.counts[node], self.gradients.by_node[node]
        outputs, parameters = dense_leaves(value), _parameters(node, module)
        fresh = {key: size for key, size in count.saved.items() if key not in seen}
        seen.update(fresh)
        forward = count.forward_operators * self.device.forward_overhead
        backward = count.backward_operators * self.device.backward_overhead
        overlaps = self.device.asynchronous
        return meta.Facts(
            flops=count.flops,
            moved_bytes=count.moved_bytes,
            output_bytes=sum(t.nbytes for t in outputs),
            parameter_bytes=sum(p.nbytes for p in parameters),
            trained_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
            saved_bytes=sum(fresh.values()),
            saved=tuple(count.saved.items()),
            saved_state=tuple(count.saved_state),
            backward_writes=tuple(count.backward_writes),
            storages=_storage_sizes(outputs),
            heavy=count.flops > 0 or _takes_table(node, parameters),
            random=count.random,
            forward_seconds=forward + count.forward_seconds,
            backward_seconds=backward + count.backward_seconds,
            forward_launches=forward if overlaps else 0.0,
            backward_launches=backward if overlaps else 0.0,
            forward_least=count.forward_least,
            backward_least=count.backward_least,
            sums=tuple(count.sums),
            weight_seconds=count.weight_seconds,
            weight_bytes=sum(tensor.nbytes for tensor in count.weights.values()),
            gradients=tuple(count.gradients.items()),
            backward_bytes=flow.most + count.rebuilt,
            made=tuple(flow.made.items()),
            freed=tuple(flow.freed),
            casts=tuple(count.casts),
        )


def _takes_table(node: fx.Node, parameters: Sequence[Tensor]) -> bool:
    """Whether a node brings a parameter of two dimensions to something else."""
    given = node.all_input_nodes
    alone = bool(given) and all(source.op == "get_attr" for source in given)  # weight.T
    return not alone and any(parameter.dim() > 1 for parameter in parameters)


def _parameters(node: fx.Node, module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a node brings: its layer's, or those it reads."""
    used = [attribute(module, path) for path in attributes_of(node)]
    parameters = [attr for attr in used if isinstance(attr, nn.Parameter)]
    for layer in used:
        parameters += layer.parameters() if isinstance(layer, nn.Module) else ()
    return parameters


def _learns(tensor: Tensor) -> bool:
    """Whether gradients may flow to a tensor.

    A view that was written to gets its grad_fn when it is asked for. If register_hook
    is the first to ask, PyTorch 2.13 crashes. It has none, and must not be used any
    more, if it was made under no_grad and its memory has changed since.
    """
    try:
        return tensor.requires_grad and (tensor.is_leaf or tensor.grad_fn is not None)
    except RuntimeError:
        return False


def _gradient_reaches(
    program: Program, values: dict[fx.Node, Any], module: nn.Module, ledger: _Ledger
) -> set[fx.Node]:
    """Return the nodes whose value takes part in the gradient of the loss.

    Gradients of parameters are computed as well, for their seconds.
    """
    loss = values[program.loss] if program.loss is not None else None
    if loss is None or not loss.requires_grad:
        return set()
    reached: set[fx.Node] = set()

    def note(node: fx.Node, gradient: Tensor | None) -> None:
        if gradient is not None:
            reached.add(node)
            ledger.book_gradient(node, gradient)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for node in program.compute_nodes:
        for tensor in pytree.tree_leaves(values[node]):
            if isinstance(tensor, Tensor) and _learns(tensor):
                tensor.register_hook(partial(note, node))  # type: ignore[no-untyped-call]
    owners = {
        parameter: node
        for node in reversed(program.compute_nodes)
        for parameter in _parameters(node, module)
        if parameter.requires_grad
    }
    for parameter, node in owners.items():
        book = partial(ledger.book_sum, node)
        parameter.register_hook(book)  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    # a user's set_detect_anomaly would look at numbers, which are not there
    with ledger.backward(), torch.autograd.set_detect_anomaly(False):
        torch.autograd.backward(loss, torch.ones_like(loss))
    return reached
