"""Methods through `torch.export`: captured, and rewritten into what can be placed."""
