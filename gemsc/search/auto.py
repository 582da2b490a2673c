"""What `auto` takes: all that agrees with the options is assessed, the best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.planner.ending import after_backward, reduced_bytes
from gemsc.planner.fitting import Scheduled
from gemsc.planner.predict import micro_batch_size, talking
from gemsc.planner.traffic import step_traffic
from gemsc.search.advice import nothing_fits, what_fits
from gemsc.search.candidates import Candidate, alternatives, is_open, ranked

Stage = Callable[..., Scheduled]  # of options; `every_tile`: not two of them only


def settled(
    options: CompileOptions, sizes: tuple[int, ...], most_branches: int, stage: Stage
) -> tuple[tuple[Candidate, ...], CompileOptions]:
    """Return what was compared where something is `auto`, and the options to take.

    `sizes` are those of the image that tiles split, `most_branches` the model's.
    """
    for name in ("recompute", "offload"):
        if "auto" in getattr(options, name) and options.device_memory is None:
            raise GemscError(
                f"--{name} auto needs to know how much memory a rank has",
                help="add --device-memory 16GiB",
            )
    if not is_open(options):
        return (), options
    candidates = search(options, sizes, most_branches, stage)
    return candidates, candidates[0].options


def search(
    options: CompileOptions, sizes: tuple[int, ...], most_branches: int, stage: Stage
) -> tuple[Candidate, ...]:
    """Return all that agrees with the options, best first.

    What does not fit the memory cap is tried again with the optimizer's state shared
    out over replicas, with some blocks recomputed, and with both.

    Raises:
        GemscError: nothing fits; says what would.
    """
    tried = alternatives(options, sizes, most_branches)
    found = [assess(each, stage) for each in tried]
    large = [o for o in map(_sharding, found) if o is not None]
    found += [c for c in (assess(o, stage) for o in large) if not c.problem]
    smaller = [each.options for each in found if each.may_recompute()]
    found += [assess(replace(o, recompute=("auto",)), stage) for o in smaller]
    found = ranked(found)
    while options.open_splits and found[0].fits():
        exact = assess(found[0].options, stage, every_tile=True)
        found[0] = exact
        if exact.fits():
            break
        found = ranked(found)
    if not found[0].fits():
        raise nothing_fits(found, lambda other: assess(other, stage))
    return tuple(found)


def _sharding(found: Candidate) -> CompileOptions | None:
    """Return the options of what is too large, with its optimizer's state shared."""
    if found.options.shard_optimizer or not found.is_too_large():
        return None
    return replace(found.options, shard_optimizer=True)


@contextmanager
def telling_what_fits(options: CompileOptions, stage: Stage) -> Iterator[None]:
    """Let the error of a program that needs too much memory name what would fit."""
    try:
        yield
    except GemscError as error:
        if options.device_memory is not None:
            found = assess(options, stage)
            if found.is_too_large():
                error.help = what_fits(found, lambda o: assess(o, stage)) or error.help
        raise


def assess(
    options: CompileOptions, stage: Stage, *, every_tile: bool = False
) -> Candidate:
    """Return what is predicted for one choice: by two tiles of a grid, or by all."""
    uncapped = replace(options, device_memory=None)
    try:
        done = stage(uncapped, every_tile=every_tile)
    except GemscError as error:
        return Candidate(options, problem=error.message)
    if options.rank_memory and max(done.timeline.peak_bytes) > options.rank_memory:
        with suppress(GemscError):  # there may be an order that holds less at a time
            done = stage(options, every_tile=every_tile)
    peaks = done.timeline.peak_bytes
    first, hardware = done.tiles[0], read_hardware(options.hardware)
    sums = reduced_bytes(first, done.task, options.data)
    ends = after_backward(first, done.task, done.timeline, options.data, hardware)
    highest = max(range(len(peaks)), key=lambda group: peaks[group])
    size = micro_batch_size(done.program)
    sent = step_traffic(done.tiles, done.task)
    return Candidate(
        options,
        seconds=done.timeline.makespan + ends.seconds,
        samples=options.data * sum(done.task.micro_batches) * size,
        micro_batch_size=size,
        peak_bytes=peaks[highest],
        activation_bytes=done.timeline.peak_activation_bytes[highest],
        bubble=done.timeline.bubble,
        talking=_talking_share(done, hardware),
        ending=ends.seconds,
        sent_bytes=sent.message_bytes + sent.sum_bytes + sum(sums),
    )


def _talking_share(done: Scheduled, hardware: Hardware) -> float:
    """Return the share of a step in which ranks wait for others of their stage."""
    first = done.tiles[0]
    each = sum(
        sum(talking(first, stage, hardware.network)) for stage in first.require_stages()
    )
    total = done.timeline.makespan * len(done.timeline.ranks)
    return sum(done.task.micro_batches) * each / total if total else 0.0
