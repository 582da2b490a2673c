"""What a graph takes on a device that several processes share; it changes nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from gemsc.base.fingerprint import fingerprint
from gemsc.costs.hardware import Device
from gemsc.costs.sharing import SharedDevice
from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.passes.annotate import Annotate


def share(
    program: Program, device: Device, micro_batches: int = 1, ranks: int = 1
) -> SharedDevice:
    """Return what processes that each hold all of a program take on a device.

    `ranks` are those of one replica, for which gains may have been measured.

    What launches take is what a device without kernels takes, what its kernels take is
    that of one without overheads, and what they fill that of one which the smallest
    operator fills.
    """
    bare = replace(device, forward_overhead=0.0, backward_overhead=0.0)
    endless = {dtype: inf for dtype in device.peak_flops}
    instant = replace(device, peak_flops=endless, memory_bandwidth=inf, fit={})
    weights = sum(parameter.nbytes for parameter in program.module.parameters())
    name = _name(program, weights, micro_batches, ranks)
    rates = device.sharing.get(name, {})
    return SharedDevice(
        name=name,
        rates={int(count): rate for count, rate in rates.items()},
        launch=micro_batches * _seconds(program, instant),
        kernels=micro_batches * _seconds(program, bare),
        full=micro_batches * _seconds(program, replace(bare, half_flops=0.0)),
        sum_seconds=2 * device.host_seconds(weights),
    )


def _name(program: Program, weights: int, micro_batches: int, ranks: int) -> str:
    """Return a name that says, on any machine, what one step computes."""
    facts = [meta.facts(node) for node in program.compute_nodes]
    work = sum(f.flops for f in facts), sum(f.saved_bytes for f in facts)
    return f"{program.name}-{fingerprint(repr((*work, weights, micro_batches, ranks)))}"


def _seconds(program: Program, device: Device) -> float:
    nodes = Annotate(device=device).apply(program).compute_nodes
    facts = [meta.facts(node) for node in nodes]
    return sum(fact.forward_seconds + fact.backward_seconds for fact in facts)
