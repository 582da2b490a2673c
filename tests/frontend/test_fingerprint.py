"""A program knows which of the user's definitions it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemsc.base.fingerprint import changed_definitions, fingerprint, source_fingerprints

MODEL = '''"""A model."""
import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def forward(self, x):
        return x + WIDTH


def helper(x):
    return x


def crops(path):
    return [path]


def dataset():
    return crops("data")


eval_windows = {"overlap": 0.5}


def optimizer(named):
    return torch.optim.SGD(named, lr=0.1)
'''


def write(folder: Path, text: str = MODEL) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


def changes(folder: Path, old: str, new: str) -> list[str]:
    """Return what is found to have changed after an edit."""
    path = write(folder)
    recorded = {str(path): source_fingerprints(path)}
    assert old in MODEL
    write(folder, MODEL.replace(old, new))
    return changed_definitions(recorded)


def test_each_definition_has_its_own(tmp_path: Path) -> None:
    fingerprints = source_fingerprints(write(tmp_path))
    assert fingerprints.keys() == {"(module)", "WIDTH", "Block", "helper"}
    assert all(len(value) == 16 for value in fingerprints.values())


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("x + WIDTH", "x - WIDTH", ["model.py: Block changed"]),
        ("WIDTH = 8", "WIDTH = 16", ["model.py: WIDTH changed"]),
        ("class Block", "class Brick", [
            "model.py: Block is gone", "model.py: Brick is new"]),
        ("import torch\n", "import torch as t\n", ["model.py: (module) changed"]),
    ],
)  # fmt: skip
def test_an_edit_is_named(tmp_path: Path, old: str, new: str, names: list[str]) -> None:
    assert changes(tmp_path, old, new) == names


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x\n", "# the same\n    return x\n"),
        ("x + WIDTH", "(x\n                + WIDTH)"),
        ('"""A model."""', '"""Another text."""'),
        ("lr=0.1", "lr=0.5"),
        ('crops("data")', 'crops("elsewhere")'),
        ("[path]", "[path, path]"),
    ],
    ids=["comment", "layout", "docstring", "optimizer", "dataset", "used by the data"],
)
def test_what_does_not_matter_is_no_change(tmp_path: Path, old: str, new: str) -> None:
    assert changes(tmp_path, old, new) == []


def test_what_the_model_uses_too_counts(tmp_path: Path) -> None:
    text = MODEL.replace('crops("data")', 'crops(helper("data"))')
    text = text.replace("return x + WIDTH", "return helper(x) + WIDTH")
    path = write(tmp_path, text)
    assert "helper" in source_fingerprints(path)


def test_a_file_that_is_gone_or_no_python_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    recorded = {str(path): source_fingerprints(path)}
    path.write_text("def (")
    assert changed_definitions(recorded) == [f"{path} is no longer valid Python"]
    path.unlink()
    assert changed_definitions(recorded) == [f"{path} no longer exists"]


def test_several_definitions_of_one_name_count_together(tmp_path: Path) -> None:
    twice = MODEL + "\n\ndef helper(x):\n    return 2 * x\n"
    before = source_fingerprints(write(tmp_path, twice))
    after = source_fingerprints(write(tmp_path, twice.replace("2 * x", "3 * x")))
    assert [n for n in before if before[n] != after[n]] == ["helper"]


def test_a_fingerprint_depends_on_the_text_only() -> None:
    assert fingerprint("abc") == fingerprint("abc") == "ba7816bf8f01cfea"
    assert fingerprint("abd") != fingerprint("abc")


def test_only_what_the_traced_lines_need_may_count(tmp_path: Path) -> None:
    """A script may hold the model and the training loop around it."""
    path = write(tmp_path)
    line = MODEL.splitlines().index("        return x + WIDTH") + 1
    recorded = source_fingerprints(path, {line})
    assert recorded.keys() == {"Block", "WIDTH"}

    def changed(old: str, new: str) -> list[str]:
        write(tmp_path, MODEL.replace(old, new) + "\nfor step in range(10):\n    ...\n")
        return changed_definitions({str(path): recorded}, whole=False)

    assert changed("return x\n", "return 2 * x\n") == []
    assert changed("import torch\n", "import torch\nimport gemsc\n") == []
    assert changed("WIDTH = 8", "WIDTH = 9") == ["model.py: WIDTH changed"]
