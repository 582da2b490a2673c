"""ResNets in the names torchvision gives them, and photographs to train them on."""

from functools import cache

import torch
from skimage import data
from torch import Tensor, nn
from torch.utils.data import Dataset


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.downsample(x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + self.downsample(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )


class ResNet(nn.Module):
    """He et al., Deep Residual Learning for Image Recognition, 2015."""

    def __init__(self, block, layers, num_classes: int = 10, width: int = 64):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = width
        for stage, num_blocks in enumerate(layers):
            blocks = []
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(inputs, width * 2**stage, stride))
                inputs = width * 2**stage * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class PreActBottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int, stride: int = 1):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.relu = nn.ReLU()
        self.downsample = nn.Identity()
        if inputs != outputs or stride != 1:
            self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.relu(self.bn1(x)))
        out = self.conv2(self.relu(self.bn2(out)))
        out = self.conv3(self.relu(self.bn3(out)))
        return out + self.downsample(x)


class ResNetV2(nn.Module):
    """He et al., Identity Mappings in Deep Residual Networks, 2016; depth is 9n + 2."""

    def __init__(self, depth: int = 110, num_classes: int = 10, width: int = 16):
        super().__init__()
        num_blocks, remainder = divmod(depth - 2, 9)
        if remainder or not num_blocks:
            raise ValueError(f"depth {depth} is not 9n + 2")
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        inputs, outputs = width, 4 * width
        for stage in range(3):
            first = PreActBottleneck(inputs, width, outputs, 2 if stage else 1)
            others = (
                PreActBottleneck(outputs, width, outputs) for _ in range(1, num_blocks)
            )
            self.add_module(f"layer{stage + 1}", nn.Sequential(first, *others))
            inputs, width, outputs = outputs, outputs, 2 * outputs
        self.bn = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        x = self.avgpool(self.relu(self.bn(x)))
        return self.fc(x.flatten(1))


def he_initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


@cache
def photographs() -> list[Tensor]:
    """Return scikit-image's ten photographs, each 3 x height x width in [-2, 2]."""
    names = """astronaut brick camera chelsea coffee grass hubble_deep_field
        immunohistochemistry retina rocket"""
    pictures = [torch.from_numpy(getattr(data, name)()) for name in names.split()]
    colour = [p if p.ndim == 3 else p[..., None].expand(-1, -1, 3) for p in pictures]
    return [(p.permute(2, 0, 1) / 255 - 0.5) * 4 for p in colour]


class Photographs(Dataset):
    """Random square crops, half of them mirrored; which photograph is each one from?"""

    def __init__(self, size: int, length: int = 640):
        self.size = size
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % len(photographs())
        picture = photographs()[label]
        top, left = (
            int(torch.randint(side - self.size + 1, ())) for side in picture.shape[1:]
        )
        crop = picture[:, top : top + self.size, left : left + self.size]
        return crop.flip(2) if torch.rand(()) < 0.5 else crop, label
