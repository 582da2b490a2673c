"""Move updates: what forward changes without data changes beside what sees it.

Example, a teacher that follows its student, layer by layer:
    ta.lerp_(a, 0.01); tb.lerp_(b, 0.01); y = tb(ta(x))
    -> ta.lerp_(a, 0.01); h = ta(x); tb.lerp_(b, 0.01); y = tb(h)

    y = tb(ta(x)); ta.lerp_(a, 0.01); tb.lerp_(b, 0.01)
    -> h = ta(x); ta.lerp_(a, 0.01); y = tb(h); tb.lerp_(b, 0.01)

A table that a loop fills moves to where it is read, and keeps no layers together:
    t = torch.zeros(2, 4); h = a(x); t[0] = h; h = b(h); t[1] = h; y = t.mean(0)
    -> h = a(x); h_1 = b(h); t = torch.zeros(2, 4); t[0] = h; t[1] = h_1; y = t.mean(0)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from gemsc.ir.mutation import mutated_state
from gemsc.ir.program import Program
from gemsc.ir.staged import in_order, predecessors, random_nodes
from gemsc.passes.base import Pass


@dataclass(frozen=True)
class MoveUpdates(Pass):
    """Move changes of parameters and buffers to what uses them next, or used them last.

    A change stays in one stage with all that uses the tensor, so that one which stands
    before or behind all layers would keep them together. It moves with what it alone
    needs, if that is computed from parameters, buffers and constants, without random
    numbers. What may not pass each other, `predecessors` says.
    """

    def apply(self, program: Program) -> Program:
        """Return the program as it is, or with its nodes in another order."""
        nodes, moving = program.compute_nodes, _updates(program) | _tables(program)
        if not moving:
            return program
        place = {node: i for i, node in enumerate(nodes)}
        before = predecessors(program)
        never = len(nodes)
        used = dict.fromkeys(nodes, never)  # where the first is, of those that stay
        for node, earlier in reversed(before.items()):
            first = used[node] if node in moving else place[node]
            for other in earlier:
                used[other] = min(first, used[other])
        goal = dict(place)
        for node, earlier in before.items():
            if node in moving:  # what nothing uses any more goes behind all it needs
                behind = max((goal[other] for other in earlier), default=-1)
                goal[node] = used[node] if used[node] < never else behind
        for node, earlier in reversed(before.items()):
            if goal[node] < 0:  # it needs nothing: to what it is for
                goal[node] = used[node] if used[node] < never else place[node]
            for other in earlier:
                used[other] = min(goal[node], used[other])
        # of equals, the one that stays is where it was: before it, or behind
        return in_order(program, sorted(nodes, key=goal.__getitem__))[0]


def _updates(program: Program) -> set[fx.Node]:
    """Return the nodes that change state without data, and what only they need."""
    nodes = program.compute_nodes
    drawn = {*random_nodes(program, nodes)}
    free: set[fx.Node] = set()
    for node in nodes:
        needs = (n.op == "get_attr" or n in free for n in node.all_input_nodes)
        is_call = node.op in ("call_function", "call_method") and node not in drawn
        if is_call and all(needs):
            free.add(node)
    updates: set[fx.Node] = set()
    for node in reversed(nodes):
        is_needed = bool(node.users) and updates.issuperset(node.users)
        if node in free and (is_needed or mutated_state(node, program.module)):
            updates.add(node)
    return updates


def _tables(program: Program) -> set[fx.Node]:
    """Return the new tensors that are filled part by part, and what fills them."""
    drawn = {*random_nodes(program, program.compute_nodes)}
    tables: set[fx.Node] = set()
    for node in program.compute_nodes:
        if node.target is operator.setitem:
            made = node.all_input_nodes[0]
            name = str(getattr(made.target, "__name__", made.target))
            is_new = made.op == "call_function" and not made.all_input_nodes
            is_new |= name.startswith("new_") or name.endswith("_like")
            if is_new and made not in drawn:
                tables |= {made, node}
    return tables
