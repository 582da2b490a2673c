"""Numbers as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemsc.base.units import (
    parse_bytes,
    show_bytes,
    show_enough_bytes,
    show_flops,
    show_seconds,
)
from gemsc.errors import GemscError


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (40.1 * 2**20, "40.1 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_have_binary_units(count: float, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (1900000000, "1.9 GFLOP"),
        (999_960, "1.0 MFLOP"),
        (2.5e15, "2.5 PFLOP"),
    ],
)
def test_operations_have_decimal_units(count: float, text: str) -> None:
    assert show_flops(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (6e-6, "6 us"),
        (0.0032, "3.2 ms"),
        (0.0009996, "1.0 ms"),
        (0.99996, "1.00 s"),
        (12.345, "12.35 s"),
    ],
)
def test_seconds_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GiB", 16 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("2 g", 2 * 10**9),
        ("1.5KiB", 1536),
        ("2097152", 2**21),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "lots", "1.2.3GB", ".", "-1", "5 XB", "GiB", "1 iB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(GemscError, match="is not a size") as caught:
        parse_bytes(text)
    assert caught.value.help


@pytest.mark.parametrize("text", ["16", "4096", "1048575"])
def test_a_small_number_needs_its_unit(text: str) -> None:
    with pytest.raises(GemscError, match=f"'{text}' has no unit") as caught:
        parse_bytes(text)
    assert f"{text}GiB" in str(caught.value.help)
    assert parse_bytes(f"{text}B") == int(text)


@given(st.integers(0, 2**50))
def test_what_is_enough_suffices(count: int) -> None:
    enough = parse_bytes(show_enough_bytes(count))
    assert count <= enough <= max(1.11 * count, count + 103)


@given(st.integers(0, 2**50))
def test_what_is_shown_reads_back_to_five_percent(count: int) -> None:
    assert parse_bytes(show_bytes(count)) == pytest.approx(count, rel=0.06, abs=1)
