"""Numbers for people: bytes, operations, seconds and counts with their units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil

from gemsc.errors import GemscError

BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
DECIMAL = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
TIMES = ("us", "ms", "s")
SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def show_bytes(count: float) -> str:
    """Return for example `40.1 MiB`."""
    return _show(count, 1024, BINARY, (0, 1, 1, 1, 1))


def show_enough_bytes(count: int) -> str:
    """Return the same, rounded up: what is shown suffices where `count` is needed."""
    unit = 1
    while count >= 1024 * unit and unit < 1024**4:
        unit *= 1024
    tenth = unit / 10 if unit > 1 else 1
    return show_bytes(ceil(count / tenth) * tenth)


def show_flops(count: float) -> str:
    """Return for example `1.9 GFLOP`."""
    return _show(count, 1000, DECIMAL, (0, 1, 1, 1, 1, 1))


def show_seconds(seconds: float) -> str:
    """Return for example `3.2 ms`."""
    return _show(seconds * 1e6, 1000, TIMES, (0, 1, 2))


def show_long(seconds: float) -> str:
    """Return for example `45 s`, `10 min` or `2.5 h`: the form that people say."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{round(seconds / size, 1):g} {unit}"
    return f"{seconds:.0f} s"


def show_micro_batches(count: int) -> str:
    """Return for example `1 micro-batch` or `4 micro-batches`."""
    return f"{count} micro-batch{'es' * (count != 1)}"


def show_some(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Return for example `a, b and 3 more`: the first ones, and how many are left."""
    more = len(names) - most
    return between.join(names[:most]) + f" and {more} more" * (more > 0)


def _show(
    value: float, base: int, units: tuple[str, ...], digits: tuple[int, ...]
) -> str:
    """Return the number, rounded, in the first unit of which there are few enough."""
    shown = ""
    for unit, count in zip(units, digits, strict=True):
        shown = f"{value:.{count}f} {unit}"
        if abs(round(value, count)) < base:
            break
        value /= base
    return shown


def parse_bytes(text: str) -> int:
    """Read `16GiB`, `512 MiB`, `2GB`, `4096B` or a plain number of bytes.

    Raises:
        GemscError: the text is not a size, or a number so small that its unit must
            have been forgotten.
    """
    pattern = r"\s*([0-9.]+)\s*(?:([KMGT])(i?))?(B?)\s*"
    match = re.fullmatch(pattern, text, re.IGNORECASE)
    try:
        if match is None:
            raise ValueError(text)
        power = " KMGT".index((match[2] or " ").upper())
        base = 1024 if match[3] or not match[2] else 1000
        count = int(float(match[1]) * base**power)
    except ValueError:
        raise GemscError(
            f"'{text}' is not a size", help="write for example 16GiB or 512MiB"
        ) from None
    if count < 2**20 and not (match[2] or match[4]):
        raise GemscError(
            f"'{text}' has no unit: it would be {count} bytes",
            help=f"write for example {text.strip()}GiB, {text.strip()}MiB, or "
            f"{text.strip()}B if bytes are meant",
        )
    return count


def parse_seconds(text: str) -> float:
    """Read `60s`, `1.5 min`, `2h`, `500ms`, `1d` or a plain number of seconds.

    Raises:
        GemscError: the text is not a time.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in SECONDS:
        raise GemscError(
            f"'{text}' is not a time", help="write for example 60s or 10min"
        )
    return float(match[1]) * SECONDS[match[2]]


def show_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 4-7` of a group."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
