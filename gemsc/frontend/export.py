"""Trace a model with torch.export: ATen operators, no layers."""

from __future__ import annotations

import copy
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gemsc.base.dtypes import (
    Autocast,
    cast_module,
    default_dtype,
    is_real,
    other_dtype,
)
from gemsc.base.dtypes import cast as cast_nest
from gemsc.base.nests import (
    Inputs,
    Path,
    as_loss,
    call_loss,
    call_model,
    map_tensors,
    normalize_inputs,
    tensor_leaves,
)
from gemsc.base.plain_forward import plain_forward
from gemsc.base.rng import preserve_rng
from gemsc.errors import GemscError
from gemsc.frontend import counters
from gemsc.frontend.closures import reject_closures
from gemsc.frontend.counters import other_generators
from gemsc.frontend.eager import (
    called_in_eval,
    detached,
    failures,
    reject_moved,
    set_training,
    snapshot,
    transformed,
)
from gemsc.frontend.fake_copy import fake_input, reject_unsupported
from gemsc.frontend.opaque import DATA_ERRORS
from gemsc.frontend.runs import mark_dtypes, reject_rounded, runs_differ
from gemsc.frontend.user_code import failing_line, printed_line
from gemsc.frontend.values import (
    Returned,
    input_names,
    output_notes,
    returned,
    state_notes_of,
)
from gemsc.frontend.writer import make_root
from gemsc.ir import meta
from gemsc.ir.fake import fake_copy
from gemsc.ir.holder import CONSTANTS, LOSS
from gemsc.ir.interpret import run_node
from gemsc.ir.meta import Region, TensorSpec
from gemsc.ir.opaque import Opaque
from gemsc.ir.program import GraphInput, Program

_MODEL = "gemsc_model"
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def export(
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

    The second way to trace, for models that `record` cannot: its nodes are ATen
    operators, and custom autograd functions lose their backward. All modules are looked
    into: `opaque`, what `record` found, is empty.

    Raises:
        GemscError: at the user's line if torch.export gives one; with `autocast`, of
            which its nodes would know nothing.
    """
    if autocast is not None:
        raise GemscError(
            "--frontend export traces only in the precision of the weights",
            help="use --frontend record, or leave out --precision",
        )
    subject = model, loss, training, normalize_inputs(inputs), target
    reject_unsupported(model)
    reject_closures(model, loss)
    with preserve_rng():
        _call_twice(_Wrapper(*subject), _Wrapper(*subject))
        program = _traced(model, loss, _Wrapper(*subject))
        if any(_has_a_dtype(node) for node in program.graph.nodes):
            program = _in_another_dtype(program, subject)
    return replace(program, name=name or type(model).__name__)


def _traced(model: nn.Module, loss: Any, wrapper: _Wrapper) -> Program:
    writer = _Writer(_export(wrapper), model, dict(_tensor_names(model, loss)))
    writer.run(wrapper, input_names(model, wrapper.given["input"]))
    root, aliases = make_root(model, loss, writer.constants)
    root.graph = writer.graph
    _attach_values(root, tuple(tensor for _, tensor in wrapper.leaves))
    lines = (meta.location(node) for node in root.graph.nodes)
    return Program(
        name="",
        module=root,
        inputs=tuple(writer.inputs),
        structure=wrapper.returned.structure,
        notes=(*output_notes(wrapper.returned), *state_notes_of(model)),
        sources=tuple(sorted({line.file for line in lines if line is not None})),
        aliases=aliases,
    )


def _has_a_dtype(node: fx.Node) -> bool:
    """Whether a node names a real dtype, of the user's or a tensor's, or has one."""
    if node.op == "get_attr" and str(node.target).startswith(CONSTANTS):
        return is_real(meta.value(node).dtype)
    leaves: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
    return any(isinstance(leaf, torch.dtype) and is_real(leaf) for leaf in leaves)


def _in_another_dtype(
    program: Program, subject: tuple[nn.Module, Any, bool, Inputs, Any]
) -> Program:
    """Mark which dtypes follow the model's, or note that it runs in its own only."""
    try:
        dtype = other_dtype(subject[0].parameters())
        with default_dtype(dtype):
            wrapper = _Wrapper(*subject, dtype=dtype)
            model = wrapper.get_submodule(_MODEL)
            other = _traced(model, wrapper.loss, wrapper)
        mark_dtypes(program.graph, other.graph, dtype)
        reject_rounded(program.module, other.module)
    except GemscError as error:
        at = f"{error.at.short}: " if error.at is not None else ""
        return replace(program, only_dtype=f"{at}{error.message}")
    return program


def _tensor_names(model: nn.Module, loss: Any) -> Iterator[tuple[str, str]]:
    """Yield each name of a parameter or buffer, with the first path of its module."""
    known: dict[int, str] = {}
    owners = [(model, "")] + ([(loss, LOSS)] if isinstance(loss, nn.Module) else [])
    for owner, prefix in owners:
        first: dict[nn.Module, str] = {}
        for path, module in owner.named_modules(prefix=prefix, remove_duplicate=False):
            first.setdefault(module, path)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                first_name = f"{first[module]}.{name}".lstrip(".")
                if tensor is not None:  # perhaps one with two names
                    first_name = known.setdefault(id(tensor), first_name)
                yield f"{path}.{name}".lstrip("."), first_name


class _Wrapper(nn.Module):
    """Takes the tensors of inputs and target, gives the loss and the outputs."""

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        training: bool,
        inputs: Inputs,
        target: Any,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        copied, self.loss = copy.deepcopy((model, loss))
        if dtype is not None:
            inputs, target = cast_nest((inputs, target), dtype)
            for module in (copied, self.loss):
                if isinstance(module, nn.Module):
                    cast_module(module, dtype)
        self.add_module(_MODEL, copied)
        set_training(copied, self.loss, training, model)
        # copies: torch.export takes one tensor at two places for one input
        self.given = detached({"input": inputs, "target": target})
        self.leaves = tuple(tensor_leaves(self.given))
        self.returned = Returned()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (loss, *outputs), or the outputs alone without a loss."""
        source = iter(tensors)
        values = map_tensors(self.given, lambda path, tensor: next(source))
        model = self.get_submodule(_MODEL)
        output = call_model(model, values["input"])
        # In place: torch.export gives all attributes the values that they had before.
        vars(self.returned).update(vars(returned(output)))
        outputs = tuple(self.returned.tensors)
        if self.loss is None:
            return outputs
        loss = call_loss(self.loss, output, values["target"])
        return (as_loss(loss), *outputs)


def _call_twice(wrapper: _Wrapper, other: _Wrapper) -> None:
    """Refuse a forward that counts its calls, or draws what torch does not know.

    Or that keeps a tensor of one call for the next, where torch.export would see a
    constant, or compute it at each call; or leaves a layer in another mode. The `other`
    is never called before.
    """
    model = wrapper.get_submodule(_MODEL)

    def seen() -> dict[str, object]:
        counted = counters.counters_of(model, wrapper.loss)
        return {**counted, "the random numbers of Python or NumPy": other_generators()}

    counters.reject_made_by_eval(model, wrapper.loss)
    states, before = [seen()], counters.tensors_in(model, wrapper.loss)
    in_eval: list[set[str]] = []
    with failures("the model fails", _call_twice.__code__), plain_forward():
        for _ in range(2):
            with called_in_eval(model) as names:
                wrapper(*(detached(tensor) for _, tensor in wrapper.leaves))
            in_eval.append(names)
            states.append(seen())
    counters.reject_counters(*states)
    reject_moved(*in_eval)
    after = counters.tensors_in(model, wrapper.loss).items()
    kept = [name for name, tensor in after if before.get(name) is not tensor]
    if kept and runs_differ(wrapper, other):
        raise GemscError(
            "forward, or the loss, uses a tensor that an earlier call made: "
            + ", ".join(kept),
            help="keep it with register_buffer, or pass it as an input",
        )


def _export(wrapper: _Wrapper) -> fx.GraphModule:
    tensors = tuple(tensor for _, tensor in wrapper.leaves)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of the copy's own attributes
            program = torch.export.export(wrapper, tensors, strict=False)
    except GemscError:
        raise
    except (Exception, SystemExit) as error:
        at = failing_line(error.__traceback__, _export.__code__)
        text = str(error).strip().partition("\n")[0]
        raise GemscError(
            f"torch.export cannot trace the model: {text}",
            at=at,
            help="try --frontend record",
        ) from error
    module: Any = program.module(check_guards=False)
    return cast("fx.GraphModule", module)


@dataclass
class _Writer:
    """Copies torch.export's graph into one with the user's names.

    Regions without gradient and with autocast are submodules there and become facts
    of the nodes here; parameters stand where they are first used.
    """

    traced: fx.GraphModule
    model: nn.Module
    names: dict[str, str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[GraphInput] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: dict[str, fx.Node] = field(default_factory=dict)

    def run(self, wrapper: _Wrapper, name_of: Callable[[Path], str]) -> None:
        """Copy everything."""
        placeholders = [n for n in self.traced.graph.nodes if n.op == "placeholder"]
        values: dict[fx.Node, Any] = {}
        for node, (path, tensor) in zip(placeholders, wrapper.leaves, strict=True):
            copied = self.graph.placeholder(name_of(path))
            _describe(node, copied, Region())
            spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
            self.inputs.append(GraphInput(copied.name, path, spec))
            values[node] = copied
        results = tuple(self._copy(self.traced, values, Region()))
        loss, outputs = None, results
        if wrapper.loss is not None:
            loss, *others = results
            outputs = tuple(others)
        self.graph.output((loss, outputs))

    def _copy(
        self, module: fx.GraphModule, values: dict[fx.Node, Any], region: Region
    ) -> Any:
        """Copy the nodes of one graph and return its results."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                values[node] = str(node.target)
            elif node.op == "output":
                return self._arguments(node.args[0], values)
            elif node.op == "call_function":
                self._call(module, node, values, region)
        return ()

    def _call(
        self,
        module: fx.GraphModule,
        node: fx.Node,
        values: dict[fx.Node, Any],
        region: Region,
    ) -> None:
        name = str(getattr(node.target, "__name__", node.target))
        if name in _REGIONS:
            values[node] = self._inline(module, node, values, region)
            return
        args = self._arguments(node.args, values)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            values[node] = args[0][args[1]]
        elif not name.startswith("_assert"):
            kwargs = self._arguments(node.kwargs, values)
            copied = self.graph.create_node(
                node.op, node.target, args, kwargs, name=node.name
            )
            _describe(node, copied, region)
            values[node] = copied

    def _inline(
        self,
        module: fx.GraphModule,
        node: fx.Node,
        values: dict[fx.Node, Any],
        region: Region,
    ) -> Any:
        """Copy the submodule of a region."""
        args: list[Any] = list(node.args)
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            inner = replace(region, grad=bool(args.pop(0)))
        else:
            device, dtype, enabled, _ = (args.pop(0) for _ in range(4))
            dtype = dtype or torch.get_autocast_dtype(device)
            inner = replace(region, autocast=(device, dtype) if enabled else None)
        submodule: Any = module.get_submodule(str(args.pop(0).target))
        inputs = (n for n in submodule.graph.nodes if n.op == "placeholder")
        given = {
            placeholder: values.get(argument, argument)
            for placeholder, argument in zip(inputs, args, strict=True)
        }
        return self._copy(submodule, given, inner)

    def _arguments(self, arguments: Any, values: dict[fx.Node, Any]) -> Any:
        def value(node: fx.Node) -> Any:
            entry = values[node]
            return self._attribute(entry) if isinstance(entry, str) else entry

        return fx.node.map_arg(arguments, value)

    def _attribute(self, path: str) -> fx.Node:
        """Return the node of a parameter, buffer or constant of torch.export's."""
        if path not in self.attributes:
            prefix, _, inner = path.partition(".")
            name = {_MODEL: inner, "loss": f"{LOSS}.{inner}"}.get(prefix, path)
            if name in self.names:
                name = self.names[name]
            else:
                constant = re.sub(r"\W", "_", name)
                tensor = operator.attrgetter(path)(self.traced)
                with suppress(AttributeError):  # it may be in the memory of a weight
                    original = operator.attrgetter(inner)(self.model)
                    if prefix == _MODEL and isinstance(original, torch.Tensor):
                        tensor = original
                self.constants[constant] = tensor
                name = f"{CONSTANTS}.{constant}"
            self.attributes[path] = node = self.graph.create_node("get_attr", name)
            meta.set_traced(
                node, value=None, location=None, module_path="", region=Region()
            )
        return self.attributes[path]


def _describe(source: fx.Node, copied: fx.Node, region: Region) -> None:
    stack = source.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    path = paths[-1] if paths else ""
    meta.set_traced(
        copied,
        value=None,
        location=printed_line(source.meta.get("stack_trace") or ""),
        module_path=path.removeprefix(_MODEL).removeprefix("."),
        region=region,
    )


def _attach_values(root: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> None:
    """Run the graph on fake tensors and keep each value as it was when it was made."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = fake_copy(root, mode)
    given = iter(inputs)
    values: dict[fx.Node, Any] = {}
    with mode:
        for node in root.graph.nodes:
            if "_functorch" in str(getattr(node.target, "__module__", "")):
                raise transformed(meta.location(node))
            if node.op == "placeholder":
                values[node] = fake_input(next(given), mode, (node.name,))
            elif node.op != "output":
                with _fixed_sizes(node):
                    values[node] = run_node(node, values, module)
            if node.op != "output":
                meta.set_value(node, snapshot(values[node]))


@contextmanager
def _fixed_sizes(node: fx.Node) -> Iterator[None]:
    try:
        yield
    except DATA_ERRORS as error:
        raise GemscError(
            "the size of this tensor depends on the data",
            at=meta.location(node),
            help="keep the size fixed: multiply by the mask, use torch.where; or move "
            "it into a submodule, which stays whole with --frontend record",
        ) from error
