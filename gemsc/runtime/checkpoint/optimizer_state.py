"""The state of an optimizer by the names of parameters, for any layout of the ranks.

    optimizer/exp_avg/conv.weight    shaped like the parameter: a tensor in pieces
    values: conv.weight: step        anything else: with the rank's piece of the weight
    groups: names, values            learning rates and the like

On other ranks a group of parameters takes the values of the saved group that its first
parameter was in, and a scheduler's lists of one value for each group go with them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import is_laid_out, to_format
from gemsc.base.elementwise import NUMBERS
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.holdings import HeldTensor
from gemsc.runtime.checkpoint.manifest import Manifest
from gemsc.runtime.checkpoint.pieces import TensorPiece

PARAMETERS = "params", "param_names"  # of a group: they are not values
FUNCTIONS = "lr_lambdas"  # of a scheduler: what objects that are called keep, by group
KERNELS = "fused", "foreach"  # how a step is computed, which is as `optimizer()` says
WEIGHTS_ALONE = (
    "or `gemsc export` the checkpoint and resume from that file, the weights alone"
)
State = dict[str, Any]
Source = tuple[int, int] | None  # rank and number of a saved group


@dataclass(frozen=True)
class UpdatedParameter:
    """A parameter of a rank's optimizer: its place in the state, and what it is."""

    index: Any
    group: int
    parameter: nn.Parameter
    held: HeldTensor

    @property
    def name(self) -> str:
        """The user's name."""
        return self.held.key

    def holds(self, state: str, value: object) -> bool:
        """Whether a value of the state has one element for each of the parameter."""
        if not isinstance(value, Tensor) or "/" in state:
            return False
        is_number = not self.held.piece.shape
        return value.shape == self.parameter.shape and not (
            is_number and state in NUMBERS
        )


def state_of(optimizer: Any) -> State:
    """Return the state of an optimizer; one that wraps another may leave out groups."""
    groups = optimizer.param_groups
    return {"state": {}, "param_groups": groups, **optimizer.state_dict()}


def slots_of(
    optimizer: Any, state: State, held: Mapping[int, HeldTensor]
) -> list[UpdatedParameter]:
    """Return what an optimizer has, in order; `held` is by the id of a parameter.

    Raises:
        GemscError: a parameter of it is none of the program.
    """
    slots = []
    groups = zip(optimizer.param_groups, state["param_groups"], strict=False)
    for number, (group, saved) in enumerate(groups):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            if id(parameter) not in held:
                raise GemscError(
                    "the optimizer has a parameter that is not one of the program's",
                    help="give it the parameters that optimizer() gets, and no others",
                )
            slots.append(
                UpdatedParameter(index, number, parameter, held[id(parameter)])
            )
    return slots


def tensor_key(state: str, name: str) -> str:
    """Return the key of a tensor of the state."""
    return f"optimizer/{state}/{name}"


def states_of(manifest: Manifest) -> dict[str, list[str]]:
    """Return the names of the tensors that an optimizer keeps of each parameter."""
    states: dict[str, list[str]] = defaultdict(list)
    for key in manifest.tensors:
        kind, _, tail = key.partition("/")
        state, _, name = tail.partition("/")
        if kind == "optimizer":
            states[name].append(state)
    return states


def split_state(
    state: State, slots: Sequence[UpdatedParameter]
) -> tuple[list[HeldTensor], State]:
    """Return the tensors in pieces of a state, and the rest of it."""
    tensors, values = [], {}
    group_of: dict[tuple[str, int], int] = {}
    shared: dict[str, bool] = {}  # by several parameters: also of several groups?
    for slot in slots:
        others = {}
        for key, value in state["state"].get(slot.index, {}).items():
            if isinstance(value, Tensor) and isinstance(key, str):
                one = key, id(value)
                if one in group_of:
                    is_of_all = shared.get(key) or group_of[one] != slot.group
                    shared[key] = is_of_all
                group_of[one] = slot.group
            if slot.holds(str(key), value):
                name = tensor_key(key, slot.name)
                tensors.append(HeldTensor(name, value.detach(), slot.held.piece))
            else:
                others[key] = value
        if others and slot.held.is_first:
            rows = [[[*pair] for pair in row] for row in slot.held.piece.intervals]
            values[slot.name] = {"piece": rows, "state": others}
    groups = [
        {
            "names": [slot.name for slot in slots if slot.group == number],
            "values": {k: v for k, v in group.items() if k not in PARAMETERS},
        }
        for number, group in enumerate(state["param_groups"])
    ]
    others = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
    known = {slot.index for slot in slots}
    if beside := {k: v for k, v in state["state"].items() if k not in known}:
        others["state"] = beside  # of no parameter
    saved = {"groups": groups, "values": values, "rest": others}
    return tensors, saved | {"shared": shared}


@dataclass(frozen=True)
class SavedOptimizer:
    """What all ranks have saved of optimizer and scheduler, in order of the ranks.

    It is still JSON, of which `decode` makes values. `states` are the names of the
    tensors in pieces that each parameter has.
    """

    ranks: Sequence[State]
    states: Mapping[str, Sequence[str]]
    decode: Callable[[Any], Any]

    @property
    def has_no_scheduler(self) -> bool:
        """Whether a run was saved, and no rank of it had a scheduler."""
        kinds = [saved["kinds"] for saved in self.ranks]
        return any(kinds) and not any("scheduler" in of_rank for of_rank in kinds)

    def check_taken(
        self, held: Iterable[HeldTensor], slots: Sequence[UpdatedParameter]
    ) -> list[str]:
        """Return which parameters of a rank's optimizer were in no saved one.

        Raises:
            GemscError: one of those that the rank has `held` was, and now is in none.
        """
        names = dict.fromkeys(slot.name for slot in slots)
        for weight in held:
            is_left_out = weight.key in self._group_of and weight.key not in names
            if is_left_out and weight.tensor.requires_grad:
                raise GemscError(
                    f"the optimizer of the checkpoint has '{weight.key}', which "
                    "optimizer() now leaves out",
                    help="give it that, too, and what a hook adds to it later; "
                    f"freeze() what is not to be trained; {WEIGHTS_ALONE}",
                )
        return [n for n in names if self._group_of and n not in self._group_of]

    def groups(
        self, slots: Sequence[UpdatedParameter], count: int, rank: int
    ) -> list[Source]:
        """Return from which saved group, of which rank, each group takes its values.

        A group that was saved on the same rank with the same parameters is that one.
        One without parameters here is that of its number on the first rank that has it.
        None is a group with a first parameter that was not saved.
        """
        of_rank = self.ranks[rank]["groups"] if rank < len(self.ranks) else []
        sources: list[Source] = []
        for number in range(count):
            names = [slot.name for slot in slots if slot.group == number]
            if number < len(of_rank) and of_rank[number]["names"] == names:
                sources.append((rank, number))
            elif names:
                sources.append(self._group_of.get(names[0]))
            else:
                counts = [len(saved["groups"]) for saved in self.ranks]
                having = (r for r, groups in enumerate(counts) if number < groups)
                sources.append(next(((r, number) for r in having), None))
        return sources

    def state(
        self,
        current: State,
        slots: Sequence[UpdatedParameter],
        sources: Sequence[Source],
        read: Callable[[str, TensorPiece], Tensor],
        fixed: Sequence[str] = (),
    ) -> State:
        """Return the state of an optimizer as its `load_state_dict` takes it.

        `read` gives a piece of the tensor with a key. Values of groups that are `fixed`
        stay what they are.
        """
        state: State = {}
        for slot in slots:
            slot_state = self.rest_of(slot.name, slot.held.piece)
            for key in self.states.get(slot.name, ()):
                tensor = read(tensor_key(key, slot.name), slot.held.piece)
                tensor = tensor.view(slot.parameter.shape)
                is_alike = not is_laid_out(slot.parameter)
                slot_state[key] = tensor if is_alike else to_format(tensor)
            if slot_state:
                state[slot.index] = slot_state
        pairs = [(slot.group, state.get(slot.index, {})) for slot in slots]
        for shared in (saved.get("shared", {}) for saved in self.ranks):
            for key, is_of_all in shared.items():
                _share(key, is_of_all, pairs)
        groups = []
        for group, source in zip(current["param_groups"], sources, strict=True):
            values = {}
            if source is not None:
                rank, number = source
                values = self.decode(self.ranks[rank]["groups"][number]["values"])
            kept = {n: group[n] for n in (*KERNELS, *fixed) if n in group}
            groups.append({**group, **values, **kept})
        return {**current, "state": state, "param_groups": groups}

    def others(self, rank: int, *, is_same: bool) -> State:
        """Return what an optimizer keeps beside groups and states of parameters.

        In another layout these are numbers and texts which all ranks have kept alike.

        Raises:
            GemscError: they have kept other things.
        """
        kept = [saved.get("rest", {}) for saved in self.ranks]
        if is_same:
            return dict(self.decode(kept[rank]))
        kept = [state for state in kept if state]  # not of ranks that update nothing
        others: State = self.decode(kept[0]) if kept else {}
        if not _is_plain(others) or any(state != kept[0] for state in kept):
            raise GemscError(
                f"the optimizer keeps '{next(iter(others))}' in a form that belongs to "
                "the ranks that saved it",
                help=f"compile with the split of the saved run, {WEIGHTS_ALONE}",
            )
        return others

    def scheduler(self, now: Any, sources: Sequence[Source], rank: int) -> Any:
        """Return the state of the scheduler of a rank whose groups have `sources`.

        `now` is the state that the scheduler has there, also for groups without any.
        """
        places = [source for source in sources if source is not None]
        base = places[0][0] if places else min(rank, len(self.ranks) - 1)
        ranks = dict.fromkeys((base, *(rank for rank, _ in places)))  # base first
        counts = {rank: len(self.ranks[rank]["groups"]) for rank in ranks}
        states = {r: self.decode(self.ranks[r]["scheduler"]) for r in counts}
        every = [(base, number) for number in range(counts[base])]
        if [*sources] in ([], every):
            return states[base]
        return _merged(states, now, sources, counts)

    @cached_property
    def _group_of(self) -> dict[str, tuple[int, int]]:
        """Where each parameter was: the rank and the number of the group."""
        places: dict[str, tuple[int, int]] = {}
        for rank, saved in enumerate(self.ranks):
            for number, group in enumerate(saved["groups"]):
                for name in group["names"]:
                    places.setdefault(name, (rank, number))
        return places

    @cached_property
    def _values_of(self) -> dict[str, list[State]]:
        """What ranks have saved of each parameter that is not in pieces."""
        by_name: dict[str, list[State]] = defaultdict(list)
        for saved in self.ranks:
            for name, values in saved["values"].items():
                by_name[name].append(values)
        return by_name

    def rest_of(self, name: str, piece: TensorPiece) -> State:
        """Return what is not in pieces: of the same piece, or the same for any.

        Raises:
            GemscError: it differs from rank to rank.
        """
        everyone = self._values_of.get(name, [])
        for saved in everyone:
            if TensorPiece.read(piece.shape, saved["piece"]) == piece:
                return dict(self.decode(saved["state"]))
        state = dict(self.decode(everyone[0]["state"])) if everyone else {}
        for key, value in state.items():
            if any(getattr(leaf, "ndim", 0) for leaf in pytree.tree_leaves(value)):
                raise GemscError(
                    f"the optimizer keeps '{key}' of '{name}' in a form that belongs "
                    "to the ranks that saved it",
                    help=f"compile with the split of the saved run, {WEIGHTS_ALONE}",
                )
        return state

    def merged_groups(self) -> list[tuple[list[str], State]]:
        """Return the groups of all ranks: those with the same values are one."""
        merged: list[tuple[list[str], State]] = []
        texts: dict[str, list[str]] = {}
        for saved in self.ranks:
            for group in saved["groups"]:
                text = json.dumps(group["values"], sort_keys=True)
                if text not in texts:
                    texts[text] = []
                    merged.append((texts[text], self.decode(group["values"])))
                known = {*texts[text]}
                texts[text] += [name for name in group["names"] if name not in known]
        return merged


def _share(key: str, is_of_all: bool, states: Iterable[tuple[int, State]]) -> None:
    """Let parameters of a group, or all, have one tensor, as when it was saved."""
    known: dict[int, list[Tensor]] = defaultdict(list)
    for group, state in states:
        if type(value := state.get(key)) is Tensor:
            tensors = known[0 if is_of_all else group]
            same = (t for t in tensors if t.dtype is value.dtype)
            state[key] = next((t for t in same if torch.equal(t, value)), value)
            tensors.append(state[key])


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return isinstance(value, Number | str | None)


def _merged(
    states: Mapping[int, Any],
    now: Any,
    places: Sequence[Source],
    counts: Mapping[int, int],
    key: object = "",
) -> Any:
    """Put together the lists of one value for each of the groups that ranks saved.

    Such a list has as many values as there are groups on each rank that saved it, and
    here. One that is everywhere as it was made stays: milestones may be as many.
    """

    def part(key: Any, now: Any) -> Any:
        theirs = {rank: state[key] for rank, state in states.items()}
        return _merged(theirs, now, places, counts, key)

    state = next(iter(states.values()))
    if isinstance(state, dict):
        known = now if isinstance(now, Mapping) else {}
        merged = {key: part(key, known.get(key)) for key in state}
        return type(state)(merged)  # a Counter of MultiStepLR, for example
    if not isinstance(state, list):
        return state
    here = now if isinstance(now, list) else []
    if any(isinstance(child, dict) for child in state) and key != FUNCTIONS:
        every = zip_longest(range(len(state)), here[: len(state)])
        return [part(i, current) for i, current in every]  # schedulers in a scheduler
    of_groups = all(len(states[rank]) == count for rank, count in counts.items())
    is_fixed = all(theirs == here for theirs in states.values())
    lacks = None in places and not here
    if is_fixed or not of_groups or lacks or len(here or places) != len(places):
        return state
    pairs = enumerate(places)
    return [here[i] if at is None else states[at[0]][at[1]] for i, at in pairs]
