"""Dimensions as products of factors, of which those that must be cut alike are one.

A fused projection of 384 features, seen as queries, keys and values of 4 heads:

    features 384                    [384]
    unflatten(-1, (3, 4, 32))       [3], [4], [32]  the features are [3, 4, 32] now
    weight of the output, 128       [4, 32]         once unified with the heads

A factor stands for all that is unified with it. When it is split, it is so in every
dimension, those unified earlier, too: ask `leaves` when all operations are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from gemsc.errors import InternalError


@dataclass(eq=False)
class Factor:
    """A factor of a dimension: what may be cut, and must be cut alike in all of them.

    `frozen` is the reason why it may not be cut, empty if it may. `joined` is the
    factor that stands for this one, `parts` are those it is split into, the outermost
    first. Only what `leaves` returns has neither. Of a value that is computed as a
    whole a rank `takes` its units where it meets such a factor: its experts' tokens.
    """

    size: int
    frozen: str = ""
    takes: bool = False
    joined: Factor | None = field(default=None, repr=False)
    parts: list[Factor] = field(default_factory=list, repr=False)


Dim = list[Factor]
"""A dimension: the product of its factors, the outermost first; [] for a size of 1."""
Dims = list[Dim]
"""The dimensions of a value."""


def fresh(size: int) -> Dim:
    """Return a dimension that is like no other."""
    if size == 0:
        return [Factor(0, "it is empty")]
    return [Factor(size)] if size > 1 else []


def leaves(dim: Dim) -> list[Factor]:
    """Return the factors that stand for a dimension now, the outermost first."""
    result = []
    for factor in dim:
        root = _root(factor)
        result += leaves(root.parts) if root.parts else [root]
    return result


def size_of(dim: Dim) -> int:
    """Return the number of elements along a dimension."""
    return prod(factor.size for factor in dim)


def freeze(dim: Dim, reason: str) -> None:
    """Let nothing of a dimension be cut; a reason given earlier stays."""
    for factor in leaves(dim):
        factor.frozen = factor.frozen or reason


def is_frozen(dim: Dim) -> bool:
    """Return whether nothing of a dimension may be cut."""
    return bool(dim) and all(factor.frozen for factor in leaves(dim))


def takes(dim: Dim) -> bool:
    """Return whether a rank takes its units of values that are whole."""
    return any(factor.takes and not factor.frozen for factor in leaves(dim))


def let_take(dim: Dim) -> None:
    """Let a rank take its units of a dimension of values that are whole."""
    for factor in leaves(dim):
        factor.takes = True


def unify(a: Dim, b: Dim, reason: str) -> None:
    """Let two dimensions be the same, factor by factor from the outermost.

    Where the sizes of their factors do not divide, both are frozen with `reason`.

    Raises:
        InternalError: they have different sizes.
    """
    if size_of(a) != size_of(b):
        raise InternalError(f"a dimension of {size_of(a)} is not one of {size_of(b)}")
    start = 0
    while len(ours := leaves(a)) > start and len(theirs := leaves(b)) > start:
        large, small = ours[start], theirs[start]
        if large.size < small.size:
            large, small = small, large
        if large.size == small.size:
            _join(large, small)
            start += 1
        elif small.size and large.size % small.size == 0:
            _split(large, small.size)
        else:
            freeze([*a, *b], reason)
            return


def take(dim: Dim, size: int, reason: str) -> tuple[Dim, Dim]:
    """Return the outer part of a dimension, of `size`, and the rest.

    Where no factors make up such a part, the dimension is frozen with `reason`, and the
    result has nothing to do with it.

    Raises:
        InternalError: `size` does not divide the dimension's.
    """
    whole = size_of(dim)
    if size < 1 or whole % size:
        raise InternalError(f"no part of {size} in a dimension of {whole}")
    parts = _outer(dim, size)
    if parts is None:
        freeze(dim, reason)
        return fixed(size, reason), fixed(whole // size, reason)
    return parts


def regroup(dims: Dims, shape: tuple[int, ...], reason: str) -> Dims:
    """Return the dimensions of a view: the same factors in order, in other groups.

    A run of dimensions into which no factors fit is frozen with `reason` on both sides,
    and new on the view's.

    Raises:
        InternalError: the view has another number of elements.
    """
    remaining = [factor for dim in dims for factor in dim]
    if size_of(remaining) != prod(shape):
        raise InternalError(f"{size_of(remaining)} elements are not viewed as {shape}")
    if 0 in shape:
        freeze(remaining, "it is empty")
        return [fixed(size, "it is empty") for size in shape]
    result: Dims = []
    while len(result) < len(shape):
        start = len(result)
        for stop in range(start + 1, len(shape) + 1):
            taken = _outer(remaining, prod(shape[start:stop]))
            if taken is not None:
                break
        assert taken is not None, "all of it fits"
        run, remaining = taken
        if stop == start + 1:
            result.append(run)
        else:
            freeze(run, reason)
            result += [fixed(size, reason) for size in shape[start:stop]]
    return result


def fixed(size: int, reason: str) -> Dim:
    """Return a dimension that is like no other, and stays whole."""
    dim = fresh(size)
    freeze(dim, reason)
    return dim


def _root(factor: Factor) -> Factor:
    while factor.joined is not None:
        factor = factor.joined
    return factor


def _join(a: Factor, b: Factor) -> None:
    """Let one leaf stand for another of its size, too."""
    if a is not b:
        a.frozen = a.frozen or b.frozen
        a.takes = a.takes or b.takes
        b.joined = a


def _split(factor: Factor, outer: int) -> None:
    """Split a leaf into `outer` times the rest."""
    sizes = outer, factor.size // outer
    factor.parts = [Factor(size, factor.frozen, factor.takes) for size in sizes]


def _outer(dim: Dim, size: int) -> tuple[Dim, Dim] | None:
    """Return the outermost factors with this product and the rest, or nothing."""
    taken: Dim = []
    remaining = leaves(dim)
    while size > 1:
        first, *remaining = remaining
        if first.size and size % first.size == 0:
            size //= first.size
            taken.append(first)
        elif first.size and first.size % size == 0:
            _split(first, size)
            outer, inner = first.parts
            return [*taken, outer], [inner, *remaining]
        else:
            return None
    return taken, remaining
