"""Solve equations: unify the dimensions of an operation's operands as its row says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gemsc.ir.operators.equations import Token, parse
from gemsc.passes.shards.factors import Dim, Dims, freeze, fresh, size_of, take, unify


@dataclass
class Roles:
    """The dimensions of one operation: by letter, and which of them are summed over.

    `result` are those of its value; of a tuple of values, those of each.
    """

    letters: dict[str, Dim] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    result: Dims = field(default_factory=list)
    results: list[Dims] | None = None


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
    parsed = parse(text)
    env = _Bound(reason, dict(sizes or {}))
    for tokens, dims in zip(parsed.operands, operands, strict=True):
        if dims is not None:
            env.bind(tokens, dims)
    for letter in env.meant_by(parsed.whole):
        freeze(env.letters[letter], reason)
    roles = Roles(env.letters, set(env.meant_by(parsed.summed)))
    roles.result = env.built(parsed.result, shape)
    return roles


class _Bound:
    """Letters and what they are bound to so far."""

    def __init__(self, reason: str, sizes: dict[str, int]) -> None:
        self.letters: dict[str, Dim] = {}
        self.reason = reason
        self.sizes = sizes
        self.stars: dict[str, int] = {}  # how many dimensions each stands for

    def bind(self, tokens: Sequence[Token], dims: Dims) -> None:
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
                result.append([f for each in token.letters for f in self.letters[each]])
            else:
                result.append(fresh(shape[len(result)]))
        return result
