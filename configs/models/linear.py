"""One linear layer, for any number of rows up to 64, with plans and graphs of its own for the usual ones."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(32, 16).eval()
example_inputs = (torch.randn(8, 32),)
dynamic_shapes = ({0: torch.export.Dim("rows", min=1, max=64)},)
buckets = {"rows": [1, 8, 64]}
