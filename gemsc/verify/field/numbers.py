"""Numbers of a finite field in float64: from -(p - 1) / 2 to (p - 1) / 2.

Products stay below 2^32 and sums of up to 2^18 of them below 2^50, so float64 has all
of them exactly; they are reduced after each operation. Infinities stay what they are:
masks have them.

A constant of the program that is no integer stands for the fraction with the smallest
denominator that rounds to it (0.1 is 1 / 10, so that 1 - 0.1 is 0.9), or, where there
is none with a small one, for a number drawn for its bits. (-c) is -c, and 24^(-1/2)
the square of 24^(-1/4).
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

# the largest below 2^17, but for 2^17 - 1, by which variances are divided
PRIMES = (131063, 131059, 131041)
LONGEST = 2**18  # products that may be added up before they are reduced
SMALL = 2**10  # integers up to this are counts: as exponents, indices and in order
_SMALL_DENOMINATORS = 10
_LARGEST = 2.0**50
_DENOMINATORS = 2**15
_SIMPLE = 2**10  # denominators of fractions that may be off by a rounding
_COUNTS = 2**24  # denominators of exact fractions: the elements that a mean is taken of
_EPS = float(np.finfo(np.float64).eps)
_ROUNDED = 2.0**-44  # off by this, if computed from numbers around 1
_INVERSES = {"back": "order", "log": "exp"}  # of one another


class NotDecidedError(Exception):
    """What this proof has no rule for; it names it."""


class Field:
    """Integers modulo a prime, and functions of them that are drawn by a key."""

    def __init__(self, p: int, key: int) -> None:
        self.p = p
        self.key = key
        self.half = p // 2

    # ------------------------------------------------------ numbers

    def reduced(self, t: Tensor) -> Tensor:
        """Reduce a tensor of integers below 2^50, in place."""
        return t.sub_((t * (1.0 / self.p)).round_().mul_(self.p))

    def of(self, t: Tensor) -> Tensor:
        """Return a tensor as numbers of the field, itself if it has them already."""
        if not t.is_floating_point():
            if t.is_complex():
                raise NotDecidedError("complex numbers")
            return self._whole(t.double())
        t = t.double()
        if not t.numel():
            return t
        low, high = (float(bound) for bound in torch.aminmax(t))
        if -self.half <= low and high <= self.half and torch.equal(t, t.round()):
            return t
        return self._whole(t)

    def number(self, value: float) -> float:
        """Return a number of the program as one of the field."""
        if isinstance(value, bool | int):
            value %= self.p
            return float(value - self.p if value > self.half else value)
        return float(self.of(torch.tensor(value, dtype=torch.float64)))

    def _whole(self, t: Tensor) -> Tensor:
        if bool(t.isnan().any()):
            raise NotDecidedError("a value that is not a number")
        given, infinite = t, t.isinf()
        t = given.masked_fill(infinite, 0.0)
        other = (t != t.round()) | (t.abs() >= _LARGEST)
        result = self.reduced(t.masked_fill(other, 0.0))
        if bool(other.any()):
            result[other] = self._constants(t[other])
        if bool(infinite.any()):
            result = torch.where(infinite, given, result)
        return result

    def _constants(self, t: Tensor) -> Tensor:
        distinct, back = np.unique(t.detach().numpy(), return_inverse=True)
        tops, bottoms, is_exact = _fractions(distinct, most=_COUNTS)
        # 1 - 1 / 3, off by its rounding, is 2 / 3
        close = _fractions(distinct, 2 * _EPS * np.abs(distinct), _SIMPLE)
        tops = np.where(close[2], close[0], tops)
        bottoms = np.where(close[2], close[1], bottoms)
        is_exact |= close[2]
        is_small = is_exact & (bottoms <= _DENOMINATORS)
        values, p = self._quotients(tops, bottoms), self.p
        # a square root of a fraction is the square of its own root, in attention
        size = np.abs(distinct)
        with np.errstate(over="ignore", under="ignore"):
            is_root = _fractions(size * size, 4 * _EPS * size * size)[2]
        is_small |= is_exact & ~is_root
        bits = np.where(is_root, np.sqrt(size), size).view(np.int64)
        drawn = _mixed(bits, self.key) % p
        drawn = np.where(is_root, drawn * drawn % p, drawn)
        drawn = np.where(distinct < 0, p - drawn, drawn) % p
        values = np.where(is_small, values, drawn)
        values = np.where(values > self.half, values - p, values)
        return torch.from_numpy(values.astype(np.float64)[back.reshape(-1)])

    def _quotients(self, tops: np.ndarray, bottoms: np.ndarray) -> np.ndarray:
        """Return the numbers of fractions, from 0 to p - 1."""
        inverse = self.table("inverse").numpy()
        products: np.ndarray = tops % self.p * inverse[(bottoms + self.half) % self.p]
        return products % self.p

    def fractions(self, t: Tensor) -> Tensor:
        """Return simple fractions, that were computed with rounding, as numbers."""
        tops, bottoms, is_small = _fractions(t.numpy().reshape(-1), _ROUNDED)
        if not is_small.all():
            raise NotDecidedError("fractions with large denominators")
        quotients = self._quotients(tops, bottoms).astype(np.float64)
        return self.reduced(torch.from_numpy(quotients).view(t.shape))

    def random(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return numbers that are drawn for a name."""
        seed = zlib.crc32(f"{self.p} {self.key} {name}".encode())
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(self.p, tuple(shape), generator=generator)
        return (numbers - self.half).double()

    # ---------------------------------------------------- functions

    def table(self, name: object) -> Tensor:
        """Return the values of a function, from that of -(p - 1) / 2 on."""
        return _table(self.p, self.key, str(name))

    def apply(self, name: object, t: Tensor) -> Tensor:
        """Return a function that is drawn for its name, of each number."""
        given, infinite = t, t.isinf()
        if bool(infinite.any()):
            t = t.masked_fill(infinite, 0.0)
        places = t.long().add_(self.half)
        result = self.table(name).take(places)
        if bool(infinite.any()):
            for end in (math.inf, -math.inf):
                result = result.masked_fill(given == end, self.number_of(name, end))
        return result

    def number_of(self, name: object, end: float) -> float:
        """Return what a function is at an infinity."""
        if str(name) == "inverse" or (str(name) == "exp" and end < 0):
            return 0.0
        if str(name) == "exp":
            return end
        return float(self.table(f"{name} at {end}")[0])

    def inverse(self, t: Tensor) -> Tensor:
        """Return 1 / t; that of 0 is 0."""
        return self.apply("inverse", t)

    def ordered(self, t: Tensor) -> Tensor:
        """Return the place of each number in an order.

        It is random, but that counts and simple fractions, as 0.5, stand as they do.
        """
        return self._through("order", t)

    def from_order(self, t: Tensor) -> Tensor:
        """Return the numbers that have these places."""
        return self._through("back", t)

    def _through(self, name: str, t: Tensor) -> Tensor:
        infinite = t.isinf()
        if not bool(infinite.any()):
            return self.table(name).take(t.long().add_(self.half))
        finite = self.table(name).take(t.masked_fill(infinite, 0.0).long() + self.half)
        return torch.where(infinite, t, finite)


@lru_cache(maxsize=256)
def _table(p: int, key: int, name: str) -> Tensor:
    half = p // 2
    if name == "inverse":
        result = np.zeros(p, dtype=np.int64)
        inverses = np.ones(p, dtype=np.int64)
        for n in range(2, p):
            inverses[n] = (p - (p // n) * inverses[p % n] % p) % p
        inverses[0] = 0
        result[:] = inverses[(np.arange(p) - half) % p]
        result = np.where(result > half, result - p, result)
        return torch.from_numpy(result.astype(np.float64))
    if name in _INVERSES:
        order = _table(p, key, _INVERSES[name]).long() + half
        back = torch.empty(p, dtype=torch.float64)
        back[order] = torch.arange(p, dtype=torch.float64) - half
        return back
    digest = hashlib.sha256(f"{p} {key} {name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    if name in _INVERSES.values():
        drawn = generator.permutation(p) - half
        if name == "order":
            known = _simple(p, _table(p, key, "inverse").long().numpy())
            drawn[known] = np.sort(drawn[known])
    else:  # never 0: what is divided by, or a scale, is none
        drawn = generator.integers(1, p, p) - half
        drawn = np.where(drawn > half, drawn - p, drawn)
        drawn[drawn == 0] = half
    return torch.from_numpy(drawn.astype(np.float64))


def _simple(p: int, inverse: np.ndarray) -> np.ndarray:
    """Return where the numbers of simple fractions stand in a table, by their size."""
    half, tops = p // 2, np.arange(-SMALL, SMALL + 1)
    places: dict[float, int] = {}
    for bottom in range(1, _SMALL_DENOMINATORS + 1):
        indices = (tops * inverse[bottom + half] + half) % p
        places.update(zip((tops / bottom).tolist(), indices.tolist(), strict=True))
    return np.array([places[value] for value in sorted(places)])


def _fractions(
    values: np.ndarray, allowed: Any = 0.0, most: int = _DENOMINATORS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numerators and denominators, and which are these when rounded."""
    tops, bottoms = np.zeros(values.shape, np.int64), np.ones(values.shape, np.int64)
    done = np.abs(values) >= 2.0**30
    is_small = np.zeros(values.shape, bool)
    remainder = np.where(done, 0.5, values)
    last = (np.ones_like(tops), np.zeros_like(tops))
    now = (np.floor(remainder).astype(np.int64), np.ones_like(tops))
    before = last
    for _ in range(24):
        with np.errstate(all="ignore"):
            quotient = now[0] / now[1]
        single = quotient.astype(np.float32).astype(np.float64)
        hit = ~done & ((np.abs(quotient - values) <= allowed) | (single == values))
        tops, bottoms = np.where(hit, now[0], tops), np.where(hit, now[1], bottoms)
        is_small |= hit
        done |= hit
        part = remainder - np.floor(remainder)
        done |= (part < 1e-12) | (now[1] > most)
        if done.all():
            break
        remainder = 1.0 / np.where(done, 2.0, part)
        whole = np.where(done | (remainder > 2**31), 0, remainder).astype(np.int64)
        now, before = (
            (whole * now[0] + before[0], np.maximum(whole * now[1] + before[1], 1)),
            now,
        )
    return tops, bottoms, is_small & (bottoms <= most)


def _mixed(bits: np.ndarray, key: int) -> np.ndarray:
    """Return numbers drawn for bits (splitmix64)."""
    with np.errstate(over="ignore"):
        z = bits.astype(np.uint64) + np.uint64(
            (key * 2 + 1) * 0x9E3779B97F4A7C15 % 2**64
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
