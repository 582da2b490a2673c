"""Ranks compare what they read: data that differ stop a run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import MODEL, Gemsc, gemsc_here, line_of
from nightly import at_night

from gemsc.base.rng import preserve_rng
from gemsc.errors import GemscError, SourceLocation
from gemsc.runtime.data.batches import NUM_REPEATED, Batches, digest
from gemsc.runtime.data.shapes import ShapeClasses
from gemsc.runtime.data.shared import Digests, SharedData
from gemsc.runtime.data.tiled import Window
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport
from gemsc.user_model import load_user_model

gemsc = pytest.fixture(gemsc_here)

PLACE = SourceLocation("model.py", 7)


class Table:
    """Twelve numbers; `changed` ones are others."""

    shape = (4,)

    def __init__(self, *changed: int, size: int = 12) -> None:
        self.values = [float(i) + 0.5 * (i in changed) for i in range(size)]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.values[index]]), index

    def read(self, index: int, box: Any) -> Any:
        return torch.tensor([box[0][0] + self.values[index]]), index


def on_ranks(
    *tables: Table | None, number: int = 0, num_parts: int = 1, **options: Any
) -> list[list[Digests]]:
    """Read an epoch on a rank for each table; None reads nothing."""
    boxes = options.pop("boxes", [None] * len(tables))
    begin, examples = options.pop("begin", 0), options.pop("examples", ())
    options = {"shuffle": True, **options}

    def read(transport: Transport) -> list[Digests]:
        rank = transport.rank
        table, box = tables[rank], boxes[rank]
        window = Window(Table.shape, (box,)) if box is not None else None
        batches = Batches(
            table or Table(),
            4,
            seed=0,
            part=rank % num_parts,
            num_parts=num_parts,
            window=window,
            **options,
        )
        data = SharedData(batches, transport, "dataset", PLACE, examples)
        reads = table is not None
        return [seen for _, seen in data.epoch(number, begin, reads=reads)]

    return run_local(len(tables), read, timeout=60)


def test_ranks_that_read_the_same_go_on() -> None:
    first, *later = on_ranks(Table(), None, Table())[0]
    assert len(first) == 4
    assert later == [{}, {}]


@pytest.mark.slow
def test_the_sample_and_the_ranks_that_differ_are_named() -> None:
    for changed in range(12):
        with pytest.raises(GemscError) as caught:
            on_ranks(Table(), None, Table(changed), compare_all=True, number=2)
        message = (
            "model.py:7: error: dataset returns different data on ranks 0 and 2: "
            f"sample {changed}, in epoch 3\n"
        )
        assert str(caught.value).startswith(message)


def test_a_sample_that_is_no_pair_is_named_with_the_line_of_the_dataset() -> None:
    class Holes(Table):
        def read(self, index: int, box: Any) -> Any:
            return super().read(index, box) if index != 5 else None

    with pytest.raises(GemscError) as caught:
        on_ranks(Holes(), Holes(), shuffle=False)
    assert str(caught.value).startswith("model.py:7: error: sample 5: the dataset does")


def test_inputs_that_no_example_has_are_not_left_out_with_no_word() -> None:
    class Pairs(Table):
        def read(self, index: int, box: Any) -> Any:
            return (torch.ones(1), 2, index // 8), index

    def read(*examples: Any) -> int:
        tables = (Pairs(), None)
        return len(on_ranks(*tables, examples=[examples], shuffle=False)[0])

    one = torch.ones(4, 1)
    assert read(one, 2, one) == read(one, None, one) == 3
    for examples, said in (
        ((one,), r"input\[1\], which example_inputs\(\) does not have"),
        ((one, 3, one), r"input\[1\], which is 3 in example_inputs"),
        ((one, one, 0), r"input\[2\], which is 0 in example_inputs"),  # later it is 1
    ):
        with pytest.raises(GemscError, match=f"model.py:7: .* has {said}"):
            read(*examples)


def test_samples_for_evaluation_are_compared() -> None:
    with pytest.raises(
        GemscError, match=r"different data on ranks 0 and 1: sample 2\n"
    ):
        on_ranks(Table(), Table(2), shuffle=False)


def test_only_the_first_batch_is_compared() -> None:
    assert on_ranks(Table(), Table(7), shuffle=False)


def test_replicas_have_one_sample_in_common() -> None:
    """Else ranks that read different samples could have different datasets."""
    first = on_ranks(Table(), Table(), num_parts=2)[1][0]
    assert len(first) == 4
    wrong = Table(*range(12))
    for begin in (0, 1):  # where a resumed run goes on
        with pytest.raises(GemscError, match="different data on ranks 0 and 1"):
            on_ranks(Table(), wrong, num_parts=2, begin=begin)


def test_ranks_compare_the_same_part_of_an_image() -> None:
    halves = [(0, 2), (2, 4)]
    assert on_ranks(Table(), Table(), boxes=halves)
    assert on_ranks(Table(), Table(*range(12)), boxes=halves)  # nothing in common
    with pytest.raises(GemscError, match="different data on ranks 0 and 2"):
        on_ranks(Table(), Table(), Table(*range(12)), boxes=[*halves, halves[0]])


def test_datasets_of_different_length_are_refused() -> None:
    with pytest.raises(GemscError, match="has 12 samples on rank 0 and 11 on rank 1"):
        on_ranks(Table(), Table(size=11))


class Counting(Table):
    """Each reading of sample `odd` gives another number."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.odd = odd
        self.reads = 0

    def read(self, index: int, box: Any) -> Any:
        self.reads += 1
        sample, target = super().read(index, box)
        return sample + self.reads * (index == self.odd), target


def test_a_dataset_that_does_not_give_a_sample_again_is_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As it cannot go on where it was interrupted."""
    on_ranks(None, Counting(2), shuffle=False)
    said = capfd.readouterr().err
    assert said.startswith(
        "model.py:7: warning: dataset returns other data when sample 2 is read again: "
        "this run cannot be resumed or repeated bit for bit\nhelp: "
    )
    assert said.count("warning") == 1
    on_ranks(Table(), Table(), shuffle=False)
    on_ranks(None, counting := Counting(99), shuffle=False)
    assert capfd.readouterr().err == ""
    assert counting.reads == 12 + 4  # the first batch's


def test_a_sample_is_read_again_in_the_first_epoch_alone() -> None:
    batches = Batches(counting := Counting(99), 12, seed=0, shuffle=True)
    reads = [(list(batches.epoch(n)), counting.reads)[1] for n in range(3)]
    assert reads == [12 + NUM_REPEATED, 24 + NUM_REPEATED, 36 + NUM_REPEATED]


def test_a_digest_depends_on_dtype_shape_and_content() -> None:
    zeros = torch.zeros(4)
    samples = [
        zeros,
        zeros.double(),
        zeros.view(2, 2),
        torch.tensor([0.0, 0.0, 0.0, -0.0]),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, dtype=torch.complex64),
        zeros.numpy().astype(np.int16),
        np.float32(0),
        torch.tensor(0.0),
        0.0,
        0,
        False,
        "0",
        (zeros, 1),
        (zeros, 2),
        {"a": zeros, "b": zeros},
    ]
    assert len({digest(sample) for sample in samples}) == len(samples)
    assert digest((zeros.t(), [1])) == digest((zeros.clone(), [1]))
    assert digest(torch.zeros(2, 2)[:1, 1]) == digest(torch.zeros(1))  # of any stride
    assert digest(torch.arange(6).view(2, 3).t()) == digest(
        torch.tensor([[0, 3], [1, 4], [2, 5]])
    )
    waves = torch.randn(3, dtype=torch.complex64)  # .conj() only marks them
    assert digest(waves.conj()) == digest(waves.conj().resolve_conj()) != digest(waves)
    assert digest(object()) == digest(object())


DRAWN = """

def table():
    return torch.rand(3), random.random(), np.random.rand()


def dataset():
    return [table()]


eval_dataset = partial(table)
"""


def test_a_dataset_is_made_under_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "drawn.py"
    imports = "import random\nfrom functools import partial\nimport numpy as np\n"
    path.write_text(imports + MODEL + DRAWN)
    user = load_user_model(str(path))

    def numbers(seed: int) -> list[str]:
        return [digest(user.make_dataset(n, seed=seed)) for n in NAMES]

    one = numbers(0)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    assert numbers(0) == one
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]
    assert not {*numbers(1)} & {*one}


NAMES = ("dataset", "eval_dataset")


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("name", ["dataset", *at_night("eval_dataset")])
def test_a_generator_that_takes_no_seed_stops_the_run(
    name: str, tmp_path: Path, gemsc: Gemsc
) -> None:
    text = MODEL.replace(
        "import torch\n",
        "import random\nimport torch\nOWN = random.SystemRandom()\n",
        1,
    )
    noisy = "class Noisy(Data):\n    def __getitem__(self, index):\n"
    noisy += "        return torch.full((8,), OWN.random()), torch.tensor(index % 4)\n"
    text = text.replace("\ndef model()", f"\n{noisy}\n\ndef model()")
    size = {"dataset": 24, "eval_dataset": 16}[name]
    text = text.replace(f"return Data({size})", f"return Noisy({size})")
    (tmp_path / "noisy.py").write_text(text)
    program = tmp_path / "program"
    assert gemsc("compile", tmp_path / "noisy.py", "-o", program).code == 0
    outcome = gemsc("run", program, "--save", tmp_path / "checkpoint")
    assert outcome.code == 1
    line = line_of(f"def {name}()", text)
    assert outcome.err.count("error: ") == 1
    message = (
        f"noisy.py:{line}: error: {name} returns different data on ranks 0 and 1: "
    )
    assert message in outcome.err
    assert "draw from no others" in outcome.err
    assert not (tmp_path / "checkpoint" / "latest").exists()


def test_what_is_drawn_beside_the_data_is_the_same_on_every_rank() -> None:
    """In hooks, after a resume too: with other processes that read, or none."""

    def draws(begin: int = 0, *, reads: bool = True, workers: int = 0) -> list[Any]:
        def read(transport: Transport) -> list[Any]:
            options = {"seed": 0, "shuffle": True, "workers": workers}
            batches = Batches(Table(), 4, **options)
            data = SharedData(batches, transport, "dataset", PLACE)
            return [
                (torch.rand(1).item(), random.random(), np.random.rand())
                for _ in data.epoch(1, begin, reads=reads)
            ]

        with preserve_rng():
            return run_local(1, read, timeout=60)[0]

    first, second, third = wanted = draws()
    assert len({first, second, third}) == 3
    assert draws(reads=False) == draws(workers=1) == wanted
    assert draws(1) == draws(1, workers=1) == [second, third]


# ------------------------------------------------------------------------- collate


@dataclass  # which cannot be hashed
class Mixing:
    """Makes batches of samples mixed with each other, as much as a generator says."""

    rng: Any

    def __call__(self, samples: list[Any], number: int) -> Any:
        x = torch.stack([sample for sample, _ in samples])
        share = self.rng.random()
        return share * x + (1 - share) * x.flip(0), torch.tensor(share)


def mixing(rng: Any) -> ShapeClasses:
    line = SourceLocation("model.py", 9)
    return ShapeClasses([], collate=Mixing(rng), at={"collate": line})


@pytest.mark.parametrize("kind", [np.random.default_rng, random.Random])
def test_what_collate_draws_is_alike_on_all_ranks(kind: Any) -> None:
    def shares(workers: int, epoch: int = 0, first: int = 0) -> list[float]:
        options: Any = {"seed": 0, "shuffle": True, "workers": workers}
        batches = Batches(Table(), 4, shapes=mixing(kind()), **options)
        with preserve_rng():
            drawn = [b.data[1].item() for b in batches.epoch(epoch, first)]
        batches.close()
        return drawn

    wanted = shares(0)
    assert len({*wanted}) == 3
    assert shares(0) == shares(2) == wanted
    assert shares(0, first=1) == wanted[1:]  # as a run that was resumed
    assert not {*wanted} & {*shares(0, epoch=1)}


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_collate_that_cannot_be_seeded_is_refused(num_parts: int) -> None:
    tables = [Table() for _ in range(4)]
    shapes = mixing(random.SystemRandom())
    with pytest.raises(GemscError) as caught:
        on_ranks(*tables, num_parts=num_parts, shapes=shapes)
    ranks = {1: "0 and 1", 2: "0 and 2"}[num_parts]
    error = "model.py:9: error: dataset and collate give different batches on ranks "
    assert str(caught.value).startswith(error + ranks)


def test_parts_and_windows_have_batches_of_their_own() -> None:
    def collate(samples: list[Any], number: int) -> Any:
        return torch.stack([sample for sample, _ in samples]), 0

    given: Any = {"shapes": ShapeClasses([], collate=collate)}
    assert on_ranks(Table(), None, Table(), Table(), num_parts=2, **given)
    assert on_ranks(Table(), Table(), boxes=[(0, 2), (2, 4)], **given)
