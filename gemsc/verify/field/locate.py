"""Where ranks' files and a model part: the first wrong value in the forward.

Two draws are recorded. An element of a rank's value is right if some value of the model
has an element with the same two numbers, so that tiles and shards need no box.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from gemsc.errors import is_users
from gemsc.verify.field.numbers import PRIMES, NotDecidedError

MOST = 2**26  # elements of the model that are kept of one draw
_MOST_OF_RANKS = 4096  # values
EXCHANGE = re.compile(r"^(\w+) = Exchange\((.*?)^\)", re.MULTILINE | re.DOTALL)
USERS_LINE = re.compile(r"# (\S+\.py:\d+)")


@dataclass(frozen=True)
class _Seen:
    """What a rank's file gave a name."""

    file: Path
    rank: int
    line: int
    name: str
    value: Tensor


@dataclass
class Recording:
    """The values of one draw: all of the model's, and the named ones of the ranks."""

    of_model: list[Tensor] = field(default_factory=list)
    of_ranks: list[_Seen] = field(default_factory=list)
    size: int = 0

    def see(self, result: Any) -> None:
        """Keep what an operation of the model returned."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.size += leaf.numel()
                if self.size <= MOST:
                    self.of_model.append(_numbers(leaf))

    @contextmanager
    def rank(self, directory: Path, copy: Path, rank: int) -> Iterator[None]:
        """Keep what a rank, this thread, names as it runs the copy of its file."""
        path, file = str(copy), directory / copy.name
        before: dict[int, dict[str, int]] = {}
        lines: dict[int, int] = {}

        def on_line(frame: FrameType, event: str, _: Any) -> Any:
            known = before.setdefault(id(frame), {})
            for name, value in list(frame.f_locals.items()):
                if name == "self" or known.get(name) == id(value):
                    continue
                known[name] = id(value)
                if isinstance(value, Tensor) and value.is_floating_point():
                    line = lines.get(id(frame), frame.f_lineno)
                    numbers = _numbers(value)
                    if len(self.of_ranks) < _MOST_OF_RANKS:
                        self.of_ranks.append(_Seen(file, rank, line, name, numbers))
            lines[id(frame)] = frame.f_lineno
            if event == "return":
                before.pop(id(frame), None)
                lines.pop(id(frame), None)
            return on_line

        def on_call(frame: FrameType, event: str, _: Any) -> Any:
            code = frame.f_code
            if code.co_filename != path or "self" not in code.co_varnames:
                return None
            return on_line

        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(None)


def _numbers(value: Tensor) -> Tensor:
    with _disable_current_modes():
        return value.detach().double().reshape(-1).clone()


def first_wrong_value(one: Recording, two: Recording, *, loss_too: bool) -> str:
    """Return the first value of a rank that the model has not, "" if all are right.

    A wrong loss, too, if each of its numbers is another value of the model.
    """
    if one.size > MOST or [t.numel() for t in one.of_model] != [
        t.numel() for t in two.of_model
    ]:
        return ""
    known = torch.unique(torch.cat(_pairs(one.of_model, two.of_model)))
    of_rank: dict[int, list[_Seen]] = {}
    for seen in two.of_ranks:
        of_rank.setdefault(seen.rank, []).append(seen)
    for seen in one.of_ranks:  # in the order of time: a cause is before what follows
        other = of_rank[seen.rank].pop(0)
        if seen.line != other.line or seen.value.numel() != other.value.numel():
            return ""
        (pairs,) = _pairs([seen.value], [other.value])
        places = torch.searchsorted(known, pairs).clamp_(max=len(known) - 1)
        wrong = (known[places] != pairs) & (seen.value != 0) & seen.value.isfinite()
        if bool(wrong.any()) and not _is_partial(seen):
            return f"{_place(seen)}, {int(wrong.sum())} of {wrong.numel()} elements"
    losses = [seen for seen in one.of_ranks if seen.name == "loss"]
    return _place(losses[0]) if loss_too and losses else ""


def _place(seen: _Seen) -> str:
    return (
        f"first wrong value: {seen.name} of rank {seen.rank} "
        f"({seen.file.name}:{seen.line}{_users_line(seen.file, seen.line)})"
    )


def _pairs(one: list[Tensor], two: list[Tensor]) -> list[Tensor]:
    """Return both numbers of each element as one."""
    return [
        a.nan_to_num(posinf=0.0, neginf=0.0) * max(PRIMES)
        + b.nan_to_num(posinf=0.0, neginf=0.0)
        for a, b in zip(one, two, strict=True)
    ]


def _is_partial(seen: _Seen) -> bool:
    """Whether the next thing done with it is a sum over the ranks, or adds its bias."""
    text = seen.file.read_text()
    lines = (line.partition("#")[0] for line in text.splitlines()[seen.line :])
    following = re.sub(r"\s+", " ", " ".join(lines)).replace("( ", "(")
    use = re.search(rf"\b{re.escape(seen.name)}\b(?! = )", following)
    if use is None:
        return False
    before, after = following[: use.start()], following[use.end() :]
    if before.endswith("all_reduce(self.grid, "):
        return not after.startswith(".")
    adding = [name for name, how in EXCHANGE.findall(text) if "adds=" in how]
    if before.endswith("redistribute(self.grid, "):
        return after[2:].startswith(tuple(adding))
    return re.match(r" \+ self\.[^()]*\bbias\b", after) is not None


def _users_line(file: Path, line: int) -> str:
    """Return where the user's code is, as the comment above a line says."""
    for text in reversed(file.read_text().splitlines()[:line]):
        if match := USERS_LINE.search(text):
            return f", {match[1]}"
        if "def " in text:
            return ""
    return ""


def first_wrong_gradient(directory: Path, names: list[str]) -> str:
    """Return the parameter of wrong gradient that backward meets first, and where."""
    order: list[tuple[int, int, str]] = []
    for file in sorted(directory.glob("rank*.py")):
        rank = int(file.stem.removeprefix("rank"))
        lines = file.read_text().splitlines()
        plain = [re.sub(r'\["([^"]+)"\]', r".\1", line) for line in lines]
        starts = [n for n, line in enumerate(plain) if "def forward(" in line]
        for name in names:
            module = name.rpartition(".")[0] or name
            used = re.compile(
                rf"self\.{re.escape(module)}(?![\w.])|self\.{re.escape(name)}\b"
            )
            for number, line in enumerate(plain, 1):
                if starts and number > starts[0] and used.search(line):
                    where = f"{file.name}:{number}{_users_line(file, number)}"
                    order.append((rank, number, f"{name} ({where})"))
    return max(order, default=(0, 0, ""))[2]


def undecided_line(error: NotDecidedError, copied: Path, directory: Path) -> str:
    """Return what has no rule, and the line that asks for it, where it is.

    That of a rank's file is named as the user knows it, with the user's line above it.
    """
    text = f"no rule for {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path, line = Path(frame.filename), frame.lineno or 0
        if path.parent == copied:
            return f"{directory / path.name}:{line}{_users_line(path, line)}: {text}"
        if is_users(path):
            return f"{path}:{line}: {text}"
    return text


def first_cause(wrong: list[str]) -> str:
    """Return what is wrong first, of all that is, as far as parameters and buffers say.

    They stand in the order of forward. Where the loss is right, backward goes wrong:
    first nearest to the loss.
    """
    if wrong[0] != "the loss":
        gradients = [name for name in wrong if name.startswith("the gradient of ")]
        return gradients[-1] if gradients else wrong[0]
    buffers = [name for name in wrong if name.startswith("buffer ")]
    return f"the loss, first {buffers[0]}" if buffers else wrong[0]
