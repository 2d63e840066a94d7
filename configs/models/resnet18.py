"""ResNet-18 ("Deep Residual Learning", He et al., 2015): an image in, 1,000 class scores out."""

import os

import torch
from torch import nn

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
WIDTH, PIXELS = (64, 224) if FULL else (8, 64)


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet18(nn.Module):
    """A stem, four stages of two blocks, pooling and a linear head."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], width
        for stage in range(4):
            outputs = width << stage
            blocks += [Block(inputs, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, image):
        x = self.blocks(self.stem(image))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def model():
    torch.manual_seed(0)
    return ResNet18(WIDTH).eval()


def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, PIXELS, PIXELS),)
