"""MiniLM-L6's shape with random weights: the real ones are a package that a GPU machine may lack."""

import torch
from transformers import BertConfig, BertModel


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def model():
    torch.manual_seed(0)
    return Encoder().eval()


def example_inputs():
    torch.manual_seed(1)
    mask = torch.ones(1, 128, dtype=torch.long)
    mask[:, 100:] = 0
    return {"input_ids": torch.randint(0, 30000, (1, 128)), "attention_mask": mask}
