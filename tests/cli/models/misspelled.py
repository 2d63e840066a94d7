"""Off the convention: `modle`."""

import torch

modle = torch.nn.Linear(2, 2)
example_inputs = (torch.ones(1, 2),)
