"""A language model of bytes, on the lines of Python's own library, as long as they are.

gemsc compile examples/lines.py --ranks 2 --micro-batches 4 -o build/lines
gemsc run build/lines --epochs 1

Batches have three shapes: lines of up to 32, 64 and 128 bytes.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

LENGTHS = (32, 64, 128)
SAMPLES = 16  # of a micro-batch
LINES = 20_000
WIDTH, HEADS, DEPTH = 128, 4, 4
IGNORED = -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).unbind(2)
        mixed = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Lines(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, line):
        places = torch.arange(line.shape[1], device=line.device)
        x = self.bytes(line) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = Lines


def example_inputs():  # a micro-batch of each shape
    inputs = [(torch.zeros(SAMPLES, n, dtype=torch.int64),) for n in LENGTHS]
    return inputs if len(inputs) > 1 else inputs[0]


def example_target():
    inputs = example_inputs()
    return [x for (x,) in inputs] if isinstance(inputs, list) else inputs[0]


pad_value = (0, IGNORED)  # of inputs, of targets


def loss(output, target):
    total = cross_entropy(
        output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total, (target != IGNORED).sum()


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)


def lines(first, count):
    """Return each line and, as the target, the byte that follows each of its bytes."""
    folder, texts = Path(sysconfig.get_paths()["stdlib"]), []
    for file in sorted(folder.glob("*.py")):
        texts += [text.rstrip() for text in file.read_bytes().splitlines()]
    texts = [text[: max(LENGTHS)] + b"\n" for text in texts if len(text) > 1]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    chosen = [torch.tensor([*texts[i]]) for i in order[first : first + count]]
    return [(line[:-1], line[1:]) for line in chosen]


def dataset():
    return lines(0, LINES)


def eval_dataset():
    return lines(LINES, LINES // 20)
