"""A multilayer perceptron that tells faces from other pictures.

The pictures are scikit-image's 100 faces and 100 other crops from Labeled Faces in the
Wild, 25 x 25 grey pixels each; every fifth is held out.
"""

import torch
import torch.nn.functional as F
from skimage import data
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

PIXELS = 25 * 25


class MLP(nn.Module):
    def __init__(self, inputs: int = PIXELS, width: int = 256, depth: int = 4):
        super().__init__()
        layers: list[nn.Module] = []
        for size in [inputs] + [width] * (depth - 1):
            layers += [nn.Linear(size, width), nn.ReLU()]
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def faces(held_out: bool) -> Dataset:
    pictures = torch.from_numpy(data.lfw_subset()).float().flatten(1)
    labels = (torch.arange(200) < 100).long()  # the faces come first
    chosen = (torch.arange(200) % 5 == 0) == held_out
    return TensorDataset((pictures[chosen] - 0.4) / 0.2, labels[chosen])


def model() -> nn.Module:
    return MLP()


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(8, PIXELS),)


def example_target() -> Tensor:
    return torch.arange(8) % 2


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def dataset() -> Dataset:
    return faces(held_out=False)


def eval_dataset() -> Dataset:
    return faces(held_out=True)
