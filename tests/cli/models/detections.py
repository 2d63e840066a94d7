"""Which scores are above a threshold: results of a size that depends on data, at most 10 by declaration."""

import torch


class Detections(torch.nn.Module):
    """Boxes [candidates, 4] of which the scores [candidates] say how good they are."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        """Those that are good, with their places."""
        (kept,) = torch.where(scores > 0.5)
        torch._check(kept.shape[0] <= 10)
        return {"kept": kept, "boxes": boxes[kept] * 2, "total": scores[scores > 0.5].sum(0)}


model = Detections
generator = torch.Generator().manual_seed(0)
example_inputs = (
    torch.rand(100, 4, generator=generator),
    torch.linspace(0, 0.54, 100)[torch.randperm(100, generator=generator)],
)
