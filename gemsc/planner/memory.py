"""The memory of each rank over the time of a step: what it is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod

from torch import Tensor

from gemsc.costs.collectives import BUCKET_BYTES
from gemsc.ir.flow import owned_tensors, shared_parameters
from gemsc.ir.program import Program
from gemsc.messages.rows import ALONE_BYTES
from gemsc.schedules import Task, Timeline, held_bytes


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Bytes of what a rank owns of a stage, whatever the micro-batches.

    `parameters` have the buffers with them; `optimizer` is the state that the user's
    optimizer keeps after its first step.
    """

    parameters: int
    gradients: int
    optimizer: int
    part_gradients: int  # those of the gradients that are of parts
    gathered: int = 0  # weights that are whole only for the actions that use them
    frozen: int = 0  # of these, what has no gradient
    packed: int = 0  # small ones of these on their way, with their rows
    rows: int = 0  # gradients that are kept between backwards, where those are rows
    scatter: int = 0  # to add up all: those of this rank, others' of its rows, a sum

    @property
    def resident(self) -> int:
        """What is there all the time."""
        return self.parameters + self.optimizer


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """What the memory of a rank is made of at one time, in bytes.

    `activations` are what backwards will need, `working` the gradients on their way
    through a stage, `messages` the buffers of receives posted ahead and of messages
    between tiles, `workspace` what libraries take for themselves.
    """

    parameters: int
    optimizer: int
    gradients: int = 0
    activations: int = 0
    messages: int = 0
    workspace: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self))


def stage_weights(program: Program) -> list[StageWeights]:
    """Return the bytes of each stage's parameters, gradients and optimizer state.

    A tied parameter that a later stage of the same ranks has too counts there only.
    """
    module = program.module
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    names_of = owned_tensors(program)
    ranks = list(map(program.require_placement().ranks_of, range(len(names_of))))
    weights = []
    for index, names in enumerate(names_of):
        elsewhere = {
            name
            for later in range(index + 1, len(names_of))
            if ranks[index] <= ranks[later]
            for name in names_of[later]
        }
        owned = {name: tensors[name] for name in names if name not in elsewhere}
        trained = {name: t for name, t in owned.items() if t.requires_grad}
        weights.append(
            StageWeights(
                parameters=sum(tensor.nbytes for tensor in owned.values()),
                gradients=sum(tensor.nbytes for tensor in trained.values()),
                part_gradients=sum(
                    t.nbytes for n, t in trained.items() if n in program.parts
                ),
                optimizer=sum(_state_bytes(program, *pair) for pair in trained.items()),
            )
        )
        if program.adds_at_once:
            tied = shared_parameters(program, names_of)
            cut = {n: t for n, t in trained.items() if n not in tied}
            frozen = {n: owned[n] for n in frozen_parts(program, names_of)[index]}
            weights[-1] = _in_parts(program, weights[-1], cut, frozen)
    return weights


def frozen_parts(
    program: Program, names_of: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Return of which frozen parameters of each stage ranks keep rows only.

    They do where weights are in parts, but for what different stages of a rank share.
    """
    if program.shard != "weights":
        return [[] for _ in names_of]
    frozen = {n for n, p in program.module.named_parameters() if not p.requires_grad}
    held = Counter[tuple[int, str]]()
    ranks = list(map(program.require_placement().ranks_of, range(len(names_of))))
    for stage, names in enumerate(names_of):
        held.update((rank, name) for rank in ranks[stage] for name in names)
    return [
        [n for n in names if n in frozen and all(held[r, n] == 1 for r in ranks[stage])]
        for stage, names in enumerate(names_of)
    ]


def _in_parts(
    program: Program,
    weights: StageWeights,
    cut: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
) -> StageWeights:
    """Return what a rank owns where it keeps rows of gradients, perhaps of weights."""
    whole, rows = _whole_and_rows(program, cut)
    kept = weights.gradients - whole + rows
    scatter = 2 * whole - rows + min(rows, BUCKET_BYTES)
    weights = replace(weights, rows=kept, scatter=scatter)
    if not program.whole_stages:
        return weights
    gathered, rows = _whole_and_rows(program, {**cut, **frozen})
    both = {**cut, **frozen}.items()
    small = {name: tensor for name, tensor in both if tensor.nbytes < ALONE_BYTES}
    return replace(
        weights,
        parameters=weights.parameters - gathered + rows,
        gathered=gathered,
        frozen=gathered - whole,
        packed=sum(_whole_and_rows(program, small)),
    )


def _whole_and_rows(program: Program, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the bytes of tensors, and of the rows that the fullest rank keeps."""
    rows = sum(program.kept[n] * t.element_size() for n, t in tensors.items())
    return sum(tensor.nbytes for tensor in tensors.values()), rows


def largest_weights(tiles: Sequence[Program]) -> list[StageWeights]:
    """Return for each stage what that rank of its grid owns which owns most.

    `tiles` are what the ranks of the largest grid run.
    """
    placement = tiles[0].require_placement()
    of_tiles = [stage_weights(tile) for tile in tiles]
    return [
        max(
            (weights[stage] for weights in of_tiles[: len(ranks)]),
            key=lambda weights: weights.resident + weights.gathered,
        )
        for stage, ranks in enumerate(placement.ranks[0])
    ]


def _state_bytes(program: Program, name: str, parameter: Tensor) -> int:
    """Return what the optimizer keeps of a parameter, or of what is updated here."""
    if name not in program.optimizer_bytes:
        return 0
    part, elements = program.parts.get(name), parameter.numel()
    whole = prod(part.shape) if part is not None else elements
    if program.updated is not None:
        elements = program.updated[name]
    return program.optimizer_bytes[name].of(elements, whole)


def memory_curve(
    weights: Sequence[StageWeights], task: Task, timeline: Timeline, rank: int
) -> list[tuple[float, MemoryParts]]:
    """Return what a rank holds from each time on, in seconds from the step's begin.

    `weights` are those of the stages: see `stage_weights`.
    """
    on_rank = [weights[stage] for stage in sorted({s for _, s in task.lanes[rank]})]
    fixed = MemoryParts(
        parameters=sum(stage.parameters for stage in on_rank),
        optimizer=sum(stage.optimizer for stage in on_rank),
        workspace=task.workspace_bytes,
    )
    curve = [(0.0, fixed)]
    for held in held_bytes(task, rank, timeline.ranks[rank]):
        names = ("gradients", "activations", "messages", "working")
        changing = {name: getattr(held, name) for name in names}
        changing["parameters"] = fixed.parameters + held.gathered
        curve.append((held.time, replace(fixed, **changing)))
    return curve


def peak_parts(
    weights: Sequence[StageWeights], task: Task, timeline: Timeline, rank: int
) -> MemoryParts:
    """Return what a rank's memory is made of when it holds most."""
    curve = memory_curve(weights, task, timeline, rank)
    return max((parts for _, parts in curve), key=lambda parts: parts.total)
