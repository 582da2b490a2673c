"""Dimensions are products of factors, and what must be cut alike is one factor."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod

import pytest

from gemsc.errors import InternalError
from gemsc.passes.shards.factors import (
    Dims,
    freeze,
    fresh,
    leaves,
    regroup,
    size_of,
    take,
    unify,
)


def sizes(dim):
    return [factor.size for factor in leaves(dim)]


def reasons(dim):
    return [factor.frozen for factor in leaves(dim)]


def dims_of(*shape: int) -> Dims:
    return [fresh(size) for size in shape]


def test_a_fused_projection_is_three_times_heads_times_width():
    (features,) = qkv = dims_of(384)
    three, heads, width = regroup(qkv, (3, 4, 32), "view")
    assert sizes(features) == [3, 4, 32]
    assert leaves(features) == leaves([*three, *heads, *width])
    merged = regroup([heads, width], (128,), "view")
    out = fresh(128)
    unify(out, merged[0], "linear")
    assert leaves(out) == leaves(heads) + leaves(width)
    assert reasons(features) == ["", "", ""]


def test_heads_that_share_keys_are_groups_times_repeats():
    keys, queries = fresh(2 * 16), fresh(8 * 16)
    groups, _ = regroup([keys], (2, 16), "view")
    heads, _ = regroup([queries], (8, 16), "view")
    (repeated,) = regroup([groups, fresh(4)], (8,), "repeat")
    unify(heads, repeated, "attention")
    assert sizes(queries) == [2, 4, 16]
    assert leaves(queries)[0] is leaves(keys)[0]


def test_a_split_holds_for_what_was_unified_before():
    first, second, third = fresh(24), fresh(24), fresh(24)
    unify(first, second, "add")
    unify(third, first, "add")
    regroup([second], (2, 3, 4), "view")
    for dim in first, third:
        assert leaves(dim) == leaves(second)
        assert sizes(dim) == [2, 3, 4]


def test_nothing_of_an_empty_view_is_cut():
    width = fresh(32)
    regroup([fresh(2), fresh(0), width], (0, 32), "view")
    assert reasons(width) == ["it is empty"]


def test_factors_that_do_not_divide_are_frozen_and_so_is_what_is_like_them():
    dim, other = fresh(12), fresh(12)
    unify(dim, other, "add")
    regroup([dim], (3, 4), "view")
    new = regroup([dim], (4, 3), "second view")
    assert reasons(other) == ["second view"] * 2
    assert [reasons(part) for part in new] == [["second view"]] * 2
    assert not set(leaves(new[0])) & set(leaves(dim))
    a, b = regroup(dims_of(12), (3, 4), ""), regroup(dims_of(12), (4, 3), "")
    unify([*a[0], *a[1]], [*b[0], *b[1]], "product")
    assert reasons([*a[0], *a[1], *b[0], *b[1]]) == ["product"] * 4


def test_what_fits_around_a_misfit_is_not_frozen():
    dims = dims_of(2, 3, 4, 5)
    view = regroup(dims, (2, 2, 6, 5), "view")
    assert leaves(view[0]) == leaves(dims[0])
    assert leaves(view[3]) == leaves(dims[3])
    assert [reasons(dim) for dim in dims] == [[""], ["view"], ["view"], [""]]
    assert [reasons(dim) for dim in view] == [[""], ["view"], ["view"], [""]]


def test_the_first_reason_stays_and_goes_to_parts_and_to_what_is_unified():
    dim, other = fresh(6), fresh(6)
    freeze(dim, "first")
    freeze(dim, "second")
    unify(other, dim, "add")
    regroup([other], (2, 3), "view")
    assert reasons(dim) == reasons(other) == ["first", "first"]


def test_the_outer_part_of_a_dimension():
    dim = fresh(24)
    groups, inner = take(dim, 4, "groups")
    assert (sizes(groups), sizes(inner)) == ([4], [6])
    assert leaves(dim) == leaves(groups) + leaves(inner)
    two, inner = take(dim, 8, "groups")
    assert (sizes(two), sizes(inner), sizes(dim)) == ([4, 2], [3], [4, 2, 3])
    assert [sizes(part) for part in take(dim, 1, "groups")] == [[], [4, 2, 3]]
    new, inner = take(dim, 6, "six groups")
    assert (sizes(new), sizes(inner)) == ([6], [4])
    assert set(reasons([*dim, *new, *inner])) == {"six groups"}


def test_a_factor_may_occur_twice_in_a_value():
    (tokens,) = dims_of(6)
    scores = [tokens, tokens]
    view = regroup(scores, (12, 3), "view")
    assert [sizes(dim) for dim in view] == [[2, 3, 2], [3]]
    assert leaves([*view[0], *view[1]]) == leaves(tokens) * 2


def test_sizes_of_one_and_of_nothing():
    assert fresh(1) == []
    assert regroup(dims_of(1, 6, 1), (6, 1), "view")[1] == []
    empty = dims_of(0, 6)
    assert [size_of(dim) for dim in regroup(empty, (2, 0, 3), "view")] == [2, 0, 3]
    assert [size_of(dim) for dim in take(empty[0], 2, "groups")] == [2, 0]
    unify(empty[0], [*fresh(6), *fresh(0)], "add")
    assert reasons(empty[0]) == ["it is empty"]


def test_other_sizes_are_an_error():
    with pytest.raises(InternalError, match="6 is not one of 4"):
        unify(fresh(6), fresh(4), "add")
    with pytest.raises(InternalError, match=r"24 elements are not viewed as \(5, 5\)"):
        regroup(dims_of(4, 6), (5, 5), "view")
    with pytest.raises(InternalError, match="no part of 4 in a dimension of 6"):
        take(fresh(6), 4, "groups")


PRIMES = [2, 2, 2, 3, 3, 5]


def random_shape(rng: random.Random, primes: list[int] = PRIMES) -> tuple[int, ...]:
    """Return sizes whose product is always the same, their primes in one order."""
    cuts = sorted(rng.choices(range(len(primes) + 1), k=rng.randrange(4)))
    ends = [0, *cuts, len(primes)]
    return tuple(prod(primes[a:b]) for a, b in pairwise(ends))


@pytest.mark.parametrize("seed", range(40))
def test_views_that_fit_go_forth_and_back(seed):
    rng = random.Random(seed)
    first = dims_of(*random_shape(rng))
    dims = first
    for _ in range(6):
        shape = random_shape(rng)
        dims = regroup(dims, shape, "view")
        assert tuple(map(size_of, dims)) == shape
    back = regroup(dims, tuple(map(size_of, first)), "view")
    assert [leaves(dim) for dim in back] == [leaves(dim) for dim in first]
    assert not any(reason for dim in back for reason in reasons(dim))


@pytest.mark.parametrize("seed", range(60))
def test_the_order_of_operations_does_not_matter(seed):
    """Also where some do not fit: then the same dimensions are frozen."""
    rng = random.Random(seed)
    primes = PRIMES if seed % 2 else [2, 3, 2, 3, 2]
    shapes = [
        random_shape(rng, rng.sample(primes, len(primes)) if not seed % 2 else primes)
        for _ in range(6)
    ]
    pairs = [tuple(rng.sample(range(6), 2)) for _ in range(7)]

    def run(order):
        values = [dims_of(*shape) for shape in shapes]
        whole = [[factor for dim in value for factor in dim] for value in values]
        for a, b in order:
            unify(whole[a], whole[b], "misfit")
        numbers: dict[object, int] = {}
        for value, shape in zip(values, shapes, strict=True):
            assert tuple(prod(sizes(dim)) for dim in value) == shape
        return [
            ["frozen"]
            if any(reasons(dim))
            else [(f.size, numbers.setdefault(f, len(numbers))) for f in leaves(dim)]
            for dim in whole
        ]

    expected = run(pairs)
    for _ in range(5):
        assert run(rng.sample(pairs, len(pairs))) == expected
