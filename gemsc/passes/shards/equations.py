"""Equations: which dimensions of an operation's operands are the same, and which sum.

    *b i+, o i, o -> *b o          a linear layer: input, weight, bias -> result

Operands are separated by commas. A letter names a dimension; the same letter is the
same dimension; `*b` stands for any number of dimensions, aligned from the last and
broadcast; `(g c)` is a dimension that is a product, its outermost factor first. Marked
`+` is summed over: if it is cut, each rank has an addend of the result. Marked `!` must
stay whole. What is not marked may be cut, and the result is cut alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from gemsc.passes.shards.factors import Dim, Dims, freeze, fresh, size_of, take, unify

_TOKEN = re.compile(r"\*?\w+[+!]?|\((?:\w+[+!]? ?)+\)")


@dataclass
class Roles:
    """The dimensions of one operation: by letter, and which of them are summed over.

    `result` are those of its value; of a tuple of values, those of each.
    """

    letters: dict[str, Dim] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    result: Dims = field(default_factory=list)
    results: list[Dims] | None = None


@dataclass(frozen=True)
class _Token:
    """One word of an equation: a letter, `*x`, or the letters of a product."""

    letters: tuple[str, ...]
    star: bool = False


def solve(
    text: str,
    operands: Sequence[Dims | None],
    shape: tuple[int, ...],
    reason: str,
    sizes: Mapping[str, int] | None = None,
) -> Roles:
    """Unify the dimensions of operands as an equation says; return all of them.

    Operands that are None were not given. `shape` is that of the result, `sizes` are
    those of all letters of a product but its last. `reason` says where a dimension
    must stay whole.
    """
    given, result, summed, whole = _parsed(text)
    env = _Bound(reason, dict(sizes or {}))
    for tokens, dims in zip(given, operands, strict=True):
        if dims is not None:
            env.bind(tokens, dims)
    for letter in env.meant_by(whole):
        freeze(env.letters[letter], reason)
    roles = Roles(env.letters, set(env.meant_by(summed)))
    roles.result = env.built(result, shape)
    return roles


class _Bound:
    """Letters and what they are bound to so far."""

    def __init__(self, reason: str, sizes: dict[str, int]) -> None:
        self.letters: dict[str, Dim] = {}
        self.reason = reason
        self.sizes = sizes
        self.stars: dict[str, int] = {}  # how many dimensions each stands for

    def bind(self, tokens: Sequence[_Token], dims: Dims) -> None:
        """Bind the letters of one operand."""
        count = len(dims) - sum(not token.star for token in tokens)
        rest = list(dims)
        for token in tokens:
            if token.star:
                (name,) = token.letters
                self.stars[name] = max(count, self.stars.get(name, 0))
                for place in reversed(range(count)):  # from the last: they broadcast
                    self._same(f"{name}{place}", rest.pop(0))
            elif len(token.letters) == 1:
                self._same(token.letters[0], rest.pop(0))
            else:
                self._product(token.letters, rest.pop(0))

    def _same(self, letter: str, dim: Dim) -> None:
        known = self.letters.get(letter)
        if not known:  # none yet, or of size 1
            self.letters[letter] = dim
        elif size_of(known) == size_of(dim):
            unify(known, dim, self.reason)
        elif dim:
            freeze([*known, *dim], self.reason)

    def _product(self, letters: Sequence[str], dim: Dim) -> None:
        for letter in letters[:-1]:
            outer, dim = take(dim, self.sizes[letter], self.reason)
            self._same(letter, outer)
        self._same(letters[-1], dim)

    def meant_by(self, marked: Iterable[str]) -> list[str]:
        """Return the letters that a mark is about: of `*x` all that it stands for."""
        found = []
        for name in marked:
            stands_for = [f"{name}{place}" for place in range(self.stars.get(name, 0))]
            found += stands_for or [name]
        return [letter for letter in found if letter in self.letters]

    def built(self, tokens: Sequence[_Token], shape: tuple[int, ...]) -> Dims:
        """Return the dimensions of the result; letters of its own are new ones."""
        result: Dims = []
        for token in tokens:
            if token.star and token.letters[0] in self.stars:
                (name,) = token.letters
                places = reversed(range(self.stars[name]))
                result += [self.letters[f"{name}{place}"] for place in places]
            elif token.star:
                count = len(shape) - (len(tokens) - 1)
                result += map(fresh, shape[len(result) :][:count])
            elif all(letter in self.letters for letter in token.letters):
                result.append([f for each in token.letters for f in self.letters[each]])
            else:
                result.append(fresh(shape[len(result)]))
        return result


@lru_cache(maxsize=256)
def _parsed(
    text: str,
) -> tuple[tuple[tuple[_Token, ...], ...], tuple[_Token, ...], set[str], set[str]]:
    left, _, right = text.partition("->")
    summed: set[str] = set()
    whole: set[str] = set()
    for mark, found in (("+", summed), ("!", whole)):
        found.update(re.findall(rf"(\w+)\{mark}", text))

    def tokens(side: str) -> tuple[_Token, ...]:
        words = [re.sub(r"[+!]", "", word) for word in _TOKEN.findall(side)]
        return tuple(
            _Token((word[1:],), star=True)
            if word.startswith("*")
            else _Token(tuple(word.strip("()").split()))
            for word in words
        )

    return tuple(map(tokens, left.split(","))), tokens(right), summed, whole
