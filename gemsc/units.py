"""Numbers for people: bytes, operations and seconds with their units."""

from __future__ import annotations

import re

from gemsc.errors import GemscError

__all__ = ["parse_bytes", "show_bytes", "show_flops", "show_seconds"]

BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def show_bytes(count: float) -> str:
    """Return for example `40.1 MiB`."""
    for unit in BINARY[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {BINARY[-1]}"


def show_flops(count: float) -> str:
    """Return for example `1.9 GFLOP`."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "FLOP" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PFLOP"


def show_seconds(seconds: float) -> str:
    """Return for example `3.2 ms`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def parse_bytes(text: str) -> int:
    """Read `16GiB`, `512 MiB`, `2GB` or a plain number of bytes.

    Raises:
        GemscError: the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    try:
        if match is None:
            raise ValueError(text)
        power = " KMGT".index(match[2].upper() or " ")
        base = 1024 if match[3] or not match[2] else 1000
        return int(float(match[1]) * base**power)
    except ValueError:
        raise GemscError(
            f"'{text}' is no size", help="write for example 16GiB or 512MiB"
        ) from None
