"""Files of weights: written and read one tensor at a time."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gemsc.base.files import facts_of
from gemsc.errors import GemscError
from gemsc.weights.source import Wanted, WeightFiles, matched
from gemsc.weights.tensor_file import TensorFile
from gemsc.weights.write import (
    DTYPES,
    Entry,
    write_shards,
    write_stream,
    write_tensors,
)


def of_all_kinds() -> dict[str, Tensor]:
    base = torch.randn(4, 6)
    kinds = {
        str(dtype): torch.randint(0, 2, (3, 5)).to(dtype)
        for dtype in DTYPES.values()
        if dtype is not torch.complex128  # written as pairs
    }
    return kinds | {
        "number": torch.tensor(3.5),
        "flag": torch.tensor(True),
        "nothing": torch.empty(0, 7),
        "row": base[1],
        "column": base[:, 2],
        "one of a column": base[:1, 2],
        "turned": base.T,
        "tied": base,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(1, dtype=torch.complex64).conj().imag,
        "a parameter": torch.nn.Parameter(base * 2),
        'ä "name"\n': torch.ones(2, dtype=torch.int8),
    }


@pytest.mark.parametrize("sync", [False, True])
def test_every_kind_of_tensor_comes_back(sync: bool, tmp_path: Path) -> None:
    path, tensors = tmp_path / "all.safetensors", of_all_kinds()
    table = {name: Entry.of(tensor) for name, tensor in tensors.items()}
    facts = write_stream(path, table, tensors.__getitem__, sync=sync)
    assert facts == facts_of(path)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert loaded[name].tolist() == tensor.tolist(), name


def test_a_shard_holds_no_more_than_it_may(tmp_path: Path) -> None:
    tensors = {name: torch.full((2,), ord(name)) for name in "abc"}
    tensors = {"": torch.empty(0)} | tensors
    table = {name: Entry.of(tensor) for name, tensor in tensors.items()}
    assert write_shards(tmp_path, table, tensors.__getitem__, 40) == 2
    first = load_file(tmp_path / "model-00001-of-00002.safetensors")
    assert first.keys() == {"", *"ab"}
    files = WeightFiles.open(tmp_path)
    assert all(files.mapped(name).equal(tensors[name]) for name in tensors)


def test_a_tied_tensor_may_be_there_by_its_second_name(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    write_tensors(tmp_path / "one.safetensors", {"head": tensor})
    wanted = [Wanted(("embedding", "head"), Entry.of(tensor))]
    files = WeightFiles.open(tmp_path / "one.safetensors")
    assert matched(files, wanted) == {"embedding": "head"}


def test_no_tensors_are_a_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "none.safetensors", {})
    assert load_file(tmp_path / "none.safetensors") == {}


def test_one_tensor_at_a_time_is_alive(tmp_path: Path) -> None:
    alive: set[str] = set()

    def read(name: str) -> Tensor:
        assert not alive
        alive.add(name)
        memory = np.full(100, float(name), np.float32)
        weakref.finalize(memory, alive.discard, name)
        return torch.from_numpy(memory)

    table = {str(number): Entry(torch.float32, (100,)) for number in range(5)}
    write_stream(tmp_path / "five.safetensors", table, read)
    assert load_file(tmp_path / "five.safetensors")["3"][0] == 3


def test_complex128_is_written_as_pairs_of_float64(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    z = torch.randn(3, 2, dtype=torch.complex128)
    given = {"z": z, "zero": z[0, 0], "real": torch.randn(3, 2, dtype=torch.float64)}
    write_tensors(path, given)
    file = TensorFile.open(path)
    for name, tensor in given.items():
        torch.testing.assert_close(file.mapped(name), tensor, rtol=0, atol=0)
        part = file.get_slice(name)
        assert part.entry == Entry.of(tensor)
    torch.testing.assert_close(load_file(path)["z"], torch.view_as_real(z))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(2)})
    with pytest.raises(GemscError, match=r"'b' is torch.complex32.*cannot hold"):
        write_tensors(path, {"b": torch.ones(2, dtype=torch.complex32)})

    def read(name: str) -> Tensor:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_stream(path, {"b": Entry(torch.float32, (2,))}, read)
    assert load_file(path).keys() == {"a"}
    assert list(tmp_path.iterdir()) == [path]
