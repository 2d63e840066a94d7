"""Not exportable: complex numbers have no place in an artifact."""

import torch


class Eigenvalues(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x)


model = Eigenvalues()
example_inputs = (torch.eye(3),)
