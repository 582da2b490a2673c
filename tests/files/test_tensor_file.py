"""Safetensors files as tables of tensors that are mapped one at a time."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from gemsc.weights.tensor_file import TensorFile
from gemsc.weights.write import Entry

TENSORS = {
    "weight": torch.arange(6000.0).view(60, 100),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "small": torch.arange(3, dtype=torch.int8),
    "number": torch.tensor(5),
    "nothing": torch.zeros(0, 4),
    "flag": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "eight": torch.arange(5).to(torch.float8_e4m3fn),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"format": "pt"})
    return tmp_path / "a.safetensors"


def test_tensors_are_what_was_saved(path: Path) -> None:
    file = TensorFile.open(path)
    assert file.table.keys() == TENSORS.keys()
    for name, wanted in TENSORS.items():
        tensor, part = file.mapped(name), file.get_slice(name)
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(tensor.view(-1).view(torch.uint8), _raw(wanted))
        assert part.entry == Entry.of(wanted)
        if wanted.dim():
            assert torch.equal(_raw(part[1:]), _raw(wanted[1:]))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_writing_leaves_the_file_as_it_is(path: Path) -> None:
    before = path.read_bytes()
    mapped = TensorFile.open(path).mapped("weight")
    mapped.zero_()
    assert not mapped.any()
    assert path.read_bytes() == before
    assert torch.equal(TensorFile.open(path).mapped("weight"), TENSORS["weight"])


def test_a_tensor_may_lie_anywhere(tmp_path: Path) -> None:
    """Other writers do not align tensors."""
    data = torch.arange(4.0)
    table = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [3, 19]},
    }
    head = json.dumps(table).encode()
    raw = data.numpy().tobytes()
    text = len(head).to_bytes(8, "little") + head + b"abc" + raw
    (tmp_path / "odd.safetensors").write_bytes(text)
    assert torch.equal(TensorFile.open(tmp_path / "odd.safetensors").mapped("b"), data)


def test_damage_is_found(path: Path) -> None:
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole[:8] + b"x" + whole[9:]):
        path.write_bytes(damaged)
        with pytest.raises(SafetensorError):
            TensorFile.open(path)


MAPPED = """
import resource, sys
from pathlib import Path
from gemsc.weights.tensor_file import TensorFile

resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]), int(sys.argv[2])))
file = TensorFile.open(Path(sys.argv[1]))
print([float(file.mapped(name)[-1]) for name in sorted(file.table)])
"""


@pytest.mark.slow
def test_a_file_may_be_larger_than_what_may_be_mapped(tmp_path: Path) -> None:
    """One tensor is mapped at a time; safetensors maps all, and is refused."""
    names, size = "abcdefgh", 2**26
    with (tmp_path / "large.safetensors").open("wb") as file:  # of holes
        table = {
            name: {"dtype": "F32", "shape": [size], "data_offsets": [i, i + 4 * size]}
            for i, name in zip(range(0, 32 * size, 4 * size), names, strict=True)
        }
        head = json.dumps(table).encode()
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 32 * size)
    limit = resource.getpagesize() * 2**18  # 1 GiB; the file has 2
    words = [sys.executable, "-c", MAPPED, tmp_path / "large.safetensors", str(limit)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([0.0] * 8)
