"""Small networks of every kind that shards cut, for tests of many ranks against one.

All have 4 heads (or 4 keys, each of 2 queries), hidden features that 2, 3 and 4 ranks
share, evenly or not, and a vocabulary that none of them divides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from gpt import Gpt, cross_entropy, words
from models import Case, Sample, encoder
from torch import Tensor, nn

__all__ = ["SHARD_MODELS"]

WIDTH, HEADS, DEPTH = 24, 4, 2
HIDDEN = 50  # of 3 ranks: 17, 17, 16
VOCABULARY = 37
LENGTH = 10
SAMPLES = 4  # of a micro-batch


class RmsNorm(nn.Module):
    """Written by hand, as Llama's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        size = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(size + 1e-6))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Two queries share a key; a gate of SiLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        linear = partial(nn.Linear, bias=False)
        self.query = linear(width, heads * size)
        self.key = linear(width, kv_heads * size)
        self.value = linear(width, kv_heads * size)
        self.out = linear(heads * size, width)
        self.gate, self.up = linear(width, HIDDEN), linear(width, HIDDEN)
        self.down = linear(HIDDEN, width)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotated(query, cos, sin),
            rotated(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=True,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Rotary positions, grouped queries, a gated MLP, a head of its own."""

    def __init__(self, heads: int = 8, kv_heads: int = 4, size: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            LlamaBlock(WIDTH, heads, kv_heads, size) for _ in range(DEPTH)
        )
        self.norm = RmsNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        speeds = 100.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(LENGTH), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class T5Attention(nn.Module):
    """Products of queries and keys by hand, with a table of distances if it has one."""

    def __init__(self, buckets: int = 0, *, looks_back: bool = False) -> None:
        super().__init__()
        self.looks_back = looks_back
        linear = partial(nn.Linear, WIDTH, WIDTH, bias=False)
        self.query, self.key, self.value = linear(), linear(), linear()
        self.out = linear()
        self.distances = nn.Embedding(buckets, HEADS) if buckets else None

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2)

    def bias(self, length: int) -> Tensor:
        places = torch.arange(length)
        apart = (places[None, :] - places[:, None]).clamp(-3, 3) + 3
        return self.distances(apart).permute(2, 0, 1).unsqueeze(0)

    def forward(
        self, x: Tensor, given: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        query, key = self.heads(self.query(x)), self.heads(self.key(given))
        scores = torch.matmul(query, key.transpose(3, 2))
        if self.distances is not None:
            bias = self.bias(x.shape[1])
            if self.looks_back:
                places = torch.arange(x.shape[1])
                is_seen = places <= places[:, None]
                bias = torch.where(is_seen, bias, torch.finfo(x.dtype).min)
        if bias is None:
            bias = torch.zeros((1, *scores.shape[1:]), dtype=x.dtype)
        scores = scores + bias
        mixed = torch.matmul(F.softmax(scores, dim=-1), self.heads(self.value(given)))
        mixed = mixed.transpose(1, 2).contiguous().view(x.shape[0], -1, WIDTH)
        return self.out(mixed), bias


class T5Layer(nn.Module):
    def __init__(self, *, first: bool, decodes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm(WIDTH) for _ in range(2 + decodes))
        self.own = T5Attention(7 if first else 0, looks_back=decodes)
        self.cross = T5Attention() if decodes else None
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(
        self, x: Tensor, bias: Tensor | None, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        y = self.norms[0](x)
        y, bias = self.own(y, y, bias)
        x = x + y
        if self.cross is not None and memory is not None:
            x = x + self.cross(self.norms[2](x), memory, None)[0]
        return x + self.down(F.relu(self.up(self.norms[1](x)))), bias


class T5(nn.Module):
    """Encoder and decoder; the first layer's table of distances serves all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        for name, decodes in (("encoder", False), ("decoder", True)):
            layers = (T5Layer(first=not i, decodes=decodes) for i in range(DEPTH))
            self.add_module(name, nn.ModuleList(layers))
        self.norm, self.last = RmsNorm(WIDTH), RmsNorm(WIDTH)
        nn.init.normal_(self.words.weight, std=0.3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, bias = self.words(source), None
        for layer in self.encoder:
            memory, bias = layer(memory, bias, None)
        memory, x, bias = self.norm(memory), self.words(target), None
        for layer in self.decoder:
            x, bias = layer(x, bias, memory)
        return F.linear(self.last(x) * WIDTH**-0.5, self.words.weight)


class ViT(nn.Module):
    """Patches by a convolution, a class token, blocks of PyTorch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 10, WIDTH))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(WIDTH),
                    "attention": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
                    "norm2": nn.LayerNorm(WIDTH),
                    "mlp": nn.Sequential(
                        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
                    ),
                }
            )
            for _ in range(DEPTH)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            y = block["norm1"](x)
            x = x + block["attention"](y, y, y, need_weights=False)[0]
            x = x + block["mlp"](block["norm2"](x))
        x = self.norm(x)
        return self.head(torch.cat((x[:, 0], x[:, 1:].mean(1)), dim=-1))


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with a mask of what is padding."""

    def __init__(self, *, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, dropout, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(self.words(tokens), src_key_padding_mask=padding)
        return self.head(x)


class TorchTransformer(nn.Module):
    """nn.Transformer, then attention with keys of another width and its weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.both = nn.Transformer(
            WIDTH, HEADS, 1, 1, HIDDEN, dropout, batch_first=True
        )
        self.last = nn.MultiheadAttention(WIDTH, HEADS, dropout, kdim=12, vdim=8)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.words(source), self.words(target)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.both(memory, x, tgt_mask=mask.to(x.dtype)).transpose(0, 1)
        memory = memory.transpose(0, 1)
        y, weights = self.last(x, memory[..., :12], memory[..., 12:20])
        return self.head((x + y).transpose(0, 1)) * (1 + weights.square().mean())


class OneHead(nn.Module):
    """Attention of one head: only the width of its values can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        mixed = F.scaled_dot_product_attention(
            *(self.query(x)[:, None], self.key(x)[:, None], self.value(x)[:, None]),
            dropout_p=0.2 if self.training else 0.0,
        )
        return self.head(x + self.out(mixed[:, 0]))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 in groups, 1 x 1, as in ResNet-50 and ResNeXt."""

    def __init__(self, inputs: int, width: int, groups: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 24, 1, bias=False),
            nn.BatchNorm2d(24),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != 24:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 24, 1, stride, bias=False), nn.BatchNorm2d(24)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs(x) + self.shortcut(x))


class Groups(nn.Module):
    """Functions that are told how many groups there are."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv2d(inputs, 16, 1), nn.Conv2d(16, 12, 1)
        self.weight = nn.Parameter(torch.randn(16, 2, 3, 3) / 4)
        self.scale, self.shift = (nn.Parameter(torch.randn(16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(self.begin(x), self.weight, None, 1, 1, 1, 8)
        return self.end(F.relu(F.group_norm(x, 8, self.scale, self.shift)))


def grouped() -> nn.Module:
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10)
    return nn.Sequential(Groups(3), Groups(12), *pool)


class Bottlenecks(nn.Module):
    """A ResNet-50 in small; a ResNeXt with groups."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        width = 12 * (2 if groups > 1 else 1)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            Bottleneck(8, width, groups, 1),
            Bottleneck(24, width, groups, 2),
            Bottleneck(24, width, groups, 1),
        )
        self.head = nn.Linear(24, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(image)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 2, stride=2)
        self.first = nn.Sequential(ConvNextBlock(12), ConvNextBlock(12))
        self.less = nn.Conv2d(12, 16, 2, stride=2)
        self.second = ConvNextBlock(16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.second(self.less(self.first(self.stem(image))))
        return self.head(self.norm(x.mean((2, 3))))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Words(nn.Module):
    """Nothing but an embedding and its own transpose: all of it is vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).tanh())


class Channels(nn.Module):
    """What treats each channel alike: of it a rank needs its own channels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.5, 12))
        self.first = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.InstanceNorm2d(12, affine=True),
            nn.PReLU(),
            nn.Conv2d(12, 12, 3, padding=1),
        )
        self.second = nn.Sequential(
            nn.Conv2d(12, 12, 3), nn.InstanceNorm2d(12), nn.ReplicationPad2d(1)
        )
        self.third = nn.Sequential(
            nn.Conv2d(12, 12, 1), nn.Dropout2d(0.3), nn.PReLU(12), nn.Conv2d(12, 12, 1)
        )
        self.larger = nn.Sequential(nn.Conv2d(12, 24, 1), nn.PixelShuffle(2))
        self.last = nn.Sequential(nn.Conv2d(6, 12, 1), nn.AdaptiveMaxPool2d(2))
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.prelu(F.instance_norm(self.first(x)), self.slopes)
        x = F.dropout2d(F.pad(self.second(x), (0, 1), value=0.5), 0.3, self.training)
        return self.head(self.last(self.larger(self.third(x))).flatten(1))


def texts(batch: int) -> Sample:
    return words(batch, LENGTH, VOCABULARY)


def pairs_of_texts(batch: int) -> Sample:
    (target,), following = texts(batch)
    return (torch.randint(VOCABULARY, (batch, 8)), target), following


def padded(batch: int) -> Sample:
    (tokens,), following = texts(batch)
    lengths = torch.randint(4, LENGTH + 1, (batch, 1))
    padding = torch.arange(LENGTH) >= lengths
    return (tokens, padding), following.masked_fill(padding, encoder.IGNORED)


def masked_texts(batch: int) -> Sample:
    tokens, target = padded(batch)
    return (tokens[0], ~tokens[1]), target


def images(batch: int, size: int = 12) -> Sample:
    return (torch.randn(batch, 3, size, size),), torch.randint(10, (batch,))


def vectors(batch: int) -> Sample:
    return (torch.randn(batch, 12),), torch.randint(10, (batch,))


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """Smoothed, with a weight for each word, some of which count for nothing."""
    weight = torch.linspace(0.5, 2.0, VOCABULARY, dtype=output.dtype)
    return F.cross_entropy(
        output.transpose(1, 2), target, weight, ignore_index=3, label_smoothing=0.1
    )


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=0.2)


def case(
    name: str,
    make: Callable[[], nn.Module],
    sample: Callable[[int], Sample],
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Case:
    return Case(name, make, sample, loss, micro_batch_size=SAMPLES)


def small_encoder(dropout: float = 0.0) -> nn.Module:
    return encoder.Encoder(WIDTH, DEPTH, HEADS, LENGTH, VOCABULARY, dropout)


def small_gpt(dropout: float = 0.0) -> nn.Module:
    return Gpt(WIDTH, HEADS, DEPTH, VOCABULARY, LENGTH, dropout)


CASES = (
    case("tied encoder", small_encoder, masked_texts, encoder.loss),
    case(
        "tied encoder dropout", partial(small_encoder, 0.2), masked_texts, encoder.loss
    ),
    case("gpt", small_gpt, texts),
    case("gpt dropout", partial(small_gpt, 0.1), texts),
    case("llama", Llama, texts),
    case("t5", T5, pairs_of_texts),
    case("vit", ViT, images, F.cross_entropy),
    case(
        "transformer",
        partial(TorchEncoder, dropout=0.0, norm_first=False),
        padded,
        encoder.loss,
    ),
    case(
        "transformer dropout",
        partial(TorchEncoder, dropout=0.1, norm_first=True),
        padded,
        encoder.loss,
    ),
    case("resnet", Bottlenecks, images, F.cross_entropy),
    case("groups", grouped, images, F.cross_entropy),
    case("resnext", partial(Bottlenecks, groups=4), images, F.cross_entropy),
    case("convnext", ConvNext, images, F.cross_entropy),
    case("features", Mlp, vectors, F.cross_entropy),
    case("words", Words, texts, weighted),
    case("words smoothed", Words, texts, smoothed),
    case("one head dropout", OneHead, texts),
    case("translator dropout", partial(TorchTransformer, 0.1), pairs_of_texts),
    case("channels dropout", Channels, images, F.cross_entropy),
)
SHARD_MODELS = {entry.name: entry for entry in CASES}
