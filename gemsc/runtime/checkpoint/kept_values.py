"""What a resumed run says: where it goes on otherwise than its file has it now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from gemsc.base.units import show_some
from gemsc.errors import say_note
from gemsc.runtime.checkpoint.optimizer_state import PARAMETERS

CYCLED = "lr", "momentum", "betas"  # of a group: what schedulers set
Notes = dict[str, list[str]]  # texts with {}, and what to name there


def say_kept(
    transport: Any, notes: Notes, parts: list[Any], made: list[dict[str, Any]]
) -> None:
    """Say once what there is to say of any rank; all ranks call this.

    These are `notes`, and where optimizers and schedulers go on with other values than
    those that they were `made` with.
    """
    notes = {text: [*names] for text, names in notes.items()}
    kinds = [
        "optimizer" if hasattr(part, "param_groups") else "scheduler" for part in parts
    ]
    left_out = (*PARAMETERS, *(CYCLED if "scheduler" in kinds else ()))
    for kind, part, before in zip(kinds, parts, made, strict=True):
        both = before, part.state_dict()
        of_groups = _of_groups(*both, left_out)
        values = of_groups if kind == "optimizer" else _of_scheduler(part, *both)
        said = f"the {kind} keeps the values of the checkpoint: {{}}; on_step can "
        said += "change them"
        for name, mine, theirs in values:
            now, then = str(mine), str(theirs)  # some are tensors
            if now != then:
                text = f"{name} {then:.40} ({kind}() gives {now:.40})"
                notes.setdefault(said, []).append(text)
    everyone = transport.all_gather_object(notes)
    for said in dict.fromkeys(chain(*everyone)) if transport.rank == 0 else ():
        texts = [*dict.fromkeys(chain(*(noted.get(said, ()) for noted in everyone)))]
        if texts:
            say_note(said.format(show_some(texts)))


def _of_groups(made: Any, loaded: Any, left_out: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values of each group, as made and as loaded.

    What a scheduler sets has changed since the start: of its rates the initial one is
    compared, where it keeps that in the group as those of PyTorch.
    """
    pairs = zip(*(s.get("param_groups", ()) for s in (made, loaded)), strict=True)
    for mine, theirs in pairs:
        names = (name for name in mine if name in theirs and name not in left_out)
        yield from ((name, mine[name], theirs[name]) for name in names)


def _of_scheduler(part: Any, made: Any, loaded: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a scheduler is made with, as far as it keeps that under its name.

    So of those that it is made of (SequentialLR, ChainedScheduler).
    """
    if not isinstance(made, Mapping):
        return
    code = getattr(type(part).__init__, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    for name in (*names, "_milestones"):
        if name in made and name in loaded and name != "last_epoch":
            yield name.lstrip("_"), made[name], loaded[name]
    inner = (state.get("_schedulers", ()) for state in (made, loaded))
    for child in zip(getattr(part, "_schedulers", ()), *inner, strict=False):
        yield from _of_scheduler(*child)
