"""MobileNet v3 small ("Searching for MobileNetV3", Howard et al., 2019): squeeze-and-excitation and hardswish."""

import os

import torch
from torch import nn

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
PIXELS = 224 if FULL else 64
ROWS = (  # kernel, expanded channels, output channels, squeeze-and-excitation, activation, stride
    (3, 16, 16, True, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 2),
    (3, 88, 24, False, nn.ReLU, 1),
    (5, 96, 40, True, nn.Hardswish, 2),
    (5, 240, 40, True, nn.Hardswish, 1),
    (5, 240, 40, True, nn.Hardswish, 1),
    (5, 120, 48, True, nn.Hardswish, 1),
    (5, 144, 48, True, nn.Hardswish, 1),
    (5, 288, 96, True, nn.Hardswish, 2),
    (5, 576, 96, True, nn.Hardswish, 1),
    (5, 576, 96, True, nn.Hardswish, 1),
)


def conv(inputs, outputs, kernel, stride=1, groups=1, activation=nn.Identity):
    """Convolution, batch norm, activation."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs, eps=0.001), activation())


class SqueezeExcitation(nn.Module):
    """Scale channels by what their means say."""

    def __init__(self, channels):
        super().__init__()
        hidden = max(8, int(channels / 4 + 4) // 8 * 8)
        self.narrow, self.widen = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x):
        mean = nn.functional.adaptive_avg_pool2d(x, 1)
        return x * nn.functional.hardsigmoid(self.widen(torch.relu(self.narrow(mean))))


class Bottleneck(nn.Module):
    def __init__(self, inputs, kernel, wide, outputs, has_squeeze, activation, stride):
        super().__init__()
        layers = [conv(inputs, wide, 1, activation=activation)] if wide != inputs else []
        layers.append(conv(wide, wide, kernel, stride, groups=wide, activation=activation))
        layers += [SqueezeExcitation(wide)] if has_squeeze else []
        self.layers = nn.Sequential(*layers, conv(wide, outputs, 1))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.is_residual else self.layers(x)


def model():
    torch.manual_seed(0)
    layers, inputs = [conv(3, 16, 3, 2, activation=nn.Hardswish)], 16
    for row in ROWS if FULL else ROWS[:5]:
        layers.append(Bottleneck(inputs, *row))
        inputs = row[2]
    layers += [conv(inputs, 576, 1, activation=nn.Hardswish), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return audible(nn.Sequential(*layers, nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, 1000))).eval()


def audible(network):
    """Random weights of such a size that results depend on the input; by default they would fade layer by layer."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return network


def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, PIXELS, PIXELS),)
