"""Keyword arguments of one call in two graphs: for training and for evaluation."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx


def keywords_of_both(
    training: fx.Node, evaluation: fx.Node
) -> dict[str, tuple[Any, Any]] | None:
    """Return each keyword's value in both graphs; None where one is not known.

    A keyword that only one of them gives has its default in the other: `training=True`
    of F.dropout is left out by the frontend, `training=False` is not.
    """
    ours, theirs = training.kwargs, evaluation.kwargs
    missing = ours.keys() ^ theirs.keys()
    defaults = _defaults(training.target) if missing else {}
    if not missing <= defaults.keys():
        return None
    names = [*ours, *(name for name in theirs if name not in ours)]
    return {
        name: (ours.get(name, defaults.get(name)), theirs.get(name, defaults.get(name)))
        for name in names
    }


def _defaults(target: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}
