"""What steps leave in ranks and in one process, and how far these are apart."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemsc.base.dtypes import same_bits
from gemsc.base.parts import Part
from gemsc.verify.precision import LowPrecision
from gemsc.weights.read import pasted, read_tensors

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# A gradient that is zero but for rounding (a bias before BatchNorm) has no relative
# error worth the name: errors are taken relative to at least this share of the largest.
# In half precision it is so many last bits: of a sum that is zero, each tile rounds its
# part, which is not.
NEGLIGIBLE, LAST_BITS = 1e-3, 10
LARGEST_BUFFER = 1.0  # at most: a mask of huge numbers hides no error in another buffer
# Both runs round: they may be so much further apart than the few that are tried in one
# process. In float32, sums of attention maps were 2.2 times as far apart.
ALLOWED = {torch.float64: 2.0, torch.float32: 4.0}
# What is further off is never called exact, however much rounding alone would explain.
LIMIT = {torch.float64: 1e-6, torch.float32: 0.1}
GATES = 1e-2  # so much a gradient moves by rounding only where a ReLU or a sign turns


@dataclass(frozen=True)
class StepRecord:
    """Losses of some steps, gradients of the first, tensors after the last.

    `unequal` are tensors that all ranks of a grid, or several replicas, hold as a
    whole, but not bit for bit the same: they drift apart, or one rank of them has none.
    `outputs` are what evaluation gives after the steps, where it was asked for; `terms`
    say of how many each loss is the mean, where one process knows.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    activation_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    unequal: frozenset[str] = frozenset()
    outputs: dict[str, Tensor] = field(default_factory=dict)
    terms: list[float] = field(default_factory=list)


def read_record(folder: Path, num_ranks: int) -> StepRecord:
    """Join what the ranks wrote (gemsc.runtime.training.verification)."""
    ranks = range(num_ranks)
    losses, *_ = (_read_json(folder / f"losses{rank}.json") for rank in ranks)
    peaks = [_read_json(folder / f"memory{rank}.json") for rank in ranks]
    held = [_read_json(folder / f"held{rank}.json") for rank in ranks]
    parts = [
        {name: Part.read(part) for name, part in said["parts"].items()} for said in held
    ]
    joined: dict[str, dict[str, Tensor]] = {}
    unequal: set[str] = set()
    for kind in ("gradients", "state"):
        files = [folder / f"{kind}{rank}.safetensors" for rank in ranks]
        joined[kind] = pasted(zip(map(read_tensors, files), parts, strict=True))
        for rank, said in enumerate(held):
            if (first := said["grid"][0]) != rank:
                pair = read_tensors(files[first]), read_tensors(files[rank])
                alone = {*said["alone"], *held[first]["alone"]}
                unequal |= _unequal(*pair) - parts[rank].keys() - alone
    unequal |= _drifted(folder, parts, joined["gradients"].keys())
    return StepRecord(
        losses,
        joined["gradients"],
        joined["state"],
        activation_bytes=[activations for activations, _ in peaks],
        peak_bytes=[peak for _, peak in peaks],
        unequal=frozenset(unequal),
    )


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _drifted(
    folder: Path, parts: list[dict[str, Part]], trained: Iterable[str]
) -> set[str]:
    """Return trained parameters that ranks hold as a whole, each with other bits."""
    first: dict[str, Tensor] = {}
    drifted = set()
    for rank, rank_parts in enumerate(parts):
        tensors = read_tensors(folder / f"state{rank}.safetensors")
        for name in tensors.keys() & trained - rank_parts.keys():
            if not same_bits(first.setdefault(name, tensors[name]), tensors[name]):
                drifted.add(name)
    return drifted


def _unequal(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> set[str]:
    """Return which tensors are not bit for bit the same."""
    both = {name: (mine.get(name), theirs.get(name)) for name in {*mine, *theirs}}
    return {
        name
        for name, (one, other) in both.items()
        if one is None or other is None or not same_bits(one, other)
    }


@dataclass(frozen=True)
class Comparison:
    """How far what ranks computed is from what one process did.

    `errors` has the relative error of the loss and of each tensor ("gradient of
    conv.weight"); `rounding` how far rounding alone changes it in one process, where
    that was measured: compared with itself in float64, or with weights changed in their
    last bit. Sums in a different order cannot be expected to be closer. What the ranks
    of a grid hold as a whole, but not with the same bits, has an infinite error
    ("copies of conv.weight"). `equal` counts the tensors that are bit for bit equal, of
    `total`. `activation_bytes` is the measured peak of each rank. `last_bit` is that of
    the precision in which the ranks of a grid add up, where it is less than the dtype.
    `inside` is what the model itself computes in, where that is less. `settled` are
    the parameters whose updates were compared without the noise of their gradients: see
    `noisy`. `turned` is the gradient that shows that gates turn: see `with_gates`.
    """

    errors: Mapping[str, float]
    equal: int = 0
    total: int = 0
    activation_bytes: tuple[int, ...] = ()
    rounding: Mapping[str, float] = field(default_factory=dict)
    last_bit: float = 0.0
    inside: LowPrecision | None = None
    settled: frozenset[str] = frozenset()
    turned: str = ""

    @property
    def loss(self) -> float:
        """The error of the loss."""
        return self.errors["loss"]

    @property
    def worst(self) -> float:
        """The largest error of all."""
        return max(self.errors.values())

    def worst_of(self, kind: str) -> tuple[float, str]:
        """Return the largest error of a gradient, parameter or buffer, and its name."""
        prefix = "gradient of " if kind == "gradient" else f"{kind} "
        pairs = self.errors.items()
        named = [(e, n.removeprefix(prefix)) for n, e in pairs if n.startswith(prefix)]
        return max((pair for pair in named if pair[0]), default=(0.0, ""))

    def limit(self, dtype: torch.dtype) -> float:
        """Return how far off a tensor may be at most, whatever rounding explains."""
        return most_allowed(dtype, self.inside)

    def allowed(self, name: str, dtype: torch.dtype) -> float:
        """Return how far a tensor may be off if nothing but rounding differs."""
        least = max(TOLERANCE[dtype], self.last_bit)
        return max(least, ALLOWED[dtype] * self.rounding.get(name, 0.0))

    def judge(self, dtype: torch.dtype) -> tuple[str, str]:
        """Return "exact", "wrong" or "undecided", and the tensor that it is about.

        Each tensor may be off by `ALLOWED` times what rounding alone does to it. Where
        that is more than `LIMIT`, and the tensor is as far off, nothing is decided; nor
        where gates turn, but of the loss, which hardly moves with them.
        """
        verdicts: dict[str, str] = {}
        for name in self._too_far(dtype):
            is_hidden = self.allowed(name, dtype) > self.limit(dtype)
            may_turn = name != "loss" and math.isfinite(self.errors[name])
            is_open = is_hidden or (self.turned and may_turn)
            verdicts.setdefault("undecided" if is_open else "wrong", name)
        for kind in ("wrong", "undecided"):
            if kind in verdicts:
                return kind, verdicts[kind]
        return "exact", max(self.errors, key=lambda name: self.errors[name])

    def _too_far(self, dtype: torch.dtype) -> list[str]:
        limit = self.limit(dtype)
        return [
            name
            for name, error in self.errors.items()
            if not error <= min(self.allowed(name, dtype), limit)
        ]

    def is_about(self, parameters: Collection[str], dtype: torch.dtype) -> bool:
        """Whether nothing but the updates of these, and buffers, is too far off."""
        wrong = self._too_far(dtype)
        named = {f"parameter {name}" for name in parameters}
        return all(n in named or n.startswith("buffer ") for n in wrong) and any(
            name in named for name in wrong
        )

    def with_updates_of(
        self, other: Comparison, parameters: Collection[str]
    ) -> Comparison:
        """Return the comparison with the errors of these and of buffers in another."""
        named = {f"parameter {name}" for name in parameters}
        taken = {
            name: other.errors[name]
            for name in self.errors
            if name in named or name.startswith("buffer ")
        }
        settled = frozenset(
            name
            for name in parameters
            if taken[f"parameter {name}"] < self.errors[f"parameter {name}"]
        )
        return replace(self, errors={**self.errors, **taken}, settled=settled)

    def with_inside(
        self, lower: LowPrecision, actual: StepRecord, expected: StepRecord
    ) -> Comparison:
        """Return the comparison of a model that computes in lower precision inside."""
        last_bit = max(self.last_bit, lower.last_bit)
        coarse = compare(actual, expected, last_bit=last_bit).errors
        names = [name for name in coarse if name.startswith("gradient of ")]
        errors = {**self.errors, **{name: coarse[name] for name in names}}
        return replace(self, errors=errors, last_bit=last_bit, inside=lower)

    def with_rounding(self, errors: Mapping[str, float]) -> Comparison:
        """Return the comparison with what one more rounding of one process changes."""
        both = self.rounding, errors
        names = {name for table in both for name in table}
        rounding = {n: max(table.get(n, 0.0) for table in both) for n in names}
        return replace(self, rounding=rounding)

    def with_gates(self) -> Comparison:
        """Return the comparison with what rounding shows of a model in float32.

        Where it moves a gradient by more than `GATES` (BatchNorm of two values that are
        nearly equal), some number came to the other side of 0, and other roundings,
        such as those of ranks, turn other ones. A few of them set no bound then.
        """
        moved = {n: e for n, e in self.rounding.items() if n.startswith("gradient of ")}
        most = max(moved, key=lambda name: moved[name], default="")
        return replace(self, turned=most if moved.get(most, 0.0) > GATES else "")


_Pair = tuple[dict[str, Tensor], dict[str, Tensor]]


def nearer(first: _Pair, second: _Pair) -> _Pair:
    """Return of two pairs, element by element, the one that differs less.

    Of a step with the noise in its gradients, and of one without: there, an element
    whose gradient is as large as the limit of noise is in one of a pair, and zero in
    the other.
    """
    nearest: _Pair = dict(first[0]), dict(first[1])
    for name in nearest[0].keys() & nearest[1].keys():
        (a, b), (c, d) = ((pair[0][name], pair[1][name]) for pair in (first, second))
        if a.is_floating_point() and a.shape == b.shape == c.shape == d.shape:
            takes = (c - d).abs() < (a - b).abs()
            nearest[0][name], nearest[1][name] = c.where(takes, a), d.where(takes, b)
    return nearest


def most_allowed(dtype: torch.dtype, inside: LowPrecision | None) -> float:
    """Return `LIMIT`; a model that computes in less inside has that of float32."""
    return LIMIT[dtype] if inside is None else LIMIT[torch.float32]


def near_zero(record: StepRecord, dtype: torch.dtype) -> float:
    """Return what a gradient may be off by, whatever its own size: see `compare`."""
    largest = max(map(_size, record.gradients.values()), default=0.0)
    return TOLERANCE[dtype] * NEGLIGIBLE * largest


def noisy(record: StepRecord, dtype: torch.dtype) -> frozenset[str]:
    """Return the parameters that have gradients which are zero but for rounding.

    As of a bias before BatchNorm, or of one that is added to all keys of an attention.
    An optimizer that divides by the size of a gradient, as Adam does, makes of such
    noise a step of any size up to its learning rate.
    """
    limit = near_zero(record, dtype)
    return frozenset(
        name
        for name, gradient in record.gradients.items()
        if bool(((gradient != 0) & (gradient.abs() <= limit)).any())
    )


def compare(
    actual: StepRecord,
    expected: StepRecord,
    *,
    may_overflow: bool = False,
    last_bit: float = 0.0,
) -> Comparison:
    """Return the largest errors of N ranks, compared with one process.

    What is NaN in both is wrong, unless it `may_overflow`: in float16 a scale of the
    loss may be too large, for both. `last_bit` is that of a lower precision in which
    they compute.
    """
    pairs = zip(actual.losses, expected.losses, strict=True)
    apart = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    loss = math.inf if any(map(math.isnan, apart)) else max(apart)  # NaN is no maximum
    parameters = {n for n, t in expected.state.items() if n in expected.gradients}
    known = actual.state
    groups = {
        "gradient of ": (
            actual.gradients,
            expected.gradients,
            sorted(expected.gradients),
        ),
        "parameter ": (known, expected.state, sorted(parameters)),
        "buffer ": (known, expected.state, sorted(expected.state.keys() - parameters)),
        "evaluation's ": (actual.outputs, expected.outputs, expected.outputs),
    }
    errors, equal = {"loss": loss}, 0
    for kind, (mine, theirs, names) in groups.items():
        most = LARGEST_BUFFER if kind in ("buffer ", "evaluation's ") else math.inf
        largest = max((_size(theirs[name]) for name in names), default=0.0)
        is_gradient = kind == "gradient of "
        share = max(NEGLIGIBLE, LAST_BITS * last_bit if is_gradient else 0.0)
        least = share * min(largest, most)
        of_kind = _errors(mine, theirs, names, least, may_overflow)
        errors |= {f"{kind}{name}": error for name, error in of_kind.items()}
        equal += sum(n in mine and torch.equal(mine[n], theirs[n]) for n in names)
    errors |= {f"copies of {name}": math.inf for name in sorted(actual.unequal)}
    total = sum(len(names) for *_, names in groups.values())
    peaks = tuple(actual.activation_bytes)
    return Comparison(errors, equal, total, peaks, last_bit=last_bit)


def _errors(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    names: Iterable[str],
    least: float,
    may_overflow: bool,
) -> dict[str, float]:
    """Return the relative error of each tensor, infinite where it is not there.

    They are relative to its size, and at least to `least`.
    """
    errors = {}
    for name in names:
        error = float("inf")
        if name in actual and actual[name].shape == expected[name].shape:
            difference = _difference(actual[name], expected[name], may_overflow)
            scale = max(_size(expected[name]), least, sys.float_info.min)
            error = difference / scale
        errors[name] = error if error == error else float("inf")
    return errors


def _difference(mine: Tensor, theirs: Tensor, may_overflow: bool) -> float:
    """Return the largest difference; infinities may be equal, and NaN if allowed."""
    mine, theirs = mine.double(), theirs.double()
    same = mine == theirs
    if may_overflow:
        same |= mine.isnan() & theirs.isnan()
    difference = (mine - theirs).masked_fill(same, 0.0)
    return float(difference.abs().max()) if difference.numel() else 0.0


def _size(tensor: Tensor) -> float:
    """Return the largest absolute value, infinities left aside."""
    numbers = tensor.double().abs()
    largest = float(numbers.max()) if numbers.numel() else 0.0
    if math.isfinite(largest):
        return largest
    finite = numbers[numbers.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
