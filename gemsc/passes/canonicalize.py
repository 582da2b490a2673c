"""Bring a traced graph into the form that other passes expect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from gemsc.base.rng import may_draw
from gemsc.ir import meta
from gemsc.ir.holder import (
    attribute,
    called_layer,
    copied_graph,
    put_layer,
    shallow_copy,
    with_graph,
)
from gemsc.ir.interpret import run_node
from gemsc.ir.mutation import (
    NO_TWIN_LAYERS,
    SIZED,
    changed_by_layer,
    functional_twin,
    memory,
    mutated_inputs,
)
from gemsc.ir.opaque import has_state
from gemsc.ir.program import Program
from gemsc.passes.base import Pass
from gemsc.runtime.tiles import must_be


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Remove what has no effect and keep values from being overwritten.

    1. A call in place becomes the same call without the change where nothing else
       looks at the old memory: no value that is being sent is ever overwritten.
    2. An assignment to a part, or a call that only exists in place, works on a clone
       and is glued to it: no cut falls between.
    3. Where views of the changed memory are used later, and where a parameter or a
       buffer changes, the calls stay as they are, glued from the first to the last.
       A sparse value, which no message takes, is glued to its uses as well.
    4. nn.Identity and nodes without effect are removed; random ones stay, so that the
       generator moves as in the user's model.
    5. What another value gives its shape is given the sizes: of a view, all operands
       are then elements.

    Example:
        before                              after
        h = self.bn(x)                      h = self.bn(x)
        y = self.relu(h)    # inplace=True  y = self.relu(h)    # inplace=False
        y += x                              y_1 = y + x
        y[:, 0] = 0                         clone = y_1.clone(); clone[:, 0] = 0
        z = self.row.expand_as(y)           z = self.row.expand(16, 64)

    The user's modules stay as they are: a layer that works in place is replaced by a
    copy that does not. A call with `out=` is one in place.
    """

    def apply(self, program: Program) -> Program:
        """Return the program with a rewritten copy of the graph."""
        copied = _copy(program)
        module = copied.module
        _remove_identities(module)
        _write_sizes(module.graph)
        _Rewriter(module).run()
        _remove_dead(module)
        for place, node in enumerate(module.graph.nodes):
            meta.traced_place.set(node, place)
        module.graph.lint()
        return copied


def _copy(program: Program) -> Program:
    graph, nodes = copied_graph(program.graph)
    new_names = {node.name: copied.name for node, copied in nodes.items()}
    inputs = tuple(replace(i, name=new_names[i.name]) for i in program.inputs)
    copied = program.with_module(with_graph(program.module, graph))
    return replace(copied, inputs=inputs)


def _remove_identities(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if type(called_layer(node, module)) is nn.Identity:
            given = [*node.args, *node.kwargs.values()][0]
            if isinstance(given, fx.Node):  # and no tuple
                node.replace_all_uses_with(given)
                module.graph.erase_node(node)


def _write_sizes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        if name in SIZED and node.op in ("call_method", "call_function"):
            given = node.args or tuple(node.kwargs.values())
            sizes = meta.spec(node).shape
            node.op, node.target, node.kwargs = "call_method", SIZED[name], {}
            node.args = (given[0], *sizes) if sizes else (given[0], ())


def _remove_dead(module: fx.GraphModule) -> None:
    for node in reversed(list(module.graph.nodes)):
        if not node.users and not _has_effect(node, module):
            module.graph.erase_node(node)


def _has_effect(node: fx.Node, module: nn.Module) -> bool:
    if node.op in ("placeholder", "output") or mutated_inputs(node, module):
        return True
    if node.target is must_be:
        return True
    if changed_by_layer(node, module):
        return True
    name = str(getattr(node.target, "__name__", node.target))
    if (layer := called_layer(node, module)) is not None:
        name = type(layer).__name__
        if has_state(layer):
            return True
    return may_draw(name)


@dataclass
class _Rewriter:
    """Rewrites the in-place calls of one graph, in their order.

    `members` are the nodes that share one memory, `starts` the member from which on
    the memory is this one: after a rewrite, a new memory begins.
    """

    module: fx.GraphModule
    order: dict[fx.Node, float] = field(default_factory=dict)
    members: dict[int, list[fx.Node]] = field(default_factory=dict)
    storage: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    starts: dict[int, fx.Node] = field(default_factory=dict)
    fresh: set[fx.Node] = field(default_factory=set)
    kept: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    def run(self) -> None:
        """Rewrite everything."""
        nodes = list(self.module.graph.nodes)
        for index, node in enumerate(nodes):
            self.order[node] = index
            self._add_member(node)
        changing = [n for n in nodes if mutated_inputs(n, self.module)]
        plain_layers = self._layers_to_copy(changing)
        for node in changing:
            for source in mutated_inputs(node, self.module):
                self._rewrite(node, source, plain_layers)
        for node in nodes:
            for name in changed_by_layer(node, self.module):
                self._keep_state(node, list(self._readers(name)), {name})
        for node in self.storage:
            if any(t.layout is not torch.strided for t in meta.tensors(node)):
                last = max(node.users, key=self.order.__getitem__, default=node)
                self.kept.append((node, last))  # no message takes it
        for path in sorted(plain_layers):
            _replace_layer(self.module, path)
        self._glue()

    def _add_member(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        self.storage[node] = keys = frozenset(memory(node))
        for key in keys:
            self.members.setdefault(key, []).append(node)
            self.starts.setdefault(key, node)

    # What to do with one call

    def _rewrite(self, node: fx.Node, source: fx.Node, plain_layers: set[str]) -> None:
        keys = self.storage[source]
        members = [member for key in keys for member in self.members[key]]
        state = {str(m.target) for m in members if m.op == "get_attr"}
        if state:
            self._keep_state(node, members, state)
        elif self._others_used_later(node, source, members):
            self._keep_aliases(node, keys)
        elif self._make_functional(node, plain_layers):
            for key in keys:
                self.starts[key] = node
        elif self.fresh.intersection(members) or _is_new(source):
            self._keep(keys, node)
        else:
            self._work_on_clone(node, source, keys)

    def _others_used_later(
        self, node: fx.Node, source: fx.Node, members: list[fx.Node]
    ) -> bool:
        """Return whether an alias is used after the change, other than by its name.

        What uses the source itself goes on with what is put in its place.
        """
        here = self.order[node]
        return any(
            self.order[user] > here
            for member in members
            if self.order[member] < here and member is not source
            for user in member.users
        )

    def _keep_state(
        self, node: fx.Node, members: list[fx.Node], names: set[str]
    ) -> None:
        """Leave a change of a parameter or buffer, glued to all that reads it."""
        involved = {user for member in members for user in member.users}
        involved |= {member for member in members if member.op != "get_attr"}
        involved |= set(self._layers_with(names))
        involved = {n for n in involved if n.op not in ("output", "get_attr")}
        ordered = sorted(involved | {node}, key=self.order.__getitem__)
        self.kept.append((ordered[0], ordered[-1]))

    def _readers(self, name: str) -> Iterator[fx.Node]:
        """Yield the nodes with the memory of a parameter."""
        tensor = attribute(self.module, name)
        for node in self.module.graph.find_nodes(op="get_attr"):
            if attribute(self.module, str(node.target)) is tensor:
                for key in self.storage[node]:
                    yield from self.members[key]

    def _layers_with(self, names: set[str]) -> Iterator[fx.Node]:
        """Yield the calls of layers that own one of these tensors."""
        tensors = {id(attribute(self.module, name)) for name in names}
        for node in self.module.graph.nodes:
            if (layer := called_layer(node, self.module)) is not None:
                state = (*layer.parameters(), *layer.buffers())
                if any(id(tensor) in tensors for tensor in state):
                    yield node

    def _keep_aliases(self, node: fx.Node, keys: frozenset[int]) -> None:
        """Leave a change that views see, on a clone where an input would change."""
        for key in keys:
            start = self.starts[key]
            if start.op == "placeholder":
                self.starts[key] = self._clone_input(start, key)
        self._keep(keys, node)

    def _clone_input(self, start: fx.Node, key: int) -> fx.Node:
        first = min(start.users, key=self.order.__getitem__)
        clone = self._clone(start, before=first)
        start.replace_all_uses_with(
            clone, delete_user_cb=lambda user: user is not clone
        )
        self.members[key].append(clone)
        self.storage[clone] = frozenset({key})
        return clone

    def _keep(self, keys: frozenset[int], node: fx.Node) -> None:
        for key in keys:
            self.kept.append((self.starts[key], node))

    def _work_on_clone(
        self, node: fx.Node, source: fx.Node, keys: frozenset[int]
    ) -> None:
        clone = self._clone(source, before=node)
        here = self.order[node]
        later = {user for user in source.users if self.order[user] >= here}
        source.replace_all_uses_with(clone, delete_user_cb=later.__contains__)
        self.storage[clone] = keys
        self.fresh.add(clone)
        for key in keys:
            self.members[key].append(clone)
            self.starts[key] = clone
        self._keep(keys, node)

    def _clone(self, source: fx.Node, *, before: fx.Node) -> fx.Node:
        with self.module.graph.inserting_before(before):
            clone = self.module.graph.call_method("clone", (source,))
        meta.copy_meta(source, clone)
        meta.set_traced(
            clone,
            value=meta.value(source),
            location=meta.location(before),
            module_path=meta.module_path(before),
            # under no_grad, too, the change lets gradients through
            region=replace(meta.region(before), grad=True),
        )
        self.order[clone] = self.order[before] - 0.5
        return clone

    # The same without the change

    def _layers_to_copy(self, changing: list[fx.Node]) -> set[str]:
        """Return the layers whose every call can do without the change."""
        paths: dict[str, bool] = {}
        for node in changing:
            if node.op == "call_module":
                (source,) = mutated_inputs(node, self.module)
                members = [m for k in self.storage[source] for m in self.members[k]]
                state = any(member.op == "get_attr" for member in members)
                blocks_gradient = (
                    meta.value(source).requires_grad and not meta.region(node).grad
                )
                layer = self.module.get_submodule(str(node.target))
                fits = not (
                    isinstance(layer, NO_TWIN_LAYERS)
                    or state
                    or blocks_gradient
                    or self._others_used_later(node, source, members)
                )
                path = str(node.target)
                paths[path] = paths.get(path, True) and fits
        return {path for path, fits in paths.items() if fits}

    def _make_functional(self, node: fx.Node, plain_layers: set[str]) -> bool:
        """Turn a call into its twin; False, and nothing done, where there is none."""
        if node.op == "call_module":
            return str(node.target) in plain_layers
        twin = functional_twin(node)
        if twin is None:
            return False
        before = node.target, node.kwargs
        node.target, node.kwargs = twin
        if not _gives_same(node, self.module):
            node.target, node.kwargs = before
            return False
        return True

    def _glue(self) -> None:
        """Give each run of kept calls a number; runs that overlap are one."""
        compute = [
            node
            for node in self.module.graph.nodes
            if node.op not in ("placeholder", "get_attr", "output")
        ]
        index = {node: i for i, node in enumerate(compute)}
        runs = sorted(
            (index[first], index[last])
            for first, last in self.kept
            if first in index and first is not last
        )
        group = -1
        end = -1
        for first, last in runs:
            group += first > end
            end = max(end, last)
            for node in compute[first : end + 1]:
                meta.glue.set(node, group)


def _is_new(node: fx.Node) -> bool:
    """Return whether a call made this tensor from no other: torch.zeros(...)."""
    return node.op == "call_function" and not node.all_input_nodes


def _gives_same(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a changed call gives the shape and dtype that it gave before."""
    old = meta.value(node)
    values = {source: meta.value(source) for source in node.all_input_nodes}
    try:
        with old.fake_mode:
            made = run_node(node, values, module)
    except Exception:
        return False  # then it stays in place, on a clone
    return isinstance(made, torch.Tensor) and (
        (made.shape, made.dtype, made.requires_grad)
        == (old.shape, old.dtype, old.requires_grad)
    )


def _replace_layer(module: nn.Module, path: str) -> None:
    """Put a copy that works out of place at `path`, without touching the user's."""
    layer: Any = shallow_copy(module.get_submodule(path))
    layer.inplace = False
    put_layer(module, path, layer)
