"""Two layers: one generated kernel, two matrix products."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
example_inputs = (torch.randn(2, 16),)
