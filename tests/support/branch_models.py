"""Small networks of every kind that has parallel branches, for tests of many ranks.

Their branches are of different length and width, so that ranks share them unevenly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import mul

import torch
import torch.nn.functional as F
from gpt import cross_entropy
from models import AmoebaNet, Case, Sample
from shard_models import RmsNorm, images, pairs_of_texts, texts, vectors
from torch import Tensor, nn

__all__ = ["BRANCH_MODELS"]

WIDTH, HEADS, DEPTH = 24, 4, 2
HIDDEN, VOCABULARY = 40, 37
SAMPLES = 4  # of a micro-batch


class ConvNorm(nn.Sequential):
    """Convolution, batch normalization, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.ReLU(inplace=True),
        )


class InceptionA(nn.Module):
    """1 x 1, 5 x 5, two of 3 x 3, and a pool."""

    def __init__(self, inputs: int, pooled: int) -> None:
        super().__init__()
        self.one = ConvNorm(inputs, 4, 1)
        self.five = nn.Sequential(ConvNorm(inputs, 3, 1), ConvNorm(3, 4, 5, padding=2))
        self.three = nn.Sequential(
            ConvNorm(inputs, 4, 1),
            ConvNorm(4, 6, 3, padding=1),
            ConvNorm(6, 6, 3, padding=1),
        )
        self.pooled = ConvNorm(inputs, pooled, 1)
        self.outputs = 14 + pooled

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.avg_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.one(x), self.five(x), self.three(x), pooled], 1)


class InceptionB(nn.Module):
    """Halves the picture: 3 x 3, two of 3 x 3, and a pool."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.three = ConvNorm(inputs, 8, 3, stride=2)
        self.twice = nn.Sequential(
            ConvNorm(inputs, 4, 1),
            ConvNorm(4, 6, 3, padding=1),
            ConvNorm(6, 6, 3, stride=2),
        )
        self.outputs = 14 + inputs

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, 3, stride=2)
        return torch.cat([self.three(x), self.twice(x), pooled], 1)


def seven(inputs: int, outputs: int, *, upright: bool) -> ConvNorm:
    if upright:
        return ConvNorm(inputs, outputs, (7, 1), padding=(3, 0))
    return ConvNorm(inputs, outputs, (1, 7), padding=(0, 3))


class InceptionC(nn.Module):
    """1 x 1, 7 x 7 in two, 7 x 7 twice in four, and a pool."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = ConvNorm(inputs, 6, 1)
        self.seven = nn.Sequential(
            ConvNorm(inputs, width, 1),
            seven(width, width, upright=False),
            seven(width, 6, upright=True),
        )
        self.twice = nn.Sequential(
            ConvNorm(inputs, width, 1),
            seven(width, width, upright=True),
            seven(width, width, upright=False),
            seven(width, width, upright=True),
            seven(width, 6, upright=False),
        )
        self.pooled = ConvNorm(inputs, 6, 1)
        self.outputs = 24

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.avg_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.one(x), self.seven(x), self.twice(x), pooled], 1)


class InceptionD(nn.Module):
    """Halves the picture: 3 x 3, 7 x 7 before 3 x 3, and a pool."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.three = nn.Sequential(ConvNorm(inputs, 6, 1), ConvNorm(6, 8, 3, stride=2))
        self.seven = nn.Sequential(
            ConvNorm(inputs, 6, 1),
            seven(6, 6, upright=False),
            seven(6, 6, upright=True),
            ConvNorm(6, 6, 3, stride=2),
        )
        self.outputs = 14 + inputs

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, 3, stride=2)
        return torch.cat([self.three(x), self.seven(x), pooled], 1)


class InceptionE(nn.Module):
    """Two of its branches fork again, into 1 x 3 and 3 x 1."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.one = ConvNorm(inputs, 6, 1)
        self.begin = ConvNorm(inputs, 6, 1)
        self.wide = ConvNorm(6, 5, (1, 3), padding=(0, 1))
        self.high = ConvNorm(6, 5, (3, 1), padding=(1, 0))
        self.begin_twice = nn.Sequential(
            ConvNorm(inputs, 6, 1), ConvNorm(6, 5, 3, padding=1)
        )
        self.wide_twice = ConvNorm(5, 5, (1, 3), padding=(0, 1))
        self.high_twice = ConvNorm(5, 5, (3, 1), padding=(1, 0))
        self.pooled = ConvNorm(inputs, 4, 1)
        self.outputs = 30

    def forward(self, x: Tensor) -> Tensor:
        three, twice = self.begin(x), self.begin_twice(x)
        three = torch.cat([self.wide(three), self.high(three)], 1)
        twice = torch.cat([self.wide_twice(twice), self.high_twice(twice)], 1)
        pooled = self.pooled(F.avg_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.one(x), three, twice, pooled], 1)


class Inception(nn.Module):
    """Inception v3 in small: every kind of block, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(3, 6, 3, stride=2),
            ConvNorm(6, 8, 3, padding=1),
            nn.MaxPool2d(3, stride=1),
        )
        kinds: tuple[Callable[[int], nn.Module], ...] = (
            partial(InceptionA, pooled=2),
            InceptionB,
            partial(InceptionC, width=5),
            InceptionD,
            InceptionE,
        )
        self.blocks, channels = nn.Sequential(), 8
        for kind in kinds:
            block = kind(channels)
            self.blocks.append(block)
            channels = block.outputs
        self.head = nn.Linear(channels, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.stem(image))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Googlenet(nn.Module):
    """Heads beside the trunk in training; evaluation has one head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 8, 3, stride=2)
        self.blocks = nn.ModuleList()
        channels = 8
        for _ in range(3):
            self.blocks.append(InceptionA(channels, 3))
            channels = 17
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.AdaptiveAvgPool2d(2),
                ConvNorm(channels, 6, 1),
                nn.Flatten(),
                nn.Linear(24, 16),
                nn.ReLU(),
                nn.Linear(16, 10),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        x, outputs = self.stem(image), []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.training and index < len(self.heads):
                outputs.append(self.heads[index](x))
        main = self.head(x.mean((2, 3)))
        return (main, *outputs) if outputs else main


def auxiliary(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Cross-entropy; that of the heads beside the trunk counts less."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, target)
    main, *others = (F.cross_entropy(logits, target) for logits in output)
    return main + 0.3 * sum(others)


class ManyBranches(nn.Module):
    """A ResNeXt as its paper draws it: equal, narrow branches that are added up."""

    def __init__(self, width: int, branches: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(
                ConvNorm(width, 2, 1),
                ConvNorm(2, 2, 3, padding=1),
                nn.Conv2d(2, width, 1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(branches)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + sum(branch(x) for branch in self.branches))


def resnext(*branches: int) -> nn.Module:
    return nn.Sequential(
        ConvNorm(3, 8, 3, stride=2),
        *(ManyBranches(8, count) for count in branches),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


class ParallelLayer(nn.Module):
    """x + attention(n(x)) + mlp(n(x)), as in PaLM; a decoder's also looks at memory."""

    def __init__(self, *, first: bool, decodes: bool) -> None:
        super().__init__()
        self.decodes = decodes
        self.norm = RmsNorm(WIDTH)
        linear = partial(nn.Linear, bias=False)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)
        self.distances = nn.Embedding(7, HEADS) if first else None
        if decodes:
            self.query, self.both = linear(WIDTH, WIDTH), linear(WIDTH, 2 * WIDTH)
            self.last = linear(WIDTH, WIDTH)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        query, key, value = (
            tensor.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        weights = (query @ key.transpose(2, 3) + bias).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2)

    def bias(self, length: int, mask: Tensor) -> Tensor:
        """Return what is added to the scores: by distance, and of what is not seen."""
        places = torch.arange(length)
        apart = (places[None, :] - places[:, None]).clamp(-3, 3) + 3
        bias = self.distances(apart).permute(2, 0, 1)[None]
        if self.decodes:
            mask = mask & (places[None, :] <= places[:, None])
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)

    def forward(
        self, x: Tensor, bias: Tensor, memory: Tensor | None, mask: Tensor
    ) -> Tensor:
        y = self.norm(x)
        attention = self.out(self.mixed(*self.qkv(y).chunk(3, 2), bias))
        result = x + attention + self.down(F.gelu(self.up(y)))
        if memory is None:
            return result
        hidden = torch.zeros_like(mask, dtype=y.dtype)
        hidden = hidden.masked_fill(~mask, torch.finfo(y.dtype).min)
        key, value = self.both(memory).chunk(2, 2)
        return result + self.last(self.mixed(self.query(y), key, value, hidden))


class ParallelT5(nn.Module):
    """SUPER's: encoder and decoder of layers whose parts are side by side.

    Word 0 is padding. The first layer's table of distances serves all layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        for name, decodes in (("encoder", False), ("decoder", True)):
            layers = (ParallelLayer(first=not i, decodes=decodes) for i in range(DEPTH))
            self.add_module(name, nn.ModuleList(layers))
        self.norm, self.last = RmsNorm(WIDTH), RmsNorm(WIDTH)
        nn.init.normal_(self.words.weight, std=0.3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        is_word = (source != 0)[:, None, None, :]
        memory, x = self.words(source), self.words(target)
        bias = self.encoder[0].bias(source.shape[1], is_word)
        for layer in self.encoder:
            memory = layer(memory, bias, None, is_word)
        memory = self.norm(memory)
        every = torch.ones_like(target, dtype=torch.bool)[:, None, None, :]
        bias = self.decoder[0].bias(target.shape[1], every)
        for layer in self.decoder:
            x = layer(x, bias, memory, is_word)
        return F.linear(self.last(x) * WIDTH**-0.5, self.words.weight)


class Towers(nn.Module):
    """A picture and a text, each by a network of its own; which belongs to which?"""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            ConvNorm(3, 8, 3, stride=2),
            ConvNorm(8, 12, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 16),
            nn.BatchNorm1d(16),
        )
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.text = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.GELU(),
            nn.Linear(HIDDEN, 16),
        )
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        image = F.normalize(self.image(image), dim=1)
        text = F.normalize(self.text(self.words(tokens)).mean(1), dim=1)
        return self.scale.exp() * image @ text.t()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Each picture among all texts, each text among all pictures: of all samples."""
    right = torch.arange(len(output), device=output.device)
    both = F.cross_entropy(output, right) + F.cross_entropy(output.t(), right)
    return both / 2 + 0 * target.sum()


def pictures_and_texts(batch: int) -> Sample:
    (image,), target = images(batch)
    return (image, texts(batch)[0][0]), target


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs)
    )


class Mixture(nn.Module):
    """A dense mixture of experts: a gate weighs what every expert says."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.stem = nn.Linear(12, WIDTH)
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            mlp(WIDTH, 10 + 6 * index, WIDTH) for index in range(experts)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        gate = self.gate(x).softmax(-1)
        outputs = [
            gate[:, index, None] * expert(x)
            for index, expert in enumerate(self.experts)
        ]
        return self.head(x + sum(outputs[1:], outputs[0]))


class Joins(nn.Module):
    """Branches that are stacked, multiplied, chosen between, and attended over."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(mlp(12, 8 + 4 * i, WIDTH) for i in range(3))
        self.second = nn.ModuleList(mlp(WIDTH, 16, WIDTH) for _ in range(3))
        self.third = nn.ModuleList(mlp(WIDTH, 12 + i, WIDTH) for i in range(3))
        self.fourth = nn.ModuleList(mlp(WIDTH, 14, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([branch(x) for branch in self.first], 1).sum(1)
        x = x + reduce(mul, (branch(x) for branch in self.second))
        chosen, one, other = (branch(x) for branch in self.third)
        x = torch.where(chosen > 0, one, other)
        query, key, value = (branch(x).unflatten(1, (6, 4)) for branch in self.fourth)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.head(x + mixed.flatten(1))


class Noisy(nn.Module):
    """Dropout and batch normalization within branches and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(12, WIDTH), nn.Dropout(0.1))
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.dropout, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    @staticmethod
    def block() -> nn.ModuleList:
        return nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, hidden),
                nn.BatchNorm1d(hidden),
                nn.ReLU(),
                nn.Dropout(0.3),
                nn.Linear(hidden, WIDTH),
                nn.Dropout(0.1),
            )
            for hidden in (30, 14, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            outputs = [branch(x) for branch in block]
            x = self.norm(self.dropout(x + outputs[0] + outputs[1] + outputs[2]))
        return self.head(x)


class Shared(nn.Module):
    """A layer of two branches, and a weight of the trunk that is one of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.both = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = mlp(WIDTH, 20, WIDTH), mlp(WIDTH, 12, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.trunk.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(self.stem(x).tanh())
        one, other = self.both(self.one(x)), self.both(self.other(x).tanh())
        last = self.tied(x.sin()).relu()
        x = torch.cat([one, other, last], 1).unflatten(1, (3, WIDTH)).mean(1)
        one, other = self.norm(self.one[0:1](x)[:, :12].repeat(1, 2)), self.norm(x)
        return self.head(one + other)


class AllShared(nn.Module):
    """Every layer of a branch is used by another one or by the trunk as well."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(x)
        outputs = [self.one(x), self.one(x.sin()), self.other(x.cos())]
        return self.head(torch.stack(outputs).amax(0))


class Deep(nn.Module):
    """Branches that fork: the outer ones are uneven, the inner ones shorten them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, WIDTH)
        self.inner = nn.ModuleList(mlp(WIDTH, 30 - 4 * i, 8) for i in range(3))
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.light = mlp(WIDTH, 6, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.before(x).relu()
        y = torch.cat([branch(y) for branch in self.inner], 1)
        return self.head((self.after(y) + self.light(x)).relu() + x)


def case(
    name: str,
    make: Callable[[], nn.Module],
    sample: Callable[[int], Sample],
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> Case:
    return Case(name, make, sample, loss, micro_batch_size=SAMPLES)


CASES = (
    case("inception", Inception, partial(images, size=24)),
    case("amoebanet", partial(AmoebaNet, 3, 16), partial(images, size=32)),
    case("googlenet", Googlenet, images, auxiliary),
    case("branches of resnext", partial(resnext, 8, 32), images),
    case("parallel t5", ParallelT5, pairs_of_texts, cross_entropy),
    case("towers", Towers, pictures_and_texts, contrastive),
    case("mixture", partial(Mixture, 5), vectors),
    case("joins", Joins, vectors),
    case("branches dropout", Noisy, vectors),
    case("shared", Shared, vectors),
    case("all shared", AllShared, vectors),
    case("nested", Deep, vectors),
    case("two branches", partial(Mixture, 2), vectors),
)
BRANCH_MODELS = {entry.name: entry for entry in CASES}
