"""A small transformer encoder that fills in hidden bytes of Python's own help texts.

The embedding is also the output projection: one weight, used at both ends.
"""

from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 64
SHARE_HIDDEN = 0.1
PADDING, HIDDEN, VOCABULARY = 256, 257, 258
IGNORED = -100  # cross entropy's own word for "no target here"


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=real[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), real))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    def __init__(
        self,
        width: int = 128,
        num_layers: int = 6,
        num_heads: int = 4,
        length: int = LENGTH,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Return batch x length x vocabulary logits; `real` is False at padding."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, real)
        return self.head(self.norm(x))


class HelpTexts(Dataset):
    """Paragraphs, each with a few bytes hidden at random."""

    def __init__(self, length: int = LENGTH):
        paragraphs = "\n\n".join(topics.topics.values()).split("\n\n")
        texts = (" ".join(paragraph.split()).encode() for paragraph in paragraphs)
        self.texts = [text[:length] for text in texts if len(text) >= length // 2]
        self.length = length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        text = torch.tensor(list(self.texts[index]))
        tokens = F.pad(text, (0, self.length - len(text)), value=PADDING)
        target = torch.full_like(tokens, IGNORED)
        hidden = (torch.rand(len(text)) < SHARE_HIDDEN).nonzero().flatten()
        target[hidden] = tokens[hidden]
        real = tokens != PADDING
        tokens[hidden] = HIDDEN
        return (tokens, real), target


def model() -> nn.Module:
    return Encoder()


def example_inputs() -> tuple[Tensor, Tensor]:
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH // 2]])
    tokens = torch.randint(256, (2, LENGTH)).where(real, PADDING)
    return tokens, real


def example_target() -> Tensor:
    target = torch.full((2, LENGTH), IGNORED)
    target[0, :8], target[1, :3] = 32, 32
    return target


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sum, and of how many: hidden bytes weigh alike in any micro-batch."""
    logits, wanted = output.flatten(0, 1), target.flatten()
    total = F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    right = output.argmax(2) == target
    return {"accuracy": right.sum() / (target != IGNORED).sum()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def dataset() -> Dataset:
    return HelpTexts()
