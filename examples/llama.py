"""A Llama of 6.7 billion parameters, written plainly, on the meta device.

    gemsc plan examples/llama.py --ranks 8 --device-memory 80GiB --hardware a100 ...
    gemsc compile examples/llama.py --ranks 8 --micro-batches 8 -o build/llama

Smaller ones: --set LAYERS=2 --set WIDTH=64 ... Ranks make its weights with `init`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS = 32
WIDTH = 4096
HEADS = 32
HIDDEN = 11008
VOCABULARY = 32000
WORDS = 2048


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.values = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.queries, self.keys, self.values)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.norm_2 = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        size = WIDTH // HEADS
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(WORDS), frequencies)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, words):
        x = self.embedding(words)
        angles = self.angles[: words.shape[1]]
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def model():
    with torch.device("meta"):
        return Llama()


def loss(scores, target):
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def example_inputs():
    return (torch.randint(VOCABULARY, (1, WORDS)),)


def example_target():
    return torch.randint(VOCABULARY, (1, WORDS))


def init(module):
    if isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
    else:
        nn.init.normal_(module.weight, std=0.02)


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-4)


def dataset():
    words = torch.randint(VOCABULARY, (64, WORDS + 1))
    return torch.utils.data.TensorDataset(words[:, :-1], words[:, 1:])
