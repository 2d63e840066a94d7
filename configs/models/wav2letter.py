"""Wav2Letter ("An End-to-End ConvNet-based Speech Recognition System", Collobert et al., 2016) on raw audio."""

import os

import torch
from torch import nn

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
CHANNELS, WIDE, SAMPLES = (250, 2000, 16000) if FULL else (24, 64, 8000)
LABELS = 40


def conv(inputs, outputs, kernel, stride, padding):
    return nn.Sequential(nn.Conv1d(inputs, outputs, kernel, stride, padding), nn.ReLU())


def model():
    torch.manual_seed(0)
    middle = [conv(CHANNELS, CHANNELS, 7, 1, 3) for _ in range(7)]
    network = nn.Sequential(
        conv(1, CHANNELS, 250, 160, 45),
        conv(CHANNELS, CHANNELS, 48, 2, 23),
        *middle,
        conv(CHANNELS, WIDE, 32, 1, 16),
        conv(WIDE, WIDE, 1, 1, 0),
        conv(WIDE, LABELS, 1, 1, 0),
        nn.LogSoftmax(1),
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv1d):
            nn.init.kaiming_normal_(layer.weight)  # by default the input would fade layer by layer
    return network.eval()


def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 1, SAMPLES),)
