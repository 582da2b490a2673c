"""Check memory: no tensor that changes is a part of another one.

Example: `head.weight.data = embedding.weight.data` makes two parameters in one memory.
In one process an update of either changes both; the ranks have copies, which part.
"""

from __future__ import annotations

from torch import Tensor, fx, nn

from gemsc.errors import GemscError
from gemsc.ir.holder import called_layer
from gemsc.ir.mutation import mutated_state
from gemsc.ir.opaque import changed_inside
from gemsc.ir.program import Program


def check_shared_memory(program: Program) -> None:
    """Refuse two tensors of a model in one memory, if one is trained or changes.

    Raises:
        GemscError: names both.
    """
    module, tensors = program.module, dict[str, Tensor]()
    for named in (module.named_parameters, module.named_buffers):
        tensors |= {n: t for n, t in named() if not t.is_meta and t.numel()}
    changed = {id(t) for t in tensors.values() if t.requires_grad}
    for node in program.compute_nodes:
        changed |= {id(tensors[n]) for n in mutated_state(node, module) if n in tensors}
        paths = [*changed_inside(node, module), *_statistics(node, module)]
        changed |= {id(tensors[path]) for path in paths if path in tensors}
    spans = {name: _span(tensor) for name, tensor in tensors.items()}
    before: list[str] = []
    for name in sorted(tensors, key=spans.__getitem__):
        before = [other for other in before if spans[other][1] > spans[name][0]]
        for other in before:
            if {id(tensors[name]), id(tensors[other])} & changed:
                raise GemscError(
                    f"'{other}' and '{name}' are two tensors that share memory, which "
                    "changes: ranks would change copies of it",
                    help="register one tensor under both names (head.weight = "
                    "embedding.weight), take the part in forward, or .clone() it",
                )
        before.append(name)


def _statistics(node: fx.Node, module: nn.Module) -> list[str]:
    layer = called_layer(node, module)
    if not isinstance(layer, nn.modules.batchnorm._NormBase) or not layer.training:
        return []
    return [f"{node.target}.{name}" for name in layer._buffers]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins in memory, and where it ends."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    length = sum((size - 1) * stride for size, stride in pairs) + 1
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.itemsize
