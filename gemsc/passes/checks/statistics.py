"""Check statistics: what the forward changes must be joinable over several runs.

Example: two replicas update their BatchNorm's running mean apart, and the two averages
join exactly; a counter that the user's forward increments does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.mutation import mutated_inputs
from gemsc.ir.opaque import opaque_of
from gemsc.ir.program import Program
from gemsc.passes.base import Pass

__all__ = ["CheckStatistics"]


@dataclass(frozen=True)
class CheckStatistics(Pass):
    """Refuse tensors that forward changes and that no rule joins, if there are runs.

    `num_runs` is replicas times data-parallel copies. The statistics of BatchNorm join
    (see gemsc.runtime.worker.reduction); nothing else is known to, nor do they in a
    module that depends on data, where some runs may update them more often.
    """

    name: ClassVar[str] = "check-statistics"
    requires: ClassVar[tuple[str, ...]] = ("stages",)

    num_runs: int = 1

    def apply(self, program: Program) -> Program:
        """Return the program as it is.

        Raises:
            GemscError: the model could not be trained exactly; names the line.
        """
        if self.num_runs > 1:
            for node in program.compute_nodes:
                changed = _changed(node, program.module)
                if changed:
                    raise GemscError(
                        f"forward changes '{changed}', and each of {self.num_runs} "
                        "replicas of the model would change it differently",
                        at=meta.location(node),
                        help="use a schedule with one replica and --data 1",
                    )
        return program


def _changed(node: fx.Node, module: fx.GraphModule) -> str | None:
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
            return f"{node.target}.running_mean" if layer.track_running_stats else None
        opaque = opaque_of(layer)
        if opaque is not None and opaque.changes:
            return f"{node.target}.{opaque.changes[0]}"
        return None
    for source in mutated_inputs(node, module):
        if source.op == "get_attr":
            return str(source.target)
    return None
