"""The dimensions of all values and parameters of one stage, and what may be cut."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from math import prod

from torch import fx

from gemsc.base.parts import Part
from gemsc.ir import meta
from gemsc.ir.holder import attribute
from gemsc.ir.operators.calls import Call
from gemsc.ir.operators.table import operator_of
from gemsc.ir.program import Program, Stage
from gemsc.ir.shards import StageShards
from gemsc.passes.shards.equations import Roles
from gemsc.passes.shards.factors import Dims, Factor, freeze, fresh, leaves
from gemsc.passes.shards.rules import is_lookup, roles_of
from gemsc.passes.spatial.classify import probe_of
from gemsc.passes.spatial.cuts import cut


@dataclass(frozen=True, slots=True)
class Place:
    """Where a factor is in a tensor: in which dimension, and how often it repeats."""

    dim: int
    outer: int


@dataclass
class Analysis:
    """The factors of a stage's values and parameters, once all operations are known.

    `calls` and `roles` are those of each node. What goes from stage to stage is frozen.
    `chosen` are the factors that were last asked for, those which these shards cut.
    `takers` are the letters of products by which a rank takes its part of whole values.
    `kept_split` are products that know what is cut, and are split as the trunk is.
    """

    program: Program
    stage: Stage
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    roles: dict[fx.Node, Roles] = field(default_factory=dict)
    parameters: dict[str, Dims] = field(default_factory=dict)
    values: dict[fx.Node, Dims] = field(default_factory=dict)
    chosen: tuple[StageShards, dict[Factor, str]] | None = None
    takers: dict[fx.Node, set[str]] = field(default_factory=dict)
    kept_split: tuple[StageShards, frozenset[fx.Node]] | None = None

    def __post_init__(self) -> None:
        self._solve()
        while products := self._products_of_taken():
            for node, letter in products:
                self.takers.setdefault(node, set()).add(letter)
            for known in (self.calls, self.roles, self.parameters, self.values):
                known.clear()
            self._solve()

    def _solve(self) -> None:
        probe, inside = probe_of(self.program), set(self.stage.nodes)
        for node in self.stage.nodes:
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node) and not meta.is_one_tensor(source):
                self.roles[node] = self._taken(node, source)
            else:
                takers = self.takers.get(node, ())
                call, roles = roles_of(self.program, probe, node, self.dims, takers)
                self.calls[node], self.roles[node] = call, roles
            self.values[node] = self.roles[node].result
        for node in self.stage.nodes:
            others = set(node.users) - inside
            outside = [n for n in node.all_input_nodes if n not in inside]
            if any(user.op != "output" for user in others):
                outside.append(node)
            for value in outside:
                if value.op != "get_attr" and meta.is_one_tensor(value):
                    why = "it goes from stage to stage"
                    if value.op == "placeholder":
                        why = "an input of the model has this dimension"
                    for dim in self.dims(value):
                        freeze(dim, why)
        self._keep_words_together()

    def _keep_words_together(self) -> None:
        """Let words be cut by their outermost factor alone: a rank has one run."""
        for node, call in self.calls.items():
            if dim := self.roles[node].letters.get(operator_of(call).words):
                for factor in leaves(dim)[1:]:
                    freeze([factor], "a rank's words would lie apart")

    def dims(self, of: fx.Node | str) -> Dims:
        """Return the dimensions of a value, or of a parameter or buffer by its path."""
        if isinstance(of, fx.Node) and of.op != "get_attr":
            if of not in self.values:  # it comes from elsewhere
                self.values[of] = [fresh(size) for size in meta.spec(of).shape]
            return self.values[of]
        path = str(of.target) if isinstance(of, fx.Node) else of
        path = self.program.aliases.get(path, path)
        if path not in self.parameters:
            shape = attribute(self.program.module, path).shape
            self.parameters[path] = [fresh(size) for size in shape]
        return self.parameters[path]

    def dims_at(self, node: fx.Node, source: fx.Node) -> Dims:
        """Return the dimensions of a value as a node has it, or of its own result."""
        return self.roles[node].taken.get(source) or self.dims(source)

    def _products_of_taken(self) -> set[tuple[fx.Node, str]]:
        """Return products, each with a letter, of which parts alone are asked for.

        Between such a product and who takes a part of it are views, and what is
        computed element by element: so the product, too, can be computed in parts.
        """
        pairs = set()
        for node, roles in self.roles.items():
            for source, taken in roles.taken.items():
                for dim, other in zip(self.dims(source), taken, strict=True):
                    for factor in leaves(dim) if dim is not other else ():
                        if not self._is_of_parameter(factor):
                            pairs |= self._products_of(source, factor, {node})
        return pairs - {(n, c) for n, letters in self.takers.items() for c in letters}

    def _products_of(
        self, node: fx.Node, factor: Factor, seen: set[fx.Node]
    ) -> set[tuple[fx.Node, str]]:
        """Return the products from which a value has a factor, if it is taken alone."""
        if node in seen or node not in self.calls or not self._is_taken(node, factor):
            return set()
        seen.add(node)
        letters = self.roots(node).get(factor, set()) - self.roles[node].summed
        kind = self.calls[node].kind
        if kind in ("matmul", "einsum") or (not kind and is_lookup(node)):
            return (
                {(node, letter) for letter in letters} if len(letters) == 1 else set()
            )
        if kind or not letters:
            return set()
        inputs = node.all_input_nodes
        return set().union(*(self._products_of(n, factor, seen) for n in inputs))

    def _is_taken(self, node: fx.Node, factor: Factor) -> bool:
        """Whether all that is done with a factor of a value is to take parts of it."""
        if not any(factor in leaves(dim) for dim in self.dims(node)):
            return False
        return all(self._takes(user, node, factor) for user in node.users)

    def _takes(self, user: fx.Node, node: fx.Node, factor: Factor) -> bool:
        """Whether a user takes parts of a value, or hands it on to who does."""
        if user in self.roles and node in self.roles[user].taken:
            return True
        hands_on = user in self.calls and not self.calls[user].kind
        return hands_on and self._is_taken(user, factor)

    def _is_of_parameter(self, factor: Factor) -> bool:
        every = (dim for dims in self.parameters.values() for dim in dims)
        return any(factor in leaves(dim) for dim in every)

    def _taken(self, node: fx.Node, source: fx.Node) -> Roles:
        """Return the roles of one of several values that a node gave."""
        given = self.roles[source].results if source in self.roles else None
        index = node.args[1]
        if not meta.is_one_tensor(node):
            return Roles()
        if given is None or not isinstance(index, int) or len(given) <= index:
            return Roles(result=[fresh(size) for size in meta.spec(node).shape])
        dims = given[index]
        return Roles({str(place): dim for place, dim in enumerate(dims)}, result=dims)

    def roots(self, node: fx.Node) -> dict[Factor, set[str]]:
        """Return the factors that a node knows of, with the letters that have them."""
        roots: dict[Factor, set[str]] = {}
        for letter, dim in self.roles[node].letters.items():
            for factor in leaves(dim):
                roots.setdefault(factor, set()).add(letter)
        return roots

    def is_summed(self, node: fx.Node, factor: Factor) -> bool:
        """Whether a node sums over a factor: if that is cut, it computes an addend."""
        return bool(self.roots(node)[factor] & self.roles[node].summed)


MOST_KNOWN = 64
_KNOWN: dict[tuple[int, int], Analysis] = {}  # the last ones, by module and stage


def analysis_of(program: Program, stage: Stage) -> Analysis:
    """Return the analysis of a stage, the same for all ranks."""
    key = id(program.module), stage.index
    analysis = _KNOWN.pop(key, None)
    if analysis is None or analysis.stage != stage:
        analysis = Analysis(program, stage)
    _KNOWN[key] = analysis
    if len(_KNOWN) > MOST_KNOWN:
        del _KNOWN[next(iter(_KNOWN))]
    return analysis


def place_of(dims: Dims, factor: Factor) -> Place | None:
    """Return where a factor is among dimensions, None if it is not."""
    for number, dim in enumerate(dims):
        factors = leaves(dim)
        if factor in factors:
            before = factors[: factors.index(factor)]
            return Place(number, prod(f.size for f in before))
    return None


def cut_parts(dims: Dims, factor: Factor, count: int) -> tuple[Part, ...]:
    """Return what each rank has of a tensor, () where it does not know the factor."""
    place = place_of(dims, factor)
    if place is None:
        return ()
    shape = tuple(prod(f.size for f in leaves(dim)) for dim in dims)
    return tuple(
        Part(shape, place.dim, place.outer, factor.size, rows)
        for rows in cut(factor.size, count)
    )


def split_dim(dims: Dims, factor: Factor, count: int) -> int | None:
    """Return the dimension in which ranks split a value by a factor; None if in none.

    Of dimensions that are joined it must be the outermost, and shared evenly.
    """
    place = place_of(dims, factor)
    if place is None or place.outer > 1:
        return None
    is_alone = len(leaves(dims[place.dim])) == 1
    return place.dim if is_alone or factor.size % count == 0 else None
