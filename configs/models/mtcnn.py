"""MTCNN's three face detection nets with facenet-pytorch's real weights, as methods of one program.

Needs `pip install --no-deps facenet-pytorch`; only its weights are read.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

FOLDER = Path(find_spec("facenet_pytorch").origin).parent / "data"


class Net(nn.Module):
    """Convolutions (name, channels, kernel, pooling), dense layers, and heads; PReLU after all but heads."""

    def __init__(self, weights, convolutions, dense, heads):
        super().__init__()
        loaded = torch.load(FOLDER / weights, map_location="cpu", weights_only=True)
        self.pools, self.dense, self.heads = [pool for _, _, pool in convolutions], dense, heads
        inputs = 3
        for index, (outputs, kernel, _) in enumerate(convolutions, 1):
            self.add_module(f"conv{index}", nn.Conv2d(inputs, outputs, kernel))
            self.add_module(f"prelu{index}", nn.PReLU(outputs))
            inputs = outputs
        for name in (*dense, *heads):
            weight = loaded[f"{name}.weight"]
            layer = (
                nn.Conv2d(*weight.shape[1::-1], 1) if weight.dim() == 4 else nn.Linear(*weight.shape[::-1])
            )
            self.add_module(name, layer)
        if dense:
            self.add_module(
                f"prelu{len(convolutions) + 1}", nn.PReLU(self.get_submodule(dense[0]).out_features)
            )
        self.load_state_dict(loaded)

    def forward(self, x):
        for index, pool in enumerate(self.pools, 1):
            x = self.get_submodule(f"prelu{index}")(self.get_submodule(f"conv{index}")(x))
            x = nn.functional.max_pool2d(x, pool, 2, ceil_mode=True) if pool else x
        for name in self.dense:
            x = x.permute(0, 3, 2, 1).flatten(1)
            x = self.get_submodule(f"prelu{len(self.pools) + 1}")(self.get_submodule(name)(x))
        found = [self.get_submodule(name)(x) for name in self.heads]
        return torch.softmax(found[0], 1), *found[1:]


pnet = Net("pnet.pt", [(10, 3, 2), (16, 3, 0), (32, 3, 0)], [], ["conv4_1", "conv4_2"]).eval()
rnet = Net("rnet.pt", [(28, 3, 3), (48, 3, 3), (64, 2, 0)], ["dense4"], ["dense5_1", "dense5_2"]).eval()
onet = Net(
    "onet.pt",
    [(32, 3, 3), (64, 3, 3), (64, 3, 2), (128, 2, 0)],
    ["dense5"],
    ["dense6_1", "dense6_2", "dense6_3"],
).eval()
torch.manual_seed(0)
methods = {
    "propose": {"module": pnet, "example_inputs": (torch.randn(1, 3, 48, 64),)},
    "refine": {"module": rnet, "example_inputs": (torch.randn(4, 3, 24, 24),)},
    "output": {"module": onet, "example_inputs": (torch.randn(2, 3, 48, 48),)},
}
