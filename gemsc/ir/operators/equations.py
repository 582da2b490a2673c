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
from dataclasses import dataclass
from functools import lru_cache

_TOKEN = re.compile(r"\*?\w+[+!]?|\((?:\w+[+!]? ?)+\)")


@dataclass(frozen=True, slots=True)
class Token:
    """One word of an equation: a letter, `*x`, or the letters of a product."""

    letters: tuple[str, ...]
    star: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """The words of each operand and of the result, and the letters that are marked."""

    operands: tuple[tuple[Token, ...], ...]
    result: tuple[Token, ...]
    summed: frozenset[str]
    whole: frozenset[str]


@lru_cache(maxsize=256)
def parse(text: str) -> Parsed:
    """Return the parts of an equation."""
    left, _, right = text.partition("->")
    summed, whole = (frozenset(re.findall(rf"(\w+)\{mark}", text)) for mark in "+!")
    operands = tuple(map(_tokens, left.split(",")))
    return Parsed(operands, _tokens(right), summed, whole)


def letters_of(tokens: tuple[Token, ...], dims: int) -> tuple[str, ...]:
    """Return a name for each of an operand's dimensions: `*b` are b1 and b0.

    A product has the letters of all its factors.
    """
    names: list[str] = []
    count = dims - sum(not token.star for token in tokens)
    for token in tokens:
        name = " ".join(token.letters)
        places = reversed(range(count))
        names += [f"{name}{place}" for place in places] if token.star else [name]
    return tuple(names)


def _tokens(side: str) -> tuple[Token, ...]:
    words = [re.sub(r"[+!]", "", word) for word in _TOKEN.findall(side)]
    return tuple(
        Token((word[1:],), star=True)
        if word.startswith("*")
        else Token(tuple(word.strip("()").split()))
        for word in words
    )
