"""`gemsc export`: a trained model as a file: of weights, Keras or ONNX; or for FSDP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from gemsc.base.files import DISTRIBUTED
from gemsc.base.nests import saved_named
from gemsc.base.units import parse_bytes
from gemsc.cli.terminal import tell
from gemsc.errors import GemscError, UsageError
from gemsc.importers.back import write_back
from gemsc.importers.folder import ORIGIN_FILE, Origin
from gemsc.importers.network import READERS
from gemsc.importers.onnx.from_torch import export_onnx
from gemsc.plan import Plan
from gemsc.runtime.checkpoint.files import SavedModel, saved_model
from gemsc.runtime.checkpoint.folder import LATEST, MODEL
from gemsc.runtime.training.run_folder import ABOUT, RUNS, options_at
from gemsc.runtime.training.starting import first_weights, tensors_of_program
from gemsc.source import split_constants
from gemsc.user_model import UserModel, load_user_model
from gemsc.weights.load import LOSS, put, stage_tensors
from gemsc.weights.source import OF_TORCH
from gemsc.weights.write import INDEX, Entry, write_shards, write_stream

FOR_TORCH = ".dcp"
KINDS = (".safetensors", FOR_TORCH, *READERS)


def export_command(
    run: Annotated[
        Path, typer.Argument(help="run folder, one of its checkpoints, or a program")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            "--to",
            help="file to write: .safetensors, .onnx, or the format that was imported; "
            "a folder that ends in .dcp is written for torch.distributed.checkpoint",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            help="write a folder of .safetensors files of at most this size each, with "
            "an index, in Hugging Face's layout: 5GiB"
        ),
    ] = None,
    ema: Annotated[
        bool,
        typer.Option(help="export the averaged weights of a run with --ema"),
    ] = False,
    loss: Annotated[
        Path | None,
        typer.Option(
            help="also write the tensors of a trained loss to this .safetensors file"
        ),
    ] = None,
) -> None:
    """Write the trained weights: as .safetensors, .onnx, Keras, or .dcp for FSDP."""
    if output is None:
        raise UsageError(
            f"no output file is given for {run}",
            help=f"for example gemsc export {run} -o {MODEL}",
        )
    if f".{output}" in KINDS:  # --to onnx
        output = Path(f"model.{output}")
    _check_names(output, loss)
    most = _most_bytes(max_shard_size, output)
    with trained_model(run, averages=ema) as trained:
        try:
            notes = _write_loss(run, loss, trained)
            if most is not None:
                notes += _write_shards(output, trained, most)
            else:
                notes += _write(run, output, trained)
        except OSError as error:
            raise GemscError(
                f"{output} cannot be written: {error.strerror}",
                help="name another file with -o",
            ) from None
    for note in notes:
        tell(f"note: {note}")
    tell(f"wrote {output}: {trained.what}")


def _write_loss(run: Path, output: Path | None, trained: Trained) -> list[str]:
    """Write the tensors of the loss as its state_dict has them; return notes.

    Raises:
        GemscError: it has none.
    """
    names = [name.removeprefix(LOSS) for name in trained.loss]
    if output is None and names:
        what = f"the loss has tensors of its own ({_first_names(names)})"
        return [f"{what}, which are not in it: --loss FILE writes them"]
    if output is None:
        return []
    if not names:
        raise GemscError(
            f"{trained.what}: its loss has no tensors of its own",
            help="leave out --loss",
        )
    plan = Plan.read((program := program_of(run)) / "plan.toml")
    keys = {name: f"{LOSS}{name}" for name in names}
    if plan.spec:
        made = load_user_model(plan.spec, constants=plan.constants).make_loss()
        state = saved_named(made)
        held = {id(state[name]): keys[name] for name in names if name in state}
        keys = {name: held.get(id(tensor), "") for name, tensor in state.items()}
    if absent := next((name for name, key in keys.items() if not key), None):
        raise GemscError(
            f"{program} does not use '{absent}' of the loss", help="leave out --loss"
        )
    table = {name: trained.loss[key] for name, key in keys.items()}
    write_stream(output, table, lambda name: trained.read(keys[name]))
    return [f"{output} has the tensors of the loss: loss.load_state_dict() takes it"]


def _check_names(*names: Path | None) -> None:
    if wrong := next((n for n in names if n and n.suffix in OF_TORCH), None):
        raise UsageError(
            f"{wrong} would be no file of torch.save: gemsc writes safetensors",
            help=f"name it {wrong.with_suffix('.safetensors')}; "
            "safetensors.torch.load_file reads it as a state_dict",
        )


def _most_bytes(size: str | None, output: Path) -> int | None:
    if size is None:
        return None
    if output.suffix in KINDS:
        raise UsageError(
            f"--max-shard-size writes several files, but {output} is a single file",
            help="name a folder with -o, without a suffix",
        )
    if (limit := parse_bytes(size)) <= 0:
        raise UsageError(
            f"--max-shard-size {size} is not a size",
            help="write for example --max-shard-size 5GiB",
        )
    return limit


def _write_shards(output: Path, trained: Trained, most_bytes: int) -> list[str]:
    """Write a folder of files with an index; return notes."""
    ours = output.is_dir() and (output / INDEX).is_file()
    if output.exists() and not ours and _has_content(output):
        raise GemscError(
            f"{output} exists and is not a folder of weights with an index",
            help="name another folder with -o",
        )
    with _replaced_folder(output) as new:
        new.mkdir()
        count = write_shards(new, trained.table, trained.read, most_bytes)
    return [f"{count} file{'s' * (count > 1)}, and {INDEX}", *_pairs(trained)]


@contextmanager
def _replaced_folder(output: Path) -> Iterator[Path]:
    """Give a folder beside to make; if that succeeds, it takes the place."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as beside:
        yield Path(beside) / "new"
        if output.exists():
            output.rename(Path(beside) / "old")
        (Path(beside) / "new").rename(output)


def _write(run: Path, output: Path, trained: Trained) -> list[str]:
    """Write the kind of file that the name ends in; return notes."""
    if output.suffix == FOR_TORCH:
        return _write_for_torch(output, trained)
    if output.suffix not in READERS:
        write_stream(output, trained.table, trained.read)
        return _pairs(trained)
    program = program_of(run)
    folder = import_folder(program)
    if folder is not None and Origin.read(folder).file.endswith(output.suffix):
        shapes = {name: entry.shape for name, entry in trained.table.items()}
        return write_back(folder, output, shapes, trained.read)
    if output.suffix == ".onnx":
        user, model = load_trained(program, trained)
        plan = Plan.read(program / "plan.toml")
        inputs = user.make_inputs(plan.first_shape)
        return [*_one_of_shapes(plan), *export_onnx(model, inputs, output)]
    raise GemscError(
        f"the model of {program} was not imported from a file that ends in "
        f"{output.suffix}",
        help="give a name that ends in .safetensors or .onnx; if it was imported, "
        "the folder of its model.py has lost its import.toml",
    )


def _one_of_shapes(plan: Plan) -> list[str]:
    """Return a note of which shape a file takes that takes one of several."""
    if plan.first_shape is None:
        return []
    first = plan.shapes[plan.first_shape]
    others = [shape.name for shape in plan.shapes if shape.sizes != first.sizes]
    note = f"the file takes the shape {first.name} alone, which costs most, and not "
    note += f"{' or '.join(others)}: for these, call torch.onnx.export yourself"
    return [note] * bool(others)


def _pairs(trained: Trained) -> list[str]:
    """Return a note of tensors that a safetensors file has as pairs of numbers."""
    wide = [n for n, entry in trained.table.items() if entry.dtype is torch.complex128]
    if not wide:
        return []
    return [
        "safetensors has no complex128: pairs of float64 stand for "
        f"{_first_names(wide)}; torch.view_as_complex takes them"
    ]


def _first_names(names: list[str]) -> str:
    """Return the first names of tensors, for a message."""
    more = ", ..." if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


def _write_for_torch(output: Path, trained: Trained) -> list[str]:
    """Write a folder that torch.distributed.checkpoint loads; return notes.

    It is written beside, and renamed.
    """
    from gemsc.weights.distributed import Lazy, write_distributed  # loads for a second

    if (
        output.exists()
        and not (output / DISTRIBUTED).is_file()
        and _has_content(output)
    ):
        raise GemscError(
            f"{output} exists and is not a checkpoint of torch.distributed",
            help="name another folder with -o",
        )

    def lazy(entry: Entry, read: Callable[[str], Tensor], key: str) -> Lazy:
        return Lazy(entry, partial(read, key))

    state: dict[str, Any] = {
        name: lazy(entry, trained.read, name) for name, entry in trained.table.items()
    }
    notes = []
    if (saved := trained.optimizer()) is not None:
        states = {
            name: {s: lazy(saved.entry(k), saved.read, k) for s, k in keys.items()}
            | {**saved.values[name]}
            for name, keys in saved.tensors.items()
        }
        groups = [
            {**values, "params": [*names], "param_names": [*names]}
            for names, values in saved.groups
        ]
        flat = {
            f"param_groups.{name}.{key}": value
            for names, values in saved.groups
            for name in names
            for key, value in values.items()
        }
        state["optimizer"] = {"state": states, "param_groups": groups, **flat}
        notes.append("the optimizer's state is in it, as 'optimizer'")
    with _replaced_folder(output) as new:
        write_distributed(new, state)
    return notes


def _has_content(place: Path) -> bool:
    """Whether there is a file, or anything in a folder."""
    return not place.is_dir() or any(place.iterdir())


@dataclass(frozen=True)
class Trained(SavedModel):
    """A model that is saved; `what` says which, `constants` what `--set` gave its run.

    One that a program starts from is of step 0.
    """

    what: str
    constants: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def trained_model(place: Path, *, averages: bool) -> Iterator[Trained]:
    """Open the model of a run, of its step- folder, or of a program.

    A program's is that of its last run with a checkpoint, or what it starts from.

    Raises:
        GemscError: there is none.
    """
    if _is_program(place):
        run = _last_run(place)
        if run is None and not averages:
            yield _initial(place)
            return
        place = run or place
    with saved_model(place, averages=averages) as saved:
        what = f"the model of step {saved.step} of {place}"
        options = options_at(place, saved.step) or {}
        constants = split_constants(options.get("set", []))
        yield Trained(**vars(saved), what=what, constants=constants)


def program_of(place: Path) -> Path:
    """Return the program that a run, or its step- folder, is of.

    Raises:
        GemscError: it is not known, or not there any more.
    """
    path, help = place.resolve(), "give the folder of a run that `gemsc run` made"
    for folder in (path, *path.parents[:3]):  # PROGRAM/runs/1/step-000010
        if (folder / ABOUT).is_file():
            try:
                program = Path(json.loads((folder / ABOUT).read_bytes())["program"])
                help = f"move it back to {program}, or compile it there again"
            except (ValueError, KeyError, TypeError):
                program = folder
            if _is_program(program):
                return program
        if _is_program(folder):
            return folder
    raise GemscError(f"the program of {place} cannot be found", help=help)


def import_folder(program: Path) -> Path | None:
    """Return the folder of the import that a program's model comes from."""
    plan = Plan.read(program / "plan.toml")
    files = [plan.spec.partition(":")[0], *plan.sources]
    folders = dict.fromkeys(Path(file).parent for file in files if file)
    imported = (folder for folder in folders if (folder / ORIGIN_FILE).is_file())
    return next(imported, None)


def load_trained(program: Path, trained: Trained) -> tuple[UserModel, nn.Module]:
    """Return a program's model in one process, with these tensors in it.

    Raises:
        GemscError: the model's file does not fit them any more.
    """
    plan = Plan.read(program / "plan.toml")
    if not plan.spec:
        raise GemscError(
            f"{program} was compiled from Python: its model is not in a file",
            help="export it as .safetensors",
        )
    user = load_user_model(plan.spec, constants=plan.constants)
    model = user.make_unfilled()
    state = saved_named(model)
    names = {id(tensor): name for name, tensor in stage_tensors(model).items()}
    missing: dict[str, Tensor] = {}
    taken = {id(state[name]) for name in trained.table if name in state}
    for name, tensor in state.items():
        entry = trained.table.get(name)
        if entry is None and id(tensor) not in taken:
            raise GemscError(
                f"{trained.what} has no '{name}', which {user.path.name} has",
                help="compile and train the model as it is now",
            )
        if entry is not None:
            if entry.shape != tuple(tensor.shape):
                raise GemscError(
                    f"'{name}' has the shape {list(entry.shape)}, but "
                    f"{list(tensor.shape)} in {user.path.name}",
                    help="compile and train the model as it is now",
                )
            if tensor.is_meta:
                missing[names[id(tensor)]] = trained.read(name)
            else:
                tensor.data.copy_(trained.read(name))
    put(model, missing)
    return user, model


def _is_program(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("plan.toml", "rank0.py"))


def _last_run(program: Path) -> Path | None:
    """Return the run with a checkpoint that began last."""
    folder = program / RUNS
    runs = [path for path in folder.iterdir()] if folder.is_dir() else []
    saved = [run for run in runs if (run / LATEST).exists() and run.name.isdecimal()]
    return max(saved, key=lambda run: int(run.name), default=None)


def _initial(program: Path) -> Trained:
    plan = Plan.read(program / "plan.toml")
    first = first_weights(program, plan)
    first.check()
    tables = [first.table(stage.index) for stage in plan.stages]
    table: dict[str, Entry] = {}
    sources: dict[str, tuple[int, str]] = {}
    for wanted in tensors_of_program(program, plan, first):
        name, names = wanted.names[0], wanted.names if wanted.required else ()
        stage = next((n for n, held in enumerate(tables) if name in held), None)
        if stage is not None:
            table |= dict.fromkeys(names, tables[stage][name])
            sources |= dict.fromkeys(names, (stage, name))
    loss = dict[str, Entry]()
    for n, held in enumerate(tables):
        own_loss = {name: held[name] for name in held if name.startswith(LOSS)}
        loss |= own_loss
        sources |= {name: (n, name) for name in own_loss}
    what = f"the model that {program} starts from"
    return Trained(
        0, table, loss, lambda name: first.read(*sources[name]), lambda: None, what
    )
