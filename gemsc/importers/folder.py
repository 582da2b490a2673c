"""The folder that an import writes: model.py, weights.safetensors, import.toml.

In unet/:
    model.py              plain PyTorch, to read and to change
    weights.safetensors   under the names that model.py has
    import.toml           what was imported, and how
    original/unet.keras   the file itself: an export fills its copy

It is written beside and renamed: it is whole, or not there. import.toml has
    gemsc = "0.1.0"
    file = "unet.onnx"               # the copy is original/unet.onnx
    batch = 2
    channels_first = false
    [shapes]
    image = [2, 3, 512, 512]
    [files."unet.onnx"]              # and what belongs to it
    bytes = 4711
    sha256 = "..."
    [written]
    "model.py" = "..."               # its SHA-256: so edits are seen
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath

import tomli_w

from gemsc.base.files import FileFacts, facts_of
from gemsc.base.toml_file import TomlFile
from gemsc.errors import GemscError
from gemsc.importers.network import ImportedNetwork, ImportOptions, read
from gemsc.importers.write import INSTALLED, model_source
from gemsc.weights.write import Entry, write_stream

ORIGIN_FILE, MODEL_FILE = "import.toml", "model.py"
WEIGHTS_FILE, ORIGINAL = "weights.safetensors", "original"
HEAD = "# Written by gemsc import; gemsc export needs it, and the folder original.\n"


@dataclass(frozen=True)
class Origin:
    """What is known of an import: its import.toml.

    `files` are the one that was imported and what belongs to it, from its folder;
    `written` has the digests of the Python files of the folder.
    """

    gemsc: str
    file: str
    files: dict[str, FileFacts]
    written: dict[str, str]
    batch: int = ImportOptions.batch
    channels_first: bool = False
    custom: str = ""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def read(folder: Path) -> Origin:
        """Read the import.toml of a folder.

        Raises:
            GemscError: there is none, or it was not written by gemsc.
        """
        path = folder / ORIGIN_FILE
        advice = "import the file again"
        file = TomlFile.read(path, what="the record of an import", advice=advice)
        origin = file.build(Origin, strict=False)
        for name in (origin.file, *origin.files, *origin.written):
            _check_inside(name, path)
        if origin.file not in origin.files:
            raise file.error((), f"it has no [files.{origin.file!r}]", help=advice)
        return origin

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        text = HEAD + tomli_w.dumps(asdict(self))
        (folder / ORIGIN_FILE).write_text(text, encoding="utf-8")

    def options(self, folder: Path) -> ImportOptions:
        """Return the choices, with the copy of the custom layers that a folder has."""
        return ImportOptions(
            batch=self.batch,
            shapes={name: tuple(sizes) for name, sizes in self.shapes.items()},
            custom=folder / self.custom if self.custom else None,
            channels_first=self.channels_first,
        )

    def is_of(self, path: Path) -> bool:
        """Whether a file, and what belongs to it, is the one that was imported."""
        return self.file == path.name and self._are(path.parent)

    def original(self, folder: Path) -> Path:
        """Return the copy of the file in a folder.

        Raises:
            GemscError: it is not what was imported.
        """
        if not self._are(folder / ORIGINAL):
            raise GemscError(
                f"{folder / ORIGINAL} does not hold the {self.file} that was imported",
                help=f"import it again: gemsc import {self.file} -o {folder}",
            )
        return folder / ORIGINAL / self.file

    def edited(self, folder: Path) -> Path | None:
        """Return a Python file that was changed since the import, if there is one."""
        for name, digest in self.written.items():
            path = folder / name
            if path.is_file() and facts_of(path).sha256 != digest:
                return path
        return None

    def _are(self, folder: Path) -> bool:
        return all(
            (folder / name).is_file() and facts_of(folder / name) == facts
            for name, facts in self.files.items()
        )


def _check_inside(name: str, path: Path) -> None:
    """Make sure that a file which another one names is in its folder."""
    place = PurePosixPath(name.replace("\\", "/"))
    if not name or place.is_absolute() or ".." in place.parts or "\0" in name:
        raise GemscError(
            f"{path} names the file {name!r:.80}, which is outside its folder",
            help="the file is damaged, or not to be trusted",
        )


# ---------------------------------------------------------------------- the import


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
    note = network.compared() if check else ""
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
        _check_inside(name, path)
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
