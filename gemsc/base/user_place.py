"""The line of the user's own code that an error comes from."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from gemsc.errors import SourceLocation

LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))


def user_place(trace: TracebackType | None) -> SourceLocation | None:
    """Return the innermost line of the user's."""
    found = None
    for frame in traceback.extract_tb(trace):
        if is_users(Path(frame.filename)) and frame.lineno is not None:
            found = SourceLocation(frame.filename, frame.lineno)
    return found


def is_users(path: Path) -> bool:
    """Whether a file is of neither Python, a package, gemsc nor a program."""
    file = str(path)
    if file.startswith(("<", *LIBRARIES)) or "-packages" in file:
        return False
    return not (path.parent / "plan.toml").is_file()
