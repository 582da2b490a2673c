"""A small CLIP, and texts and images for it: for tests and benchmarks of towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Clip", "Image", "Text", "contrastive", "texts_and_images"]

WIDTH, DEPTH, WORDS, LENGTH, SIZE, PATCH = 16, 2, 40, 6, 8, 4


class Block(nn.Module):
    """A block of a transformer, attention and MLP."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Text(nn.Module):
    """What a causal transformer has at the end of a text."""

    def __init__(
        self,
        width: int = WIDTH,
        depth: int = DEPTH,
        words: int = WORDS,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.words(tokens) + self.positions))
        end = tokens.argmax(1)  # the word with the largest number ends a text
        return x[torch.arange(len(tokens)), end]


class Image(nn.Module):
    """A vision transformer's first token."""

    def __init__(
        self, width: int = WIDTH, depth: int = DEPTH, patch: int = PATCH
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images / 255).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        return self.norm(self.blocks(x)[:, 0])


class Clip(nn.Module):
    """Texts against images of a micro-batch, each with each."""

    def __init__(
        self,
        width: int = WIDTH,
        depth: int = DEPTH,
        words: int = WORDS,
        length: int = LENGTH,
        patch: int = PATCH,
    ) -> None:
        super().__init__()
        self.text = Text(width, depth, words, length)
        self.image = Image(width, depth, patch)
        self.text_out = nn.Linear(width, width, bias=False)
        self.image_out = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor, images: Tensor) -> dict[str, Tensor]:
        text, image = self.text(tokens), self.image(images)
        text = F.normalize(self.text_out(text), dim=-1)
        image = self.image_out(image)
        image = image / image.norm(dim=-1, keepdim=True)
        logits = self.scale.exp() * text @ image.t()
        return {"logits": logits, "text": text, "image": image}


def contrastive(output: dict[str, Tensor], weight: Tensor) -> Tensor:
    """Each text is to find its image among all of the micro-batch, and back."""
    logits = output["logits"]
    labels = torch.arange(len(logits), device=logits.device)
    there = F.cross_entropy(logits, labels, reduction="none")
    back = F.cross_entropy(logits.t(), labels, reduction="none")
    return ((there + back) * weight).mean()


def texts_and_images(
    batch: int, words: int = WORDS, length: int = LENGTH, size: int = SIZE
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return ((texts, images), what each pair counts)."""
    tokens = torch.randint(words, (batch, length))
    return (tokens, 255 * torch.rand(batch, 3, size, size)), torch.rand(batch)
