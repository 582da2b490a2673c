"""What the files of a checkpoint have, put together by whoever needs it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemsc.base.files import FileFacts
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint import files, folder, optimizer_state
from gemsc.runtime.checkpoint import manifest as manifests
from gemsc.runtime.checkpoint.files import StoredTensors
from gemsc.runtime.checkpoint.manifest import MANIFEST, Manifest, Stored
from gemsc.runtime.checkpoint.pieces import TensorPiece

WHOLE = TensorPiece.whole((2, 3))
ROWS = [WHOLE.rows(row, row + 1) for row in range(2)]


def stored(path: Path, pieces: list[TensorPiece], *tensors: Tensor) -> StoredTensors:
    """Write each tensor, a piece of "x", into a file of its own."""
    names = [f"rank{rank}.safetensors" for rank in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        save_file({"x": tensor}, path / name)
    pairs = zip(names, pieces, strict=True)
    return StoredTensors(path, {"x": Stored("float32", (2, 3), tuple(pairs))})


@pytest.mark.parametrize(
    ("only", "found"), [("rank0.safetensors", 1), ("rank1.safetensors", 2), (None, 3)]
)
def test_the_sum_is_that_of_all_files_or_of_one(
    only: str | None, found: int, tmp_path: Path
) -> None:
    terms = [torch.full((2, 3), float(number)) for number in (1, 2)]
    x, total = stored(tmp_path, [WHOLE] * 2, *terms), torch.zeros(2, 3)
    x.check("x", WHOLE, sums=True)
    x.add("x", WHOLE, total, only)
    assert total.tolist() == [[found] * 3] * 2
    with pytest.raises(GemscError, match="it has not all of 'x'"):
        x.check("x", WHOLE)  # twice


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (torch.ones(1, 3), ""),
        (torch.ones(1, 4), "'x' is not what was saved"),
        (torch.ones(1, 3).double(), "'x' is not what was saved"),
    ],
)
def test_pieces_are_what_the_manifest_says(
    second: Tensor, says: str, tmp_path: Path
) -> None:
    x = stored(tmp_path, ROWS, torch.zeros(1, 3), second)
    if not says:
        assert x.whole("x").tolist() == [[0] * 3, [1] * 3]
        assert x.read("x", ROWS[1]).tolist() == [[1] * 3]
        return
    with pytest.raises(GemscError, match=says):
        x.check("x", WHOLE)
    x.check("x", ROWS[0])  # the file of another piece is not looked at


@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (2, 3, 1)])
def test_a_piece_of_another_shape_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    x = stored(tmp_path, [WHOLE], torch.zeros(2, 3))
    with pytest.raises(GemscError, match=r"'x' has shape \[2, 3\], but the"):
        x.check("x", TensorPiece.whole(shape))


def manifest(aliases: dict[str, str], *keys: str) -> Manifest:
    tensors = {key: Stored("float32", (), ()) for key in keys}
    return Manifest(1, 1, {"rank0.safetensors": FileFacts(0, "")}, tensors, aliases)


def test_averages_take_the_place_of_weights_under_all_their_names() -> None:
    loss = "beside/_loss.scale"
    saved = manifest({"tied": "w"}, "model/w", "model/seen", "ema/w", "beside/x", loss)
    keys: Any = {"w": "model/w", "seen": "model/seen", "_loss.scale": loss}
    chosen = files._keys(saved, Path(), averages=False)
    assert chosen == keys | {"tied": "model/w"}
    chosen = files._keys(saved, Path(), averages=True)
    assert chosen == keys | {"w": "ema/w", "tied": "ema/w"}


def test_without_a_link_the_step_that_was_written_last_counts(tmp_path: Path) -> None:
    """A run that starts anew comes to smaller numbers."""
    for seconds, name in enumerate(("step-000009", "step-000010", "step-000002")):
        path = tmp_path / name / MANIFEST
        path.parent.mkdir()
        path.write_text("")
        os.utime(path, (seconds, seconds))
    latest = folder._step_in(tmp_path)
    assert latest is not None
    assert latest.name == "step-000002"


def rewritten(change: Any, path: Path, *, digest: bool = True) -> None:
    """Change the content of a manifest, and its digest."""
    parts = json.loads((path / MANIFEST).read_text())
    change(parts["content"])
    if digest:
        parts["sha256"] = manifests._digest(parts["content"])
    (path / MANIFEST).write_text(json.dumps(parts))


def pieces_are(*intervals: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        pieces = [("rank0.safetensors", interval) for interval in intervals]
        content["tensors"]["x"]["pieces"] = pieces

    return change


CHANGES: dict[str, tuple[Any, str]] = {
    "ranks": (lambda c: c.update(ranks=2), "does not name a file of each rank"),
    "files": (
        lambda c: c["files"].update({"rank2.safetensors": {"bytes": 0, "sha256": ""}}),
        "does not name a file of each rank",
    ),
    "another file": (
        lambda c: (
            c["files"].update(
                {"rank7.safetensors": c["files"].pop("rank0.safetensors")}
            ),
            c["tensors"].clear(),
        ),
        "does not name a file of each rank",
    ),
    "turned": (pieces_are([[[1, 2], [0, 1]], [[0, 3]]]), "are not in order"),
    "overlapping": (pieces_are([[[0, 2], [1, 2]], [[0, 3]]]), "are not in order"),
    "empty": (pieces_are([[[1, 1]], [[0, 3]]]), "are not in order"),
    "larger": (pieces_are([[[0, 3]], [[0, 3]]]), "a piece is larger than its tensor"),
    "flat": (pieces_are([[[0, 2]]]), r"zip\(\) argument 2 is longer"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_is_read_if_it_can_be_right(name: str, tmp_path: Path) -> None:
    change, says = CHANGES[name]
    pieces = (("rank0.safetensors", ROWS[0]), ("rank0.safetensors", ROWS[1]))
    tensors = {"x": Stored("float32", (2, 3), pieces)}
    saved = Manifest(7, 1, {"rank0.safetensors": FileFacts(3, "a")}, tensors)
    saved.write(tmp_path)
    assert Manifest.read(tmp_path) == saved
    rewritten(change, tmp_path)
    with pytest.raises(GemscError, match=says):
        Manifest.read(tmp_path)


def test_a_manifest_that_has_changed_is_not_read(tmp_path: Path) -> None:
    Manifest(7, 1, {"rank0.safetensors": FileFacts(3, "a")}, {}).write(tmp_path)
    rewritten(lambda content: content.update(step=8), tmp_path, digest=False)
    with pytest.raises(GemscError, match="it is not what was saved"):
        Manifest.read(tmp_path)


def test_the_latest_stays_until_another_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts anew comes to the same step."""
    latest, rename = tmp_path / folder.LATEST, os.rename

    def watched(source: Any, target: Any) -> None:
        assert not latest.is_symlink() or (latest / MANIFEST).is_file()
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    for _ in range(4):
        beside = folder.clear_space(tmp_path, 4)
        (beside / MANIFEST).write_text("")
        folder.publish(tmp_path, beside, folder.Retention(newest=1))
        assert (latest / MANIFEST).is_file()


def test_lists_of_one_value_for_each_group_are_put_together() -> None:
    ranks = [
        {"rates": [0.1, 0.2], "steps": [4, 5, 6], "of": [{"rates": [1.0, 2.0]}]},
        {"rates": [0.3, 0.4], "steps": [4, 5, 6], "of": [{"rates": [3.0, 4.0]}]},
    ]
    now = {"rates": [0.0, 0.0], "steps": [0, 0, 0], "of": [{"rates": [0.0, 0.0]}]}
    places, counts = [(1, 0), (0, 1)], {0: 2, 1: 2}
    state = optimizer_state._merged(dict(enumerate(ranks)), now, places, counts)
    assert state == {"rates": [0.3, 0.2], "steps": [4, 5, 6], "of": [{"rates": [3, 2]}]}
