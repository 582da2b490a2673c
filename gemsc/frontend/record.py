"""Trace a model by running it on fake tensors and recording what it does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from gemsc.base.dtypes import (
    Autocast,
    autocasting,
    default_dtype,
    other_dtype,
    within,
)
from gemsc.base.nests import (
    Inputs,
    Path,
    as_loss,
    map_tensors,
    normalize_inputs,
)
from gemsc.base.rng import preserve_rng
from gemsc.base.visible import forgetting
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.closures import reject_closures
from gemsc.frontend.counters import (
    AnyDraw,
    counters_of,
    drawn,
    other_generators,
    reject_counters,
)
from gemsc.frontend.eager import (
    in_mode,
    kept_in_eval,
    reject_moved,
    reject_trained,
    set_training,
)
from gemsc.frontend.fake_copy import (
    FakeCopy,
    copy_on_fakes,
    fake_input,
    reject_unsupported,
)
from gemsc.frontend.opaque import DependsOnDataError, Leaves
from gemsc.frontend.runs import (
    check_same,
    mark_dtypes,
    reject_changes_by_eval,
    reject_new_flags,
    trained_parameters,
)
from gemsc.frontend.tracer import Tracer, TracerFakeMode
from gemsc.frontend.user_code import at_line_of, is_user_file, line_of_function
from gemsc.frontend.values import (
    Returned,
    checkpoint_notes,
    input_names,
    loss_fails_on,
    output_notes,
    returned,
    state_notes_of,
    unchanged,
)
from gemsc.frontend.writer import GraphWriter, make_root
from gemsc.ir.holder import LOSS, put_layer
from gemsc.ir.layers import as_of_torch
from gemsc.ir.meta import TensorSpec, location, set_value, tensors, value
from gemsc.ir.opaque import Opaque, OpaqueLeaf
from gemsc.ir.program import GraphInput, Program


@dataclass(frozen=True)
class _Request:
    """What to trace; a target of None means that the loss takes none.

    `opaque` are the modules that are not looked into, by their paths. With a `dtype`,
    the model runs in that floating-point type.
    """

    model: nn.Module
    inputs: Inputs
    loss: Any
    target: Any
    training: bool
    opaque: Mapping[str, Opaque]
    autocast: Autocast | None = None
    dtype: torch.dtype | None = None


@dataclass
class _Trace:
    writer: GraphWriter
    inputs: list[GraphInput] = field(default_factory=list)
    returned: Returned = field(default_factory=Returned)
    frozen: frozenset[str] = frozenset()
    checkpoints: list[SourceLocation] = field(default_factory=list)
    only_dtype: str = ""


def record(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Any = None,
    target: Any = None,
    training: bool = True,
    name: str | None = None,
    opaque: Mapping[str, Opaque] | None = None,
    autocast: Autocast | None = None,
) -> Program:
    """Return the program of `loss(model(*inputs), target)`, or of the model alone.

    The model runs on a copy with fake tensors: its parameters, buffers, training flags
    and all random generators stay as they are. It runs twice; what differs between
    the runs cannot be compiled. A third run, in another floating-point type, shows
    which dtypes came from a tensor. A submodule whose forward depends on data becomes
    one node; it runs for real, on another copy. `opaque` are such modules of the model
    in its other mode: they are so in this one too. All of this happens within
    `autocast`.

    Raises:
        GemscError: at the user's line, for whatever cannot be traced.
    """
    subject = model, normalize_inputs(inputs), loss, target, training
    reject_unsupported(model)
    if isinstance(loss, nn.Module):
        reject_unsupported(loss)
    reject_closures(model, loss)
    leaves = Leaves(*subject)
    request = _Request(*subject, leaves.opaque, autocast)
    seen = forgetting(model, loss)
    with preserve_rng(), autocasting(autocast), seen as forget:
        leaves.take(opaque or {})
        trace = None
        while trace is None:
            request = replace(request, loss=leaves.loss)
            try:
                trace = _trace_twice(request)
            except DependsOnDataError as error:
                forget()
                leaves.add(error)
        forget()
        _trace_in_other_dtype(request, trace)
    named = getattr(model, "_orig_mod", model)  # of what torch.compile gave
    return _program(request, trace, name or type(named).__name__)


def _trace_twice(request: _Request) -> _Trace:
    fake = TracerFakeMode()
    copied = _copy(request, fake)
    numbers = [counters_of(request.model, request.loss)]
    with _no_random_numbers(request):
        first = _trace(request, copied, fake)
    numbers.append(counters_of(copied.model, copied.loss))
    second = _trace(request, copied, fake, earlier=first.writer)
    numbers.append(counters_of(copied.model, copied.loss))
    check_same(first.writer, second.writer, request.training)
    reject_counters(*numbers)
    reject_moved(first.frozen, second.frozen)
    return first


def _copy(request: _Request, fake: TracerFakeMode) -> FakeCopy:
    copied = copy_on_fakes(request.model, request.loss, fake, request.dtype)
    set_training(copied.model, copied.loss, request.training, request.model)
    return copied


def _trace(
    request: _Request,
    copied: FakeCopy,
    fake: TracerFakeMode,
    *,
    earlier: GraphWriter | None = None,
    on_node: Callable[[fx.Node], None] | None = None,
) -> _Trace:
    writer = GraphWriter(copied, earlier)
    writer.on_node = on_node or writer.on_node
    tracer = Tracer(copied, fake, writer, request.opaque)
    trace = _Trace(writer)
    inputs = _placeholders(request, trace, fake, "input", request.inputs)
    target = _placeholders(request, trace, fake, "target", request.target)
    buffers = _buffers(copied)
    mode = "" if request.training else f" {in_mode(training=False)}"
    what = f"the model fails on example_inputs{mode}"
    if not request.training:  # it may look up here what forward takes
        tracer.run(what, set_training, (copied.model, copied.loss, False))
        reject_changes_by_eval(writer.graph)
    trained = trained_parameters(copied.model)
    output = tracer.run(what, copied.model, inputs)
    if request.training:
        reject_new_flags(writer.graph, trained, trained_parameters(copied.model))
    trace.returned = returned(output)
    with tracer.pause():
        _record_assignments(writer, buffers)
        outputs = [writer.value_of(tensor) for tensor in trace.returned.tensors]
    loss = None
    if request.loss is not None:
        arguments = (output,) if request.target is None else (output, target)
        what = loss_fails_on(*arguments)
        with unchanged(trace.returned.tensors, request.loss):
            loss = tracer.run(what, copied.loss, arguments, then=_loss_of(request))
        _check_loss(loss, request)
    with tracer.pause():
        _record_assignments(writer, buffers)  # of the loss
        writer.output(loss, outputs)
    if request.training:
        trace.frozen = frozenset(kept_in_eval(tracer.called, request.opaque))
        trace.checkpoints = tracer.checkpoints
    else:
        reject_trained(tracer.called, request.opaque)
    return trace


def _placeholders(
    request: _Request, trace: _Trace, fake: TracerFakeMode, kind: str, values: Any
) -> Any:
    """Return the nest with a fake tensor and a placeholder for each tensor."""
    name_of = input_names(request.model, request.inputs)

    def add(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        copied = fake_input(tensor, fake, path, request.dtype)
        node = trace.writer.placeholder(name_of(path), copied)
        dtype = within(tensor.dtype, request.dtype)
        spec = TensorSpec(tuple(tensor.shape), dtype)
        trace.inputs.append(GraphInput(node.name, path, spec))
        return copied

    return map_tensors(values, add, (kind,))


_Buffer = tuple[str, nn.Module, str, torch.Tensor]  # path, owner, name, value


def _buffers(copied: FakeCopy) -> list[_Buffer]:
    return [
        (f"{path}.{name}".lstrip("."), module, name, buffer)
        for owner, prefix in ((copied.model, ""), (copied.loss, LOSS))
        if isinstance(owner, nn.Module)
        for path, module in owner.named_modules(prefix=prefix)
        for name, buffer in module.named_buffers(recurse=False)
    ]


def _record_assignments(writer: GraphWriter, before: list[_Buffer]) -> None:
    """Record `self.buffer = new` as a copy into the buffer, and take it back."""
    for path, module, name, old in before:
        new = getattr(module, name, None)
        if new is old:
            continue
        kind = getattr(new, "shape", None), getattr(new, "dtype", None)
        if not isinstance(new, torch.Tensor) or kind != (old.shape, old.dtype):
            raise GemscError(
                f"forward replaces buffer {path} with something of another kind",
                help="keep its shape and dtype",
            )
        writer.assign_buffer(path, old, new)
        setattr(module, name, old)


def _loss_of(request: _Request) -> Callable[[Any], torch.Tensor]:
    """Return what makes a loss of what the user's function has returned."""

    def loss_of(returned: Any) -> torch.Tensor:
        if LOSS in request.opaque and isinstance(returned, tuple | list):
            # each float of a node seems to have a gradient; the check on numbers knows
            count = map_tensors(tuple(returned[1:]), lambda _, t: t.detach())
            returned = (*returned[:1], *count)
        with at_line_of(request.loss):
            return as_loss(returned)

    return loss_of


def _check_loss(loss: torch.Tensor, request: _Request) -> None:
    learns = any(parameter.requires_grad for parameter in request.model.parameters())
    if request.training and learns and not loss.requires_grad:
        raise GemscError(
            "no parameter gets a gradient from the loss",
            at=line_of_function(request.loss),
            help="compute the loss from the model's output, without detach or no_grad",
        )


# Comparing runs


def _trace_in_other_dtype(request: _Request, trace: _Trace) -> None:
    """Mark what changes with the model's dtype; note why it can run in no other."""
    try:
        dtype = other_dtype(request.model.parameters())
        leaves = Leaves(
            *(request.model, request.inputs, request.loss, request.target),
            training=request.training,
            dtype=dtype,
        )
        leaves.take(request.opaque)
        request = replace(request, opaque=leaves.opaque, dtype=dtype)
        fake = TracerFakeMode()
        with default_dtype(dtype):
            other = _trace(request, _copy(request, fake), fake)
        mark_dtypes(trace.writer.graph, other.writer.graph, dtype)
    except GemscError as error:
        error = getattr(error, "otherwise", error)  # it may fail with numbers, too
        at = f"{error.at.short}: " if error.at is not None else ""
        trace.only_dtype = f"{at}{error.message}"


@contextmanager
def _no_random_numbers(request: _Request) -> Iterator[None]:
    """Refuse a forward for which draws of Python or NumPy decide something."""
    before = other_generators()
    yield
    if other_generators() == before or _same_for_all_draws(request):
        return
    fake = TracerFakeMode()
    lines: list[SourceLocation] = []

    def watch(node: fx.Node) -> None:
        line = location(node)
        if not lines and line is not None and other_generators() != start:
            lines.append(line)

    start = other_generators()
    _trace(request, _copy(request, fake), fake, on_node=watch)
    raise GemscError(
        "forward is not deterministic: it draws from Python's or NumPy's random "
        "numbers, on this line or before it",
        at=lines[0] if lines else None,
        help="use torch's random functions, for example torch.rand or nn.Dropout; if a "
        "setting turns the draw off, use it (SpecAugment of transformers: "
        "apply_spec_augment=False)",
    )


def _same_for_all_draws(request: _Request) -> bool:
    """Return whether no draw of Python's `random` decides anything.

    Each comparison of a draw (`random.random() < self.layerdrop`, which is 0) must come
    out alike for all that may be drawn: see `AnyDraw`. What takes its value gives
    another graph for another draw. A draw made in another way moves a generator: what
    it decides is not known.
    """
    before = other_generators()
    traces: list[_Trace] = []
    try:
        for numbers in ((AnyDraw.LOW,), (AnyDraw.HIGH,), (AnyDraw.LOW, AnyDraw.HIGH)):
            fake = TracerFakeMode()
            with drawn(numbers):
                traces.append(_trace(request, _copy(request, fake), fake))
            if other_generators() != before:
                return False
        for other in traces[1:]:
            check_same(traces[0].writer, other.writer, request.training)
    except GemscError:
        return False
    return True


# The result


def _program(request: _Request, trace: _Trace, name: str) -> Program:
    writer = trace.writer
    module, aliases = make_root(request.model, request.loss, writer.constants)
    module.graph = writer.graph
    for path, opaque in request.opaque.items():
        put_layer(module, path, OpaqueLeaf(opaque))
    for path in {str(n.target) for n in writer.graph.nodes if n.op == "call_module"}:
        layer = module.get_submodule(path)
        if (plain := as_of_torch(layer)) is not layer:
            put_layer(module, path, plain)
    _forget_numbers(writer.graph)
    lines = (location(node) for node in writer.graph.nodes)
    files = {line.file for line in lines if line is not None}
    files.update(_class_files(request.opaque.values()))
    return Program(
        name=name,
        module=module,
        inputs=tuple(trace.inputs),
        structure=trace.returned.structure,
        notes=(
            *output_notes(trace.returned),
            *state_notes_of(request.model),
            *checkpoint_notes(trace.checkpoints, request.model),
            *_compile_notes(request.model),
        ),
        sources=tuple(sorted(files)),
        frozen=trace.frozen,
        only_dtype=trace.only_dtype,
        autocast=request.autocast,
        aliases=aliases,
    )


def _forget_numbers(graph: fx.Graph) -> None:
    """Let values that are tensors of the user's file be fakes, as all others are."""
    known = [node for node in graph.nodes if "val" in node.meta]
    recorded = [tensor for node in known for tensor in tensors(node)]
    modes = [tensor.fake_mode for tensor in recorded if isinstance(tensor, FakeTensor)]

    def fake(_: Any, tensor: Tensor) -> Tensor:
        is_fake = isinstance(tensor, FakeTensor)
        return tensor if is_fake else modes[0].from_tensor(tensor)

    for node in known if modes else ():
        if any(not isinstance(tensor, FakeTensor) for tensor in tensors(node)):
            set_value(node, map_tensors(value(node), fake))


def _compile_notes(model: nn.Module) -> Iterator[str]:
    """Say what becomes of torch.compile."""
    held = [vars(module) for module in model.modules()]
    if any({"dynamo_ctx", "_compiled_call_impl"} & attrs.keys() for attrs in held):
        yield (
            "torch.compile has no effect within the model: --torch-compile compiles "
            "each stage"
        )


def _class_files(leaves: Iterable[Opaque]) -> Iterator[str]:
    """Yield the user's files that define the modules, and the modules inside."""
    classes = {type(module) for leaf in leaves for module in leaf.module.modules()}
    for cls in classes:
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if file is not None and is_user_file(file):
            yield file
