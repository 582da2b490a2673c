"""Seconds of one kernel on one device: the fitted function, or else a roofline."""

from __future__ import annotations

from gemsc.costs.hardware import Device
from gemsc.costs.operators import family
from gemsc.ir.work import Work

MULTIPLIES = frozenset({"convolution", "matmul", "attention"})


def seconds(device: Device, work: Work) -> float:
    """Return the predicted time of one kernel, without the device's overheads.

    Where the device has a `fit` for the kind: the sum of its coefficients times the
    features, those of operations scaled by the peaks of the dtypes.
    """
    fitted = device.fit.get(work.kind) or device.fit.get(family(work.kind))
    fitted = fitted or device.fit.get(work.kind.replace("-unfolded", ""))
    if fitted is None:
        return roofline(device, work)
    slower = _peak(device, "float32") / _peak(device, work.dtype)
    return sum(
        each * work.features.get(name, 0.0) * (slower if "flops" in name else 1.0)
        for name, each in fitted.items()
    )


def roofline(device: Device, work: Work) -> float:
    """Return the longer of computing and moving (Williams et al. 2009).

    computing = (flops (1 + h/in + h/out) + half_flops) / (peak x efficiency)
    moving = bytes / (bandwidth x efficiency)

    with h = half_channels: half the efficiency at h channels, all of it at many; and
    half of it at half_flops operations.
    """
    kind = family(work.kind)
    features = work.features
    share = device.efficiency.get(kind, device.efficiency.get("other", 1.0))
    moved = features["read"] + features["written"]
    if kind not in MULTIPLIES or not features["flops"]:
        return moved / (device.memory_bandwidth * share)
    thin = features.get("flops_per_in", 0.0) + features.get("flops_per_out", 0.0)
    flops = features["flops"] + device.half_channels * thin + device.half_flops
    dtype = work.dtype
    if kind == "convolution" and dtype == "float32" and "tf32" in device.peak_flops:
        dtype = "tf32"
    copying = device.efficiency.get("copy", 1.0)
    return max(
        flops / (_peak(device, dtype) * share),
        moved / (device.memory_bandwidth * copying),
    )


def _peak(device: Device, dtype: str) -> float:
    """Return the peak of a dtype; of float32 if the file does not know it."""
    peaks = device.peak_flops
    return peaks.get(dtype) or peaks.get("float32") or max(peaks.values())
