"""Files are written beside, then renamed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from gemsc.base.files import replaced, write_text
from gemsc.weights.write import write_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_weights_have_the_permissions_of_any_file(
    umask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == mode


def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "whole")
    with pytest.raises(FileNotFoundError), replaced(path) as beside:
        Path("nowhere").rename(beside)
    assert path.read_text(encoding="utf-8") == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with pytest.raises(OSError, match=re.escape(str(path))), replaced(path):
        Path("/dev/full").write_text("full")
    assert [*tmp_path.iterdir()] == []
