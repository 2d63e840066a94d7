"""Two methods with a state in common: what `store` adds up, `recall` sees."""

import torch


class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))

    def store(self, x):
        self.kept.add_(x)
        return self.kept * 2

    def recall(self, scale):
        return self.kept * scale


memory = Memory()
methods = {
    "store": {"function": memory.store, "example_inputs": (torch.ones(4),)},
    "recall": {"function": memory.recall, "example_inputs": {"scale": torch.full((1,), 3.0)}},
}
