"""What a fork and its branches are called: after the user's modules and variables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torch import fx

from gemsc.ir import meta
from gemsc.ir.flow import base_name, layer_path, shared_path, unique_names
from gemsc.ir.holder import attributes_of
from gemsc.passes.branches.forks import Component


def names_of(parts: Sequence[Component]) -> tuple[str, list[str]]:
    """Return the name of a fork, and that of each of its components.

    The fork is called after the module in which all their layers are, or after them:
    `image and text`.
    """
    layers = [node for each in parts for node in each.nodes if _has_weights(node)]
    fork = shared_path(map(layer_path, layers))
    names = list(unique_names(_name(each.nodes, fork) for each in parts))
    between = " and " if len(names) < 3 else " to "
    return fork or between.join(dict.fromkeys([names[0], names[-1]])), names


def _name(nodes: Sequence[fx.Node], fork: str) -> str:
    """Return `one.b` of layers one.b.0 and one.b.1, and of one.b_0 and one.b_1.

    Else it is that of the slowest layer; of no layers, the variable's.
    """
    layers = [node for node in nodes if _has_weights(node)]
    if not layers:
        return f"{fork}.{base_name(nodes[0])}" if fork else base_name(nodes[0])
    heavy = [node for node in layers if meta.facts(node).heavy] or layers
    shared = shared_path(map(layer_path, layers))
    letters = _letters([layer_path(node) for node in heavy]).rstrip("._")
    slowest = layer_path(max(heavy, key=lambda node: meta.facts(node).seconds))
    depth = len(fork.split(".")) + 1 if fork else 1
    word = ".".join(slowest.split(".")[:depth])
    longer = (name for name in (shared, letters, word) if len(name) > len(fork))
    return next(longer, fork)


def _has_weights(node: fx.Node) -> bool:
    facts = meta.facts(node)
    is_layer = facts.heavy or facts.parameter_bytes > 0
    return is_layer and bool(attributes_of(node))


def _letters(paths: Sequence[str]) -> str:
    columns = zip(*paths, strict=False)
    same = takewhile(lambda each: len(set(each)) == 1, columns)
    return "".join(each[0] for each in same)
