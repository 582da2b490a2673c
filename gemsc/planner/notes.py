"""What a plan tells the user of a step: where it is not what one process would do.

Example: a loss that is a sum, weights that forward changes once for each micro-batch,
an optimizer that looks at parameters of other ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from torch.nn import SyncBatchNorm

from gemsc.base.units import show_seconds, show_some
from gemsc.costs.hardware import Hardware
from gemsc.errors import GemscError
from gemsc.ir.changes import unjoined_changes
from gemsc.ir.flow import owned_tensors, shared_parameters
from gemsc.ir.holder import LOSS
from gemsc.ir.mutation import changed_by_layer
from gemsc.ir.program import NO_SUM, Program
from gemsc.options import CompileOptions
from gemsc.plan import FUSED
from gemsc.planner.predict import micro_batch_size
from gemsc.schedules import Task

# for a byte of Adam's state: 63 ms for two numbers of 4 bytes of each of 9.5 million
# parameters, and 11 ms fused
UNFUSED_SECONDS = 0.69e-9
WORTH_IT = 0.02  # of a step
OWN_LOSS = "the loss takes what the model computes of a whole micro-batch"


def loss_notes(program: Program, task: Task, options: CompileOptions) -> list[str]:
    """Say what evaluation asks for if the model itself computes the loss.

    And of a loss that is no mean over samples, what a step makes of it.
    """
    count = options.data * sum(task.micro_batches)
    size = count * micro_batch_size(program)
    if program.halves.startswith(NO_SUM):
        return [
            f"{program.halves}. A step divides the sum of the first by the sum of the "
            "second: return the loss alone if that is something else, such as an "
            "accuracy, and a count as it is, without clamp(min=1): it may be 0"
        ]
    if program.halves and count > 1:
        counted = "return a sum and a count, or " if not program.mixes_samples else ""
        return [
            f"{program.halves}. A step takes the mean of the losses of its {count} "
            f"micro-batches, which is not the loss of its {size} samples together. If "
            f"it should be that, {counted}let example_inputs() have all samples of a "
            f"step, with --micro-batches 1{' --data 1' if options.data > 1 else ''}"
        ]
    if not program.loss_of_all and program.loss not in program.outputs:
        return []
    return [f"{OWN_LOSS}: the length of any eval_dataset must be a multiple of {size}"]


def state_notes(program: Program, task: Task, options: CompileOptions) -> list[str]:
    """Say what moves with the micro-batches, and what a loss trains of its own.

    Left out are BatchNorm's statistics, which everybody knows of, and rows that
    `max_norm` has made small: they stay so.
    """
    notes, count = [], options.data * sum(task.micro_batches)
    changed = {
        f"'{change.name}'": change.by
        for change in unjoined_changes(program)
        if not changed_by_layer(change.node, program.module)
    }
    if changed and count > 1:
        names, by = [*changed], next(iter(changed.values()))
        notes.append(
            f"{by} changes {show_some(names, 1)} once for each micro-batch: "
            f"{count} times in a step, where one process that takes its "
            f"{count * micro_batch_size(program)} samples together would do so once"
        )
    if count > 1 and any(
        isinstance(m, SyncBatchNorm) for m in program.module.modules()
    ):
        notes.append(
            "SyncBatchNorm normalizes each micro-batch by itself, as BatchNorm does: "
            f"there are {count} in a step, which are not joined as those of processes"
        )
    names = [
        f"'{name}'"
        for name, parameter in program.module.named_parameters()
        if name.startswith(f"{LOSS}.") and parameter.requires_grad
    ]
    weights = [weight.requires_grad for weight in program.module.parameters()]
    if program.loss and weights and not any(weights):
        notes.append("nothing is trained: all parameters have requires_grad=False")
    if names:
        notes.append(
            f"the loss has parameters of its own, {show_some(names, 1)}: optimizer() "
            "gets them, too, so they are trained. If they should stay as they are "
            "(those of a pretrained network), call requires_grad_(False) for them"
        )
    return notes


def optimizer_note(program: Program) -> list[str]:
    """Say that an optimizer would need all parameters, where no rank has them.

    Raises:
        GemscError: it fails for what a rank has; or stages on other ranks share one,
            whose copies it would make differ.
    """
    placement, stages = program.require_placement(), program.require_stages()
    owned = owned_tensors(program)
    by_rank = defaultdict[int, list[str]](list)
    for stage in stages:
        for rank in placement.ranks_of(stage.index):
            by_rank[rank] += owned[stage.index]
    sets = tuple(tuple(dict.fromkeys(names)) for names in by_rank.values())
    for names in sets:
        program.try_optimizer(names)
    stages_of = Counter(r for s in stages for r in placement.ranks_of(s.index))
    is_cut = program.shards or program.shard != "off"
    if not is_cut and min(stages_of.values()) == len(stages):
        return []
    if not (together := program.updated_together(() if is_cut else sets)):
        return []
    difference = max(together.values())
    shared = shared_parameters(program, owned)
    for name, held in shared.items() if program.shard == "off" else ():
        ranks = {frozenset(placement.ranks_of(stage)) for stage in held}
        if name in together and len(ranks) > 1:
            raise GemscError(
                f"stages {' and '.join(map(str, held))} share '{name}', of which the "
                "copies would not stay alike: optimizer() looks at several parameters "
                "at once, counts them, or draws random numbers (without others they "
                f"step differently, by {difference:.0e})",
                help="use --shard-optimizer: then one rank updates each row, for all",
            )
    return [
        "optimizer() looks at several parameters at once, counts them, or draws random "
        f"numbers: without others they step differently, by {difference:.0e}. It gets "
        "what its rank has only, so weights need not be those of one process. Clip by "
        "the norm of all gradients with `gemsc run --clip-norm`, and choose rates by "
        "names, not numbers"
    ]


def unfused_note(
    program: Program, state_bytes: int, step_seconds: float, hardware: Hardware
) -> list[str]:
    """Say what a fused optimizer would save, where that is worth a line."""
    name, saved = program.unfused_optimizer, UNFUSED_SECONDS * state_bytes
    if not name or hardware.device.asynchronous or saved < WORTH_IT * step_seconds:
        return []
    return [
        f"{name} is about six times as fast on a CPU with {FUSED}, which would save "
        f"about {show_seconds(saved)} of each step: give it to {name}"
    ]
