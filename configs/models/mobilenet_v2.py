"""MobileNet v2 ("Inverted Residuals and Linear Bottlenecks", Sandler et al., 2018)."""

import os

import torch
from torch import nn

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
PIXELS = 224 if FULL else 64
STAGES = (  # expansion, channels, repeats, stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def conv(inputs, outputs, kernel, stride=1, groups=1):
    """Convolution, batch norm, ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """Widen, filter each channel by itself, narrow again without an activation."""

    def __init__(self, inputs, outputs, stride, expansion):
        super().__init__()
        wide = inputs * expansion
        layers = [conv(inputs, wide, 1)] if expansion != 1 else []
        layers += [conv(wide, wide, 3, stride, groups=wide), nn.Conv2d(wide, outputs, 1, bias=False)]
        self.layers = nn.Sequential(*layers, nn.BatchNorm2d(outputs))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.is_residual else self.layers(x)


def model():
    torch.manual_seed(0)
    layers, inputs = [conv(3, 32, 3, 2)], 32
    for expansion, outputs, repeats, stride in STAGES if FULL else STAGES[:4]:
        for index in range(repeats):
            layers.append(InvertedResidual(inputs, outputs, stride if index == 0 else 1, expansion))
            inputs = outputs
    layers += [conv(inputs, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return audible(nn.Sequential(*layers)).eval()


def audible(network):
    """Random weights of such a size that results depend on the input; by default they would fade layer by layer."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return network


def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, PIXELS, PIXELS),)
