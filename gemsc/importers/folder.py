"""The folder that an import writes: model.py, weights.safetensors, import.toml.

In unet/:
    model.py              plain PyTorch, to read and to change
    weights.safetensors   under the names that model.py has
    import.toml           what was imported, and how
    original/unet.keras   the file itself: an export fills its copy

It is written beside and renamed: it is whole, or not there.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from gemsc.base.files import facts_of
from gemsc.errors import GemscError
from gemsc.importers.check import compared
from gemsc.importers.network import ImportedNetwork, ImportOptions, read
from gemsc.importers.origin import (
    MODEL_FILE,
    ORIGIN_FILE,
    ORIGINAL,
    WEIGHTS_FILE,
    Origin,
    check_inside,
)
from gemsc.importers.write import INSTALLED, model_source
from gemsc.weights.write import Entry, write_stream


def default_folder(path: Path) -> Path:
    """Return where a file is imported to: unet_keras beside unet.keras."""
    return path.with_name(path.name.replace(".", "_"))


def import_once(path: Path) -> tuple[Path, ImportedNetwork | None]:
    """Import a file into the folder beside it, unless that has been done.

    Returns the folder, and the network if the file was read. A folder of the same file
    is used as it is, with what was changed in its model.py; one of an older state of
    the file is written anew with the same options.

    Raises:
        GemscError: see `import_file`.
    """
    folder, options = default_folder(path), ImportOptions()
    if (folder / ORIGIN_FILE).is_file():
        origin = Origin.read(folder)
        if origin.is_of(path) and (folder / MODEL_FILE).is_file():
            return folder, None
        options = origin.options(folder)
    return folder, import_file(path, folder, options)


def import_file(
    path: Path,
    folder: Path,
    options: ImportOptions,
    *,
    overwrite: bool = False,
    check: bool = True,
) -> ImportedNetwork:
    """Import a file into a folder, which has model.py then.

    With `check` it is run once beside another implementation of the file, where there
    is one. What else is in the folder of an earlier import stays there.

    Raises:
        GemscError: the file cannot be imported, the folder holds something else, or
            an import that was edited; `overwrite` loses the edits.
    """
    _check_free(path, folder, overwrite)
    options = replace(options, custom=_checked_custom(options.custom))
    network = read(path, options)
    if not network.model.inputs:
        raise GemscError(
            f"{path} has no inputs: it computes the same each time",
            help="save a model that takes the samples as its input",
        )
    note = compared(network) if check else ""
    if note:
        network.notes.append(note)
    place = folder.resolve()
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        _fill(beside, path, network, options)
        _put(beside, place)
    except OSError as error:
        raise GemscError(
            f"{folder} cannot be written: {(error.strerror or str(error)).lower()}",
            help=f"choose another folder: gemsc import {path} -o FOLDER",
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return network


def _check_free(path: Path, folder: Path, overwrite: bool) -> None:
    """Make sure that nothing is lost which a user has made."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / ORIGIN_FILE).is_file():
        raise GemscError(
            f"{folder} holds something other than an import",
            help=f"choose another folder: gemsc import {path} -o FOLDER",
        )
    if overwrite:
        return
    if (edited := Origin.read(folder).edited(folder)) is not None:
        raise GemscError(
            f"{edited} was changed after it was imported",
            help=f"choose another folder: gemsc import {path} -o FOLDER; or discard "
            f"the changes: gemsc import {path} -o {folder} --overwrite",
        )


def _checked_custom(path: Path | None) -> Path | None:
    """Make sure that model.py can import the user's layers by the file's name."""
    if path is None:
        return None
    if not path.is_file():
        raise GemscError(
            f"--custom {path}: there is no such file",
            help="give a Python file with a function for each layer",
        )
    if path.suffix != ".py" or not path.stem.isidentifier() or path.name == MODEL_FILE:
        raise GemscError(
            f"--custom {path}: {MODEL_FILE} cannot import a file of this name",
            help="call it layers.py",
        )
    if path.stem in (*sys.stdlib_module_names, *INSTALLED):
        raise GemscError(
            f"--custom {path}: there is another module {path.stem}",
            help="call it layers.py, or choose an unused name",
        )
    return path


def _fill(
    folder: Path, path: Path, network: ImportedNetwork, options: ImportOptions
) -> None:
    original = folder / ORIGINAL
    facts = {}
    for name in (path.name, *network.tensors.files):
        check_inside(name, path)
        copy = original / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path.parent / name, copy)
        facts[name] = facts_of(copy)
    source = model_source(network, path.name, facts[path.name].sha256)
    (folder / MODEL_FILE).write_text(source, encoding="utf-8")
    written = [MODEL_FILE]
    if options.custom is not None:
        shutil.copyfile(options.custom, folder / options.custom.name)
        written.append(options.custom.name)
    state = network.model.root.state_dict()
    entries = {name: Entry.of(tensor) for name, tensor in state.items()}
    weights = folder / WEIGHTS_FILE
    write_stream(weights, entries, lambda name: network.tensor(name, state[name]))
    Origin(
        gemsc=version("gemsc"),
        file=path.name,
        files=facts,
        written={name: facts_of(folder / name).sha256 for name in written},
        batch=options.batch,
        channels_first=options.channels_first,
        custom=options.custom.name if options.custom else "",
        shapes={name: list(sizes) for name, sizes in options.shapes.items()},
        notes=network.notes,
    ).write(folder)


def _put(beside: Path, folder: Path) -> None:
    """Let a whole folder take the place of an older one; others' files stay."""
    if not folder.exists() or not any(folder.iterdir()):
        beside.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.old.{os.getpid()}")
    folder.rename(old)
    beside.rename(folder)
    for path in old.iterdir():
        if not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(old)
