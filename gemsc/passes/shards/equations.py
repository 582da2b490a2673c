"""Solve equations: unify the dimensions of an operation's operands as its row says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemsc.ir.operators.equations import Parsed, Token, letters_of, parse
from gemsc.passes.shards.factors import (
    Dim,
    Dims,
    freeze,
    fresh,
    is_frozen,
    let_take,
    size_of,
    take,
    takes,
    unify,
)


@dataclass
class Roles:
    """The dimensions of one operation: by letter, and which of them are summed over.

    `result` are those of its value; of a tuple of values, those of each. `taken` are
    those of operands that are whole, of which a rank takes its part here: by operand.
    """

    letters: dict[str, Dim] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    result: Dims = field(default_factory=list)
    results: list[Dims] | None = None
    taken: dict[Any, Dims] = field(default_factory=dict)


def solve(
    text: str,
    operands: Sequence[Dims | None],
    shape: tuple[int, ...],
    reason: str,
    sizes: Mapping[str, int] | None = None,
    values: Collection[int] = (),
    parameters: Collection[int] = (),
    takers: Collection[str] = (),
) -> Roles:
    """Unify the dimensions of operands as an equation says; return all of them.

    Operands that are None were not given. `shape` is that of the result, `sizes` are
    those of all letters of a product but its last. `reason` says where a dimension
    must stay whole. The operands `values` may be whole where another's dimension may
    be cut: then a rank takes its part of them. It does so by the letters `takers`, too,
    and by those which one of `parameters` has beside a value and the result.
    """
    parsed = parse(text)
    env = _Bound(reason, dict(sizes or {}), values, takers)
    for number in parameters:
        for dim in _beside_values(parsed, operands, number, values):
            let_take(dim)
    for number, (tokens, dims) in enumerate(
        zip(parsed.operands, operands, strict=True)
    ):
        if dims is not None:
            env.bind(tokens, dims, number)
    for letter in env.meant_by(parsed.whole):
        freeze(env.letters[letter], reason)
    roles = Roles(env.letters, set(env.meant_by(parsed.summed)))
    roles.result = env.built(parsed.result, shape)
    for number, place, letter in env.taken:
        taken = roles.taken.setdefault(number, list(operands[number] or ()))
        taken[place] = env.letters[letter]
    return roles


def _beside_values(
    parsed: Parsed,
    operands: Sequence[Dims | None],
    number: int,
    values: Collection[int],
) -> list[Dim]:
    """Return the dimensions of an operand that a value and the result have too."""
    names = [
        letters_of(tokens, len(dims)) if dims is not None else ()
        for tokens, dims in zip(parsed.operands, operands, strict=True)
    ]
    others = {name for place in values for name in names[place]}
    stars = {token.letters[0] for token in parsed.result if token.star}
    kept = {letter for token in parsed.result for letter in token.letters} - stars
    return [
        dim
        for name, dim in zip(names[number], operands[number] or (), strict=True)
        if name in others and (name in kept or name.rstrip("0123456789") in stars)
    ]


class _Bound:
    """Letters and what they are bound to so far."""

    def __init__(
        self,
        reason: str,
        sizes: dict[str, int],
        values: Collection[int],
        takers: Collection[str],
    ) -> None:
        self.letters: dict[str, Dim] = {}
        self.values, self.takers = values, takers
        self.holders: dict[str, list[tuple[int, int]]] = {}  # operands' dimensions
        self.taken: list[tuple[int, int, str]] = []
        self.reason = reason
        self.sizes = sizes
        self.stars: dict[str, int] = {}  # how many dimensions each stands for

    def bind(self, tokens: Sequence[Token], dims: Dims, number: int) -> None:
        """Bind the letters of one operand."""
        count = len(dims) - sum(not token.star for token in tokens)
        remaining = list(dims)
        for token in tokens:
            if token.star:
                (name,) = token.letters
                self.stars[name] = max(count, self.stars.get(name, 0))
                for place in reversed(range(count)):  # from the last: they broadcast
                    where = number, len(dims) - len(remaining)
                    self._meet(f"{name}{place}", remaining.pop(0), where)
            elif len(token.letters) == 1:
                where = number, len(dims) - len(remaining)
                self._meet(token.letters[0], remaining.pop(0), where)
            else:
                self._product(token.letters, remaining.pop(0))

    def _meet(self, letter: str, dim: Dim, where: tuple[int, int]) -> None:
        """Let a whole operand be taken in parts, or a letter be the same dimension."""
        whole = is_frozen(dim) and where[0] in self.values
        if whole and letter in self.takers and not self.letters.get(letter):
            self.letters[letter] = fresh(size_of(dim))
            let_take(self.letters[letter])
        known = self.letters.get(letter) or []
        alike = size_of(known) == size_of(dim)
        if alike and whole and takes(known):
            self.taken.append((*where, letter))
            return
        holders = self.holders.setdefault(letter, [])
        are_values = all(number in self.values for number, _ in holders)
        if alike and is_frozen(known) and takes(dim) and are_values:
            self.taken += [(*holder, letter) for holder in holders]
            holders.clear()
            self.letters[letter] = dim
        self._same(letter, dim)
        if dim:
            holders.append(where)

    def _same(self, letter: str, dim: Dim) -> None:
        known = self.letters.get(letter)
        if not known:  # none yet, or of size 1
            self.letters[letter] = dim
        elif size_of(known) == size_of(dim):
            unify(known, dim, self.reason)
        elif dim:
            freeze([*known, *dim], self.reason)

    def _product(self, letters: Sequence[str], dim: Dim) -> None:
        for letter in letters:
            self.holders.setdefault(letter, []).append((-1, -1))  # never taken
        for letter in letters[:-1]:
            outer, dim = take(dim, self.sizes[letter], self.reason)
            self._same(letter, outer)
        self._same(letters[-1], dim)

    def meant_by(self, marked: Iterable[str]) -> list[str]:
        """Return the letters that a mark is about: of `*x` all that it stands for."""
        letters = []
        for name in marked:
            stands_for = [f"{name}{place}" for place in range(self.stars.get(name, 0))]
            letters += stands_for or [name]
        return [letter for letter in letters if letter in self.letters]

    def built(self, tokens: Sequence[Token], shape: tuple[int, ...]) -> Dims:
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
                result.append([f for key in token.letters for f in self.letters[key]])
            else:
                result.append(fresh(shape[len(result)]))
        return result
