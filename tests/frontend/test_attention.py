"""The attention of torch.nn is recorded as plain calls, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import mse, written
from threads import run_on_threads
from torch import Tensor, nn

from gemsc.base.plain_forward import plain_forward
from gemsc.base.rng import same_draws
from gemsc.frontend import check, record
from gemsc.frontend.check import check_against_eager
from gemsc.ir.opaque import opaque_of
from gemsc.ir.program import Program
from gemsc.passes.canonicalize import Canonicalize
from gemsc.verify.compare import compare
from gemsc.verify.one_process import reference_steps

SAMPLES, LENGTH, WIDTH, HEADS = 3, 5, 8, 2
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH).double()
PADDED = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
SEED = torch.Generator().manual_seed(0)
SAME_FOR_EACH_HEAD = torch.randn(LENGTH, LENGTH, generator=SEED).double()
FOR_EACH_HEAD = torch.randn(SAMPLES * HEADS, LENGTH, LENGTH, generator=SEED).double()


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=SEED).double()


X, MEMORY = rows(SAMPLES, LENGTH, WIDTH), rows(SAMPLES, LENGTH, WIDTH)
KEYS, VALUES = rows(SAMPLES, 7, 6), rows(SAMPLES, 7, 4)


class Attends(nn.Module):
    """A layer of nn.MultiheadAttention, of one, two or three inputs."""

    def __init__(self, layer: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **layer)
        self.drop = nn.Dropout(0.25)
        self.options = options

    def forward(self, *inputs: Tensor) -> Any:
        query, key, value = (*inputs, *inputs[-1:] * 2)[:3]
        result, weights = self.attention(query, key, value, **self.options)
        result = self.drop(result)
        return result if weights is None else (result, weights)


def square(output: Any) -> Tensor:
    tensors = output if isinstance(output, tuple) else (output,)
    return sum((t.square().mean() for t in tensors), start=torch.zeros(()))


def checked(model: nn.Module, *inputs: Any) -> list[Program]:
    """Return what is recorded for training and evaluation; both compute the same."""
    model.double()
    programs = []
    for training in (True, False):
        program = record(model, inputs, loss=square, training=training)
        program = Canonicalize().apply(program)
        check_against_eager(program, model, inputs, square, training=training)
        programs.append(program)
    return programs


def called(program: Program) -> list[str]:
    return [str(getattr(n.target, "__name__", n.target)) for n in program.compute_nodes]


FUSED: dict[str, Any] = {"need_weights": False}
WEIGHTS: dict[str, dict[str, Any]] = {
    "averaged": {},
    "of each head": {"average_attn_weights": False},
}
MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "float": {"attn_mask": SAME_FOR_EACH_HEAD},
    "bool": {"attn_mask": CAUSAL < 0},
    "padding": {"key_padding_mask": PADDED},
    "both": {"attn_mask": CAUSAL < 0, "key_padding_mask": PADDED},
    "of each head": {"attn_mask": FOR_EACH_HEAD},
    "all": {"attn_mask": FOR_EACH_HEAD, "key_padding_mask": 0.3 * PADDED.double()},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal, padding": {
        **{"attn_mask": CAUSAL, "is_causal": True},
        "key_padding_mask": 0.3 * PADDED.double(),
    },
}


@pytest.mark.slow(4)
@pytest.mark.by_day(12)
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("more", [FUSED, *WEIGHTS.values()], ids=["fused", *WEIGHTS])
def test_masks_and_weights(options: dict[str, Any], more: dict[str, Any]) -> None:
    model = Attends({"dropout": 0.25, "batch_first": True}, options | more)
    for program in checked(model, X):
        calls = called(program)
        assert "multi_head_attention_forward" not in calls
        assert ("scaled_dot_product_attention" in calls) == (more is FUSED)
        assert ("softmax" in calls) != (more is FUSED)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
}


@pytest.mark.slow(1)
@pytest.mark.by_day(5)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("inputs", [(X,), (X, MEMORY), (X, MEMORY, X)])
def test_inputs_and_layouts(layer: dict[str, Any], inputs: tuple[Tensor, ...]) -> None:
    for program in checked(Attends(layer | {"dropout": 0.25}, FUSED), *inputs):
        linears = called(program).count("linear")
        assert linears == (2 if len(inputs) == 1 else 4)  # one projection, or three


@pytest.mark.slow(1)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_keys_and_values_of_other_widths(layer: dict[str, Any]) -> None:
    inputs = X, KEYS, VALUES
    if "batch_first" not in layer:
        inputs = tuple(x.transpose(0, 1) for x in inputs)
    model = Attends(layer | {"dropout": 0.25, "kdim": 6, "vdim": 4}, {})
    for program in checked(model, *inputs):
        assert "scaled_dot_product_attention" not in called(program)
        assert called(program).count("linear") == 4


@pytest.mark.parametrize("layer", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_extra_keys_stay_in_one_call(layer: dict[str, Any]) -> None:
    for program in checked(Attends(layer | {"dropout": 0.25}, FUSED), X):
        assert "multi_head_attention_forward" in called(program)


def test_without_samples_it_stays_one_call() -> None:
    for program in checked(Attends({}, {}), X[0]):
        assert "multi_head_attention_forward" in called(program)


class Called(nn.Module):
    """Calls the function itself, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Any:
        weights = self.layer.in_proj_weight, self.layer.in_proj_bias
        out = self.layer.out_proj.weight, self.layer.out_proj.bias
        others: Any = (None, None, False, 0.25, *out)
        result: Any = F.multi_head_attention_forward(
            *(x, x, x, WIDTH, HEADS), *weights, *others, training=self.training
        )
        return result


def test_the_function_itself() -> None:
    for program in checked(Called(), X):
        assert "multi_head_attention_forward" not in called(program)


class Translator(nn.Module):
    """An nn.Transformer with masks, which are not looked into."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both = nn.Transformer(WIDTH, HEADS, 1, 2, 8, **options)
        self.batch_first = self.both.batch_first

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1 if self.batch_first else 0]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        padding = PADDED if self.batch_first else None
        result: Tensor = self.both(
            *(source, target),
            tgt_mask=mask.to(source.dtype),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return result


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer(norm_first: bool, batch_first: bool) -> None:
    model = Translator(norm_first=norm_first, batch_first=batch_first)
    for program in checked(model, X, MEMORY):
        assert called(program).count("scaled_dot_product_attention") == 5
        layers = [module for _, module in program.module.named_modules()]
        assert not any(opaque_of(layer) for layer in layers)


class Encoder(nn.Module):
    """Two layers of nn.TransformerEncoder; where x begins with 9 is padding."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"dropout": dropout, "batch_first": True}
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, **options)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = x[..., 0] == 9
        result: Tensor = self.layers(x, src_key_padding_mask=padding)
        return result


def with_padding() -> Tensor:
    x = X.clone()
    x[..., 0] = torch.where(PADDED, 9.0, x[..., 0])
    return x


def test_evaluation_takes_no_fast_path() -> None:
    model, x = Encoder().double(), with_padding()
    model.requires_grad_(False)  # else there is no fast path under enable_grad
    program = record(model, (x,), training=False)
    check_against_eager(program, model, (x,), training=False)
    model.eval()
    fast = model(x)
    with plain_forward():
        slow = model(x)
    assert (fast[PADDED] == 0).all()
    assert (slow[PADDED] != 0).all()
    torch.testing.assert_close(fast[~PADDED], slow[~PADDED])
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.slow
def test_what_is_changed_for_a_trace_is_put_back() -> None:
    before = F.multi_head_attention_forward, nn.modules.transformer.__dict__.copy()
    checked(Encoder(), with_padding())
    with pytest.raises(Exception, match="same reduction dim"):
        record(Encoder(), (X[..., :3],))
    after = F.multi_head_attention_forward, nn.modules.transformer.__dict__
    assert after == before


@pytest.mark.slow
def test_two_ranks_draw_what_the_model_draws(tmp_path: Path) -> None:
    model = Encoder(dropout=0.3)
    x = with_padding().float()
    written(tmp_path, model, (x,), target=x, ranks=2, micro_batches=1)
    batches = [((x,), x)] * 2
    record = run_on_threads(tmp_path, 2, batches, draws=same_draws)
    with same_draws():
        expected = reference_steps(model, mse, batches, 1, torch.float64)
    diff = compare(record, expected)
    assert diff.worst < 1e-14
    record = run_on_threads(tmp_path, 2, batches)
    assert compare(record, expected).worst > 1e-3
    text = (tmp_path / "rank0.py").read_text()
    assert "permute = qkv.unflatten(-1, (3, 2, 4)).permute(2, 1, 3, 0, 4)" in text
    assert "query, key, value = permute.unbind(0)" in text
    assert "dropout_p=0.3 if self.training else 0.0" in text
    assert 'self.layers.layers["0"].self_attn.out_proj.weight' in text


@pytest.mark.parametrize("weights", [True, False])
def test_its_values_are_no_first_difference(weights: bool) -> None:
    """Else a gradient that rounding alone changes is called a wrong trace (DETR)."""
    model = Attends({}, {"need_weights": weights}).double()
    program = record(model, (X,), loss=square, training=True)
    copies = check._copies(program, model, square, {}, True)
    assert check._first_difference(program, copies, (X,), None) is None
    wrong = next(n for n in program.graph.nodes if "linear" in str(n.target))
    wrong.args = (*wrong.args[:2], None)  # without the bias
    with torch.no_grad():
        copies[2].attention.in_proj_bias += 1
        copies[0].attention.in_proj_bias += 1
    assert check._first_difference(program, copies, (X,), None) is wrong
