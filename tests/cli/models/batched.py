"""One dynamic dimension, and the sizes that its callers use most."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
example_inputs = (torch.randn(4, 16),)
dynamic_shapes = ({0: torch.export.Dim("batch", max=32)},)
buckets = {"batch": [8]}
