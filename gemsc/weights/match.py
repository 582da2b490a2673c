"""Which tensor of a user's weights belongs where: names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from gemsc.errors import GemscError
from gemsc.weights.source import WeightFiles
from gemsc.weights.write import Entry

SHOWN = 3  # names in a message
LINE = 400  # names above which none is looked for that is alike


@dataclass(frozen=True)
class Wanted:
    """A tensor of a model, by all its names: a tied one has several.

    One that is not `required` is taken where the files have it.
    """

    names: tuple[str, ...]
    entry: Entry
    required: bool = True


def matched(files: WeightFiles, wanted: Sequence[Wanted]) -> dict[str, str]:
    """Return under which name the files have each tensor that is wanted.

    The keys are first names. Tied tensors may be there under several.

    Raises:
        GemscError: a name is missing, or there are others; a shape is another, or a
            dtype of another kind.
    """
    found = {}
    for each in wanted:
        name = next((name for name in each.names if name in files.table), None)
        if name is not None:
            found[each.names[0]] = name
    known = {name for each in wanted for name in each.names}
    missing = [e.names[0] for e in wanted if e.required and e.names[0] not in found]
    extra = [name for name in files.table if name not in known]
    if missing or extra:
        raise _other_names(files, known, missing, extra)
    for each in wanted:
        if each.names[0] in found:
            _check(files, found[each.names[0]], each.entry)
    return found


def conversions(files: WeightFiles, wanted: Iterable[Wanted]) -> list[str]:
    """Return what is said of dtypes: `12 tensors: bfloat16 in FILES, float32 here`."""
    found: dict[tuple[str, str], int] = {}
    for each in wanted:
        for name in each.names[:1]:
            if name in files.table and files.table[name].dtype != each.entry.dtype:
                pair = _word(files.table[name]), _word(each.entry)
                found[pair] = found.get(pair, 0) + 1
    return [
        f"{count} tensor{'s' * (count > 1)} of {files.path} converted from {a} to {b}"
        for (a, b), count in found.items()
    ]


def _check(files: WeightFiles, name: str, entry: Entry) -> None:
    have = files.table[name]
    if have.shape != entry.shape:
        raise GemscError(
            f"{files.path}: '{name}' has shape {list(have.shape)}, the model needs "
            f"{list(entry.shape)}",
            help="give weights of this model, or build the model with their sizes",
        )
    kinds = [(e.dtype.is_floating_point, e.dtype.is_complex) for e in (have, entry)]
    if kinds[0] != kinds[1]:
        raise GemscError(
            f"{files.path}: '{name}' is {_word(have)}, the model needs {_word(entry)}",
            help="give weights of this model; quantized ones have to be converted",
        )


def _other_names(
    files: WeightFiles, known: Iterable[str], missing: list[str], extra: list[str]
) -> GemscError:
    problems = []
    if missing:
        problems.append(f"has no {_list(missing)}")
    if extra:
        problems.append(f"has {_list(extra)}, which the model has not")
    help = "the names must be those of the model's state_dict()"
    if prefix := _prefix(missing, files.table):
        help = f"its names begin with '{prefix}': save the module inside, or rename"
    elif prefix := _prefix(extra, dict.fromkeys(known)):
        help = f"its names lack '{prefix}': save the model around it, or rename"
    elif missing and len(extra) <= LINE:
        if close := get_close_matches(missing[0], extra, n=1):
            help = f"is '{close[0]}' meant? Rename it there, or in the model"
    elif extra:
        help = "save the model's state_dict() without it"
    return GemscError(f"{files.path} {' and '.join(problems)}", help=help)


def _prefix(names: Sequence[str], others: Mapping[str, object]) -> str:
    """Return what stands before each of some names in others: `module.`."""
    if not names:
        return ""
    ends = [other for other in others if other.endswith(f".{names[0]}")]
    for prefix in (end.removesuffix(names[0]) for end in ends):
        if all(prefix + name in others for name in names):
            return prefix
    return ""


def _list(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    shown = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")


def _word(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")
