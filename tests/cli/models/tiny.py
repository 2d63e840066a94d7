"""Two layers of few rows: two kernels."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
example_inputs = (torch.randn(2, 16),)
