"""The cores of this machine: how many there are, how processes take turns on them."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

__all__ = ["SLICE_SECONDS", "num_cores", "set_time_slice"]

# For ranks that take turns on a core: they find its caches cold after every turn. Linux
# grants longer ones since version 6.12; the share of the core stays the same.
SLICE_SECONDS = 0.05
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ORDINARY = (0, 3)  # SCHED_OTHER and SCHED_BATCH


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of Linux (man 2 sched_setattr)."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),  # of an ordinary process: the slice, in ns
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_time_slice(seconds: float) -> float | None:
    """Ask for turns of this length on a core; return the length granted.

    Holds for this thread and those it starts. None where the system has no such thing,
    or the user gave the process a special policy.
    """
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return None
    setting, getting = calls
    system = ctypes.CDLL(None).syscall
    attributes = _Attributes()
    size = ctypes.sizeof(attributes)
    if system(getting, 0, ctypes.byref(attributes), size, 0):
        return None
    if attributes.policy not in _ORDINARY:
        return None
    attributes.runtime = round(seconds * 1e9)
    system(setting, 0, ctypes.byref(attributes), 0)
    system(getting, 0, ctypes.byref(attributes), size, 0)
    return attributes.runtime / 1e9 or None  # older versions say 0
