"""One method of a stage as text: the nodes of a graph as the user's lines."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import Autocast, is_real
from gemsc.codegen.exchanges import note_of
from gemsc.codegen.expressions import Named, access, expression
from gemsc.codegen.python_text import quoted
from gemsc.codegen.rank_text import Segments, StageText
from gemsc.codegen.writer import Names, Writer, comment
from gemsc.errors import SourceLocation
from gemsc.ir import meta
from gemsc.ir.flow import StageFlow, base_name, inner_flow, made_once

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
RESERVED = (
    *("self", "torch", "nn", "F", "Tensor", "operator", "device", "dtype", "user"),
    *("offloaded", "once", "recompute", "tiles"),
)


def write_forwards(
    writer: Writer, stage: StageText, named: Named, methods: Names
) -> None:
    """Write `forward`, the blocks that it recomputes, and `forward_eval` if it differs.

    What no micro-batch changes has a method of its own, and so has what replicas do for
    each other (`advance_state`). `methods` has the names that no further method may
    have.
    """
    flow, constant = stage.flow, made_once(stage.flow)
    if constant:
        others = [node for node in flow.nodes if node not in constant]
        flow = replace(flow, nodes=(*constant, *others))
    sections = _sections_of(flow.nodes, stage.segments, methods, constant)
    _write_forward(writer, stage, "forward", flow, named, sections)
    for section in sections:
        if section.method:
            writer.line()
            inner = inner_flow(flow, section.nodes)
            about = (
                f"{section.name}: runs again in the backward, keeps its inputs only."
                if section.kind == "recompute"
                else "What no micro-batch changes: made once."
            )
            _write_forward(writer, stage, section.method, inner, named, about=about)
    if stage.apart:
        writer.line()
        _write_forward(writer, stage, "forward_eval", stage.evaluation, named)
    advances = {"advance_state": stage.advances}
    if stage.apart:
        advances["advance_state_eval"] = stage.advances_eval
    for name, nodes in advances.items():
        if nodes:
            writer.line()
            alone = StageFlow(flow.index, nodes, (), (), (), ())
            about = "What changes without data: for micro-batches of other replicas."
            _write_forward(writer, stage, name, alone, named, about=about)


@dataclass(frozen=True, slots=True)
class _Section:
    """Consecutive nodes that are written in one way.

    `kind` is "plain", "offload", or one whose nodes are the `method` of that name:
    "recompute", or "once". `name` is what the user calls them.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    name: str = ""
    method: str = ""


def _sections_of(
    nodes: Sequence[fx.Node],
    segments: Segments,
    methods: Names,
    constant: Sequence[fx.Node],
) -> list[_Section]:
    """Return the sections of a row of nodes, in order; first those made once."""
    segments = tuple(
        (segment, tuple(node for node in inside if node not in constant))
        for segment, inside in segments
    )
    segment_of = {node: item for item in segments for node in item[1]}
    sections: list[_Section] = []
    if constant:
        method = methods.unique("constants")
        sections.append(_Section("once", tuple(constant), method=method))
    for item, run in groupby(nodes[len(constant) :], key=segment_of.get):
        if item is None:
            sections.append(_Section("plain", tuple(run)))
        elif next(run) is item[1][0]:  # others of its nodes may come later, apart
            segment, inside = item
            method = f"{segment.name}_block" if segment.kind == "recompute" else ""
            method = method and methods.unique(method)
            sections.append(_Section(segment.kind, inside, segment.name, method))
    return sections


def _write_forward(
    writer: Writer,
    stage: StageText,
    name: str,
    flow: StageFlow,
    named: Named,
    sections: Sequence[_Section] | None = None,
    about: str = "",
) -> None:
    sections = [_Section("plain", flow.nodes)] if sections is None else sections
    names = Names(RESERVED)
    local: dict[fx.Node, str] = {}
    for node in flow.takes:
        local[node] = names.unique(stage.names.get(node, base_name(node)))
    arguments = ["self", *(f"{local[node]}: Tensor" for node in flow.takes)]
    writer.bracketed(f"def {name}(", arguments, f") -> {_result(len(flow.gives))}:")
    with writer.indented():
        if about:
            writer.docstring(about)
        here = [n for section in sections if not section.method for n in section.nodes]
        dtype = None
        if any(map(_mentions_dtype, here)):
            source, dtype = _dtype_source(stage, flow, local)
            writer.line(f"dtype = {source}")
        around = stage.program.autocast
        alone = around and any(meta.region(n).autocast is None for n in here)
        if alone or _mentions_device(here):
            source = local[flow.takes[0]] if flow.takes else "next(self.parameters())"
            writer.line(f"device = {source}.device")
        _Body(writer, stage, flow, names, local, named, dtype).write(sections)


def _result(count: int) -> str:
    """Return the annotation of what a stage gives."""
    if count < 2:
        return "Tensor" if count else "None"
    return f"tuple[{', '.join(['Tensor'] * count) if count < 5 else 'Tensor, ...'}]"


def _mentions_device(nodes: Sequence[fx.Node]) -> bool:
    leaves = pytree.tree_leaves([(node.args, node.kwargs) for node in nodes])
    return any(isinstance(leaf, torch.device) for leaf in leaves)


def _mentions_dtype(node: fx.Node) -> bool:
    """Whether a node has constants that follow the dtype of the model."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return any(
        isinstance(leaf, meta.TypedNumber)
        or (isinstance(leaf, torch.dtype) and is_real(leaf))
        for leaf in leaves
        if isinstance(leaf, meta.TypedNumber) or not meta.dtypes(node).constants
    )


def _dtype_source(
    stage: StageText, flow: StageFlow, local: dict[fx.Node, str]
) -> tuple[str, torch.dtype]:
    """Return where a forward finds the dtype of the model, and what it was as traced.

    That is a value that it takes, or one of its parameters.
    """
    for node in flow.takes:
        dtype = meta.spec(node).dtype
        if dtype.is_floating_point and not meta.dtypes(node).value:
            return f"{local[node]}.dtype", dtype
    module = stage.program.module
    tensors = dict(module.named_parameters())
    for name in stage.owned:
        if name in tensors and tensors[name].is_floating_point():
            return f"{access(name, module)}.dtype", tensors[name].dtype
    return "torch.get_default_dtype()", torch.get_default_dtype()


@dataclass
class _Body:
    """Writes nodes as statements.

    A value that is used once, by the next node and on the same line of the user's code,
    is written inside that node's expression, as the user wrote it, while the line is
    short enough. A name is used again once its value is dead, so that memory is freed
    as early as in the user's own code.
    """

    writer: Writer
    stage: StageText
    flow: StageFlow
    names: Names
    local: dict[fx.Node, str]
    named: Named
    dtype: torch.dtype | None
    pending: tuple[fx.Node, str] | None = None
    # written with the tuple that they are of, and the parts of these tuples
    unpacked: set[fx.Node] = field(default_factory=set)
    parts: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    shown: SourceLocation | None = None
    shown_path: str = ""

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        return {node: place for place, node in enumerate(self.flow.nodes)}

    @cached_property
    def last_use(self) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(self.flow.nodes):
            last.update(dict.fromkeys(node.all_input_nodes, place))
            last.setdefault(node, place)
        last.update(dict.fromkeys(self.flow.gives, len(self.flow.nodes)))
        return last

    def write(self, sections: Sequence[_Section]) -> None:
        for section in sections:
            if section.method:
                self._write_method(section)
            elif section.kind == "offload":
                with self.writer.block("with offloaded():"):
                    self._write_nodes(section.nodes)
            else:
                self._write_nodes(section.nodes)
        gives = [self.local[node] for node in self.flow.gives]
        if len(", ".join(gives)) > self.writer.room - len("return "):
            self.writer.bracketed("return (", gives, ")")
        elif gives:
            self.writer.line(f"return {', '.join(gives)}")
        elif not self.flow.nodes:
            self.writer.line("pass")

    def _write_nodes(self, nodes: Sequence[fx.Node]) -> None:
        for region, run in groupby(nodes, key=meta.region):
            with _modes(self.writer, region, self.stage.program.autocast):
                for node in run:
                    self._add(node)
                self._flush()

    def _write_method(self, section: _Section) -> None:
        """Write a call of what has a method, under `recompute` or `once`."""
        inner = inner_flow(self.flow, section.nodes)
        taken = [f"self.{section.method}", *(self.local[n] for n in inner.takes)]
        if section.kind == "once":
            held = (n for node in inner.nodes for n in node.all_input_nodes)
            taken += dict.fromkeys(self._name(n) for n in held if n.op == "get_attr")
        self._release(self.position[section.nodes[-1]])
        for node in inner.gives:
            self.local[node] = self.names.unique(self._wish(node))
        targets = ", ".join(self.local[node] for node in inner.gives)
        self.writer.statement(f"{targets} = {section.kind}({', '.join(taken)})")
        self.shown, self.shown_path = None, ""

    def _release(self, position: int) -> None:
        """Let the names of values be used again that nothing uses after a node."""
        for value in [v for v in self.local if self.last_use.get(v, -1) <= position]:
            self.names.release(self.local.pop(value))

    def _add(self, node: fx.Node) -> None:
        if node in self.unpacked:
            return
        if self.pending is not None and not self._may_nest(self.pending[0], node):
            self._flush()
        shown = self._expression(node)
        self.parts[node] = self._parts(node)
        wishes = map(self._wish, self.parts[node] or (node,))
        width = len(", ".join(wishes)) + len(" = ") + len(shown)
        if self.pending is not None and width > self.writer.room:
            self._flush()
            shown = self._expression(node)
        self.pending = (node, shown)
        self.unpacked.update(self.parts[node])

    def _may_nest(self, node: fx.Node, consumer: fx.Node) -> bool:
        return (
            list(node.users) == [consumer]
            and not note_of(node, self.stage.tile, self.stage.noun)
            and node not in self.flow.gives
            and meta.location(node) == meta.location(consumer)
            and meta.location(node) is not None
            and meta.glue(node) is None
            and _argument_count(consumer, node) == 1
        )

    def _expression(self, node: fx.Node) -> str:
        twin = (self.stage.twins or {}).get(node)
        return expression(node, self._name, twin, self.named, self.dtype)

    def _name(self, node: fx.Node) -> str:
        if self.pending is not None and node is self.pending[0]:
            return self.pending[1]
        if node.op == "get_attr":
            path = str(node.target)
            program = self.stage.program
            return access(program.aliases.get(path, path), program.module)
        return self.local[node]

    def _wish(self, node: fx.Node) -> str:
        if node in self.flow.gives and node in self.stage.names:
            return self.stage.names[node]
        if node is self.stage.program.loss:
            return "loss"
        return base_name(node)

    def _flush(self) -> None:
        if self.pending is None:
            return
        node, text = self.pending
        self.pending = None
        self._write_comment(node)
        self._release(self.position[node])
        note = note_of(node, self.stage.tile, self.stage.noun)
        is_used = any(user in self.position for user in node.users)
        if not is_used and node not in self.flow.gives:
            self.writer.statement(text, note)
            return
        targets = self.parts[node] or (node,)
        for target in targets:
            self.local[target] = self.names.unique(self._wish(target))
        names = ", ".join(self.local[target] for target in targets)
        self.writer.statement(f"{names} = {text}", note)

    def _parts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the nodes that take the parts of a tuple, if the next ones take all.

        Then they are written as one statement: `query, key, value = qkv.unbind(0)`.
        """
        first = self.position[node] + 1
        parts = self.flow.nodes[first : first + len(node.users)]
        value, alike = meta.value(node), {meta.region(part) for part in parts}
        if not isinstance(value, tuple | list) or {*parts} != {*node.users}:
            return ()
        if any(part.target is not operator.getitem for part in parts):
            return ()
        by_number = {part.args[1]: part for part in parts}
        numbers = range(len(value))
        is_all = by_number.keys() == {*numbers} and len(parts) > 1
        if not is_all or alike != {meta.region(node)}:
            return ()
        return tuple(by_number[number] for number in numbers)

    def _caller(self, node: fx.Node) -> str:
        """Return the path of the module that ran the node, not of a container."""
        path = meta.module_path(node)
        while path and isinstance(self._submodule(path), CONTAINERS):
            path = path.rpartition(".")[0]
        return path

    def _submodule(self, path: str) -> nn.Module | None:
        try:
            return self.stage.program.module.get_submodule(path)
        except AttributeError:
            return None

    def _write_comment(self, node: fx.Node) -> None:
        """Write the user's line when it, or the module that runs it, changes."""
        where, path = meta.location(node), self._caller(node)
        same_call = _is_inside(path, self.shown_path) or _is_inside(
            self.shown_path, path
        )
        if where is None or (where == self.shown and same_call):
            return
        self.shown, self.shown_path = where, path
        module = f" in {path}" if path else ""
        text = f"{where.short}{module}  {where.text}".rstrip()
        self.writer.line(comment(text, self.writer.room))


def _is_inside(path: str, module: str) -> bool:
    return path == module or not module or path.startswith(module + ".")


def _argument_count(consumer: fx.Node, node: fx.Node) -> int:
    leaves = pytree.tree_leaves(
        (consumer.args, consumer.kwargs), is_leaf=lambda x: isinstance(x, slice)
    )
    return sum(leaf is node for leaf in leaves)


@contextmanager
def _modes(
    writer: Writer, region: meta.Region, around: Autocast | None
) -> Iterator[None]:
    """Write what differs from the modes in which a rank runs a stage."""
    modes: list[str] = []
    if not region.grad:
        modes.append("torch.no_grad()")
    if region.autocast is not None and region.autocast != around:
        device, dtype = region.autocast
        modes.append(f"torch.autocast({quoted(device)}, dtype={dtype})")
    if region.autocast is None and around is not None:
        modes.append("torch.autocast(device.type, enabled=False)")
    if region.draw is not None:
        modes.append(f"tiles.own_numbers({region.draw})")
    if not modes:
        yield
        return
    with writer.block(f"with {', '.join(modes)}:"):
        yield
