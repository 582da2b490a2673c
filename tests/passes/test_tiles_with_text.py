"""Images on tiles, beside inputs that are none: texts, and signals cut along time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from program_support import against_one_process, written
from torch import Tensor, nn

from gemsc.errors import GemscError


class Attention(nn.Module):
    """What is seen asks what is said."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.words = nn.Linear(text, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        batch, _, width = x.shape
        query = self.query(self.norm(x)).view(batch, -1, 2, width // 2)
        words = self.words(text).view(batch, -1, 2, 2, width // 2)
        key, value = words.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key, value)
        return x + self.out(attended.transpose(1, 2).reshape(batch, -1, width))


class Told(nn.Module):
    """Convolutions, the time that is added, and attention to a text between them."""

    def __init__(self, taken: int, width: int, text: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(taken, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.time = nn.Linear(4, width)
        self.attention = Attention(width, text)
        self.last = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        h = self.first(x) + self.time(F.silu(time))[:, :, None, None]
        batch, width, rows, columns = h.shape
        seen = self.norm(h).permute(0, 2, 3, 1).reshape(batch, rows * columns, width)
        seen = self.attention(seen, text).reshape(batch, rows, columns, width)
        return h + self.last(seen.permute(0, 3, 1, 2))


class ToldUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Told(2, 4, 6), Told(4, 8, 6), Told(12, 4, 6)
        self.stride = nn.Conv2d(4, 4, 3, 2, 1)
        self.end = nn.Conv2d(4, 2, 3, padding=1)

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor
    ) -> Tensor:
        angle = timestep[:, None].to(sample.dtype)
        time = torch.cat([angle.sin(), angle.cos()], -1).repeat(1, 2)
        kept = self.down(sample, time, encoder_hidden_states)
        x = self.middle(self.stride(kept), time, encoder_hidden_states)
        x = torch.cat([F.interpolate(x, scale_factor=2.0), kept], 1)
        return self.end(self.up(x, time, encoder_hidden_states))


IMAGE = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))
TEXT = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
GIVEN = (IMAGE, torch.tensor([3, 7]), TEXT)


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("ranks", "tiles"), [(2, "2x1"), (4, "2x2"), (3, "2x1")], ids=str
)
def test_a_text_is_whole_beside_an_image_on_tiles(
    ranks: int, tiles: str, tmp_path: Path
) -> None:
    given = {"ranks": ranks, "tiles": (tiles,), "micro_batches": 2}
    diff = against_one_process(tmp_path, ToldUNet(), GIVEN, target=IMAGE, **given)
    assert diff.judge(torch.float64)[0] == "exact"


def test_a_text_of_as_many_numbers_as_an_image_has_pixels_is_no_image(
    tmp_path: Path,
) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(8, 2)

        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            said = self.linear(torch.tanh(text)).mean(1)
            return self.conv(x) * said[:, :, None, None]

    text = torch.randn(2, 8, 8)
    given = {"ranks": 2, "tiles": ("2x1",), "micro_batches": 2}
    diff = against_one_process(tmp_path, Same(), (IMAGE, text), target=IMAGE, **given)
    assert diff.judge(torch.float64)[0] == "exact"
    assert "(2, 8, 8)" in (tmp_path / "rank0.py").read_text()  # all of it


class Heard(nn.Module):
    """A signal and a text: both are [batch, ..., ...], and only one is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 2, 1)
        self.attention = Attention(4, 6)

    def forward(self, signal: Tensor, text: Tensor) -> Tensor:
        heard = self.first(signal).transpose(1, 2)
        return self.last(self.attention(heard, text).transpose(1, 2))


@pytest.mark.slow
def test_a_text_is_whole_beside_a_signal_that_is_cut(tmp_path: Path) -> None:
    signal = torch.randn(2, 2, 12)
    given = {"ranks": 2, "tiles": ("2",), "micro_batches": 2}
    diff = against_one_process(
        tmp_path, Heard(), (signal, TEXT), target=signal, **given
    )
    assert diff.judge(torch.float64)[0] == "exact"
    assert "(2, 5, 6)" in (tmp_path / "rank0.py").read_text()


@pytest.mark.slow
def test_a_grid_of_another_rank_than_the_image_is_refused_for_the_image(
    tmp_path: Path,
) -> None:
    """The text would fit."""
    given = {"ranks": 2, "tiles": ("2",), "micro_batches": 2}
    with pytest.raises(GemscError, match="splits 1 axes, but input 'sample' has 2"):
        written(tmp_path, ToldUNet(), GIVEN, target=IMAGE, **given)
