"""A small vision transformer: which of ten photographs is this crop from?

Patches become tokens; an additional one, the class token, gives the answer (Dosovitskiy
et al., An image is worth 16x16 words, 2021). With `--ranks 4 --tiles 2x1 --shards 2`
tiles have tokens, by rows of the picture, and shards have heads and features of these.
"""

import torch
import torch.nn.functional as F
from resnet import Photographs
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE, PATCH = 64, 4


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 96, num_layers: int = 4, num_heads: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.answer = nn.Parameter(torch.zeros(1, 1, width))
        count = (SIZE // PATCH) ** 2 + 1
        self.positions = nn.Parameter(0.02 * torch.randn(1, count, width))
        self.layers = nn.Sequential(
            *(Layer(width, num_heads) for _ in range(num_layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        answer = self.answer.expand(len(x), -1, -1)
        tokens = torch.cat([answer, tokens], 1) + self.positions
        return self.head(self.norm(self.layers(tokens))[:, 0])


def model() -> nn.Module:
    return VisionTransformer()


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(4, 3, SIZE, SIZE),)


def example_target() -> Tensor:
    return torch.arange(4)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def dataset() -> Dataset:
    return Photographs(SIZE)
