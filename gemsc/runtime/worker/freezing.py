"""Freeze and unfreeze: parameters that are not trained for a while, on all ranks.

A frozen parameter has no gradient, so that the optimizer leaves it and its state alone.
Gradients flow through its stage to those before it as ever: no message changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

from gemsc.errors import GemscError
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.program import RankProgram
from gemsc.runtime.worker.stages import Stages


class Freezing:
    """Which parameters are frozen at the moment; `names` are those of all ranks."""

    def __init__(
        self, program: RankProgram, stages: Stages, transport: Transport
    ) -> None:
        self._program = program
        self._named = stages.parameters
        self._transport = transport
        self._never = {n for n, p in self._named.items() if not p.requires_grad}
        self.names: set[str] = set()

    def change(self, paths: Sequence[str], *, trains: bool) -> None:
        """Freeze what is under these paths, or train it again; all ranks call this.

        Raises:
            GemscError: the model has no such path, or it was compiled as frozen.
        """
        if self._program.branches:
            raise GemscError(
                "parameters cannot be frozen in a program with --branches",
                help="compile without --branches, or with requires_grad=False",
            )
        mine = [*self._named], [*self._never]
        everyone: list[Any] = self._transport.all_gather_object(mine)
        names = {name for theirs, _ in everyone for name in theirs}
        never = {name for _, theirs in everyone for name in theirs}
        found: set[str] = set()
        for path in paths:
            under = {n for n in names if n == path or n.startswith(f"{path}.")}
            if not under:
                raise _unknown(path, names)
            found |= under
        if trains and (fixed := sorted(found & never)):
            raise GemscError(
                f"'{fixed[0]}' was frozen when the program was compiled: no rank has "
                "the messages for its gradient",
                help="compile with requires_grad=True, and freeze it when the run "
                "starts",
            )
        self.set(self.names - found if trains else self.names | found)

    def set(self, names: Iterable[str]) -> None:
        """Freeze these parameters and no others, besides those that always are."""
        self.names = {*names}
        for name, parameter in self._named.items():
            if name not in self._never:
                parameter.requires_grad_(name not in self.names)
            if name in self.names:
                parameter.grad = None


def _unknown(path: str, names: Iterable[str]) -> GemscError:
    paths = {
        part
        for name in names
        for part in accumulate(name.split("."), lambda a, b: f"{a}.{b}")
    }
    close = get_close_matches(path, sorted(paths), n=1)
    there = sorted({name.split(".")[0] for name in names})
    advice = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(there)}"
    return GemscError(f"the model has no parameters under '{path}'", help=advice)
