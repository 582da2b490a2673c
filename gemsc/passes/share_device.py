"""What a graph takes on a device that several processes share; it changes nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from gemsc.costs.hardware import Device
from gemsc.costs.sharing import SharedDevice
from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.passes.annotate import Annotate

__all__ = ["share"]


def share(program: Program, device: Device, micro_batches: int = 1) -> SharedDevice:
    """Return what processes that each hold all of a program take on a device.

    What launches take is what a device without kernels takes, what its kernels take is
    that of one without overheads, and what they fill that of one which the smallest
    operator fills.
    """
    bare = replace(device, forward_overhead=0.0, backward_overhead=0.0)
    endless = {dtype: inf for dtype in device.peak_flops}
    instant = replace(device, peak_flops=endless, memory_bandwidth=inf, fit={})
    weights = sum(parameter.nbytes for parameter in program.module.parameters())
    return SharedDevice(
        launch=micro_batches * _seconds(program, instant),
        kernels=micro_batches * _seconds(program, bare),
        full=micro_batches * _seconds(program, replace(bare, half_flops=0.0)),
        sum_seconds=2 * device.host_seconds(weights),
    )


def _seconds(program: Program, device: Device) -> float:
    nodes = Annotate(device=device).apply(program).compute_nodes
    facts = [meta.facts(node) for node in nodes]
    return sum(each.forward_seconds + each.backward_seconds for each in facts)
