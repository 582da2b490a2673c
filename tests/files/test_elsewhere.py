"""Programs of models on the meta device: each rank finds its own weights elsewhere."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Gemsc, Outcome, gemsc_here
from nightly import at_night
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gemsc import compile
from gemsc.base.dtypes import default_dtype
from gemsc.base.rng import same_draws
from gemsc.cli.export import trained_model
from gemsc.errors import GemscError
from gemsc.lowering import tracing
from gemsc.plan import Plan
from gemsc.runtime.training.starting import first_weights
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport
from gemsc.user_model import load_user_model
from gemsc.weights.elsewhere import Elsewhere
from gemsc.weights.first import FirstWeights
from gemsc.weights.initialize import Initialized
from gemsc.weights.on_meta import is_on_meta
from gemsc.weights.write import write_tensors

MODEL = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.blocks = nn.Sequential(*(Block(8) for _ in range(3)))
            self.scale = nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight
            angles = torch.outer(torch.arange(4), 10.0 ** -torch.arange(8))
            self.register_buffer("angles", angles, persistent=False)
            self.table = torch.cos(torch.arange(8) * 0.1)

        def forward(self, x):
            x = self.embed(x) + self.angles.sin() + self.table
            x = self.blocks(x)
            return self.head(self.scale(x.transpose(1, 2)).transpose(1, 2))

    DEVICE = "meta"

    def model():
        with torch.device(DEVICE):
            return Net()

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def example_inputs():
        return (torch.randint(16, (2, 4)),)

    def example_target():
        return torch.randint(16, (2, 4))

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)

    def dataset():
        x = torch.randint(16, (16, 4))
        return torch.utils.data.TensorDataset(x, x.flip(1))
"""
NAMED = '\n    weights = "w"\n'
INIT = """
    def init(module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.1)
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
"""


@pytest.fixture
def gemsc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Gemsc:
    """Return the command, in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return gemsc_here(monkeypatch, capfd)


def write(more: str = "", **constants: str) -> None:
    text = textwrap.dedent(MODEL + more)
    for old, new in constants.items():
        text = text.replace(old, new)
    Path("model.py").write_text(text)


def write_weights(seed: int = 0) -> dict[str, Tensor]:
    """Write weights of the model in two files with an index; return them."""
    write()
    user = load_user_model("model.py", constants={"DEVICE": "cpu"})
    state = {
        n: t.clone() for n, t in user.make_unfilled(seed=seed).state_dict().items()
    }
    state.pop("head.weight")  # as files have tied ones
    places = {n: f"{len(n) % 2}.safetensors" for n in sorted(state)}
    shutil.rmtree("w", ignore_errors=True)
    Path("w").mkdir()
    for file in sorted({*places.values()}):
        save_file({n: state[n] for n in places if places[n] == file}, f"w/{file}")
    index = json.dumps({"weight_map": places})
    Path("w/model.safetensors.index.json").write_text(index)
    return state


def good(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.err
    return outcome


def compiled(gemsc: Gemsc, *more: str, into: str = "out") -> Path:
    words = "--ranks", "2", "--micro-batches", "2", "-o", into
    good(gemsc("compile", "model.py", *words, *more))
    return Path(into)


def trained(gemsc: Gemsc, program: Path, *more: str) -> dict[str, Tensor]:
    folder = f"run-{program}"
    good(gemsc("run", str(program), "--steps", "3", "--save", folder, *more))
    return load_file(f"{folder}/model.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


def first_of(program: Path) -> dict[str, Tensor]:
    with trained_model(program, averages=False) as model:
        return {name: model.read(name) for name in model.table}


def first_of_stage(program: Path) -> dict[str, Tensor]:
    paths = program.glob("weights*/stage*.safetensors")
    return {name: t for path in paths for name, t in load_file(path).items()}


# ------------------------------------------------------------- in the user's files


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "options",
    [("--shards", "2"), ("--data", "2", "--shard", "weights"), *at_night(())],
    ids=str,
)
def test_it_trains_as_if_its_weights_had_been_loaded(
    options: tuple[str, ...], gemsc: Gemsc
) -> None:
    state = write_weights()
    write(NAMED)
    program = compiled(gemsc, *options)
    held = first_of_stage(program).keys()
    assert held
    assert not held & state.keys()
    write(NAMED, **{'"meta"': '"cpu"'})
    whole = compiled(gemsc, *options, into="whole")
    assert equal(first_of(program), first_of(whole))
    write(NAMED)
    weights = trained(gemsc, program)
    write(NAMED, **{'"meta"': '"cpu"'})
    assert equal(weights, trained(gemsc, whole))


@pytest.mark.slow
def test_all_inputs_take_what_ranks_take(gemsc: Gemsc) -> None:
    write_weights()
    write(NAMED)
    program = compiled(gemsc, "--shards", "2")
    good(gemsc("verify", str(program), "--all-inputs"))


@pytest.mark.mpi
@pytest.mark.nightly
def test_verify_takes_what_ranks_take(gemsc: Gemsc) -> None:
    write_weights()
    write(NAMED)
    program = compiled(gemsc, "--shards", "2")
    good(gemsc("verify", str(program), "--steps", "1"))


@pytest.mark.slow
def test_files_of_another_dtype_are_converted(gemsc: Gemsc) -> None:
    state = write_weights()
    shutil.rmtree("w")
    floats = {n: t for n, t in state.items() if t.is_floating_point()}
    low = state | {n: t.to(torch.bfloat16) for n, t in floats.items()}
    save_file(low, "w.safetensors")
    write('\n    weights = "w.safetensors"\n')
    weights = first_of(compiled(gemsc))
    assert all(torch.equal(weights[n], low[n].to(t.dtype)) for n, t in state.items())


@pytest.mark.slow
def test_a_tied_weight_may_have_either_name(gemsc: Gemsc) -> None:
    state = write_weights()
    other = state | {"head.weight": state["embed.weight"]}
    del other["embed.weight"]
    save_file(other, "w.safetensors")
    write('\n    weights = "w.safetensors"\n')
    weights = first_of(compiled(gemsc))
    assert torch.equal(weights["embed.weight"], state["embed.weight"])


def test_program_and_files_may_be_moved_together(
    gemsc: Gemsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = write_weights()
    write(NAMED)
    compiled(gemsc)
    (tmp_path / "there").mkdir()
    for name in ("out", "w", "model.py"):
        shutil.move(name, f"there/{name}")
    monkeypatch.chdir(tmp_path / "there")
    weights = first_of(Path("out"))
    assert all(torch.equal(weights[name], state[name]) for name in state)


@pytest.mark.slow
def test_files_that_changed_are_refused_before_ranks_start(gemsc: Gemsc) -> None:
    state = write_weights()
    write(NAMED)
    compiled(gemsc)
    shutil.move("w", "away")
    outcome = gemsc("run", "out", "--steps", "1")
    assert outcome.code == 1
    assert "there is no file or folder" in outcome.err
    save_file(state | {"scale.bias": torch.zeros(3)}, "w")
    outcome = gemsc("run", "out", "--steps", "1")
    assert "'scale.bias' has shape [3], but the model needs [8]" in outcome.err
    assert "rank" not in outcome.err


@pytest.mark.parametrize("check", ["--check", "--no-check"])
def test_files_of_another_model_are_refused_at_once(check: str, gemsc: Gemsc) -> None:
    state = write_weights()
    shutil.rmtree("w")
    save_file(state | {"more": torch.zeros(3)}, "w.safetensors")
    write('\n    weights = "w.safetensors"\n')
    outcome = gemsc("compile", "model.py", "-o", "out", *([check] * (check[2] == "n")))
    assert outcome.code == 1
    assert "has 'more', which the model does not have" in outcome.err
    line = 1 + Path("model.py").read_text().splitlines().index(
        'weights = "w.safetensors"'
    )
    assert f"model.py:{line}: error" in outcome.err


@pytest.mark.slow
def test_files_have_what_the_model_has_too(gemsc: Gemsc) -> None:
    """Persistent buffers that are not on the meta device: the files' count."""
    state = write_weights()
    state["scale.running_mean"] = torch.arange(8.0)
    shutil.rmtree("w")
    save_file(state, "w.safetensors")
    old = "self.scale = nn.BatchNorm1d(8)"
    new = f'{old}.to_empty(device="cpu")\n        self.scale.reset_parameters()'
    write('\n    weights = "w.safetensors"\n', **{old: new})
    mean = torch.arange(8.0)
    assert torch.equal(first_of(compiled(gemsc))["scale.running_mean"], mean)
    write(**{old: new})
    program = compiled(gemsc)
    assert not first_of_stage(program)["scale.running_mean"].any()
    good(gemsc("import", str(program), "w.safetensors"))
    assert torch.equal(first_of(program)["scale.running_mean"], mean)


@pytest.mark.slow
def test_a_program_that_has_its_weights_takes_the_place_of_one_that_has_not(
    gemsc: Gemsc,
) -> None:
    state = write_weights(seed=1)
    write(INIT)
    compiled(gemsc)
    good(gemsc("import", "out", "w"))
    weights = first_of(Path("out"))
    assert all(torch.equal(weights[name], state[name]) for name in state)
    write(**{'"meta"': '"cpu"'})
    compiled(gemsc)
    shutil.rmtree("w")
    assert not [*Path("out").rglob("elsewhere.json")]
    assert not torch.equal(first_of(Path("out"))["embed.weight"], state["embed.weight"])


@pytest.mark.slow(1)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_graph_is_compared_where_that_does_not_take_long(
    device: str, gemsc: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not on the meta device is compared however long it takes."""
    write_weights()
    write(NAMED, **{'"meta"': f'"{device}"'})
    compared = []

    def check(*given: object, **how: object) -> str:
        compared.append(given)
        return ""

    monkeypatch.setattr(tracing, "check_against_eager", check)
    compiled(gemsc)
    assert compared.pop()
    monkeypatch.setattr(tracing, "MOST_FLOPS", 1)
    compiled(gemsc)
    assert bool(compared) is (device == "cpu")


# ------------------------------------------------------------------- none at first


@pytest.mark.slow
@pytest.mark.mpi
def test_a_program_without_weights(gemsc: Gemsc) -> None:
    state = write_weights()
    write()
    outcome = good(gemsc("compile", "model.py", "--ranks", "2", "-o", "out"))
    assert "the model has no weights here" in outcome.err
    good(gemsc("show", "out"))
    for command in ("run", "verify", "export"):
        more = ["-o", "x.safetensors"] if command == "export" else []
        refused = gemsc(command, "out", *more)
        assert refused.code == 1
        assert "out has no weights: its model was on the meta" in refused.err
        assert "gemsc import out WEIGHTS" in refused.err
    # a checkpoint has all that it needs
    save_file(state, "given.safetensors")
    resumed = trained(gemsc, Path("out"), "--resume", "given.safetensors")
    assert all(tensor.isfinite().all() for tensor in resumed.values())
    shutil.rmtree("run-out")
    good(gemsc("import", "out", "w"))
    assert equal(trained(gemsc, Path("out")), resumed)


def test_python_may_compile_what_has_no_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    before = [*model.parameters()]
    program = compile(model, (torch.randn(2, 4),), ranks=2)
    program.write(tmp_path / "out")
    assert [a is b for a, b in zip(model.parameters(), before, strict=True)] == [
        True
    ] * 4
    assert is_on_meta(model)
    first = first_weights(tmp_path / "out", Plan.read(tmp_path / "out" / "plan.toml"))
    assert [*first.table(0)] == ["0.weight", "0.bias"]
    with pytest.raises(GemscError, match="has no weights"):
        first.read(0, "0.weight")
    assert first.blank(0, "0.weight").isnan().all()

    def step(transport: Transport) -> None:
        Trainer(tmp_path / "out", transport).evaluate(torch.randn(2, 4))

    with pytest.raises(GemscError, match="out has no weights"):
        run_local(2, step)


# ---------------------------------------------------------------------- made by init


def made(ranks: str, gemsc: Gemsc, *more: str) -> dict[str, Tensor]:
    compiled(gemsc, "--ranks", ranks, *more, into=f"out{ranks}{len(more)}")
    return first_of(Path(f"out{ranks}{len(more)}"))


@pytest.mark.slow
def test_what_init_makes_does_not_depend_on_ranks(gemsc: Gemsc) -> None:
    write(INIT)
    one = made("2", gemsc)
    assert equal(one, made("3", gemsc))
    assert equal(one, made("2", gemsc, "--shards", "2"))
    assert one["scale.num_batches_tracked"] == 0
    assert 0.05 < one["blocks.0.up.weight"].std() < 0.15
    assert not torch.equal(one["blocks.0.up.weight"], one["blocks.1.up.weight"])


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "options", [("--shards", "2"), ("--data", "2", "--shard", "weights")], ids=str
)
def test_ranks_make_what_one_process_makes(
    options: tuple[str, ...], gemsc: Gemsc
) -> None:
    """In float64 as well, where ranks have another default dtype."""
    write(INIT)
    program = compiled(gemsc, *options)
    good(gemsc("verify", str(program), "--steps", "1", "--dtype", "float64"))


def test_what_init_leaves_out_is_named(gemsc: Gemsc) -> None:
    write("\n    def init(module):\n        pass\n")
    outcome = gemsc("compile", "model.py", "-o", "out")
    assert outcome.code == 1
    assert "init() of" in outcome.err
    assert "does not initialize" in outcome.err
    write("\n    def init(module):\n        module.nothing()\n")
    outcome = gemsc("compile", "model.py", "-o", "out")
    assert outcome.code == 1
    assert "model.py:" in outcome.err
    assert "init() fails" in outcome.err


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3), nn.BatchNorm1d(3))


def drawn(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.copy_(torch.randn(parameter.shape))


def test_each_module_is_made_of_its_own_seed_whatever_modes_are_on() -> None:
    model = on_meta()
    initialized = Initialized(model, drawn)
    one, other = (initialized.tensor(f"{number}.weight") for number in range(2))
    assert not torch.equal(one, other)
    assert all(parameter.is_meta for parameter in model.parameters())
    with same_draws(), default_dtype(torch.float64):
        again = Initialized(on_meta(), drawn).tensor("1.weight")
    assert torch.equal(again, other)


def test_a_rank_reads_rows_of_what_is_made_or_of_nothing(tmp_path: Path) -> None:
    there = Elsewhere.of(on_meta())
    write_tensors(tmp_path / "stage0.safetensors", {})
    there.write(tmp_path, [[*there.tensors]], tmp_path)
    blank = FirstWeights(tmp_path).blank(0, "0.weight", rows=(1, 3))
    assert blank.shape == (2, 2)
    assert blank.isnan().all()
    replace(there, is_made=True).write(tmp_path, [[*there.tensors]], tmp_path)
    dtypes = []

    def make() -> tuple[nn.Module, Callable[[nn.Module], None]]:
        dtypes.append(torch.get_default_dtype())
        return on_meta(), drawn

    with default_dtype(torch.float64):  # of a rank that computes in it
        first = FirstWeights(tmp_path, make)
        whole, rows = (first.read(0, "0.weight", rows=r) for r in (None, (1, 3)))
    assert torch.equal(rows, whole[1:3])
    assert dtypes == [torch.float32]


def first_row(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter[0] = 1.0


def no_counter(module: nn.Module) -> None:
    for tensor in (*module.parameters(), module.running_mean, module.running_var):
        tensor.fill_(1.0)


@pytest.mark.parametrize(
    ("init", "name", "unset"),
    [(first_row, "0.bias", "weight"), (no_counter, "2.bias", "num_batches_tracked")],
)
def test_what_init_leaves_out_in_part_is_named(
    init: Callable[[nn.Module], None], name: str, unset: str
) -> None:
    with pytest.raises(GemscError, match=f"does not initialize '{unset}'"):
        Initialized(on_meta(), init).tensor(name)


# --------------------------------------------------------- what is in no file


def test_tables_have_the_values_that_they_would_have(gemsc: Gemsc) -> None:
    write()
    meta = load_user_model("model.py").make_unfilled()
    real = load_user_model("model.py", constants={"DEVICE": "cpu"}).make_unfilled()
    assert torch.equal(meta.angles, real.angles)
    assert torch.equal(meta.table, real.table)
    assert meta.embed.weight.is_meta
    assert meta.head.weight is meta.embed.weight


def test_what_is_drawn_at_random_is_refused(gemsc: Gemsc) -> None:
    table = "torch.cos(torch.arange(8) * 0.1)"
    old = "self.table = " + table
    buffer = 'self.register_buffer("table", torch.rand(8), persistent=False)'
    for new, kind in (
        ("self.table = torch.rand(8)", "tensor"),
        ("self.table = self.embed.weight[0].detach()", "tensor"),
        (buffer, "buffer"),
    ):
        write(**{old: new})
        outcome = gemsc("compile", "model.py", "-o", "out")
        assert outcome.code == 1
        assert f"the model's {kind} 'table' has no data" in outcome.err
        assert "make it with device='cpu'" in outcome.err


# --------------------------------------------------------------------------- export


@pytest.mark.slow(1)
@pytest.mark.parametrize("most", ["1KiB", "1GiB"])
def test_export_writes_shards_with_an_index(most: str, gemsc: Gemsc) -> None:
    state = write_weights()
    write(NAMED)
    program = compiled(gemsc)
    good(gemsc("export", str(program), "-o", "shards", "--max-shard-size", most))
    index = json.loads(Path("shards/model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) == len([*Path("shards").iterdir()]) - 1
    merged = {}
    for file in {*index["weight_map"].values()}:
        tensors = load_file(f"shards/{file}")
        size = sum(t.nbytes for t in tensors.values())
        assert len(tensors) == 1 or size <= (1024 if most == "1KiB" else 2**30)
        assert all(index["weight_map"][name] == file for name in tensors)
        merged |= tensors
    assert (len({*index["weight_map"].values()}) > 3) is (most == "1KiB")
    assert all(torch.equal(merged[name], state[name]) for name in state)
    # again, from its own shards
    good(gemsc("import", str(program), "shards"))
    assert equal(first_of(program), merged)
    words = "export", str(program), "--max-shard-size", most, "-o"
    assert gemsc(*words, "w2.safetensors").code != 0
    Path("full").mkdir()
    Path("full/x").write_text("")
    assert "full exists" in gemsc(*words, "full").err
