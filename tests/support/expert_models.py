"""Mixtures of experts with a fixed capacity, as people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MIXTURES", "batch", "build", "loss"]

WIDTH, HIDDEN, EXPERTS, CAPACITY = 8, 12, 4, 5


class Experts(nn.Module):
    """Two layers of each expert, in one tensor each."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, hidden))
        self.up_bias = nn.Parameter(0.3 * torch.randn(EXPERTS, 1, hidden))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, WIDTH))

    def mlp(self, inside: Tensor) -> Tensor:
        hidden = F.gelu(torch.bmm(inside, self.up) + self.up_bias)
        return torch.bmm(hidden, self.down)


class Switch(Experts):
    """Each token goes to one expert, as long as that has places (Switch)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        probs = self.router(tokens).softmax(-1)
        gate, index = probs.max(-1)
        chosen = F.one_hot(index, EXPERTS).to(x.dtype)
        balance = EXPERTS * (chosen.mean(0) * probs.mean(0)).sum()
        position = (chosen.cumsum(0) - 1) * chosen
        kept = chosen * (position < CAPACITY)
        place = position.sum(-1).long().clamp(max=CAPACITY - 1)
        places = F.one_hot(place, CAPACITY).to(x.dtype)
        dispatch = kept.unsqueeze(-1) * places.unsqueeze(1)
        inside = torch.einsum("nec,nd->ecd", dispatch, tokens)
        combine = dispatch * gate[:, None, None]
        y = torch.einsum("nec,ecd->nd", combine, self.mlp(inside))
        return y.view_as(x), balance


class TopTwo(Experts):
    """Each token goes to two experts; capacity is by sample (GShard)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, _ = x.shape
        probs = self.router(x).softmax(-1)
        weights, index = probs.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = F.one_hot(index, EXPERTS).to(x.dtype)
        flat = chosen.transpose(1, 2).reshape(b, 2 * s, EXPERTS)
        position = (flat.cumsum(1) - flat) * flat
        position = position.reshape(b, 2, s, EXPERTS).transpose(1, 2)
        chosen = chosen * (position < CAPACITY)
        place = (position * chosen).sum(-1).long()
        places = F.one_hot(place, CAPACITY).to(x.dtype)
        dispatch = torch.einsum("bske,bskc->bsec", chosen, places)
        combine = torch.einsum("bsk,bske,bskc->bsec", weights, chosen, places)
        inside = torch.einsum("bsec,bsd->ebcd", dispatch, x)
        hidden = F.silu(torch.einsum("ebcd,edh->ebch", inside, self.up))
        out = torch.einsum("ebch,ehd->ebcd", hidden, self.down)
        y = torch.einsum("bsec,ebcd->bsd", combine, out)
        balance = (
            F.one_hot(index[..., 0], EXPERTS).to(x.dtype).mean(1) * probs.mean(1)
        ).mean()
        return y, balance


class Groups(Experts):
    """Tokens are in groups, a sample each; an expert has places for each (GShard)."""

    places = 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.router(x).softmax(-1)
        gate, index = probs.max(-1)
        chosen = F.one_hot(index, EXPERTS)
        place = (chosen.cumsum(1) - 1) * chosen
        kept = chosen * (place < self.places)
        places = F.one_hot(place.sum(-1).clamp(max=self.places - 1), self.places)
        dispatch = (kept[..., None] * places[:, :, None]).to(x.dtype)
        combine = dispatch * gate[..., None, None]
        inside = torch.einsum("gtec,gtd->gecd", dispatch, x)
        hidden = F.gelu(torch.einsum("gecd,edf->gecf", inside, self.up))
        out = torch.einsum("gecf,efd->gecd", hidden, self.down)
        y = torch.einsum("gtec,gecd->gtd", combine, out)
        return y, (probs.mean(1) * chosen.to(x.dtype).mean(1)).sum()


class Roomy(Groups):
    """An expert has places for nearly all tokens of a group."""

    places = 5


class EveryToken(Experts):
    """Every expert sees every token, and zeros count for others (Llama 4, GPT-OSS)."""

    def __init__(self) -> None:
        super().__init__(2 * HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.view(-1, WIDTH)
        logits = self.router(tokens)
        top, index = torch.topk(logits, 2, dim=-1)
        least = torch.full_like(logits, float("-inf"))
        weights = least.scatter(1, index, top).softmax(-1)
        inside = tokens.repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH)
        both = torch.bmm(inside, self.up) + self.up_bias
        gate, up = both.chunk(2, dim=-1)
        out = torch.bmm(up * F.silu(gate), self.down)
        out = out * weights.transpose(0, 1).unsqueeze(-1)
        return out.sum(0).view_as(x), logits.softmax(-1).mean(0).square().sum()


class Choice(Experts):
    """Each expert takes its best tokens; what comes back is added to them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        probs = self.router(tokens).softmax(-1)
        gate, index = probs.t().topk(CAPACITY, dim=-1)
        out = self.mlp(tokens[index]) * gate.unsqueeze(-1)
        y = tokens.index_add(0, index.flatten(), out.flatten(0, 1))
        return y.view_as(x), probs.mean(0).square().sum()


MIXTURES: dict[str, type[Experts]] = {
    "switch": Switch,
    "top two": TopTwo,
    "groups": Groups,
    "roomy groups": Roomy,
    "every token": EveryToken,
    "choice": Choice,
}


class Model(nn.Module):
    """Two blocks with a mixture each; their losses of balance are added up."""

    def __init__(self, mixture: type[Experts]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixtures = nn.ModuleList(mixture() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.first(x), torch.zeros(())
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            y, balance = mixture(norm(x))
            x, total = x + y, total + balance
        return x, total


def build(name: str) -> nn.Module:
    """Return a model of two mixtures, seeded."""
    torch.manual_seed(1)
    return Model(MIXTURES[name])


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Return the error, and a little of what the routers do unevenly."""
    return F.mse_loss(output[0], target) + 0.1 * output[1]


def batch(samples: int = 4) -> tuple[tuple[Any, ...], Tensor]:
    """Return inputs and a target."""
    return (torch.randn(samples, 6, WIDTH),), torch.randn(samples, 6, WIDTH)
