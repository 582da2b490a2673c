"""Ring attention: keys and values that come part by part, beside one process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import Gemsc, gemsc_here
from parity_support import (
    FLOAT64,
    draws_of,
    lowered,
    options,
    traced,
    trained,
    worst_error,
)
from plan_support import metered_peaks, search
from safetensors.torch import load_file
from test_trunk import cut_along, drawn_alike
from tile_support import Step, assert_same, eager, on_tiles
from torch import Tensor, nn

from gemsc.base.boxes import everything
from gemsc.base.rng import same_draws
from gemsc.errors import GemscError
from gemsc.ir.flow import exchange_of, is_exchange, is_ring
from gemsc.options import CompileOptions
from gemsc.passes.spatial.rules import attention
from gemsc.runtime.tiles import ring
from gemsc.runtime.tiles.dropout import PairMask

__all__ = ["cut_along"]  # a fixture
in_double = pytest.mark.usefixtures("in_double")
gemsc = pytest.fixture(gemsc_here)
TOKENS = 11
WHOLE = tuple(f"blocks.{block}.{name}" for block in (0, 1) for name in ("qkv", "out"))


class Mixed(nn.Module):
    """Attention of four heads; with `shared`, two of them share keys and values."""

    def __init__(self, shared: int = 1, **how: Any) -> None:
        super().__init__()
        self.shared, self.how = shared, how
        self.query, self.out = nn.Linear(12, 16), nn.Linear(16, 12)
        self.key, self.value = (nn.Linear(12, 16 // shared) for _ in range(2))
        self.register_buffer("mask", how.pop("mask", None))
        if shape := how.pop("learns", ()):
            self.mask = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(2, (-1, 4)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        how = dict(self.how)
        if how.pop("wide", False):
            v = torch.cat([v, v * v], -1)
        if how.pop("twice", False):
            k, v = (torch.cat([t, t * t], 2) for t in (k, v))
        if how.pop("one sample", False):
            k, v = k[:1], v[:1]
        if (whole := how.pop("whole", None)) is not None:
            v = whole
        if how.pop("flat", False):
            q, k, v = (t[:, 0] for t in (q, k, v))
        if how.pop("padded", False):
            how["attn_mask"] = (x[:, :, 0] < 0.8)[:, None, None]
        if self.mask is not None:
            how["attn_mask"] = self.mask
        mixed = F.scaled_dot_product_attention(q, k, v, **how)
        if mixed.dim() == 3:
            return mixed.repeat(1, 1, 3).sin()
        return self.out(mixed[..., :4].transpose(1, 2).flatten(2)).sin()


def distances(*, allowed: int = TOKENS) -> Tensor:
    """Return a bias for each head that grows with the distance; -inf beyond."""
    place = torch.arange(TOKENS)
    far = (place[:, None] - place).abs()
    bias = -far * torch.tensor([0.1, 0.2, 0.3, 0.5], dtype=torch.float64)[:, None, None]
    return bias.masked_fill(far > allowed, -torch.inf)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Mixed,
    "causal": lambda: Mixed(is_causal=True),
    "scaled": lambda: Mixed(scale=0.7),
    "causal, heads that share keys": lambda: Mixed(
        2, is_causal=True, enable_gqa=True, scale=0.3
    ),
    "heads that share keys": lambda: Mixed(4, enable_gqa=True),
    "bias": lambda: Mixed(mask=distances()),
    "local": lambda: Mixed(mask=distances(allowed=1)),  # whole parts are out of sight
    "one bias": lambda: Mixed(mask=distances()[0]),
    "padded": lambda: Mixed(padded=True),
    "truth": lambda: Mixed(mask=distances(allowed=2)[0].isfinite()),
    "blind rows": lambda: Mixed(mask=torch.ones(TOKENS, TOKENS).tril(-3).bool()),
    "a column for all": lambda: Mixed(mask=torch.randn(TOKENS, 1)),
    "dropout": lambda: Mixed(dropout_p=0.4),
    "dropout, causal": lambda: Mixed(dropout_p=0.4, is_causal=True),
    "dropout, heads that share keys": lambda: Mixed(
        2, enable_gqa=True, scale=0.3, dropout_p=0.4
    ),
    "dropout, local": lambda: Mixed(mask=distances(allowed=1), dropout_p=0.4),
    "a bias that learns": lambda: Mixed(learns=(TOKENS, TOKENS)),
    "a bias of heads that learns, dropout": lambda: Mixed(
        learns=(4, TOKENS, TOKENS), dropout_p=0.4
    ),
    "a bias of samples that learns": lambda: Mixed(learns=(3, 1, 1, TOKENS)),
    "a bias of queries that learns": lambda: Mixed(learns=(TOKENS, 1)),
    "heads that share keys, and learn": lambda: Mixed(
        2, enable_gqa=True, learns=(4, TOKENS, TOKENS)
    ),
    "all dropped": lambda: Mixed(dropout_p=1.0),
}
dropout = sys.modules[PairMask.__module__]  # the package's name is the function's


def step_of(
    build: Callable[[], nn.Module], count: int, *, facts: bool = False
) -> tuple[Step, Step]:
    torch.manual_seed(0)
    model = build()
    x, target = torch.randn(3, TOKENS, 12), torch.randn(3, TOKENS, 12)
    given = model, (x,), F.mse_loss, target
    with pytest.MonkeyPatch.context() as patch, same_draws():
        drawn_alike(patch)
        expected = eager(*given)
        step = on_tiles(*given, (count,), rings=True, facts=facts)
    expected.buffers.pop("mask", None)
    step.buffers.pop("mask", None)  # it has infinite numbers
    return step, expected


@pytest.mark.slow(3)
@in_double
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_attends_as_one_process_does(
    kind: str, count: int, cut_along: Callable[[int], None]
) -> None:
    cut_along(1)
    step, expected = step_of(KINDS[kind], count)
    assert_same(step, expected)
    assert not step.barriers
    nodes = [n for n in step.programs[0].graph.nodes if is_exchange(n)]
    (node,) = filter(is_ring, nodes)
    assert len(exchange_of(node).rounds) == count - 1
    others = [n for n in nodes if n is not node and not exchange_of(n).is_local]
    if "causal" in kind:  # queries are dealt out, and what they find comes home
        assert len(others) == 2
        assert len(node.kwargs["rows"]) == 2
    else:
        assert not others or kind == "padded"  # a mask is that of all keys


@pytest.mark.slow(1)
@in_double
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_without_the_kernel_computes_the_same(
    kind: str, cut_along: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_along(1)
    monkeypatch.setattr(ring, "_has_kernel", lambda tensor: False)
    monkeypatch.setattr(dropout, "ROWS", 2)  # queries meet keys in strips
    assert_same(*step_of(KINDS[kind], 3))


@in_double
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_all_tiles_drop_by_one_mask(
    count: int,
    is_causal: bool,
    cut_along: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training, tiles draw cells of a mask, forward and again in the backward."""
    cut_along(1)
    monkeypatch.setattr(dropout, "ROWS", 3)
    torch.manual_seed(5)
    model = Mixed(dropout_p=0.4, is_causal=is_causal)
    x, target = torch.randn(3, TOKENS, 12), torch.randn(3, TOKENS, 12)
    step = on_tiles(model, (x,), F.mse_loss, target, (count,), rings=True)
    (node,) = filter(is_ring, step.programs[0].graph.nodes)
    shape = node.kwargs["shape"]
    assert shape == (3, 4, TOKENS, TOKENS)
    whole = PairMask(0.4, shape, node.kwargs["draw"]).part(x, everything(shape))

    def attend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        scores = q @ k.mT / 2
        if is_causal:
            scores = scores + torch.full(shape, -torch.inf).triu(1)
        return (scores.softmax(-1) * whole) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    assert_same(step, eager(model, (x,), F.mse_loss, target))


def test_cells_of_a_mask_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "ROWS", 8)
    like, shape = torch.zeros(()), (2, 3, 40, 44)
    mask = PairMask(0.25, shape, draw=1, seed=7)
    whole = mask.part(like, everything(shape))
    assert whole.unique().tolist() == [0, torch.tensor(1 / 0.75)]
    assert (whole > 0).double().mean() == pytest.approx(0.75, abs=0.02)
    cells = [whole[..., r : r + 8, c : c + 8] for r in (0, 8) for c in (0, 8, 16)]
    other = [
        PairMask(0.25, shape, *of).part(like, everything(shape))
        for of in ((1, 8), (2, 7))
    ]
    cells += [part[..., :8, :8] for part in other]
    pairs = combinations(cells, 2)
    assert not any(torch.equal(a, b) for a, b in pairs)
    box = ((1, 2), (0, 2), (5, 23), (7, 40))
    assert torch.equal(mask.part(like, box), whole[tuple(slice(*s) for s in box)])
    widest = PairMask(0.25, (1, 1, 8, 8 * 1024), draw=1, seed=7)
    assert (
        widest.part(like, ((0, 1), (0, 1), (0, 8), (0, 8 * 1024))).size(-1) == 8 * 1024
    )


# what is changed, into what, and a kind of attention that must not bear it
MUTANTS: dict[str, tuple[ModuleType, str, str, str]] = {
    "no rescaling": (ring, "out * first + more * second", "out + more", "plain"),
    "sums of one part": (ring, "torch.logsumexp(both, 0)", "sums", "plain"),
    "a round less": (
        ring,
        "self.exchange.rounds,",
        "self.exchange.rounds[1:],",
        "plain",
    ),
    "each part causal": (ring, "(seen, False)", "(seen, True)", "causal"),
    "none causal": (ring, "(diagonal, True)", "(diagonal, False)", "causal"),
    "fewer keys": (attention, "max(box[-2][1], other[-2][1])", "box[-2][1]", "causal"),
    "halves in another order": (
        attention,
        "(first, back), 2",
        "(back, first), 2",
        "causal",
    ),
    "earlier keys": (
        ring,
        "(key, value), -1)",
        "(key, value.roll(1, 2)), -1)",
        "causal",
    ),
    "no gradient home": (ring, "local.add_(came)", "came", "plain"),
    "the last gradient alone": (ring, "rows] += more", "rows] = more", "plain"),
    "first columns": (
        ring,
        "slice(*block.columns)",
        "slice(block.columns[1] - block.columns[0])",
        "one bias",
    ),
    "blind parts count": (ring, "where(blind, -math.inf, sums)", "abs(sums)", "local"),
    "blind rows": (
        ring,
        "torch.where(sums == -math.inf, 0.0, sums)",
        "sums",
        "blind rows",
    ),
    "heads in another order": (
        ring,
        "t.repeat_interleave(self.heads, 1)",
        "t.repeat(1, self.heads, 1, 1)",
        "causal, heads that share keys",
    ),
    "the gradient of one head": (ring, ".sum(2)", "[:, :, 0]", "heads that share keys"),
    "the gradient of what is dropped": (
        ring,
        "of_weights * kept, weights * kept",
        "of_weights, weights * kept",
        "dropout",
    ),
    "values get the gradient of all": (
        ring,
        "of_weights * kept, weights * kept",
        "of_weights * kept, weights",
        "dropout",
    ),
    "the mask of all heads' first rows": (
        ring,
        "*self.box[:2], block.rows, block.columns",
        "*self.box[:2], (block.here.start, block.here.stop), block.columns",
        "dropout",
    ),
    "a bias learns of the last part": (
        ring,
        "own_bias += ",
        "own_bias[:] = ",
        "a bias of queries that learns",
    ),
    "a bias learns twice as much": (
        ring,
        "return of_bias, of_query",
        "return 2 * of_bias, of_query",
        "a bias that learns",
    ),
    "no scale": (ring, "scale = 1 / math.sqrt(query.size(-1))", "scale = 1.0", "plain"),
}


@pytest.mark.slow(2)
@in_double
@pytest.mark.parametrize("name", MUTANTS)
def test_whatever_is_wrong_in_a_ring_shows(
    name: str, cut_along: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_along(1)
    module, right, wrong, kind = MUTANTS[name]
    text = inspect.getsource(module)
    assert text.count(right) == 1
    changed: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(text.replace(right, wrong), str(module.__file__), "exec"), changed)
    for key, new in changed.items():
        if getattr(new, "__module__", "") != module.__name__:
            continue
        if isinstance(new, FunctionType):  # others have imported the function
            monkeypatch.setattr(getattr(module, key), "__code__", new.__code__)
        else:
            monkeypatch.setattr(module, key, new)
    step, expected = step_of(KINDS[kind], 3)
    with pytest.raises(AssertionError):
        assert_same(step, expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_as_much_to_do_under_a_causal_mask(
    ranks: int, cut_along: Callable[[int], None]
) -> None:
    cut_along(1)
    model = Mixed(is_causal=True)
    x, target = torch.randn(2, 12, 12), torch.randn(2, 12, 12)
    step = on_tiles(model, (x,), F.mse_loss, target, (ranks,), rings=True)
    nodes = [next(filter(is_ring, p.graph.nodes)) for p in step.programs]
    seen = [
        sum(row + 1 for rows in node.kwargs["rows"] for row in range(*rows))
        for node in nodes
    ]
    assert seen == [12 * 13 // 2 // ranks] * ranks
    wanted = exchange_of(nodes[0]).wanted  # no later keys are sent
    ends = [max(rows[1] for rows in node.kwargs["rows"]) for node in nodes]
    assert [box[-2] for box in wanted[:-1]] == [(0, end) for end in ends[:-1]]


REASONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "wide values": (lambda: Mixed(wide=True), "of one size"),
    "three dimensions": (lambda: Mixed(flat=True), "batch x heads x tokens x features"),
    "causal, more keys": (
        lambda: Mixed(twice=True, is_causal=True),
        "not as many queries as keys",
    ),
    "keys of one sample": (
        lambda: Mixed(**{"one sample": True}),
        "some queries share keys without enable_gqa",
    ),
    "whole values": (
        lambda: Mixed(whole=torch.randn(3, 4, TOKENS, 4)),
        "are not cut alike",
    ),
}


@pytest.mark.slow(3)
@in_double
@pytest.mark.parametrize("kind", REASONS)
def test_where_no_ring_can_be_keys_are_gathered_and_it_says_why(
    kind: str, cut_along: Callable[[int], None]
) -> None:
    cut_along(1)
    build, reason = REASONS[kind]
    step, expected = step_of(build, 3)
    assert_same(step, expected)
    (barrier,) = step.barriers
    assert barrier.reason.startswith("no ring: ")
    assert reason in barrier.reason
    assert not any(map(is_ring, step.programs[0].graph.nodes))


class Shared(nn.Module):
    """Six heads, of which three share a key."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        keys = x[:, ::3]
        return F.scaled_dot_product_attention(x, keys, keys, enable_gqa=True)


@in_double
def test_heads_that_share_a_key_are_not_parted(
    cut_along: Callable[[int], None],
) -> None:
    cut_along(1)
    given = Shared(), (torch.randn(2, 6, 5, 4),), F.mse_loss, torch.randn(2, 6, 5, 4)
    step = on_tiles(*given, (3,))
    assert_same(step, eager(*given))
    assert "heads that share a key" in step.barriers[0].reason


@pytest.mark.slow(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["gpt", "gpt dropout"])
def test_a_program_trains_as_one_process_does(
    name: str, ranks: int, tmp_path: Path
) -> None:
    choice = rings(ranks)
    program = lowered(name, choice)
    text = program.compilation.files["rank1.py"]
    assert "tiles.ring_attention(" in text
    assert ("dropout_p=0.1" in text) == ("dropout" in name)
    assert not program.plan.barriers
    error = worst_error(name, choice, tmp_path / "p", draws=draws_of(name))
    assert error <= FLOAT64


def rings(ranks: int, **more: Any) -> CompileOptions:
    given = {"ranks": ranks, "shards": str(ranks), "trunk": "sequence"}
    how = given | {"whole": WHOLE, "micro_batches": 2, "attention": "ring"} | more
    return options(**how)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt dropout"])
@pytest.mark.parametrize("recompute", ["off", "all"])
def test_what_a_ring_keeps_is_predicted(
    name: str, recompute: str, tmp_path: Path
) -> None:
    kept = {}
    for how in ("gather", "ring"):
        choice = rings(3, attention=how, recompute=(recompute,))
        record, program = trained(name, choice, tmp_path / how, torch.float32)
        (activations,) = program.plan.activation_bytes
        assert max(record.activation_bytes) == pytest.approx(activations, 0.01)
        kept[how] = max(record.peak_bytes)
        assert kept[how] == pytest.approx(max(metered_peaks(program.plan)), 0.01)
    if recompute == "off":  # else the peak is elsewhere
        assert kept["ring"] < kept["gather"]


MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.far = nn.Embedding(7, 2)

    def forward(self, x):
        heads = self.qkv(x).unflatten(2, (3, 2, 4))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        place = torch.arange(7)
        far = (place[:, None] - place).abs()
        seen = torch.zeros(7, 7).masked_fill(far > 1, -torch.inf)
        attend = F.scaled_dot_product_attention
        x = x + attend(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2)
        x = x + attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        bias = self.far(far).permute(2, 0, 1)[None]
        x = x + attend(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)
        return x + self.down(F.relu(self.up(self.out(x))))

model = Net
loss = nn.MSELoss()

def example_inputs():
    return (torch.randn(2, 7, 8),)

def example_target():
    return torch.randn(2, 7, 8)
"""
CUT = [
    "--ranks",
    "3",
    "--shards",
    "3",
    "--trunk",
    "sequence",
    "--whole",
    "qkv,out",
    "--micro-batches",
    "2",
]


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.usefixtures("engine")
def test_processes_with_uneven_parts(tmp_path: Path, gemsc: Gemsc) -> None:
    causal = "is_causal=True"
    model = MODEL.replace(causal, f"{causal}, dropout_p=0.3 * self.training")
    (tmp_path / "net.py").write_text(model)
    path = tmp_path / "p"
    words = *CUT, "--attention", "ring", "--no-check"
    done = gemsc("compile", tmp_path / "net.py", "-o", path, *words)
    assert done.code == 0, done.err
    text = (path / "rank1.py").read_text()
    assert text.count("tiles.ring_attention(") == 6  # those of evaluation, too
    assert text.count("dropout_p=0.3,") == 1
    assert "keys of 1 other shard, one after the other" in text
    done = gemsc("show", path)
    assert "no ring" not in done.out
    done = gemsc("verify", path, "--steps", "2", "--dtype", "float64")
    assert done.code == 0, done.out + done.err
    assert "exact" in done.out


DATA = """
def dataset():
    x, y = torch.randn(2, 12, 7, 8, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(x, y)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
TWINS = {"two": ("2", "off"), "three": ("3", "off"), "recomputed": ("2", "all")}


@pytest.mark.mpi
@pytest.mark.slow
def test_dropout_is_the_same_on_any_number_of_ranks_and_when_recomputed(
    tmp_path: Path, gemsc: Gemsc
) -> None:
    """Training, nothing is drawn as one process would."""
    drops = "is_causal=True, dropout_p=0.3 * self.training"
    (tmp_path / "net.py").write_text(MODEL.replace("is_causal=True", drops) + DATA)
    weights = {}
    for name, (ranks, recompute) in TWINS.items():
        words = ["--ranks", ranks, "--shards", ranks, *CUT[4:], "--attention", "ring"]
        words += ["--recompute", recompute, "--no-check"]
        done = gemsc("compile", tmp_path / "net.py", "-o", tmp_path / name, *words)
        assert done.code == 0, done.err
        saved = tmp_path / f"{name}-trained"
        done = gemsc("run", tmp_path / name, "--epochs", "1", "--save", saved)
        assert done.code == 0, done.out + done.err
        weights[name] = load_file(saved / "model.safetensors")
    for other in ("three", "recomputed"):
        for name, tensor in weights["two"].items():
            torch.testing.assert_close(weights[other][name], tensor, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_ring_is_proved_for_all_inputs(tmp_path: Path, gemsc: Gemsc) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    words = *CUT, "--attention", "ring", "--no-check"
    done = gemsc("compile", tmp_path / "net.py", "-o", tmp_path / "p", *words)
    assert done.code == 0, done.err
    assert "proved" in gemsc("verify", tmp_path / "p", "--all-inputs").out


def test_the_faster_way_is_taken_and_a_ring_where_it_saves_memory() -> None:
    """Of few tokens, to deal out the queries takes longer than it saves."""
    gather, ring = search(traced("gpt"), rings(3, attention="auto"))
    assert (ring.options.attention, gather.options.attention) == ("ring", "gather")
    assert ring.name == f"{gather.name}, ring"
    assert gather.seconds < ring.seconds
    assert ring.peak_bytes < gather.peak_bytes
    no_tokens = rings(2, attention="auto", trunk="whole", whole=())
    assert search(traced("gpt"), no_tokens)[0].options.attention == "gather"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"attention": "rings"}, "unknown attention 'rings'"),
        ({"shards": (), "trunk": "auto", "whole": ()}, "has no effect without --tiles"),
    ],
)
def test_what_cannot_be_chosen_is_said(more: dict[str, Any], message: str) -> None:
    with pytest.raises(GemscError, match=message):
        rings(2, **more)
