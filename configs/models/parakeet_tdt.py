"""Parakeet-TDT: encoder, prediction network and joint network of a transducer, as methods of one program.

The prediction network's LSTM state stays on the device; `decode` takes one token and moves it on.
"""

import os

import torch
from transformers import ParakeetEncoderConfig, ParakeetForTDT, ParakeetTDTConfig

FULL = os.environ.get("DEVPLAN_MODEL_SIZE") == "full"
ENCODER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
ENCODER |= {"subsampling_conv_channels": 16, "num_mel_bins": 80}
VOCABULARY, HIDDEN, FRAMES = (8193, 640, 1000) if FULL else (65, 32, 96)


class Parakeet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        encoder = ParakeetEncoderConfig(**({"num_mel_bins": 128} if FULL else ENCODER))
        config = ParakeetTDTConfig(
            vocab_size=VOCABULARY,
            decoder_hidden_size=HIDDEN,
            blank_token_id=VOCABULARY - 1,
            encoder_config=encoder,
        )
        self.network = ParakeetForTDT(config)
        self.mels = encoder.num_mel_bins
        self.register_buffer("hidden", torch.zeros(config.num_decoder_layers, 1, HIDDEN))
        self.register_buffer("cell", torch.zeros(config.num_decoder_layers, 1, HIDDEN))

    def encode(self, features):
        return self.network.encoder_projector(self.network.encoder(features).last_hidden_state)

    def decode(self, token):
        decoder = self.network.decoder
        output, (hidden, cell) = decoder.lstm(decoder.embedding(token), (self.hidden, self.cell))
        self.hidden.copy_(hidden)
        self.cell.copy_(cell)
        return decoder.decoder_projector(output)

    def join(self, encoded, decoded):
        scores = self.network.joint(decoded, encoded)
        return scores[..., :VOCABULARY].argmax(-1), scores[..., VOCABULARY:].argmax(-1)


torch.manual_seed(0)
model = Parakeet().eval()
methods = {
    "encode": {"function": model.encode, "example_inputs": (torch.randn(1, FRAMES, model.mels),)},
    "decode": {"function": model.decode, "example_inputs": (torch.tensor([[3]]),)},
    "join": {
        "function": model.join,
        "example_inputs": (torch.randn(1, 1, HIDDEN), torch.randn(1, 1, HIDDEN)),
    },
}
