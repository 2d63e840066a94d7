"""Qwen3.5-MoE's language model, tiny: gated delta-rule layers, one full attention layer, experts by token."""

import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig


class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = Qwen3_5MoeTextConfig(
            vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
            linear_num_value_heads=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            num_experts_per_tok=2, num_experts=4, use_cache=False,
        )  # fmt: skip
        self.network = Qwen3_5MoeForCausalLM(config)

    def forward(self, input_ids):
        return self.network(input_ids).logits


def model():
    torch.manual_seed(0)
    return Logits().eval()


example_inputs = (torch.arange(3, 19)[None],)
