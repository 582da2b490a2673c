"""A GPT-2, and texts of random words for it: for tests and benchmarks of shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Gpt", "cross_entropy", "words"]


class GptBlock(nn.Module):
    """Queries, keys and values by one layer, as in GPT-2."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.size, self.dropout = heads, width // heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        shape = *x.shape[:2], self.heads, self.size
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm1(x))
        x = x + F.dropout(mixed, self.dropout, self.training)
        h = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(h, self.dropout, self.training)


class Gpt(nn.Module):
    """Learned positions, fused QKV, causal attention, the embedding as the head."""

    def __init__(
        self,
        width: int,
        heads: int,
        depth: int,
        vocabulary: int,
        length: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            GptBlock(width, heads, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def words(batch: int, length: int, vocabulary: int) -> tuple[tuple[Tensor], Tensor]:
    """Return texts and, of each word, the next one."""
    text = torch.randint(vocabulary, (batch, length + 1))
    return (text[:, :-1],), text[:, 1:]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
