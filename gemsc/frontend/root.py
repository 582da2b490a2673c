"""The module of a traced graph: the user's layers, parameters and buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from gemsc.errors import GemscError
from gemsc.frontend.fake_copy import LOSS
from gemsc.frontend.writer import CONSTANTS
from gemsc.ir.holder import with_graph


def make_root(
    model: nn.Module, loss: Any, constants: dict[str, torch.Tensor]
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Return a graph module that holds the user's modules, and the aliases in it.

    Raises:
        GemscError: a submodule or parameter of the model has a name of FX's own.
    """
    root = with_graph(nn.Module(), fx.Graph())
    names = [*model._modules, *model._parameters, *model._buffers]
    for attribute in names:
        taken = attribute in vars(root) or hasattr(type(root), attribute)
        if taken or attribute in (LOSS, CONSTANTS):
            raise GemscError(
                f"the model has an attribute with the reserved name {attribute}",
                help=f"call it {attribute}_ or the like",
            )
    root._modules.update(model._modules)
    root._parameters.update(model._parameters)
    root._buffers.update(model._buffers)
    root._non_persistent_buffers_set |= model._non_persistent_buffers_set
    if isinstance(loss, nn.Module):
        root.add_module(LOSS, loss)
    if constants:
        holder = nn.Module()
        for constant, value in constants.items():
            holder.register_buffer(constant, value.detach(), persistent=False)
        root.add_module(CONSTANTS, holder)
    return root, _aliases(root)


def _aliases(root: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for named in (root.named_parameters, root.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            original = first.setdefault(id(tensor), name)
            if original != name:
                aliases[name] = original
    return aliases
