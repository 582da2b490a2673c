"""Resume: read and check what was saved, and take it once it fits on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.files import StoredTensors
from gemsc.runtime.checkpoint.folder import (
    check_checkpoint,
    check_digests,
    damage_named,
    place_in,
)
from gemsc.runtime.checkpoint.holdings import (
    BESIDE_KEY,
    MODEL_KEY,
    Extra,
    Holdings,
    gradient_key,
)
from gemsc.runtime.checkpoint.kept_values import CYCLED, Notes, say_kept
from gemsc.runtime.checkpoint.manifest import MANIFEST, Manifest, damaged
from gemsc.runtime.checkpoint.optimizer_state import (
    WEIGHTS_ALONE,
    SavedOptimizer,
    slots_of,
    state_of,
    states_of,
)
from gemsc.runtime.checkpoint.pieces import TensorPiece
from gemsc.runtime.checkpoint.states import (
    check_alike,
    check_generators,
    check_step,
    decode,
    is_torchs,
    set_generators,
)
from gemsc.runtime.process.stop import told_by_all
from gemsc.runtime.worker.updates import Updates
from gemsc.runtime.worker.worker import Worker
from gemsc.weights.source import Wanted, open_distributed

if TYPE_CHECKING:
    from gemsc.weights.distributed import DistributedCheckpoint


@dataclass
class _Fit:
    """What fits this rank, and is done once all ranks have that.

    `is_same` says whether the rank has the layout of the one that saved.
    """

    acts: list[Callable[[], object]] = field(default_factory=list)
    take_gradients: Callable[[bool], object] | None = None
    is_same: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def resume(worker: Worker, directory: Path, tensors: Extra) -> dict[str, Any]:
    """Take what `save` wrote, once it fits on all ranks: see `Trainer.resume`."""
    transport = worker.transport.host
    everything = worker.variants.updates.values()
    pairs = ((updates.optimizer, updates.scheduler) for updates in everything)
    stateful = [part for pair in pairs for part in pair if part]
    before = [part.state_dict() for part in stateful]
    fit, problem = _Fit(), None
    reader = _Reader(worker, tensors)
    mine = place_in(directory), reader.holdings.wanted()
    ranks = told_by_all(transport, "trainer.resume()", mine)
    wanted = {key: want for _, held in ranks for key, want in held.items()}
    with torch.no_grad():
        try:
            fit = _fit(reader, ranks[0][0], wanted)
        except GemscError as error:
            problem = error
        everyone = transport.all_gather_object((problem, fit.is_same))
        for theirs, _ in everyone:
            if theirs is not None:  # perhaps of another rank
                for part, state in zip(stateful, before, strict=True):
                    part.load_state_dict(state)
                raise theirs
        say_kept(transport, reader.notes, stateful, before)
        for act in fit.acts:
            act()
        worker.stages.align()
        worker.updates.forget_whole_weights()
        if fit.take_gradients is not None:
            fit.take_gradients(all(is_same for _, is_same in everyone))
    return fit.extra


def _fit(reader: _Reader, directory: Path, wanted: Mapping[str, Wanted]) -> _Fit:
    saved, transport = check_checkpoint(directory), reader.worker.transport.host
    if (manifest := saved.manifest) is None:
        if saved.place.is_dir():
            return reader.of_distributed(open_distributed(saved.place))
        stored = StoredTensors.of_weights(saved.place, wanted)
        return _Fit([*reader.weights(stored, MODEL_KEY, {})])
    with damage_named(saved.place), _checked(saved.place):
        check_digests(saved.place, manifest, transport.rank, transport.size)
        stored = StoredTensors(saved.place, manifest.tensors)
        stored.check_taken(wanted.values())
        return reader.everything(stored, manifest)


def _waiting(manifest: Manifest) -> int:
    """Return how many steps were done since the last update; checkpoints may not say.

    Raises:
        ValueError, ArithmeticError: it cannot be so many.
    """
    progress = manifest.progress
    count = progress.get("waiting", manifest.step % progress["accumulate"])
    return range(progress["accumulate"]).index(count)


@contextmanager
def _checked(folder: Path) -> Iterator[None]:
    """Say that a manifest is damaged whose parts are not what they must be."""
    try:
        yield
    except (
        *(KeyError, TypeError, ValueError, AttributeError, IndexError),
        *(ArithmeticError, RecursionError, RuntimeError),
    ) as error:
        what = f"is damaged: {type(error).__name__} {str(error)[:100]}"
        raise damaged(folder / MANIFEST, what) from error


def _checked_extra(decoded: Any) -> dict[str, Any]:
    """Return what the trainer keeps beside weights and states; its kinds are right."""
    extra = dict(decoded)
    frozen = extra.get("frozen", [])
    named = isinstance(frozen, list) and all(isinstance(name, str) for name in frozen)
    if not named or not all(
        isinstance(extra.get(key, {}), dict) for key in ("callbacks", "own")
    ):
        raise ValueError("it does not say what is frozen, or what callbacks keep")
    return extra


@dataclass
class _Reader:
    """Makes what this rank needs of what was saved, in whatever layout."""

    worker: Worker
    tensors: Extra

    def __post_init__(self) -> None:
        self.holdings = Holdings(self.worker)
        self.notes: Notes = defaultdict(list)

    def weights(
        self, stored: StoredTensors, key: str, extra: Extra
    ) -> Iterator[Callable[[], object]]:
        """Yield what fills this rank's tensors; `key` stands before the names."""
        for held in self.holdings.tensors(extra):
            name = held.key
            if name.startswith(MODEL_KEY):
                name = f"{key}{name.removeprefix(MODEL_KEY)}"
            elif name not in stored and name.startswith(BESIDE_KEY):
                continue
            stored.check(name, held.piece)
            yield partial(stored.copy, name, held.piece, held.tensor)

    def everything(self, stored: StoredTensors, manifest: Manifest) -> _Fit:
        """Return what fits; optimizer and scheduler have taken their state already."""
        worker, progress = self.worker, manifest.progress
        read = partial(decode, get=stored.whole)
        rank, ranks = worker.transport.host.rank, progress["ranks"]
        if len(ranks) != manifest.ranks:
            raise ValueError("it does not know all ranks")
        self._check_run(manifest)
        kinds = {key.partition("/")[0] for key in manifest.tensors}
        extra = {kind: named for kind, named in self.tensors.items() if kind in kinds}
        acts = [*self.weights(stored, MODEL_KEY, extra)]
        acts.append(partial(setattr, worker.steps, "done", manifest.step))
        acts.append(partial(setattr, worker.steps, "waiting", _waiting(manifest)))
        generators = read(ranks[rank % len(ranks)]["generators"])
        check_generators(generators, worker.device)
        acts.append(partial(set_generators, generators, worker.device))
        scales = {"": progress["scaler"], **progress.get("scalers", {})}
        pending = read(progress.get("pending", {}))
        for name, updates in worker.variants.updates.items():
            acts.append(updates.drop_gradients)
            if (begun := pending.get(name)) is not None:
                acts.append(partial(setattr, updates, "terms", float(begun["terms"])))
                acts.append(
                    partial(setattr, updates, "is_spoilt", bool(begun["spoilt"]))
                )
            scaler, scale = updates.scaler, scales.get(name)
            if scaler is not None and scale is not None:
                numbers = {key: float(number) for key, number in scale.items()}
                acts.append(partial(scaler.load_state_dict, numbers))
        gradients = self._gradients(stored)
        is_same = len(ranks) == worker.transport.host.size
        is_same = is_same and ranks[rank]["layout"] == self.holdings.digest()
        for name, updates in worker.variants.updates.items():
            saved = [state if not name else state["phases"][name] for state in ranks]
            optimizer = SavedOptimizer(saved, states_of(manifest), read)
            states = updates, optimizer, stored
            self._load_states(*states, is_same=is_same)
        more, saved = read(progress["extra"]), ranks[rank] if is_same else {}
        if "callbacks" in (kept := ranks[0] | saved):  # an older gemsc has it in extra
            more["callbacks"] = read(kept["callbacks"])
        return _Fit(
            acts,
            partial(self._take_gradients, stored, gradients),
            is_same,
            _checked_extra(more),
        )

    def of_distributed(self, saved: DistributedCheckpoint) -> _Fit:
        """Return what fits of torch's checkpoint: weights, and states by their names.

        Learning rates and the like are those of this program.
        """
        stored = StoredTensors.of_distributed(saved)
        acts = [*self.weights(stored, "", {})]
        states: dict[str, list[str]] = defaultdict(list)
        others: dict[str, tuple[str, str]] = {}
        for (state, name), key in saved.states.items():
            if saved.is_like_its_parameter(state, name):
                states[name].append(state)
            else:
                others[key] = state, name
        values: dict[str, dict[str, Any]] = {}
        for key, value in saved.values([*others]).items():
            state, name = others[key]
            whole = TensorPiece.whole(saved.table[name].shape).intervals
            values.setdefault(name, {"piece": whole, "state": {}})["state"][state] = (
                value
            )
        if states or others:
            one: dict[str, Any] = {"kinds": {}, "groups": [], "scheduler": None}
            optimizer = SavedOptimizer(
                [one | {"values": values}], states, lambda value: value
            )
            for updates in self.worker.variants.updates.values():
                self._load_states(updates, optimizer, stored, is_same=False)
        return _Fit(acts)

    def _check_run(self, manifest: Manifest) -> None:
        """Make sure that this run goes on as the one that was saved."""
        worker, progress = self.worker, manifest.progress
        saved, accumulate = progress["accumulate"], worker.steps.accumulate
        phases = [name for name in worker.variants.updates if name]
        before = [*progress["ranks"][0].get("phases", ())]
        if phases != before:
            shown = [", ".join(names) or "no phases" for names in (before, phases)]
            raise GemscError(
                f"the checkpoint's steps have {shown[0]}, but the program's have "
                f"{shown[1]}",
                help=f"use the same phases again, {WEIGHTS_ALONE}",
            )
        if _waiting(manifest) and saved != accumulate:
            raise GemscError(
                f"step {manifest.step} of the checkpoint is one of {saved} that make "
                f"one update together, but in the program {accumulate} do",
                help=f"resume with --accumulate {saved}, {WEIGHTS_ALONE}",
            )
        if progress["seed"] != worker.seed:
            raise GemscError(
                f"the checkpoint is of a run with seed {progress['seed']}, but this "
                f"run has {worker.seed}: samples would come in another order",
                help=f"leave out --seed, {WEIGHTS_ALONE}",
            )

    # ------------------------------------------------------- gradients

    def _gradients(
        self, stored: StoredTensors
    ) -> list[tuple[str, nn.Parameter, TensorPiece]]:
        """Return which parameters have gradients of steps without an update."""
        gradients = []
        for name, parameter in self.worker.stages.parameters.items():
            if gradient_key(name) in stored:
                piece = self.holdings.summed(name)
                stored.check(gradient_key(name), piece, sums=True)
                gradients.append((name, parameter, piece))
        return gradients

    def _take_gradients(
        self,
        stored: StoredTensors,
        gradients: list[tuple[str, nn.Parameter, TensorPiece]],
        same: bool,
    ) -> None:
        """Give parameters their gradients: the same ranks take their own.

        Otherwise the first rank that holds a parameter takes the sum of all. So does
        each of its rows, where it keeps the sums of these alone; of two that keep the
        same the first does.
        """
        updates, rank = self.worker.updates, self.worker.transport.host.rank
        rows, file = updates.gradients_in_parts, f"rank{rank}.safetensors"
        for name, parameter, piece in gradients:
            if name in rows:
                key, _ = rows[name]
                into, is_first = updates.parts.take(key, name), updates.parts.is_first
                takes = same or is_first(key)
            elif takes := same or self.holdings.is_first(name):
                into = parameter.grad = torch.zeros_like(parameter)
            if takes:
                stored.add(gradient_key(name), piece, into, file if same else None)

    # ------------------------------------------------ optimizer, scheduler

    def _load_states(
        self,
        updates: Updates,
        saved: SavedOptimizer,
        stored: StoredTensors,
        *,
        is_same: bool,
    ) -> None:
        holdings = self.holdings
        for key in ("optimizer", "scheduler"):
            now = getattr(updates, key)
            for theirs in saved.ranks:
                before = theirs["kinds"].get(key)
                kind = type(now).__name__ if now is not None else "none"
                # a rank that updates nothing has none of both
                is_asked = now is not None or updates.optimizer is not None
                if is_asked and before not in (None, kind):
                    raise GemscError(
                        f"the checkpoint has the {key} {before}, but the program has "
                        f"{kind}",
                        help=f"use {before} again, {WEIGHTS_ALONE}",
                    )
        held, rank = holdings.updated(updates), self.worker.transport.host.rank
        if updates.optimizer is None:
            saved.check_taken(held.values(), ())
            return
        current = state_of(updates.optimizer)
        slots = slots_of(updates.optimizer, current, held)
        text = "the optimizer has parameters that the checkpoint's did not have: {}"
        self.notes[text] += saved.check_taken(held.values(), slots)
        sources = saved.groups(slots, len(current["param_groups"]), rank)
        if begins := updates.scheduler is not None and saved.has_no_scheduler:
            text = "the checkpoint has no scheduler: {} begins, as scheduler() makes it"
            self.notes[text] += [type(updates.scheduler).__name__]
        fixed = CYCLED if begins else ()
        state = saved.state(current, slots, sources, stored.read, fixed)
        others = saved.others(rank, is_same=is_same)
        state = {**state, **others, "state": state["state"] | others.get("state", {})}
        with _fits("optimizer", updates.optimizer):
            both = (version["param_groups"] for version in (current, state))
            check_alike(None, *both, is_same=is_torchs(updates.optimizer))
            updates.optimizer.load_state_dict(state)
            self._keep_dtypes(updates.optimizer, slots, state["state"], stored)
            check_step(updates.optimizer)
        if updates.scheduler is not None:
            part, now = updates.scheduler, updates.scheduler.state_dict()
            loaded = saved.scheduler(now, sources, rank)
            if loaded is not None:
                with _fits("scheduler", part):
                    check_alike(part, now, loaded, is_same=is_same and is_torchs(part))
                    part.load_state_dict(loaded)

    def _keep_dtypes(
        self, optimizer: Any, slots: Any, saved: Any, stored: StoredTensors
    ) -> None:
        """Give tensors of the state the dtypes that they were saved in.

        torch has made them of the dtype of their parameter, for a parameter of another
        dtype than before: a count or a sum in another one would go on otherwise.
        """
        for slot in slots:
            keys = (f"{place}{slot.name}" for place in (MODEL_KEY, BESIDE_KEY, ""))
            before = next((stored.entry(k).dtype for k in keys if k in stored), None)
            state = getattr(optimizer, "state", {}).get(slot.parameter, {})
            for key, value in saved.get(slot.index, {}).items():
                dtype = getattr(value, "dtype", before)
                if dtype not in (before, getattr(state.get(key), "dtype", dtype)):
                    state[key] = value.to(state[key].device)


@contextmanager
def _fits(key: str, part: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise GemscError(
            f"the state of the {key} does not fit {type(part).__name__}: "
            f"{type(error).__name__} {error!s:.200}",
            help=f"create it as in the run that was saved, {WEIGHTS_ALONE}",
        ) from error
