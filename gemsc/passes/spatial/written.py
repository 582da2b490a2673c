"""Written views: what a custom function on a grid may change in place."""

from __future__ import annotations

from torch import fx

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.mutation import memory, mutated_inputs
from gemsc.ir.program import Program


def check_written_views(node: fx.Node, program: Program) -> None:
    """Refuse a custom function on a grid that writes to what is used later.

    Around its call, gradients are added up over ranks (`tiles.with_whole_gradients`):
    those of views of what it has written to would go past it.

    Raises:
        GemscError: it does; names the function and the line.
    """
    place = {each: number for number, each in enumerate(program.graph.nodes)}
    sources = mutated_inputs(node, program.module)
    written = {key for n in sources if n.op != "get_attr" for key in memory(n)}
    for each in place:
        shares = place[each] < place[node] and not written.isdisjoint(memory(each))
        if shares and any(place[user] > place[node] for user in each.users):
            name = node.target.__self__.__name__  # type: ignore[union-attr]
            raise GemscError(
                f"{name}.forward changes its input in place, and several ranks share "
                f"this stage: '{each.name}', used later, has the same memory",
                at=meta.location(node),
                help=f"let {name}.forward compute a new value (x = x - 1 for x -= 1), "
                "and go on with what it returns",
            )
