"""A one-dimensional convolution with stride, then GELU."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv1d(8, 16, 5, stride=2, padding=2), torch.nn.GELU()).eval()
example_inputs = (torch.randn(2, 8, 100),)
