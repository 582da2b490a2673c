"""`import.toml`: which file a folder was imported from, and with which choices.

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

from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

import tomli_w

from gemsc.base.files import FileFacts, facts_of
from gemsc.base.toml_file import TomlFile
from gemsc.errors import GemscError
from gemsc.importers.network import ImportOptions

ORIGIN_FILE, MODEL_FILE = "import.toml", "model.py"
WEIGHTS_FILE, ORIGINAL = "weights.safetensors", "original"
HEAD = "# Written by gemsc import; gemsc export needs it, and the folder original.\n"


@dataclass(frozen=True)
class Origin:
    """What is known of an import.

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
        found = file.build(Origin, strict=False)
        for name in (found.file, *found.files, *found.written):
            check_inside(name, path)
        if found.file not in found.files:
            raise file.error((), f"it has no [files.{found.file!r}]", help=advice)
        return found

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


def check_inside(name: str, path: Path) -> None:
    """Make sure that a file which another one names is in its folder.

    Raises:
        GemscError: it is elsewhere.
    """
    place = PurePosixPath(name.replace("\\", "/"))
    if not name or place.is_absolute() or ".." in place.parts or "\0" in name:
        raise GemscError(
            f"{path} names the file {name!r:.80}, which is outside its folder",
            help="the file is damaged, or not to be trusted",
        )
