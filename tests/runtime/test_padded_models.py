"""A batch that is padded to its shape has the loss of the samples themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import on_ranks
from torch import Tensor, nn

from gemsc.base.nests import call_model
from gemsc.codegen.package import write_directory
from gemsc.compiler import compile
from gemsc.runtime.data.shapes import ShapeClasses, join_samples, numbers_of
from gemsc.runtime.training.trainer import Trainer

IGNORED = -100
VOCABULARY = 31
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Case:
    """A model; what a sample of a size is; how samples are padded."""

    make: Callable[[], nn.Module]
    sample: Callable[[int], tuple[Any, Any]]
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]  # of the samples of a batch, each of the last size
    pad_value: Any
    rounding: float = 1e-12


def words(count: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (count,))


def next_words(count: int) -> tuple[Any, Any]:
    line = words(count + 1)
    return {"input_ids": line[:-1]}, line[1:]


def hidden_words(count: int) -> tuple[Any, Any]:
    line = words(count)
    target = torch.where(torch.arange(count) % 3 == 1, line, IGNORED)
    mask = torch.ones(count, dtype=torch.int64)
    return {"input_ids": line, "attention_mask": mask}, target


def translated(count: int) -> tuple[Any, Any]:
    target = words(count - 1)
    inputs = {
        "input_ids": words(count),
        "attention_mask": torch.ones(count, dtype=torch.int64),
        "decoder_input_ids": F.pad(target[:-1], (1, 0)),
    }
    return inputs, target


def picture(size: int) -> tuple[Any, Any]:
    labels = torch.randint(3, (size, size))
    return {"x": torch.randn(3, size, size)}, labels.where(labels > 0, IGNORED)


def gpt2() -> nn.Module:
    import transformers

    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**SMALL, **sizes, **no_dropout, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        **SMALL,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


class Pixels(nn.Module):
    """Each pixel by what is above and left of it: nothing of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for layer in (self.first, self.second):
            x = torch.relu(layer(F.pad(x, (2, 0, 2, 0))))
        return (self.head(x).movedim(1, -1),)


TEXT = {"sizes": (5, 8, 12), "pad_value": (0, IGNORED)}
CASES = {
    "GPT-2": Case(gpt2, next_words, lengths=(9, 12, 10, 11), **TEXT),
    "BERT": Case(bert, hidden_words, lengths=(6, 8, 7, 8), **TEXT),
    # its norms are computed in float32
    "T5": Case(t5, translated, lengths=(4, 5, 3, 3), rounding=1e-8, **TEXT),
    "segmentation": Case(
        Pixels, picture, (4, 6), (5, 6, 5, 6), pad_value=(0.0, IGNORED)
    ),
}


def counted(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    rows = output[0].flatten(0, -2)
    total = F.cross_entropy(
        rows, target.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total, (target != IGNORED).sum()


def batched(sample: Any) -> Any:
    """Return one sample as a micro-batch of one."""
    inputs, target = sample
    return {name: tensor[None] for name, tensor in inputs.items()}, target[None]


@pytest.mark.slow(3)
@pytest.mark.parametrize("name", CASES)
def test_a_padded_batch_has_the_loss_of_its_samples(
    name: str, tmp_path: Path, in_double: None
) -> None:
    case = CASES[name]
    if name != "segmentation":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = case.make().double()
    shapes = [batched(case.sample(size)) for size in case.sizes]
    program = compile(
        model,
        [inputs for inputs, _ in shapes],
        loss=counted,
        example_target=[target for _, target in shapes],
        ranks=2,
        micro_batches=4,
    )
    assert program.plan.unchecked == ""
    write_directory(program.compilation, tmp_path)
    samples = [case.sample(length) for length in case.lengths]
    classes = ShapeClasses(program.plan.shapes, case.pad_value)
    (number,) = {*numbers_of(classes, samples, 0, range(len(samples)))}
    padded = [classes.padded(sample, number) for sample in samples]
    batch = join_samples(padded, classes, number)
    assert not any(_same(a, b) for a, b in zip(samples[:1], padded[:1], strict=True))

    def work(trainer: Trainer) -> tuple[float, dict[str, Tensor]]:
        loss = trainer.evaluate(*batch).loss
        assert loss == pytest.approx(trainer.step(*batch), rel=1e-12)
        return loss, trainer.state_dict()

    expected, after = step_of(model, samples)
    for loss, state in on_ranks(tmp_path, 2, work, dtype=torch.float64):
        assert loss == pytest.approx(expected, rel=case.rounding)
        for key, tensor in state.items():
            limits = {"rtol": 1000 * case.rounding, "atol": case.rounding}
            torch.testing.assert_close(tensor, after[key], **limits)


def step_of(model: nn.Module, samples: list[Any]) -> tuple[float, Mapping[str, Tensor]]:
    """Train one step on the samples as they are; return its loss and the state."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    terms = []
    for inputs, target in map(batched, samples):
        terms.append(counted(call_model(model, inputs), target))
    total, count = (sum(parts) for parts in zip(*terms, strict=True))
    loss = total / count
    loss.backward()
    optimizer.step()
    return float(loss.detach()), model.state_dict()


def _same(one: Any, other: Any) -> bool:
    return all(one[0][key].shape == other[0][key].shape for key in one[0])
